"""L1, L3, L4: an exception from a signal's handler strikes at each line of a request in
turn, ours or Django's.
"""

from __future__ import annotations

import json

import pytest
from django.http import HttpResponse

from tests.support.callers import entry_point, pay
from tests.support.striking import Interrupted, assert_all_or_nothing, struck_by

pytestmark = [
    pytest.mark.usefixtures("payer"),
    pytest.mark.row_locks,
    pytest.mark.slow,
    pytest.mark.interruptions,
]


@struck_by(Interrupted, SystemExit)
def test_an_atomic_request_that_is_struck_leaves_all_or_nothing(policy, error):
    view = entry_point(
        lambda request: HttpResponse(str(pay(json.loads(request.body)).pk), status=201),
        **policy,
    )
    status = lambda response: response and response.status_code  # noqa: E731

    assert_all_or_nothing(
        lambda reference: view(reference, f'"{reference}"'.encode()),
        is_done=lambda response: status(response) == 201,
        is_running=lambda response: status(response) == 409,
        error=error,
    )
