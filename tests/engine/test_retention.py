"""How long a key is remembered: a window that outlasts the client's retries, and what comes later is refused."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

import pytest
from django.db import connection, transaction
from django.test import RequestFactory

from django_idempotency import engine, signals
from django_idempotency.decorators import idempotent
from django_idempotency.exceptions import MalformedRequestTime
from django_idempotency.maintenance.cleaner import cleanup
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Keys, Lease, Policy, retention_for
from django_idempotency.stores.database import ahead
from django_idempotency.values.keys import born, parse_sent
from django_idempotency.values.outcomes import Claimed, Operation
from tests.support.callers import effects, heard, is_replay, paying
from tests.support.checks import found
from tests.support.views_of_laws import terminate

HOUR, DAY = 3600, 24 * 3600


@pytest.mark.parametrize(
    ("schedule", "seconds"),
    [
        ({"attempts": 1, "base": 5, "timeout": 30}, 30),
        ({"attempts": 3, "base": 1}, 1 + 2),
        ({"attempts": 5, "base": 1, "factor": 3, "cap": 10, "timeout": 2}, 5 * 2 + 1 + 3 + 9 + 10),
        ({"attempts": 4, "base": 60, "factor": 1}, 180),
        ({"attempts": 10_000, "base": 1, "cap": 60}, 1 + 2 + 4 + 8 + 16 + 32 + 60 * 9993),  # no overflow on the way
    ],
)
def test_the_window_outlasts_a_clients_retries(schedule, seconds):
    assert retention_for(**schedule, margin=0) == seconds
    assert retention_for(**schedule, margin=300) == seconds + 300
    assert Policy(retention=retention_for(**schedule))


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"base": -1}, {"timeout": -1}, {"cap": -1}, {"margin": -1}])
def test_a_schedule_that_can_not_be_is_refused(wrong):
    with pytest.raises(ValueError, match="at least 1, and no time may be negative"):
        retention_for(**{"attempts": 3, "base": 1} | wrong)


def uuid7(seconds):
    """A UUID of version 7 that was made so many seconds from now."""
    milliseconds = int((time.time() + seconds) * 1000)
    return str(UUID(int=(milliseconds << 80) | (7 << 76) | (2 << 62) | (uuid4().int & 0xFFFFFFFF)))


def test_a_schedule_gets_a_minute_s_margin_unless_it_is_stated():
    assert retention_for(attempts=1, base=1) == 60


def test_a_uuid7_tells_when_it_was_made():
    assert born("017f22e2-79b0-7cc3-98c4-dc0c0c07398f") == datetime(2022, 2, 22, 19, 22, 22, tzinfo=UTC)  # RFC 9562


@pytest.mark.parametrize(
    "key", ["k", "919108f7-52d1-4320-9bac-f847db4148a8", "ffffffff-ffff-7fff-bfff-ffffffffffff", "7" * 255]
)
def test_other_keys_do_not(key):
    assert born(key) is None


@pytest.mark.parametrize("value", ["@1767225600", "1767225600", " @1767225600\t"])
def test_a_header_tells_when_the_request_was_first_sent(value):
    assert parse_sent(value) == datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    "value", ["", "@", "yesterday", "@-1", "@1.5", "9" * 15, "@1767225600\0", "१७६७", "2026-01-01", "X@1767225600"]
)
def test_a_header_without_a_time_is_malformed(value):
    with pytest.raises(MalformedRequestTime):
        parse_sent(value)


LATE = {"retention": DAY, "keys": Keys(max_age=DAY - HOUR)}


@pytest.fixture
def send(payer):
    """Send a keyed request to a view that pays, under a policy that refuses what comes late."""

    refusing = idempotent(**LATE, scope="public")(paying)

    def post(key, sent=None, view=refusing):
        headers = {"Idempotency-Key": f'"{key}"'} | ({"First-Sent": f"@{int(time.time() + sent)}"} if sent else {})
        return view(RequestFactory().post("/pay/", {"amount": 5}, headers=headers))

    return post


def code(answer):
    return answer.status_code, answer.headers["Content-Type"], b"request_too_old" in answer.content


REFUSED = (410, "application/problem+json", True)


def test_a_late_retry_of_a_forgotten_key_is_refused(send):
    assert code(send(uuid7(-DAY))) == REFUSED
    assert effects() == IdempotencyRecord.objects.count() == 0


def test_a_request_within_the_window_runs(send):
    assert send(uuid7(-DAY + 2 * HOUR)).status_code == 201
    assert send(uuid7(+DAY)).status_code == 201
    assert send("no-uuid").status_code == 201


def test_a_late_retry_of_what_is_known_is_replayed(send):
    first = send(key := uuid7(-DAY), view=idempotent(scope="public")(paying))
    again = send(key)
    assert is_replay(again)
    assert again.content == first.content


def test_a_late_retry_of_an_expired_key_keeps_the_audit_copy(send):
    send(key := uuid7(-DAY), view=idempotent(scope="public", audit_retention=2 * DAY)(paying))
    IdempotencyRecord.objects.update(expires_at=ahead(-1))
    before = IdempotencyRecord.objects.values().get()
    assert code(send(key)) == REFUSED
    assert IdempotencyRecord.objects.values().get() == before
    IdempotencyRecord.objects.update(purge_at=ahead(-1))
    assert cleanup().rows == 1
    assert code(send(key)) == REFUSED
    assert effects() == 1


def test_a_late_retry_of_what_may_run_again_runs(send):
    def fails(request):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        send(key := uuid7(-DAY), view=idempotent(scope="public")(fails))
    assert send(key).status_code == 201


def test_a_key_on_hold_is_reported_to_a_retry_however_late(send):
    def interrupted(request):
        raise KeyboardInterrupt

    hold = {"mode": Lease(on_crash="hold"), "scope": "public"}
    with pytest.raises(KeyboardInterrupt):
        send(key := uuid7(-DAY), view=idempotent(**hold)(interrupted))
    IdempotencyRecord.objects.update(expires_at=ahead(-2), purge_at=ahead(-1))
    assert send(key, view=idempotent(**hold, **LATE)(paying)).status_code == 409


@pytest.mark.postgresql
def test_a_late_retry_while_the_table_is_locked(send, other_thread):
    block = transaction.atomic()
    other_thread(block.__enter__)
    other_thread(lambda: connection.cursor().execute("LOCK TABLE django_idempotency_record"))
    connection.cursor().execute("SET lock_timeout = '20ms'")
    assert send(uuid7(-DAY)).status_code == 503
    connection.close()
    other_thread(block.__exit__, None, None, None)
    assert code(send(uuid7(-DAY))) == REFUSED


def test_without_the_option_nothing_is_refused(send):
    assert send(uuid7(-DAY), view=idempotent(scope="public")(paying)).status_code == 201
    assert isinstance(
        engine.claim(Operation("public", "k", bytes(32), sent=datetime(2000, 1, 1, tzinfo=UTC)), Policy()), Claimed
    )


def test_a_header_states_the_request_time_for_keys_without_one(send, settings):
    settings.IDEMPOTENCY = {"REQUEST_TIME_HEADER": "First-Sent"}
    assert code(send("k", sent=-DAY)) == REFUSED
    assert code(send(uuid7(-1), sent=-DAY)) == REFUSED
    assert send(uuid7(-DAY), sent=-1).status_code == 201


def test_a_header_that_says_nothing_readable_is_refused(send, settings):
    settings.IDEMPOTENCY = {"REQUEST_TIME_HEADER": "Idempotency-Key"}  # which is no time
    answer = send("k")
    assert (answer.status_code, b"request_time_malformed" in answer.content, effects()) == (400, True, 0)


@pytest.mark.parametrize("skew", [-2 * DAY, 2 * DAY])
def test_l9_the_age_of_a_request_goes_by_the_databases_clock(send, monkeypatch, skew):
    class Jumped(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime.now(tz) + timedelta(seconds=skew)

    late, early = uuid7(-DAY), uuid7(-1)
    for module in ("django.utils.timezone", "django_idempotency.engine.decisions", "django_idempotency.http.requests"):
        monkeypatch.setattr(f"{module}.datetime", Jumped)
    assert code(send(late)) == REFUSED
    assert send(early).status_code == 201


def test_a_request_that_is_too_old_sends_its_age_by_signal(send):
    with heard(signals.request_rejected) as rejected:
        send(uuid7(-DAY))
    assert DAY - 1 <= rejected[0]["age"] <= DAY + 60


@pytest.mark.postgresql
def test_a_connection_that_the_server_has_closed_is_no_failure(send):
    send(uuid7(-1))
    terminate(connection.connection.info.backend_pid)
    assert send(uuid7(-1)).status_code == 201


def test_e002_late_retries_that_would_run_again_between_two_windows(settings):
    settings.IDEMPOTENCY = {"RETENTION": HOUR, "KEYS": Keys(max_age=HOUR + 1)}
    (message,) = found(databases=())
    assert message.id == "django_idempotency.E002"
    settings.IDEMPOTENCY = {"RETENTION": HOUR, "KEYS": Keys(max_age=HOUR)}
    assert found(databases=()) == []
