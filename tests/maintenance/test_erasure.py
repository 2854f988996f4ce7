"""Forgetting a caller: what has ended of that scope is erased, nothing else is touched, and what is left is told."""

from __future__ import annotations

import json
from unittest.mock import ANY

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.http import HttpResponse
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from django_idempotency.maintenance import Swept, erase, reap, resolve
from django_idempotency.maintenance.history import write_entry
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Atomic, Lease, Policy
from django_idempotency.stores.database import ahead
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import StoredResponse
from django_idempotency.values.scopes import BuiltInScope
from tests.support.callers import Gate, claim, effects, entry_point, is_replay, paying, record, shift
from tests.support.threads import OtherThread
from tests.support.views import code

pytestmark = pytest.mark.usefixtures("payer")

MINE, OTHERS = "user:7", "user:70"
NONE = {"live": 0, "on_hold": 0, "busy": 0}
HOLD = {"mode": Lease(on_crash="hold")}


def done(*keys, scope=MINE, **policy):
    for key in keys:
        assert entry_point(paying, scope=lambda request: BuiltInScope(scope), **policy)(key).status_code == 201


def left(**condition):
    return set(IdempotencyRecord.objects.filter(**condition).values_list("scope", "key"))


def dying(request):
    raise KeyboardInterrupt


def on_hold(key="on_hold", scope=MINE):
    with pytest.raises(KeyboardInterrupt):
        entry_point(dying, scope=lambda request: BuiltInScope(scope), **HOLD)(key)
    assert record(key, scope).on_hold


def failing(request):
    raise ValueError


@pytest.mark.parametrize("batch", [1, 2, 7, 100])
def test_only_ended_records_of_the_scope_are_erased(batch):
    done(*"abcdefg")
    done(*"abc", scope=OTHERS)
    with pytest.raises(ValueError, match=r"^$"):
        entry_point(failing, scope=lambda request: BuiltInScope(MINE))("failed")
    shift_scope = IdempotencyRecord.objects.filter(scope=MINE, key="a")
    shift_scope.update(expires_at=shift_scope.get().created_at)
    forgotten = erase(MINE, batch=batch, pause=0)
    assert (forgotten.rows, forgotten.complete) == (8, True)
    assert left() == {(OTHERS, key) for key in "abc"}


@pytest.mark.parametrize("other", ["User:7", "user:7 ", "üser:7"])
def test_a_scope_is_the_same_only_to_the_letter(other):
    done("a")
    done("a", scope=other)
    assert erase(MINE).rows == 1
    assert left() == {(other, "a")}


def test_a_key_that_is_erased_runs_again():
    send = entry_point(paying, scope=lambda request: BuiltInScope(MINE))
    first = send()
    erase(MINE)
    assert (is_replay(second := send()), second.content != first.content, effects()) == (False, True, 2)


def test_a_key_whose_response_alone_is_erased_is_not_run_again():
    send = entry_point(
        lambda request: HttpResponse(paying(request).content, headers={"Location": "/me/"}), scope="public"
    )
    send()
    with pytest.raises(ValueError, match=r"^$"):
        entry_point(failing)("failed")
    forgotten = erase("public", bodies=True)
    assert (forgotten.rows, forgotten.complete) == (2, True)
    again = send()
    assert (again.status_code, code(again), is_replay(again), effects()) == (200, "response_not_stored", True, 1)
    assert "Location" not in again.headers
    emptied = record()
    assert (emptied.path, emptied.response_headers, emptied.response_body) == ("", [], None)
    assert (record("failed").path, record("failed").reason) == ("", "")
    assert [bytes(record(key).fingerprint) for key in ("k", "failed")] == [b"", b""]
    assert code(send("k", b"another body")) == "response_not_stored", "nothing is left to compare it with"
    IdempotencyRecord.objects.filter(key="k").update(response_body=b"secret")
    assert code(send()) == "response_not_stored", "nor is it known whose response this is"
    assert entry_point(paying)("failed").status_code == 201, "still free to run again"


