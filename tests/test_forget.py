"""Forgetting a caller: what has ended of that scope is erased, nothing else is touched, and what is left is told."""

from __future__ import annotations

import json
import signal

import pytest
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.http import HttpResponse
from django.test.utils import CaptureQueriesContext

from django_idempotency.interventions import resolve
from django_idempotency.maintenance import Forgotten, forget, forgetting, reap
from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import StoredResponse
from django_idempotency.policy import Policy
from django_idempotency.stores.database import ahead
from tests.callers import Gate, claim, door, effects, is_replay, paying, record, shift
from tests.test_commands import running
from tests.threads import OtherThread
from tests.views import code

pytestmark = pytest.mark.usefixtures("payer")

MINE, OTHERS = "user:7", "user:70"
HOLD = {"mode": "lease", "on_crash": "hold"}


def done(*keys, scope=MINE, **policy):
    for key in keys:
        assert door(paying, scope=lambda request: scope, **policy)(key).status_code == 201


def left(**condition):
    return set(IdempotencyRecord.objects.filter(**condition).values_list("scope", "key"))


def dying(request):
    raise KeyboardInterrupt


def held(key="held", scope=MINE):
    with pytest.raises(KeyboardInterrupt):
        door(dying, scope=lambda request: scope, **HOLD)(key)
    assert record(key, scope).held


def failing(request):
    raise ValueError


# --- What is erased --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 7, 100])
def test_all_that_has_ended_of_a_scope_is_erased_and_nothing_of_another(batch):
    done(*"abcdefg")
    done(*"abc", scope=OTHERS)
    with pytest.raises(ValueError, match=r"^$"):
        door(failing, scope=lambda request: MINE)("failed")
    shift_scope = IdempotencyRecord.objects.filter(scope=MINE, key="a")
    shift_scope.update(expires_at=shift_scope.get().created_at)
    forgotten = forget(MINE, batch=batch, pause=0)
    assert (forgotten.erased, forgotten.complete) == (8, True)
    assert left() == {(OTHERS, key) for key in "abc"}


@pytest.mark.parametrize("other", ["User:7", "user:7 ", "üser:7"])
def test_a_scope_is_the_same_only_to_the_letter(other):
    done("a")
    done("a", scope=other)
    assert forget(MINE).erased == 1
    assert left() == {(other, "a")}


def test_a_key_that_is_forgotten_runs_again():
    send = door(paying, scope=lambda request: MINE)
    first = send()
    forget(MINE)
    assert (is_replay(second := send()), second.content != first.content, effects()) == (False, True, 2)


def test_a_key_whose_answer_alone_is_forgotten_is_not_run_again():
    send = door(lambda request: HttpResponse(paying(request).content, headers={"Location": "/me/"}), scope="public")
    send()
    with pytest.raises(ValueError, match=r"^$"):
        door(failing)("failed")
    forgotten = forget("public", bodies=True)
    assert (forgotten.erased, forgotten.complete) == (2, True)
    again = send()
    assert (again.status_code, code(again), is_replay(again), effects()) == (200, "response_not_stored", True, 1)
    assert "Location" not in again.headers
    emptied = record()
    assert (emptied.path, emptied.response_headers, emptied.response_body) == ("", [], None)
    assert record("failed").path == ""
    assert door(paying)("failed").status_code == 201, "still free to run again"


def test_a_dry_run_counts_and_changes_nothing():
    done("a", "b")
    before = list(IdempotencyRecord.objects.order_by("pk").values())
    assert forget(MINE, dry_run=True).erased == 2
    assert list(IdempotencyRecord.objects.order_by("pk").values()) == before


# --- What is left alone, and told ------------------------------------------------------------------------------------


@pytest.mark.row_locks
@pytest.mark.parametrize("policy", [{}, {"mode": "lease"}, {"grace": 0}], ids=["atomic", "lease", "without grace"])
@pytest.mark.parametrize("bodies", [False, True])
def test_a_live_holder_is_not_touched(policy, bodies):
    gate = Gate()
    with gate.running(**policy) as answer:
        forgotten = forget("public", held=True, bodies=bodies)
        assert (forgotten.erased, forgotten.live, forgotten.complete) == (0, 1, False)
    assert answer.result().status_code == 201
    assert (record().status, effects()) == ("completed", 1)
    assert forget("public").complete


def test_a_dead_holder_is_left_to_the_reaper():
    claim(policy=Policy(mode="lease"))
    shift(locked_until=-1)
    assert forget("public").live == 1
    reap()
    assert forget("public").complete


@pytest.mark.row_locks
def test_a_record_that_somebody_has_locked_is_passed_over():
    done("a", "b")
    other = OtherThread()

    def lock():
        transaction.set_autocommit(False)
        return IdempotencyRecord.objects.select_for_update().get(key="a").pk

    other(lock)
    try:
        forgotten = forget(MINE)
        assert (forgotten.erased, forgotten.busy, forgotten.complete) == (1, 1, False)
    finally:
        other(transaction.rollback)
        other(transaction.set_autocommit, True)
        other.close()
    assert forget(MINE).complete


def test_held_records_are_erased_only_when_told_so():
    held()
    done("a")
    assert forget(MINE) == Forgotten(erased=1, held=1)
    assert left() == {(MINE, "held")}
    assert forget(MINE, held=True) == Forgotten(erased=1)
    assert left() == set()


