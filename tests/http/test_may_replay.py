"""``may_replay``: who gets a stored response, at every entry point, and what a refusal
leaves as it was.
"""

from __future__ import annotations

from functools import partial

import pytest
from django.contrib.auth.models import Permission
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.views import View

from django_idempotency import signals
from django_idempotency.http.placement import idempotent
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import StoredRecord, StoredResponse
from django_idempotency.values.policy import Policy
from tests.support.callers import heard, is_replay
from tests.support.pages import FENCE, text
from tests.support.views import Runs, api_class, code

pytestmark = pytest.mark.usefixtures("transactional_db")
ALLOWED = "X-Allowed"  # what the header of a request says, its callable says


class Asked:
    """A ``may_replay`` that remembers what it was asked."""

    def __init__(self):
        self.questions = []

    def __call__(self, request, record):
        self.questions.append((request, record))
        return request.headers.get(ALLOWED) == "yes"


def by_header(request, record):
    return request.headers.get(ALLOWED) == "yes"


async def aby_header(request, record):
    return by_header(request, record)


class AsyncByHeader:
    async def __call__(self, request, record):
        return by_header(request, record)


aby_object = AsyncByHeader()
aby_object.__name__ = "aby_object"


SENT = pytest.mark.parametrize(
    ("send", "may_replay"),
    [("__call__", by_header), ("asgi", aby_header), ("__call__", aby_object)],
    ids=["wsgi", "asgi", "async object"],
)


def of_rest_framework(runs, policy):
    from rest_framework.authentication import SessionAuthentication

    view = api_class(runs.view, authentication_classes=[SessionAuthentication])
    return (view if policy is None else idempotent(policy=policy)(view)).as_view()


def of_a_class(runs):
    return type(
        "Payments", (View,), {"post": lambda view, request: runs.view(request)}
    ).as_view()


DECORATED = {
    "function": lambda runs, policy: idempotent(policy=policy)(runs.view),
    "in lease mode": lambda runs, policy: idempotent(
        policy=policy.derive(mode="lease")
    )(runs.view),
    "async function": lambda runs, policy: idempotent(
        policy=policy.derive(mode="lease")
    )(runs.aview),
    "waiting": lambda runs, policy: idempotent(
        policy=policy.derive(mode="lease", wait=10)
    )(runs.aview),
    "class": lambda runs, policy: idempotent(policy=policy)(of_a_class(runs)),
    "mixin": pytest.param(of_rest_framework, marks=pytest.mark.drf),
}
COVERED = {
    "function": lambda runs: runs.view,
    "async function": lambda runs: runs.aview,
    "class": of_a_class,
    "APIView": pytest.param(
        lambda runs: of_rest_framework(runs, None), marks=pytest.mark.drf
    ),
}


def is_refused(response):
    return (response.status_code, code(response), is_replay(response)) == (
        403,
        "replay_forbidden",
        False,
    )


def holds(send, runs):
    """The response is stored; a caller who may not see it is told so, and one who may
    gets it.
    """
    first = send()
    assert first.content == b"run 1", "the first caller is not asked for"
    before = IdempotencyRecord.objects.values_list(
        "status", "attempts", "response_body"
    ).get()
    assert is_refused(send())
    assert (
        IdempotencyRecord.objects.values_list(
            "status", "attempts", "response_body"
        ).get()
        == before
    )
    allowed = send(headers={ALLOWED: "yes"})
    assert (allowed.content, is_replay(allowed), runs.count) == (b"run 1", True, 1)


@SENT
@pytest.mark.parametrize("make", DECORATED.values(), ids=DECORATED)
def test_every_entry_point_asks_before_a_replay(call, make, send, may_replay):
    runs = Runs()
    holds(partial(getattr(call, send), make(runs, Policy(may_replay=may_replay))), runs)


