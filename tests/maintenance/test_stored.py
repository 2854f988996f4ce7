"""What an operator sees and does in a store outside the database."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from django_idempotency import engine
from django_idempotency.maintenance import stored
from django_idempotency.maintenance.interventions import Refusal
from django_idempotency.outcomes import Claimed, Fail, Keep, Operation, StoredResponse
from django_idempotency.policy import Policy
from django_idempotency.stores import store_for
from tests.stores.memory import MemoryStore
from tests.support.callers import stop_heartbeat

POLICY = Policy(mode="lease", store="mine", lease=1)
NAMED = f"{MemoryStore.__module__}.{MemoryStore.__qualname__}"


@pytest.fixture(autouse=True)
def stores(settings):
    settings.IDEMPOTENCY = {"STORES": {"mine": {"BACKEND": NAMED}}}
    MemoryStore.rows.clear()
    yield
    stop_heartbeat()
    MemoryStore.rows.clear()


def operation(key: str, scope: str = "user:1") -> Operation:
    return Operation(scope, key, bytes(32), "POST", "/")


def claimed(key: str, **policy) -> Claimed:
    claim = engine.claim(operation(key), POLICY.derive(**policy))
    assert isinstance(claim, Claimed)
    return claim


def ended(key: str, verdict) -> None:
    with engine.execution(claimed(key), POLICY) as run:
        run.settle(verdict)


def lapsed(key: str) -> Claimed:
    """Its owner is gone, and nobody has watched its lease."""
    claim = claimed(key)
    row = MemoryStore.rows[claim.id]
    times = {name: getattr(row, name) - timedelta(seconds=10) for name in ("locked_at", "locked_until")}
    MemoryStore.rows[claim.id] = replace(row, **times)
    return claim


@pytest.fixture
def one_of_each():
    ended("done", Keep(StoredResponse(201)))
    ended("refused", Keep(StoredResponse(402), failure=True))
    ended("broke", Fail("ValueError"))
    ended("held", Fail("who knows", on_hold=True))
    claimed("runs", lease=300)
    lapsed("gone")


def told(capsys, *arguments):
    call_command("idempotency_store", *arguments, "--store", "mine", "--json")
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def read(key: str):
    return store_for(POLICY).read(operation(key).id)


@pytest.mark.usefixtures("one_of_each")
def test_what_waits_for_a_decision_is_listed_and_everything_if_asked(capsys):
    waiting = {line["key"]: line["standing"] for line in told(capsys, "list")}
    assert waiting == {"held": "on hold", "gone": "lapsed"}
    assert {line["key"] for line in told(capsys, "list", "--all")} == {
        "done",
        "refused",
        "broke",
        "held",
        "runs",
        "gone",
    }
    assert len(told(capsys, "list", "--all", "--limit", "2")) == 2
    assert told(capsys, "list", "--all", "--scope", "user:2") == []
    call_command("idempotency_store", "list", store="mine")
    assert "who knows" in capsys.readouterr().out


@pytest.mark.usefixtures("one_of_each")
def test_stats_count_how_records_stand(capsys):
    names = ("running", "lapsed", "on hold", "free to retry", "failed", "completed")
    assert told(capsys, "stats") == [dict.fromkeys(names, 1)]


@pytest.mark.usefixtures("one_of_each")
@pytest.mark.parametrize("key", ["held", "broke", "gone"])
def test_a_released_key_runs_as_new(capsys, key):
    assert told(capsys, "release", key, "--scope", "user:1") == [{"released": ["user:1"]}]
    assert read(key) is None
    assert claimed(key).attempt == 1


@pytest.mark.usefixtures("one_of_each")
@pytest.mark.parametrize(
    ("key", "why"), [("runs", Refusal.LIVE), ("done", Refusal.HAS_RESPONSE), ("nobody", Refusal.ABSENT)]
)
def test_what_is_not_released_says_why(capsys, key, why):
    before = read(key)
    with pytest.raises(CommandError, match="Nothing was done: ") as refused:
        call_command("idempotency_store", "release", key, store="mine", scope="user:1")
    assert str(why.label) in str(refused.value)
    with pytest.raises(CommandError):
        told(capsys, "release", key, "--scope", "user:1")
    assert json.loads(capsys.readouterr().out) == {"error": str(refused.value)}
    assert (read(key) is None) == (before is None)


def test_an_owner_that_comes_back_keeps_its_key(monkeypatch):
    """The store was away, and it renews its lease while that is watched."""
    claim = lapsed("k")
    reads = MemoryStore.read

    def renewing(self, id):
        if stored.leases._keepers:
            MemoryStore.renew(self, [claim])
        return reads(self, id)

    monkeypatch.setattr(MemoryStore, "read", renewing)
    assert stored.release(store_for(POLICY), claim.id) is Refusal.LIVE
    assert store_for(POLICY).complete(claim, StoredResponse(201))


def test_what_changes_after_it_was_read_is_not_released(monkeypatch):
    ended("k", Fail("ValueError", on_hold=True))
    deletes = MemoryStore.delete

    def overtaken(self, record):
        engine_claim = store_for(POLICY)
        with engine_claim.try_lock(record.id) as seen:
            engine_claim.reassign(seen, operation("k"), record.id)
        return deletes(self, record)

    monkeypatch.setattr(MemoryStore, "delete", overtaken)
    assert stored.release(store_for(POLICY), operation("k").id) is Refusal.CHANGED


@pytest.mark.usefixtures("one_of_each")
def test_erasing_a_scope_leaves_what_runs_or_is_on_hold(capsys):
    engine.claim(operation("other", "user:2"), POLICY)
    with pytest.raises(SystemExit):
        told(capsys, "erase", "--scope", "user:1")
    assert json.loads(capsys.readouterr().out) == {"erased": 3, "left": 3}
    assert {record.key for record in store_for(POLICY).records()} == {"held", "runs", "gone", "other"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("release", "k", "--store", "mine"), "Pass the key, and its scope"),
        (("erase", "--store", "mine"), "Pass the scope"),
        (("list", "--store", "mien"), "did you mean 'mine'"),
    ],
)
def test_what_is_missing_is_said(arguments, why):
    with pytest.raises(CommandError, match=why):
        call_command("idempotency_store", *arguments)


def test_a_store_that_cannot_list_says_so(monkeypatch):
    monkeypatch.setattr(MemoryStore, "listing", False)
    with pytest.raises(CommandError, match="can't list its records"):
        call_command("idempotency_store", "list", store="mine")
