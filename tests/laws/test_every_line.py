"""L1, L3, L4: an exception from a signal's handler strikes at each line of a request in turn, ours or Django's."""

from __future__ import annotations

import pytest
from django.http import HttpResponse

from tests.support.callers import entry_point, pay
from tests.support.striking import ERRORS, POLICIES, assert_all_or_nothing

pytestmark = [pytest.mark.usefixtures("payer"), pytest.mark.row_locks, pytest.mark.slow, pytest.mark.interruptions]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("policy", POLICIES)
def test_an_atomic_request_that_is_struck_leaves_all_or_nothing(policy, error):
    def view(request):
        return HttpResponse(str(pay(request.idempotency.key).pk), status=201)

    send = entry_point(view, **policy)  # decorated once, as in a project: what makes a policy is no part of a request
    assert_all_or_nothing(send, lambda response: response is not None and response.status_code == 201, error)