# --- How -------------------------------------------------------------------------------------------------------------


def test_an_answer_given_to_a_record_that_was_emptied_is_kept_for_its_time():
    """One that was held for longer than it deduplicates."""
    held()
    IdempotencyRecord.objects.update(updated_at=ahead(-200), expires_at=ahead(-100), purge_at=ahead(-100))
    assert forget(MINE, bodies=True, held=True).complete
    resolve(record("held", MINE).pk, StoredResponse(201, (), b"done"))
    assert is_replay(door(paying, scope=lambda request: MINE)("held"))
    assert effects() == 0


def test_an_interrupted_pass_is_taken_up_where_it_ended():
    done(*"abcdef")
    first = forget(MINE, batch=2, max_seconds=0)
    assert (first.erased, first.finished, first.complete) == (2, False, False)
    assert not IdempotencyRecord.objects.filter(pk__lte=first.after).exists()
    rest = forget(MINE, batch=2, pause=0, after=first.after)
    assert (rest.erased, rest.complete) == (4, True)


def test_each_batch_is_a_transaction_of_its_own():
    done(*"abcd")
    batches = forgetting(MINE, batch=2, pause=0)
    next(batches)
    assert len(left()) == 2, "the first is committed"
    batches.close()


def test_a_batch_can_not_be_of_nothing():
    with pytest.raises(ValueError, match="at least 1"):
        forget(MINE, batch=0)


@pytest.mark.postgresql
def test_the_table_is_walked_by_its_primary_key_and_each_statement_is_bounded():
    table = IdempotencyRecord._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {table} (id, scope, key, method, path, fingerprint, mode, created_at, updated_at, expires_at,"
            " purge_at, status, response_status, response_headers) SELECT gen_random_uuid(), 'user:8', i, 'POST', '/',"
            " '', 'atomic', now(), now(), now(), now(), 'completed', 200, '[]' FROM generate_series(1, 20000) AS i"
        )
        cursor.execute(f"ANALYZE {table}")
        with CaptureQueriesContext(connection) as captured:
            assert next(forgetting("user:8", batch=100, pause=0, dry_run=True)).erased == 100
        selects = [query["sql"] for query in captured if query["sql"].startswith("SELECT")]
        assert len(selects) == 3
        for select in selects:
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {select}")
            plan = cursor.fetchone()[0][0]["Plan"]
            assert f"{table}_pkey" in json.dumps(plan)
            assert plan["Shared Hit Blocks"] + plan["Shared Read Blocks"] < 500


# --- The command -----------------------------------------------------------------------------------------------------


def told(capsys, *arguments, exits=0):
    try:
        call_command("idempotency_forget", *arguments, "--json")
        status = 0
    except SystemExit as ended:
        status = ended.code
    assert status == exits
    return json.loads(capsys.readouterr().out)


def test_the_command_reports_and_exits_with_0_when_nothing_is_left(capsys):
    done("a", "b")
    assert told(capsys, f"--scope={MINE}", "--dry-run")["erased"] == 2
    facts = told(capsys, f"--scope={MINE}", "--batch=1", "--pause=0")
    assert facts == {
        **{"database": "default", "erased": 2, "live": 0, "held": 0, "busy": 0},
        **{"after": facts["after"], "finished": True, "complete": True},
    }


def test_the_command_exits_with_1_while_something_is_left(capsys):
    held()
    assert told(capsys, f"--scope={MINE}", exits=1)["held"] == 1
    assert told(capsys, f"--scope={MINE}", "--held")["erased"] == 1
    done(*"abc")
    unfinished = told(capsys, f"--scope={MINE}", "--batch=1", "--max-seconds=0", exits=1)
    assert not unfinished["finished"]
    assert told(capsys, f"--scope={MINE}", f"--after={unfinished['after']}")["erased"] == 2


def test_the_command_says_in_words_what_forgetting_means(capsys):
    done("a")
    call_command("idempotency_forget", scope=MINE)
    assert capsys.readouterr().out == "1 records erased; left: none. A retry of a forgotten key runs again.\n"
    done("a")
    call_command("idempotency_forget", "--bodies", scope=MINE)
    assert capsys.readouterr().out == "1 records emptied; left: none.\n"


def test_the_command_wants_a_scope():
    with pytest.raises(CommandError, match="--scope"):
        call_command("idempotency_forget")


MANY = 60


@pytest.mark.server
def test_sigterm_ends_the_pass_after_its_batch_and_says_where_to_go_on(capsys):
    done(*(f"{number:02}" for number in range(MANY)))
    with running("idempotency_forget", f"--scope={MINE}", "--batch=1", "--pause=0.3", "--json") as process:
        while IdempotencyRecord.objects.count() == MANY:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        facts = json.loads(process.stdout.read())
        assert process.wait() == 1
    assert (facts["finished"], 0 < facts["erased"] < MANY) == (False, True)
    assert len(left()) == MANY - facts["erased"]
    rest = told(capsys, f"--scope={MINE}", f"--after={facts['after']}", "--pause=0")
    assert rest["erased"] == MANY - facts["erased"]
    assert left() == set()