SELECTIONS = {
    "scope": ({"scope": MINE}, {(MINE, "a"), (MINE, "b")}),
    "scope prefix": ({"scope_prefix": "acme/"}, {("acme/user:1", "a"), ("acme/user:7", "b")}),
    "key": ({"key": "a"}, {(MINE, "a"), (OTHERS, "a"), ("acme/user:1", "a")}),
    "record": ({"record": record_id(OTHERS, "a")}, {(OTHERS, "a")}),
    "key and scope": ({"key": "a", "scope": OTHERS}, {(OTHERS, "a")}),
}


@pytest.fixture
def several():
    done("a", "b")
    done("a", scope=OTHERS)
    done("a", scope="acme/user:1")
    done("A", scope="Acme/user:1")
    for key, scope in (("r", OTHERS), ("b", "acme/user:7")):
        entry_point(paying, scope=lambda request, scope=scope: BuiltInScope(scope))(key, path="/refund/")


@pytest.mark.parametrize("batch", [2, 100])
@pytest.mark.parametrize("name", SELECTIONS)
def test_an_erasure_erases_its_selection_and_nothing_else(name, batch, several):
    selected, gone = SELECTIONS[name]
    before = left()
    assert erase(**selected, dry_run=True, batch=batch, pause=0).rows == len(gone)
    assert erase(**selected, batch=batch, pause=0) == Swept(done={"erased": len(gone)}, left=NONE, after=ANY)
    assert before - left() == gone


@pytest.mark.parametrize(
    "selected", [{}, {"scope": ""}, {"scope_prefix": ""}, {"key": "a", "scope": ""}], ids=lambda selected: str(selected)
)
def test_an_erasure_without_a_selection_is_refused(selected, several):
    with pytest.raises(ValueError, match="to select records"):
        erase(**selected)
    with pytest.raises(TypeError, match="paths"):
        erase(key="a", paths="/refund/")
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in selected.items()]
    with pytest.raises(CommandError, match="to select records"):
        call_command("idempotency_privacy", "erase", *arguments)
    assert len(left()) == 7


@pytest.mark.postgresql
def test_a_key_is_erased_by_its_range_of_the_primary_key(several):
    with CaptureQueriesContext(connection) as captured:
        erase(key="a", dry_run=True)
    assert all(" BETWEEN " in query["sql"] for query in captured if query["sql"].startswith("SELECT"))


@pytest.fixture
def operator(db, django_user_model):
    return django_user_model.objects.create_user("operator")


def decided(scope, key, operator, note="because"):
    """An operator has decided about the record, which may be gone since."""
    found = IdempotencyRecord(pk=record_id(scope, key), scope=scope, key=key)
    found.now = timezone.now()
    return write_entry(found, operator, note)


def unredacted():
    return set(LogEntry.objects.exclude(change_message="(erased)").values_list("object_repr", flat=True))


@pytest.mark.parametrize("bodies", [False, True])
def test_texts_of_the_admins_log_are_erased(operator, bodies, several):
    for scope, key in left():
        decided(scope, key, operator)
    erase(MINE, dry_run=True)
    assert len(unredacted()) == 7
    erase(MINE, bodies=bodies)
    assert unredacted() == {str(record_id(scope, key)) for scope, key in left(path__gt="") if scope != MINE}
    erased = LogEntry.objects.filter(change_message="(erased)")
    assert {(entry.user, entry.object_id) for entry in erased} == {(operator, str(record_id(MINE, k))) for k in "ab"}


@pytest.mark.parametrize("prefix", ["acct:1", "acme"])
def test_a_prefix_without_a_separator_is_refused(prefix, capsys):
    """acct:1 would match acct:10."""
    done("a", scope=f"{prefix}0")
    with pytest.raises(ValueError, match="End it with a separator"):
        erase(scope_prefix=prefix)
    with pytest.raises(CommandError, match="End it with a separator"):
        call_command("idempotency_privacy", "erase", scope_prefix=prefix)
    assert left() == {(f"{prefix}0", "a")}


