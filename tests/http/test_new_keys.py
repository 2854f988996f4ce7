"""``admit`` and the limits of each scope: a new key may be refused, and a known one
never is.
"""

from __future__ import annotations

import functools
from uuid import uuid4

import pytest
from django.http import HttpResponse

from django_idempotency import signals
from django_idempotency.engine import admission
from django_idempotency.http.placement import idempotent
from django_idempotency.messages import AlreadyDone, Done, Message, consume
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Atomic, Lease, Limits, Policy
from tests.http.test_may_replay import COVERED, DECORATED
from tests.support.callers import (
    Gate,
    effects,
    entry_point,
    heard,
    is_replay,
    paying,
    shift,
)
from tests.support.statements import sent_statements
from tests.support.threads import in_threads
from tests.support.views import Runs, code

pytestmark = pytest.mark.usefixtures("transactional_db")
ALLOWED = "k-allowed"


@pytest.fixture
def counts(settings, monkeypatch):
    """A cache to count in, and a clock that stands still until it is set."""
    location = {
        "BACKEND": "django.core.cache.backends.locmem.LocMemCache",
        "LOCATION": uuid4().hex,
    }
    settings.CACHES = {**settings.CACHES, "counts": location}
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "LIMITS_CACHE": "counts"}
    admission._guards.clear()
    monkeypatch.setattr(admission, "PATIENCE", 60)  # a slow cache limits nothing

    def clock(seconds):
        monkeypatch.setattr(
            "django_idempotency.engine.admission.time.time", lambda: seconds
        )

    clock(6000.0)
    return clock


def is_refused(response):
    return (response.status_code, code(response), is_replay(response)) == (
        429,
        "idempotency_key_not_admitted",
        False,
    )


def by_key(operation):
    return True if operation.key.startswith(ALLOWED) else 7


async def aby_key(operation):
    return by_key(operation)


def nobody(operation):
    return False


def holds(send, runs):
    """A new key is refused, and leaves nothing; one that is admitted runs."""
    refused = send(key="k")
    assert is_refused(refused)
    assert int(refused.headers["Retry-After"]) in range(7, 11)
    assert refused.json()["retryable"] is True
    assert (runs.count, IdempotencyRecord.objects.count()) == (0, 0)
    assert send(key=ALLOWED).content == b"run 1"
    assert is_replay(send(key=ALLOWED))


@pytest.mark.parametrize("make", DECORATED.values(), ids=DECORATED)
@pytest.mark.parametrize("send", ["__call__", "asgi"])
def test_every_entry_point_asks_before_a_new_key(call, make, send):
    runs = Runs()
    holds(
        functools.partial(getattr(call, send), make(runs, Policy(admit=by_key))), runs
    )


@pytest.mark.parametrize("make", COVERED.values(), ids=COVERED)
@pytest.mark.parametrize(
    ("send", "admit"), [("__call__", by_key), ("asgi", aby_key)], ids=["wsgi", "asgi"]
)
def test_the_middleware_asks_before_a_new_key(call, make, send, admit, settings):
    settings.IDEMPOTENCY = {"ADMIT": f"{__name__}.{admit.__name__}"}
    runs = Runs()
    holds(functools.partial(getattr(call, send), make(runs)), runs)


def test_admit_is_not_called_for_messages(settings):
    settings.IDEMPOTENCY = {"ADMIT": f"{__name__}.nobody"}
    messages = [Message("queue", id, b"{}") for id in ("a", "b", "a")]
    told = [
        type(consume(message, lambda message, context: None)) for message in messages
    ]
    assert told == [Done, Done, AlreadyDone]


@pytest.mark.parametrize(
    "answer", [False, None, 0, -1, float("nan"), float("inf"), "yes"], ids=repr
)
def test_an_admit_that_returns_neither_true_nor_a_time_refuses_for_a_minute(
    call, answer
):
    refused = call(idempotent(admit=lambda operation: answer)(Runs().view))
    assert is_refused(refused)
    assert int(refused.headers["Retry-After"]) >= 60


def test_an_error_of_the_callable_is_the_projects(call):
    def broken(operation):
        raise LookupError("no quota service")

    with pytest.raises(LookupError):
        call(idempotent(admit=broken)(Runs().view))
    assert IdempotencyRecord.objects.count() == 0


pays = pytest.mark.usefixtures("payer")


def refusing(view=paying, **policy):
    return entry_point(view, admit=nobody, **policy)


@pays
def test_a_known_key_is_never_refused():
    first = entry_point(paying)()
    assert refusing()().content == first.content
    assert refusing()(body=b'{"amount": 6}').status_code == 422


@pays
@pytest.mark.parametrize(
    "mode",
    [
        Atomic(takeover_grace=0),
        Lease(),
        pytest.param(
            Atomic(claim="lock", takeover_grace=0), marks=pytest.mark.postgresql
        ),
    ],
)
def test_a_key_that_runs_is_never_refused(mode):
    with Gate().running(mode=mode):
        assert code(refusing(mode=mode)()) == "idempotency_key_in_use"


