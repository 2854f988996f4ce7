"""``duplicates_at_once``: threads with connections of their own, and what it finds in
peers without a claim.
"""

from __future__ import annotations

import pytest
from django.core.cache import cache

from django_idempotency.contrib.testing import duplicates_at_once
from tests.support.callers import effects

pytestmark = [pytest.mark.usefixtures("payer"), pytest.mark.row_locks]


@pytest.mark.parametrize("path", ["/orders/", "/lease/"])
def test_duplicates_at_once_are_executed_once(client, path):
    response = duplicates_at_once(client, "POST", path, {"item": "book"}, count=4)
    assert response.status_code == 201
    assert effects() == 2, "one, and the one that measured"


def test_a_peer_that_looks_and_then_acts_fails(client):
    cache.delete("measured")
    with pytest.raises(AssertionError, match=r"the duplicates \{.*Entry': 2\}"):
        duplicates_at_once(client, "POST", "/remembered/", count=2)


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        (
            "/unprotected/",
            r"one request added \{.*Entry': 1\}, the duplicates \{.*Entry': 3\}",
        ),
        ("/pointed/", "then"),
        ("/nothing/", "one request added nothing"),
        ("/busy/", "to a duplicate: 409"),
    ],
)
def test_wrong_responses_to_duplicates_are_reported(client, path, fault):
    with pytest.raises(AssertionError, match=fault):
        duplicates_at_once(client, "POST", path, count=3, patience=0.1)
