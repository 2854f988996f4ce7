"""The dashboard on 200,000 records and the counters of a week: what the database does
for it, and for how long.
"""

from __future__ import annotations

import pytest

from tests.performance.test_admin_at_scale import get, many, person, pytestmark
from tests.support.happening import a_week

__all__ = ["many", "person", "pytestmark"]


@pytest.mark.parametrize("query", ["", "?range=7d"])
def test_a_page_of_the_dashboard_does_not_scan_the_records(person, query):
    a_week()
    assert "What happened" in get(person, f"dashboard/{query}").content.decode()
