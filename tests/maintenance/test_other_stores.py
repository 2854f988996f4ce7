"""The records of a store outside the database: operators see them, decide about them,
and erase and export them.
"""

from __future__ import annotations

import base64
from collections import Counter
from dataclasses import replace
from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.core.management.base import CommandError

from django_idempotency import engine, signals
from django_idempotency.engine import leases
from django_idempotency.maintenance import decisions
from django_idempotency.maintenance.decisions import Refusal
from django_idempotency.maintenance.passes import run_pass
from django_idempotency.management.commands import idempotency_privacy
from django_idempotency.stores import store_for
from django_idempotency.values.outcomes import (
    Claimed,
    Fail,
    Keep,
    Operation,
    StoredResponse,
)
from django_idempotency.values.policy import Lease, Policy
from tests.stores.memory import MemoryStore
from tests.support.callers import heard, stop_heartbeat
from tests.support.commands import told
from tests.support.waiting import eventually

POLICY = Policy(mode=Lease(seconds=1), store="mine")
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
        run.verdict = verdict


def lapsed(key: str, **policy) -> Claimed:
    """Its owner is gone, and nobody has watched its lease."""
    claim = claimed(key, **policy)
    lapse(key)
    return claim


def lapse(key: str) -> None:
    row = MemoryStore.rows[operation(key).id]
    times = {
        name: getattr(row, name) - timedelta(seconds=10)
        for name in ("locked_at", "locked_until")
    }
    MemoryStore.rows[row.id] = replace(row, **times)


@pytest.fixture
def one_of_each():
    ended("done", Keep(StoredResponse(201)))
    ended("refused", Keep(StoredResponse(402), failure=True))
    ended("broke", Fail("ValueError"))
    ended("held", Fail("who knows", on_hold=True))
    claimed("runs", mode=Lease(seconds=300))
    lapsed("gone")


@pytest.fixture
def anna(db):
    return get_user_model().objects.create_superuser("anna")


def listed(*arguments):
    (facts,) = told("idempotency_keys", "list", "--store=mine", *arguments)
    return {record["key"]: record["standing"] for record in facts["records"]}


def decide(act, key, *arguments):
    who = ("--scope=user:1", "--by=anna", "--note=asked the bank")

    def decided():
        try:
            call_command("idempotency_keys", act, key, *who, *arguments)
        except CommandError as error:
            if "try again" in str(error):  # on a busy machine, watching takes longer
                return False
            raise
        return True

    eventually(decided)


def read(key: str):
    return store_for(POLICY).read(operation(key).id)


@pytest.mark.usefixtures("one_of_each")
def test_records_awaiting_a_decision_are_listed(capsys):
    assert listed() == {"held": "on hold", "gone": "lapsed"}
    assert len(listed("--limit", "1")) == 1
    assert listed("--scope", "user:2") == {}
    call_command("idempotency_keys", "list", store="mine")
    assert "who knows" in capsys.readouterr().out


@pytest.mark.django_db
@pytest.mark.usefixtures("one_of_each")
def test_a_list_without_a_database_includes_the_store():
    in_database, in_store = told("idempotency_keys", "list")
    assert (in_database["database"], in_database["records"]) == ("default", [])
    assert (in_store["store"], len(in_store["records"])) == ("mine", 2)


@pytest.mark.django_db
@pytest.mark.usefixtures("one_of_each")
@pytest.mark.parametrize(
    "named",
    [("held", "--scope=user:1"), ("held",), (f"--record={operation('held').id}",)],
)
def test_a_key_is_shown_by_its_name_or_id(named):
    (shown,) = told("idempotency_keys", "show", *named)
    assert (shown["store"], shown["key"], shown["standing"]) == (
        "mine",
        "held",
        "on hold",
    )
    assert "(who knows)" in shown["what"]


@pytest.mark.usefixtures("one_of_each")
@pytest.mark.parametrize("key", ["held", "gone"])
def test_a_key_whose_retry_is_allowed_runs_again_and_its_history_says_who_allowed_it(
    anna, key
):
    with heard(signals.operator_decided) as sent:
        decide("allow-retry", key)
    assert (read(key).status, read(key).on_hold) == ("failed", False)
    assert isinstance(engine.claim(operation(key), POLICY), Claimed)
    entry = LogEntry.objects.get()
    assert (entry.user, entry.change_message) == (anna, "Retry allowed. asked the bank")
    assert (entry.object_id, entry.object_repr) == (
        str(operation(key).id),
        str(operation(key).id),
    )
    assert [(told["act"], told["by"]) for told in sent] == [("allow_retry", anna)]


