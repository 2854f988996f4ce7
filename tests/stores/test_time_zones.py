"""L9 in every time zone: in the hour that comes twice when summer time ends, a lease is
neither longer nor shorter.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from django.db import connection, connections

from django_idempotency import engine
from django_idempotency.maintenance import decisions
from django_idempotency.values.outcomes import InFlight
from django_idempotency.values.policy import Lease, Policy
from tests.support.callers import claim, entry_point, operation, paying, record
from tests.support.sql import run_sql

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("payer")]

BERLIN = "Europe/Berlin"
# and 2:50 for the first time in Berlin
ONCE = datetime.datetime(2026, 10, 25, 0, 50, tzinfo=datetime.UTC)
ZONES = [
    pytest.param({}, id="UTC"),
    # What psycopg2 tells is without a fold.
    pytest.param(
        {"USE_TZ": False, "TIME_ZONE": BERLIN},
        id="USE_TZ=False",
        marks=pytest.mark.psycopg3,
    ),
    pytest.param(
        {"DATABASE": BERLIN}, id="a zone of the database's", marks=pytest.mark.psycopg3
    ),
]
LEASE = Policy(mode=Lease(seconds=1200), retention=7200, scope="public")

CLOCK = """
CREATE SCHEMA clock;
CREATE FUNCTION clock.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS
    $$ SELECT current_setting('clock.now')::timestamptz $$
"""


@pytest.fixture(params=ZONES)
def zone(request, payer, settings, monkeypatch):
    """The test project in a time zone."""
    wanted = dict(request.param)
    monkeypatch.setitem(
        connection.settings_dict, "TIME_ZONE", wanted.pop("DATABASE", None)
    )
    connection.close()
    _forget_the_zone()
    for name, value in wanted.items():
        setattr(settings, name, value)
    yield
    connection.close()
    _forget_the_zone()


def _forget_the_zone() -> None:
    for name in ("timezone", "timezone_name"):
        connections["default"].__dict__.pop(name, None)


@pytest.fixture
def clock(zone) -> Iterator[None]:
    """A function that is found before PostgreSQL's own, and tells the time that the
    test says.
    """
    run_sql(CLOCK)
    run_sql("SET search_path = clock, pg_catalog, public")
    yield
    run_sql("RESET search_path; DROP SCHEMA clock CASCADE")


@contextmanager
def at(time: datetime.datetime) -> Iterator[None]:
    run_sql("SELECT set_config('clock.now', %s, false)", [time.isoformat()])
    yield


def minutes(number: int) -> datetime.timedelta:
    return datetime.timedelta(minutes=number)


def asked(policy: Policy = LEASE):
    return engine.claim(operation(), policy)


@pytest.mark.usefixtures("clock")
def test_a_live_lease_is_live():
    with at(ONCE):
        claim(policy=LEASE)
    with at(ONCE + minutes(2)):
        assert isinstance(asked(), InFlight)


@pytest.mark.not_on_citus
@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize(
    ("stored", "asked", "is_kept"), [(5, 7, True), (-20, 30, False)]
)
def test_a_response_is_replayed_until_it_expires(stored, asked, is_kept):
    send = entry_point(paying, retention=600)
    with at(ONCE + minutes(stored)):
        first = send()
    with at(ONCE + minutes(asked)):
        assert (send().content == first.content) == is_kept


@pytest.mark.not_on_citus
@pytest.mark.usefixtures("clock")
def test_an_operator_can_not_end_a_live_lease():
    with at(ONCE):
        claim(policy=LEASE)
    with at(ONCE + minutes(2)):
        refused = decisions.allow_retry(record().pk)
    assert refused == decisions.Refusal.LIVE