@pays
def test_a_key_that_failed_may_run_again():
    assert entry_point(lambda request: HttpResponse(status=500))().status_code == 500
    assert refusing()().status_code == 201


@pays
def test_a_key_that_was_released_or_has_expired_is_new():
    assert entry_point(lambda request: HttpResponse(status=400))().status_code == 400
    assert is_refused(refusing()())
    entry_point(paying)()
    shift(expires_at=-1, purge_at=-1)
    assert is_refused(refusing()())
    assert effects() == 1


@pays
@pytest.mark.parametrize("answer", [False, True])
def test_a_key_that_becomes_known_during_admit_is_not_refused(answer):
    """Another request with it is done by the time that the answer comes."""

    def admit(operation):
        (first,) = in_threads(1, lambda _: entry_point(paying)())
        assert first.status_code == 201
        return answer

    assert is_replay(entry_point(paying, admit=admit)())


def test_a_scope_has_so_many_new_keys_a_minute(call, counts):
    limited = idempotent(admit=Limits(new_keys=2))(Runs().view)
    assert [call(limited, key=key).status_code for key in ("a", "b", "c", "d")] == [
        200,
        200,
        429,
        429,
    ]
    assert is_replay(call(limited, key="a"))
    assert (
        call(
            idempotent(admit=Limits(new_keys=2), scope="public")(Runs().view), key="c"
        ).status_code
        == 200
    ), "another scope"
    counts(6059.5)
    assert int(call(limited, key="c").headers["Retry-After"]) in (1, 2)
    counts(6060.0)
    assert [call(limited, key=key).status_code for key in ("c", "d", "e")] == [
        200,
        200,
        429,
    ]


@pays
def test_concurrent_callers_share_max_new_keys(counts):
    callers, most = 8, 3
    limited = entry_point(Runs().view, admit=Limits(new_keys=most), mode="lease")
    statuses = sorted(
        in_threads(callers, lambda number: limited(f"k{number}").status_code)
    )
    assert statuses == [200] * most + [429] * (callers - most)
    assert IdempotencyRecord.objects.count() == most


def test_a_scope_stores_so_many_bytes(call, counts):
    """More than that by the last response, as its size is not known before."""
    runs = Runs(lambda request: HttpResponse(b"x" * 1000))
    limited = idempotent(admit=Limits(bytes=1500), retention=3600)(runs.view)
    assert [call(limited, key=key).status_code for key in ("a", "b", "c")] == [
        200,
        200,
        429,
    ]
    assert is_replay(call(limited, key="a"))
    assert int(call(limited, key="c").headers["Retry-After"]) >= 1200, (
        "the hour that it is has 20 minutes more"
    )
    counts(7200.0)
    assert call(limited, key="c").status_code == 200


def test_a_cache_that_fails_limits_nothing(call, settings, caplog, monkeypatch):
    monkeypatch.setattr(admission, "PAUSE", 600)
    settings.CACHES = {"default": {"BACKEND": f"{__name__}.NoCache"}}
    admission._guards.clear()
    limited = idempotent(admit=Limits(new_keys=1, bytes=1))(Runs().view)
    assert [call(limited, key=key).status_code for key in ("a", "b")] == [200, 200]
    assert [record.event for record in caplog.records] == ["cache_error"]


class NoCache:
    def __init__(self, location, params):
        pass

    def get(self, *args, **kwargs):
        raise ConnectionError

    incr = add = get

    def close(self):
        pass


def test_a_refusal_is_an_event(call):
    with (
        heard(signals.request_rejected) as rejected,
        heard(signals.key_claimed) as claimed,
    ):
        call(idempotent(admit=by_key)(Runs().view))
    assert [(named["reason"], named["retry_after"]) for named in rejected] == [
        ("not_admitted", 7)
    ]
    assert claimed == []


@pytest.mark.postgresql
@pytest.mark.psycopg3
@pays
@pytest.mark.parametrize(
    "policy",
    [
        {"admit": by_key},
        {"admit": Limits(new_keys=100)},
        {"admit": Limits(bytes=10**9)},
    ],
    ids=lambda policy: next(iter(policy)),
)
def test_admission_costs_one_more_statement_a_request(counts, policy):
    def statements(send, key):
        with sent_statements() as sent:
            send(key)
        return len(sent.all)

    plain, asking = entry_point(paying), entry_point(paying, **policy)
    for send in (plain, asking, plain, asking):  # until all is prepared
        for _once_more in range(6):
            send(key := ALLOWED + uuid4().hex)
            send(key)
    first, again = ALLOWED + "1", ALLOWED + "2"
    assert statements(asking, again) == statements(plain, first) + 1
    assert statements(asking, again) == statements(plain, first) + 1, "a replay"