@pytest.mark.usefixtures("anna", "one_of_each")
@pytest.mark.parametrize("key", ["held", "broke", "gone"])
@pytest.mark.parametrize(
    ("act", "arguments", "status"),
    [
        ("resolve", ("--status=201", '--body={"id": 7}'), 201),
        ("fail", ("--detail=lost",), 410),
    ],
)
def test_a_response_of_an_operator_is_replayed(key, act, arguments, status):
    decide(act, key, *arguments)
    outcome = engine.claim(operation(key), POLICY)
    assert (outcome.response.status, b"7" in outcome.response.body) == (
        status,
        act == "resolve",
    )
    assert read(key).status == ("completed" if act == "resolve" else "failed")


@pytest.mark.usefixtures("anna", "one_of_each")
def test_a_response_of_an_operator_is_encrypted_where_there_is_a_key(settings):
    key = base64.b64encode(bytes(range(1, 33))).decode()
    settings.IDEMPOTENCY |= {"ENCRYPTION_KEYS": [key]}
    decide("resolve", "held", "--status=201", '--body={"card": 7}')
    assert b"card" not in read("held").response_body
    outcome = engine.claim(operation("held"), POLICY)
    assert outcome.response.body == b'{"card": 7}'


@pytest.mark.usefixtures("anna", "one_of_each")
def test_a_lease_is_extended_and_never_shortened():
    decide("extend", "runs", "--seconds=1200")
    assert (
        timedelta(minutes=19)
        < read("runs").locked_until - read("runs").now
        <= timedelta(minutes=20)
    )
    decide("extend", "runs", "--seconds=5")
    assert read("runs").locked_until - read("runs").now > timedelta(minutes=19)


@pytest.mark.usefixtures("anna", "one_of_each")
@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("runs", "its owner may be alive"),
        ("done", "It got its response, 201"),
        ("nobody", "Unknown key"),
    ],
)
def test_a_refusal_says_why_and_changes_nothing(key, why):
    before = dict(MemoryStore.rows)
    with pytest.raises(CommandError, match=why):
        decide("allow-retry", key)
    assert MemoryStore.rows == before
    assert not LogEntry.objects.exists()


@pytest.mark.usefixtures("anna")
def test_an_owner_that_comes_back_keeps_its_key(monkeypatch):
    """The store was away, and the owner renews its lease while it is watched."""
    claim = lapsed("k")
    reads = MemoryStore.read

    def renewing(self, id):
        if leases._keepers:
            MemoryStore.renew(self, [claim])
        return reads(self, id)

    monkeypatch.setattr(MemoryStore, "read", renewing)
    with pytest.raises(CommandError, match="its owner may be alive"):
        decide("allow-retry", "k")
    assert store_for(POLICY).complete(claim, StoredResponse(201))


@pytest.mark.usefixtures("anna", "one_of_each")
def test_a_key_that_is_in_a_database_and_in_a_store_is_decided_about_in_the_one_named():
    elsewhere = Policy(mode="lease", store="default")
    with engine.execution(engine.claim(operation("held"), elsewhere), elsewhere) as run:
        run.verdict = Fail("who knows", on_hold=True)
    with pytest.raises(
        CommandError, match="pass one of them with --database or --store: default, mine"
    ):
        decide("allow-retry", "held")
    decide("allow-retry", "held", "--store=mine")
    assert not read("held").on_hold
    assert store_for(elsewhere).read(operation("held").id).on_hold


@pytest.mark.django_db
@pytest.mark.usefixtures("one_of_each")
def test_an_erasure_that_a_signal_ended_before_the_store_exits_with_1(monkeypatch):
    worked = idempotency_privacy.Command._erase

    def end_after(command, options):
        command.ended.set()
        return worked(command, options)

    monkeypatch.setattr(idempotency_privacy.Command, "_erase", end_after)
    assert len(told("idempotency_privacy", "erase", "--scope=user:1", exits=1)) == 1


@pytest.mark.django_db
def test_a_record_that_changes_meanwhile_is_left_alone_and_without_history(
    monkeypatch, anna
):
    ended("k", Fail("ValueError", on_hold=True))
    monkeypatch.setattr(MemoryStore, "fail", lambda *_args, **_named: False)
    outcome = decisions.allow_retry(operation("k").id, store=store_for(POLICY), by=anna)
    assert outcome == Refusal.BUSY
    assert not LogEntry.objects.exists()


@pytest.mark.django_db
def test_a_key_stays_on_hold_if_the_operators_process_dies_in_the_middle(monkeypatch):
    ended("k", Fail("who knows", on_hold=True))

    def die(*_args, **_named):
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryStore, "fail", die)
    with pytest.raises(KeyboardInterrupt):
        decisions.allow_retry(operation("k").id, store=store_for(POLICY))
    row = MemoryStore.rows[operation("k").id]
    assert (row.status, row.hold_on_crash) == ("processing", True)