def test_a_record_that_was_not_erased_keeps_its_texts(operator):
    on_hold()
    decided(MINE, "on_hold", operator)
    erase(MINE)
    assert unredacted() == {str(record_id(MINE, "on_hold"))}
    erase(MINE, on_hold=True)
    assert unredacted() == set()


@pytest.mark.usefixtures("no_history")
def test_erasing_works_without_the_admin():
    done("a")
    with CaptureQueriesContext(connection) as captured:
        assert erase(MINE).rows == 1
    assert not [query["sql"] for query in captured if LogEntry._meta.db_table in query["sql"]]


@pytest.mark.row_locks
@pytest.mark.parametrize(
    "policy", [{}, {"mode": "lease"}, {"mode": Atomic(takeover_grace=0)}], ids=["atomic", "lease", "without grace"]
)
@pytest.mark.parametrize("bodies", [False, True])
def test_a_live_owner_is_not_touched(policy, bodies):
    gate = Gate()
    with gate.running(**policy) as answer:
        forgotten = erase("public", on_hold=True, bodies=bodies)
        assert (forgotten.rows, forgotten.left["live"], forgotten.complete) == (0, 1, False)
    assert answer.result().status_code == 201
    assert (record().status, effects()) == ("completed", 1)
    assert erase("public").complete


def test_a_dead_owner_is_left_to_the_reaper():
    claim(policy=Policy(mode="lease"))
    shift(locked_until=-1)
    assert erase("public").left["live"] == 1
    reap()
    assert erase("public").complete


@pytest.mark.row_locks
def test_a_record_that_somebody_has_locked_is_passed_over():
    done("a", "b")
    other = OtherThread()

    def lock():
        transaction.set_autocommit(False)
        return IdempotencyRecord.objects.select_for_update().get(key="a").pk

    other(lock)
    try:
        forgotten = erase(MINE)
        assert (forgotten.rows, forgotten.left["busy"], forgotten.complete) == (1, 1, False)
    finally:
        other(transaction.rollback)
        other(transaction.set_autocommit, True)
        other.close()
    assert erase(MINE).complete


def test_records_on_hold_are_erased_only_on_request():
    on_hold()
    done("a")
    assert erase(MINE) == Swept(done={"erased": 1}, left=NONE | {"on_hold": 1})
    assert left() == {(MINE, "on_hold")}
    assert erase(MINE, on_hold=True) == Swept(done={"erased": 1}, left=NONE)
    assert left() == set()


def test_the_erasure_of_a_record_on_hold_leaves_who_did_it_and_why(operator):
    on_hold()
    decided(MINE, "on_hold", operator)
    erase(MINE, on_hold=True, by=operator, note="asked to be forgotten")
    assert [(entry.user, entry.change_message) for entry in LogEntry.objects.order_by("pk")] == [
        (operator, "(erased)"),
        (operator, "Erased while on hold. asked to be forgotten"),
    ]


@pytest.mark.parametrize(("required", "why"), [("note", "a note"), ("second_operator", "two operators")])
def test_records_on_hold_are_not_erased_past_what_decisions_require(settings, required, why):
    """Else an erasure would let the key run again, with nobody's consent."""
    settings.IDEMPOTENCY = {"DECISIONS": [required]}
    on_hold()
    with pytest.raises(ValueError, match=f"DECISIONS requires {why}"):
        erase(MINE, on_hold=True)
    assert left() == {(MINE, "on_hold")}
    assert erase(MINE, on_hold=True, bodies=True).complete, "the key stays on hold"