@SENT
@pytest.mark.parametrize("make", COVERED.values(), ids=COVERED)
def test_the_middleware_asks_before_a_replay(call, make, send, may_replay, settings):
    settings.IDEMPOTENCY = {"MAY_REPLAY": f"{__name__}.{may_replay.__name__}"}
    runs = Runs()
    holds(partial(getattr(call, send), make(runs)), runs)


def test_may_replay_is_called_only_for_a_caller_who_would_get_a_response(call):
    asked = Asked()
    statuses = iter([503, 201])
    view = idempotent(may_replay=asked)(
        Runs(lambda request: _status(next(statuses))).view
    )
    assert [call(view, {"amount": 1}).status_code for _ in range(2)] == [503, 201]
    assert call(view, {"amount": 2}).status_code == 422
    assert asked.questions == []
    call(view, {"amount": 1})
    ((request, record),) = asked.questions
    assert isinstance(request, HttpRequest)
    assert isinstance(record, StoredRecord)
    assert (record.key, record.method, record.path, record.response.status) == (
        "k",
        "POST",
        "/view/",
        201,
    )
    assert (record.id, record.scope) == IdempotencyRecord.objects.values_list(
        "id", "scope"
    ).get()


def _status(status):
    return HttpResponse(status=status)


@pytest.mark.drf
def test_rest_framework_asks_with_its_own_request(call):
    from rest_framework.request import Request

    asked = Asked()
    view = of_rest_framework(Runs(), Policy(may_replay=asked))
    call(view)
    call(view)
    assert [type(request) for request, _record in asked.questions] == [Request]


@pytest.mark.parametrize(
    "answer",
    [None, 0, 1, "yes", object(), {"payments.view"}],
    ids=["None", "0", "1", "yes", "object", "set"],
)
def test_anything_but_true_refuses(call, answer):
    view = idempotent(may_replay=lambda request, record: answer)(Runs().view)
    call(view)
    assert is_refused(call(view))


@pytest.mark.parametrize(
    "make", [DECORATED["function"], DECORATED["async function"], DECORATED["mixin"]]
)
def test_may_replay_may_deny_by_exception(call, make):
    def deny(request, record):
        raise PermissionDenied

    runs = Runs()
    view = make(runs, Policy(may_replay=deny))
    call(view)
    assert call(view).status_code == 403
    assert (runs.count, IdempotencyRecord.objects.get().status) == (1, "completed")


@pytest.mark.drf
def test_rest_framework_handles_an_exception_of_may_replay_after_a_loss(call):
    from rest_framework.exceptions import NotFound

    def deny(request, record):
        raise NotFound

    def overtaken(request):
        claim, policy = request.idempotency.claim, request.idempotency.policy
        assert store_for(policy, claim.operation).complete(claim, StoredResponse(201))
        return HttpResponse("too late")

    view = of_rest_framework(Runs(overtaken), Policy(mode="lease", may_replay=deny))
    assert call(view).status_code == 404


def test_a_refusal_is_counted_as_one(call):
    view = idempotent(may_replay=by_header)(Runs().view)
    call(view)
    with (
        heard(signals.request_rejected) as rejected,
        heard(signals.response_replayed) as replayed,
    ):
        call(view)
    assert ([named["reason"] for named in rejected], replayed) == (["forbidden"], [])


@pytest.fixture
def recipe():
    """The callable that the page shows, for a permission that there is here."""
    ((_language, block),) = FENCE.findall(text("replays.md"))
    names = {}
    exec(block.replace("shop.view_payment", "testproject.view_ledgerentry"), names)
    return names


def test_a_revoked_permission_ends_replays(call, alice, recipe):
    alice.user_permissions.add(Permission.objects.get(codename="view_ledgerentry"))
    view = idempotent(may_replay=recipe["may_view_payments"])(Runs().view)
    assert [is_replay(call(view)) for _ in range(2)] == [False, True]
    alice.user_permissions.clear()
    assert is_refused(call(view))