@pytest.mark.django_db
@pytest.mark.usefixtures("one_of_each")
def test_erasing_a_scope_leaves_what_runs_or_is_on_hold():
    engine.claim(operation("other", "user:2"), POLICY)
    in_database, in_store = told(
        "idempotency_privacy", "erase", "--scope=user:1", exits=1
    )
    assert (in_database["database"], in_database["complete"]) == ("default", True)
    left = {"live": 2, "on_hold": 1, "busy": 0}
    assert (in_store["store"], in_store["done"], in_store["left"]) == (
        "mine",
        {"erased": 3},
        left,
    )
    assert {record.key for record in store_for(POLICY).records()} == {
        "held",
        "runs",
        "gone",
        "other",
    }


@pytest.mark.django_db
@pytest.mark.usefixtures("one_of_each")
def test_a_dry_run_erases_nothing():
    before = dict(MemoryStore.rows)
    (facts,) = told(
        "idempotency_privacy",
        "erase",
        "--scope-prefix=user:",
        "--store=mine",
        "--dry-run",
    )
    assert (facts["done"], MemoryStore.rows) == ({"erased": 3}, before)


@pytest.mark.usefixtures("one_of_each")
def test_the_erasure_of_a_record_on_hold_leaves_who_did_it_and_why(anna):
    who = ("--by=anna", "--note=asked to be forgotten")
    with pytest.raises(SystemExit):  # others run
        call_command(
            "idempotency_privacy",
            "erase",
            "--scope=user:1",
            "--store=mine",
            "--on-hold",
            *who,
        )
    assert read("held") is None
    (entry,) = LogEntry.objects.all()
    assert (entry.user, entry.object_id) == (anna, str(operation("held").id))
    assert entry.change_message == "Erased while on hold. asked to be forgotten"


@pytest.mark.usefixtures("anna", "one_of_each")
def test_an_export_includes_the_records_of_the_store():
    lines = told(
        "idempotency_privacy", "export", "--scope=user:1", "--bodies", "--by=anna"
    )
    assert {line["store"] for line in lines} == {"mine"}
    assert {line["key"]: (line["response"] or {}).get("status") for line in lines} == {
        **{"done": 201, "refused": 402},
        **dict.fromkeys(("broke", "held", "runs", "gone")),
    }


@pytest.mark.django_db
def test_a_store_in_which_nothing_could_be_erased_says_so(capsys):
    with pytest.raises(SystemExit):
        call_command("idempotency_privacy", "erase", "--bodies", "--scope=user:1")
    assert "mine: The store 'mine' erases only whole records" in capsys.readouterr().err


def test_a_store_that_is_not_configured_is_an_error():
    with pytest.raises(CommandError, match="STORES has no store 'mien'"):
        call_command("idempotency_keys", "list", store="mien")


@pytest.mark.django_db
def test_keys_in_a_store_whose_owners_are_gone_are_freed_or_put_on_hold():
    lapsed("gone")
    lapsed("crashed", mode=Lease(seconds=1, on_crash="hold"))
    counted = told("idempotency_reap", "--store=mine", "--dry-run")
    assert [each["done"] for each in counted] == [{"failed": 2}]
    of_database, of_store = Counter(), Counter()

    def both_are_freed():  # on a busy machine, watching takes longer than one run has
        for done, found in zip(
            (of_database, of_store), told("idempotency_reap", "--batch=2"), strict=True
        ):
            done.update(found["done"])
        return of_store.total() >= 2

    with (
        heard(signals.key_reaped) as reaped,
        engine.execution(claimed("runs"), POLICY) as running,
    ):
        lapse("runs")  # its owner is alive, and renews its lease
        eventually(both_are_freed)
        assert read("runs").token == running.claim.token
        running.verdict = Keep(StoredResponse(201))
    assert (of_database.total(), of_store) == (0, {"failed": 1, "on_hold": 1})
    assert {each["operation"].key: each["on_hold"] for each in reaped} == {
        "gone": False,
        "crashed": True,
    }
    assert listed() == {"crashed": "on hold"}
    assert (read("gone").status, read("gone").on_hold) == ("failed", False)


@pytest.mark.django_db
def test_the_scheduled_pass_frees_keys_in_stores():
    lapsed("gone")
    assert eventually(lambda: run_pass("reap")["store:mine"]["done"]["failed"]) == 1
    assert isinstance(engine.claim(operation("gone"), POLICY), Claimed)