def test_the_command_erases_records_on_hold_only_for_a_user_who_may_decide(operator):
    on_hold()
    with pytest.raises(CommandError, match="Pass --by"):
        call_command("idempotency_privacy", "erase", f"--scope={MINE}", "--on-hold")
    with pytest.raises(CommandError, match="does not have the permission"):
        call_command("idempotency_privacy", "erase", f"--scope={MINE}", "--on-hold", "--by=operator")
    assert left() == {(MINE, "on_hold")}


def test_a_response_given_to_an_erased_record_is_kept():
    """One that was on hold for longer than it deduplicates."""
    on_hold()
    IdempotencyRecord.objects.update(updated_at=ahead(-200), expires_at=ahead(-100), purge_at=ahead(-100))
    assert erase(MINE, bodies=True, on_hold=True).complete
    resolve(record("on_hold", MINE).pk, StoredResponse(201, (("Content-Type", "text/plain"),), b"done"))
    assert is_replay(entry_point(paying, scope=lambda request: BuiltInScope(MINE))("on_hold"))
    assert effects() == 0


def test_an_interrupted_pass_is_taken_up_where_it_ended():
    done(*"abcdef")
    first = erase(MINE, batch=2, max_seconds=0)
    assert (first.rows, first.finished, first.complete) == (2, False, False)
    assert not IdempotencyRecord.objects.filter(pk__lte=first.after).exists()
    rest = erase(MINE, batch=2, pause=0, after=first.after)
    assert (rest.rows, rest.complete) == (4, True)


@pytest.mark.postgresql
def test_erasing_goes_by_primary_key_in_bounded_statements():
    table = IdempotencyRecord._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} (id, scope, key, method, path, fingerprint, mode, created_at, updated_at, expires_at,"
            " purge_at, status, response_status, response_headers) SELECT gen_random_uuid(), 'user:8', i, 'POST', '/',"
            " '', 'atomic', now(), now(), now(), now(), 'completed', 200, '[]' FROM generate_series(1, 20000) AS i"
        )
        cursor.execute(f"ANALYZE {table}")
        with CaptureQueriesContext(connection) as captured:
            assert next(erase.in_steps("user:8", batch=100, pause=0, dry_run=True)).rows == 100
        selects = [query["sql"] for query in captured if query["sql"].startswith("SELECT")]
        assert len(selects) == 2
        for select in selects:
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {select}")
            plan = cursor.fetchone()[0][0]["Plan"]
            assert f"{table}_pkey" in json.dumps(plan)
            assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 500


def told(capsys, *arguments, exits=0):
    try:
        call_command("idempotency_privacy", "erase", *arguments, "--json")
        status = 0
    except SystemExit as ended:
        status = ended.code
    assert status == exits
    return json.loads(capsys.readouterr().out)


def test_the_command_reports_and_exits_with_0_when_nothing_is_left(capsys):
    done("a", "b")
    assert told(capsys, f"--scope={MINE}", "--dry-run")["done"] == {"erased": 2}
    facts = told(capsys, f"--scope={MINE}", "--batch=1", "--pause=0")
    assert (facts["database"], facts["done"], facts["left"]) == ("default", {"erased": 2}, NONE)
    assert (facts["finished"], facts["complete"], facts["cached_for"]) == (True, True, 0.0)


def test_the_command_exits_with_1_while_something_is_left(capsys, django_user_model):
    on_hold()
    assert told(capsys, f"--scope={MINE}", exits=1)["left"]["on_hold"] == 1
    django_user_model.objects.create_superuser("anna")
    assert told(capsys, f"--scope={MINE}", "--on-hold", "--by=anna")["done"] == {"erased": 1}
    done(*"abc")
    unfinished = told(capsys, f"--scope={MINE}", "--batch=1", "--max-seconds=0", exits=1)
    assert not unfinished["finished"]
    assert told(capsys, f"--scope={MINE}", f"--after={unfinished['after']}")["done"] == {"erased": 2}
