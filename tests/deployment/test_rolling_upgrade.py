"""An upgrade while requests come in: an older version serves on while a newer one
migrates and serves beside it.

The older version is the newest release that git knows, or what ``UPGRADE_FROM`` names:
a commit, or a wheel. So that this works on the day of a release, this version also
stands in as the older one, of a next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import psycopg
import pytest
from django.db import connection
from environ import Env

from tests.support.databases import create_database, drop_database
from tests.support.requirements import older_version
from tests.support.servers import Server
from tests.support.versions import next_version, run, serving, this_version, unpacked
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.server,
    pytest.mark.postgresql,
    pytest.mark.psycopg3,
    pytest.mark.exhaustive,
]

PATHS = (
    *(
        "/api/charges/",
        "/api/transfers/",
        "/api/payouts/",
        "/orders/",
        "/legacy/refunds/",
        "/legacy/api/refunds/",
    ),
    *("/encrypted/", "/locked/"),
)
PREPARE = "from testproject import service; service.prepare()"
MIGRATE = "manage('migrate', verbosity=0)"
MAINTAIN = """
manage('idempotency_outbox', 'relay',
    once=True); manage('idempotency_reap'); manage('idempotency_cleanup')
from django_idempotency.messages import Message, consume
print(consume(Message('orders', 'm-1', b'{}'), lambda message, context: {'made': 1},
    consumer='stock'))
"""
ALLOW = (
    "manage('idempotency_keys', 'allow-retry', {key!r}, by='admin', note='not at the"
    " bank')"
)
COLUMNS = """
SELECT format('%s.%s %s', table_name, column_name, data_type)
    FROM information_schema.columns
WHERE table_name LIKE 'django\\_idempotency\\_%'
"""
FUNCTIONS = """
SELECT format('%s(%s) %s', proname, pg_get_function_identity_arguments(oid),
    pg_get_function_result(oid))
FROM pg_proc WHERE proname LIKE 'django\\_idempotency\\_%'
"""
WAITING = (
    "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND"
    " wait_event_type = 'Lock'"
)
LAPSE = """
UPDATE django_idempotency_record
SET locked_at = locked_at - interval '1 h', locked_until = locked_until -
    interval '1 h' WHERE key = %s
"""
ADDED = (
    "migrations.AddField('idempotencyrecord', 'remark', models.CharField(max_length=9,"
    " null=True))"
)
IN_MODELS = (
    "    attempts = models.",
    "    remark = models.CharField(max_length=9, null=True)\n    attempts = models.",
)


@pytest.fixture
def database(db, tmp_path) -> Iterator[str]:
    """The URL of an empty one."""
    name = f"{connection.settings_dict['NAME']}_versions"
    yield create_database(name, tmp_path)
    drop_database(name)


@pytest.fixture
def here(tmp_path) -> Path:
    return this_version(tmp_path / "here")


def test_a_next_version_takes_over_from_this_one(here, tmp_path, database):
    upgrade(here, next_version(tmp_path / "next", ADDED, IN_MODELS), database, tmp_path)


@pytest.mark.older_version
def test_the_current_version_takes_over_from_an_older_one(here, tmp_path, database):
    upgrade(unpacked(older_version(), tmp_path / "old"), here, database, tmp_path)


def upgrade(old: Path, new: Path, database: str, directory: Path) -> None:
    run(old, database, PREPARE)
    with (
        serving(old, database, directory) as before,
        connected(database, autocommit=True) as spy,
    ):
        needed = parts(spy)
        left = leave(before, spy)
        with in_flight(before, database, "/api/payouts/") as payout:
            run(new, database, MIGRATE)
            gone = needed - parts(spy)
            assert not gone, (
                f"the older version needs what the migration took away: {sorted(gone)}"
            )
            left.are_replayed_by(before)
            with serving(new, database, directory) as after:
                refuses_meanwhile(after, payout)
                payout.let_go()
                assert payout.is_replayed_by(after)
                pick_up(left, before, after, database, new)
                pick_up(leave(after, spy), after, before, database, old)
                for one, other in ((before, after), (after, before)):
                    keep_apart(one, other, database)
                maintain(old, new, database)
                left.are_told_of_by(after)
                assert "Traceback" not in before.log() + after.log()


def connected(database: str, **options: Any) -> psycopg.Connection[Any]:
    found = Env.db_url_config(database)
    where = {
        "host": found["HOST"],
        "port": found["PORT"],
        "user": found["USER"],
        "password": found["PASSWORD"],
    }
    return psycopg.connect(
        dbname=found["NAME"],
        **{name: value or None for name, value in where.items()},
        **options,
    )


def parts(spy: Any) -> set[str]:
    """The columns and functions that there are."""
    return {name for query in (COLUMNS, FUNCTIONS) for (name,) in spy.execute(query)}


@dataclass
class Request:
    """One with a key of its own, and the first response to it."""

    path: str
    token: str = "alice-token"
    key: str = field(default_factory=lambda: uuid4().hex)
    response: Any = None
    let_go: Any = None  # lets one in flight end

    def sent_to(
        self, server: Server, amount: int = 5, **simulate: Any
    ) -> httpx.Response:
        payment = {"amount": amount, "currency": "eur", "reference": self.key}
        sent = {
            "key": self.key,
            "token": self.token,
            "simulate": simulate or None,
            "timeout": 300,
        }
        return server.post(self.path, payment, **sent)

    def runs_on(self, server: Server, **simulate: Any) -> Request:
        self.response = self.sent_to(server, **simulate)
        assert "Idempotent-Replayed" not in self.response.headers
        return self

    def dies_on(self, server: Server, when: str) -> Request:
        with pytest.raises(httpx.TransportError):
            self.sent_to(server, kill=when)
        return self

    def is_replayed_by(self, server: Server) -> bool:
        again = self.sent_to(server)
        assert (again.status_code, again.content) == (
            self.response.status_code,
            self.response.content,
        ), again.text
        return again.headers.get("Idempotent-Replayed") == "true"

    def code_from(self, server: Server, amount: int = 5) -> str:
        code: str = self.sent_to(server, amount).json()["code"]
        return code


@dataclass
class Left:
    """Requests that have left a record of each kind."""

    stored: list[Request]
    runnable: list[Request]
    crashed: Request

    def are_replayed_by(self, server: Server) -> None:
        for request in self.stored:
            assert request.is_replayed_by(server), request
            assert request.code_from(server, amount=6) == "idempotency_key_reused"

    def are_told_of_by(self, server: Server) -> None:
        charge = self.stored[0]
        ledger = server.request(
            "GET", "/api/ledger/", params={"reference": charge.key}
        ).json()
        assert (charge.path, ledger["receipts"]) == ("/api/charges/", 1)


def leave(server: Server, spy: Any) -> Left:
    """Responses of every entry point, a refusal, a failure, and operations whose
    process was killed.
    """
    killed = Request("/orders/").dies_on(server, "after")
    crashed = Request("/held/").dies_on(server, "before")
    spy.execute(LAPSE, [crashed.key])
    stored = [Request(path).runs_on(server) for path in PATHS]
    assert {request.response.status_code for request in stored} == {201}
    stored.append(Request("/orders/").runs_on(server, status=402))
    failed = Request("/orders/").runs_on(server, status=500)
    return Left(stored, [failed, killed], crashed)


def pick_up(
    left: Left, one: Server, other: Server, database: str, version: Path
) -> None:
    """The ``other`` server goes on with what ``one`` has left, and an operator with its
    ``version``.
    """
    left.are_replayed_by(other)
    for request in left.runnable:
        assert request.runs_on(other).response.status_code == 201
        assert request.is_replayed_by(one)
    for server in (other, one):
        eventually(
            lambda server=server: (
                left.crashed.code_from(server) == "idempotency_key_on_hold"
            ),
            every=0.2,
        )
    run(version, database, ALLOW.format(key=left.crashed.key))
    assert left.crashed.runs_on(one).response.status_code == 201
    assert left.crashed.is_replayed_by(other)
    for request in (*left.stored[:-1], *left.runnable, left.crashed):
        assert other.ledger(request.key) == 1


@contextmanager
def in_flight(server: Server, database: str, path: str) -> Iterator[Request]:
    """Bob's request, which runs and waits until the end: he is locked, and what is
    written refers to him.
    """
    request = Request(path, token="bob-token")
    with connected(database) as locker, ThreadPoolExecutor(1) as thread:
        locker.execute("SELECT 1 FROM auth_user WHERE username = 'bob' FOR UPDATE")
        sent = thread.submit(request.runs_on, server)
        with connected(database, autocommit=True) as spy:
            eventually(lambda: sent.done() or spy.execute(WAITING).fetchall())
        request.let_go = lambda: (locker.rollback(), sent.result())
        try:
            yield request
        finally:
            request.let_go()


def refuses_meanwhile(server: Server, request: Request) -> None:
    assert request.code_from(server) == "idempotency_key_in_use"
    assert request.code_from(server, amount=6) == "idempotency_key_reused"


def keep_apart(one: Server, other: Server, database: str) -> None:
    """What runs on ``one`` does not begin on ``other``, in each mode."""
    for path in ("/orders/", "/api/payouts/", "/locked/"):
        with in_flight(one, database, path) as request:
            refuses_meanwhile(other, request)
        assert request.is_replayed_by(other)
        assert other.ledger(request.key) == 1


def maintain(old: Path, new: Path, database: str) -> None:
    """The commands of both work; a message that one has handled is known to the
    other.
    """
    assert run(old, database, MAINTAIN).splitlines()[-1].startswith("Done(")
    assert run(new, database, MAINTAIN).splitlines()[-1].startswith("AlreadyDone(")
