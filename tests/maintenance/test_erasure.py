"""Erasing a caller: what has ended of that scope goes, nothing else is touched, and
what is left is told and listed.
"""

from __future__ import annotations

import re
from pathlib import Path
from unittest.mock import ANY

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from django.db import connection, transaction
from django.http import HttpResponse
from django.test.utils import CaptureQueriesContext
from django.urls import path
from django.utils import timezone

from django_idempotency.contrib.outbox.publishing import publish
from django_idempotency.maintenance import Swept, erase, reap, resolve
from django_idempotency.maintenance.history import write_entry
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import ahead
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import Fail, StoredResponse
from django_idempotency.values.policy import Atomic, Policy
from django_idempotency.values.scopes import BuiltInScope
from tests.admin.pages import LIST, ended, found
from tests.support.callers import (
    Gate,
    claim,
    effects,
    entry_point,
    is_replay,
    paying,
    record,
    shift,
)
from tests.support.commands import told
from tests.support.maintained import one_batch, vacuum
from tests.support.sql import run_sql
from tests.support.statements import buffers, explaining
from tests.support.views import code

pytestmark = pytest.mark.usefixtures("payer")

MINE, OTHERS = "user:7", "user:70"
NONE = {"live": 0, "on_hold": 0, "busy": 0}


def done(*keys, scope=MINE, **policy):
    for key in keys:
        assert (
            entry_point(paying, scope=lambda request: BuiltInScope(scope), **policy)(
                key
            ).status_code
            == 201
        )


def left(**condition):
    return set(
        IdempotencyRecord.objects.filter(**condition).values_list("scope", "key")
    )


def on_hold():
    ended("on_hold", Fail("crashed", on_hold=True), scope=MINE)


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
    assert (
        is_replay(second := send()),
        second.content != first.content,
        effects(),
    ) == (False, True, 2)


def test_a_key_whose_response_alone_is_erased_is_not_run_again():
    send = entry_point(
        lambda request: HttpResponse(
            paying(request).content, headers={"Location": "/me/"}
        ),
        scope="public",
    )
    send()
    ended("failed", Fail("ValueError"), scope="public")
    forgotten = erase("public", bodies=True)
    assert (forgotten.rows, forgotten.complete) == (2, True)
    again = send()
    assert (again.status_code, code(again), is_replay(again), effects()) == (
        200,
        "response_not_stored",
        True,
        1,
    )
    assert "Location" not in again.headers
    emptied = record()
    assert (emptied.path, emptied.response_headers, emptied.response_body) == (
        "",
        [],
        None,
    )
    assert (record("failed").path, record("failed").reason) == ("", "")
    assert [bytes(record(key).fingerprint) for key in ("k", "failed")] == [b"", b""]
    assert code(send("k", b"another body")) == "response_not_stored", (
        "nothing is left to compare it with"
    )
    IdempotencyRecord.objects.filter(key="k").update(response_body=b"secret")
    assert code(send()) == "response_not_stored", (
        "nor is it known whose response this is"
    )
    assert entry_point(paying)("failed").status_code == 201, "still free to run again"


SELECTIONS = {
    "scope": ({"scope": MINE}, {(MINE, "a"), (MINE, "b"), (MINE, "failed")}),
    "scope prefix": (
        {"scope_prefix": "acme/"},
        {("acme/user:1", "a"), ("acme/user:7", "b")},
    ),
    "key": ({"key": "a"}, {(MINE, "a"), (OTHERS, "a"), ("acme/user:1", "a")}),
    "record": ({"record": record_id(OTHERS, "a")}, {(OTHERS, "a")}),
    "key and scope": ({"key": "a", "scope": OTHERS}, {(OTHERS, "a")}),
}


@pytest.fixture
def several():
    """Records that have ended, one of which has expired, and one failed."""
    done("a", "b")
    IdempotencyRecord.objects.filter(key="a").update(expires_at=ahead(-1))
    ended("failed", Fail("ValueError"), scope=MINE)
    done("a", scope=OTHERS)
    done("a", scope="acme/user:1")
    done("A", scope="Acme/user:1")
    for key, scope in (("r", OTHERS), ("b", "acme/user:7")):
        entry_point(paying, scope=lambda request, scope=scope: BuiltInScope(scope))(
            key, path="/refund/"
        )


@pytest.mark.parametrize("batch", [1, 2, 7, 100])
@pytest.mark.parametrize("name", SELECTIONS)
def test_an_erasure_erases_its_selection_and_nothing_else(name, batch, several):
    selected, gone = SELECTIONS[name]
    before = left()
    assert erase(**selected, dry_run=True, batch=batch, pause=0).rows == len(gone)
    assert erase(**selected, batch=batch, pause=0) == Swept(
        done={"erased": len(gone)}, left=NONE, after=ANY
    )
    assert before - left() == gone


@pytest.mark.parametrize(
    "selected",
    [{}, {"scope": ""}, {"scope_prefix": ""}, {"key": "a", "scope": ""}],
    ids=lambda selected: str(selected),
)
def test_an_erasure_without_a_selection_is_refused(selected, several):
    with pytest.raises(ValueError, match="to select records"):
        erase(**selected)
    with pytest.raises(TypeError, match="paths"):
        erase(key="a", paths="/refund/")
    arguments = [
        f"--{name.replace('_', '-')}={value}" for name, value in selected.items()
    ]
    with pytest.raises(CommandError, match="to select records"):
        call_command("idempotency_privacy", "erase", *arguments)
    assert len(left()) == 8


@pytest.mark.postgresql
def test_a_key_is_erased_by_its_range_of_the_primary_key(several):
    with CaptureQueriesContext(connection) as captured:
        erase(key="a", dry_run=True)
    assert all(
        " BETWEEN " in query["sql"]
        for query in captured
        if query["sql"].startswith("SELECT")
    )


@pytest.fixture
def operator(db, django_user_model):
    return django_user_model.objects.create_user("operator")


def decided(scope, key, operator, note="because"):
    """An operator has decided about the record, which may be gone since."""
    found = IdempotencyRecord(pk=record_id(scope, key), scope=scope, key=key)
    found.now = timezone.now()
    return write_entry(found, operator, note)


def unredacted():
    return set(
        LogEntry.objects.exclude(change_message="(erased)").values_list(
            "object_repr", flat=True
        )
    )


@pytest.mark.parametrize("bodies", [False, True])
def test_texts_of_the_admins_log_are_erased(operator, bodies, several):
    for scope, key in left():
        decided(scope, key, operator)
    erase(MINE, dry_run=True)
    assert len(unredacted()) == 8
    erase(MINE, bodies=bodies)
    assert unredacted() == {
        str(record_id(scope, key)) for scope, key in left(path__gt="") if scope != MINE
    }
    erased, mine = (
        LogEntry.objects.filter(change_message="(erased)"),
        ("a", "b", "failed"),
    )
    assert {(entry.user, entry.object_id) for entry in erased} == {
        (operator, str(record_id(MINE, k))) for k in mine
    }


@pytest.mark.parametrize("prefix", ["acct:1", "acme"])
def test_a_prefix_without_a_separator_is_refused(prefix):
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
    assert not [
        query["sql"] for query in captured if LogEntry._meta.db_table in query["sql"]
    ]


@pytest.mark.row_locks
@pytest.mark.parametrize(
    "policy",
    [{}, {"mode": "lease"}, {"mode": Atomic(takeover_grace=0)}],
    ids=["atomic", "lease", "without grace"],
)
@pytest.mark.parametrize("bodies", [False, True])
def test_a_live_owner_is_not_touched(policy, bodies):
    gate = Gate()
    with gate.running(**policy) as answer:
        forgotten = erase("public", on_hold=True, bodies=bodies)
        assert (forgotten.rows, forgotten.left["live"], forgotten.complete) == (
            0,
            1,
            False,
        )
    assert answer.result().status_code == 201
    assert (record().status, effects()) == ("completed", 1)
    assert erase("public").complete


def test_a_dead_owner_is_left_to_the_reaper():
    claim(policy=Policy(mode="lease"))
    shift(locked_until=-1)
    assert erase("public").left["live"] == 1
    reap()
    assert erase("public").complete


def test_records_on_hold_are_erased_only_on_request():
    on_hold()
    done("a")
    for dry_run in (True, False):
        assert erase(MINE, dry_run=dry_run) == Swept(
            done={"erased": 1}, left=NONE | {"on_hold": 1}
        )
    assert left() == {(MINE, "on_hold")}
    assert erase(MINE, on_hold=True) == Swept(done={"erased": 1}, left=NONE)
    assert left() == set()


def test_the_erasure_of_a_record_on_hold_leaves_who_did_it_and_why(operator):
    on_hold()
    decided(MINE, "on_hold", operator)
    erase(MINE, on_hold=True, by=operator, note="asked to be forgotten")
    assert [
        (entry.user, entry.change_message) for entry in LogEntry.objects.order_by("pk")
    ] == [
        (operator, "(erased)"),
        (operator, "Erased while on hold. asked to be forgotten"),
    ]


@pytest.mark.parametrize(
    ("required", "why"), [("note", "a note"), ("second_operator", "two operators")]
)
def test_records_on_hold_are_not_erased_past_what_decisions_require(
    settings, required, why
):
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
        call_command(
            "idempotency_privacy",
            "erase",
            f"--scope={MINE}",
            "--on-hold",
            "--by=operator",
        )
    assert left() == {(MINE, "on_hold")}


def test_a_response_given_to_an_erased_record_is_kept():
    """One that was on hold for longer than it deduplicates."""
    on_hold()
    IdempotencyRecord.objects.update(
        updated_at=ahead(-200), expires_at=ahead(-100), purge_at=ahead(-100)
    )
    assert erase(MINE, bodies=True, on_hold=True).complete
    resolve(
        record("on_hold", MINE).pk,
        StoredResponse(201, (("Content-Type", "text/plain"),), b"done"),
    )
    assert is_replay(
        entry_point(paying, scope=lambda request: BuiltInScope(MINE))("on_hold")
    )
    assert effects() == 0


@pytest.mark.postgresql
def test_erasing_goes_by_primary_key_in_bounded_statements():
    table = IdempotencyRecord._meta.db_table
    vacuum()  # rows that earlier tests have deleted would be read, too
    run_sql(
        f"INSERT INTO {table} (id, scope, key, method, path, fingerprint, mode,"
        " created_at, updated_at, expires_at, purge_at, status, response_status,"
        " response_headers) SELECT gen_random_uuid(), 'user:8', i, 'POST', '/',"
        " '', 'atomic', now(), now(), now(), now(), 'completed', 200, '[]' FROM"
        f" generate_series(1, 20000) AS i; ANALYZE {table}"
    )
    with explaining(table, only=("SELECT",)) as plans:
        assert one_batch(erase, "user:8", batch=100, dry_run=True).rows == 100
    assert len(plans) == 2
    for plan in plans:
        assert f"{table}_pkey" in str(plan)
        assert buffers(plan) < 500


def erased(*arguments, exits=0):
    (facts,) = told("idempotency_privacy", "erase", *arguments, exits=exits)
    return facts


def test_the_command_reports_and_exits_with_0_when_nothing_is_left():
    done("a", "b")
    assert erased(f"--scope={MINE}", "--dry-run")["done"] == {"erased": 2}
    facts = erased(f"--scope={MINE}", "--batch=1", "--pause=0")
    assert (facts["database"], facts["done"], facts["left"]) == (
        "default",
        {"erased": 2},
        NONE,
    )
    assert (facts["finished"], facts["complete"], facts["cached_for"]) == (
        True,
        True,
        0.0,
    )


def test_the_command_exits_with_1_while_something_is_left(django_user_model):
    on_hold()
    assert erased(f"--scope={MINE}", exits=1)["left"]["on_hold"] == 1
    django_user_model.objects.create_superuser("anna")
    assert erased(f"--scope={MINE}", "--on-hold", "--by=anna")["done"] == {"erased": 1}
    done(*"abc")
    unfinished = erased(f"--scope={MINE}", "--batch=1", "--max-seconds=0", exits=1)
    assert not unfinished["finished"]
    assert erased(f"--scope={MINE}", f"--after={unfinished['after']}")["done"] == {
        "erased": 2
    }


DOCS = Path(__file__).parents[2] / "docs"
SCOPE = "marked-scope"
GIVEN = {"body": '{"card": "marked-response"}', "note": "marked-note"}
REASON = "marked-reason"


@pytest.fixture
def marks(client, django_user_model, settings, transactional_db):
    """What is in the database of a record that was on hold, was resolved and looked at,
    and has published an event.
    """
    settings.ROOT_URLCONF = (path("admin/", admin.site.urls),)
    client.force_login(django_user_model.objects.create_superuser("operator"))
    ended("marked-key", Fail(REASON, on_hold=True), scope=SCOPE)
    record = found("marked-key", SCOPE)
    chosen = {
        "record": [f"{record.pk} {record.status} 1 1 {record.updated_at.isoformat()}"]
    }
    resolved = {
        "status": 201,
        "content_type": "application/vnd.marked-type+json",
        **GIVEN,
    }
    assert (
        client.post(f"{LIST}intervene/resolve/", chosen | resolved).status_code == 302
    )
    assert (
        "marked-response" in client.get(f"{LIST}{record.pk}/change/").content.decode()
    )
    with transaction.atomic():
        publish("topic", {"event": "marked-event"})
    (digest,) = re.findall(
        r"Digest (\S+)\.",
        " ".join(LogEntry.objects.values_list("change_message", flat=True)),
    )
    return {
        **{
            "scope": SCOPE,
            "key": "marked-key",
            "path": record.path,
            "record id": str(record.pk),
        },
        **{
            "fingerprint": "f" * 32,
            "reason": REASON,
            "note": "marked-note",
            "digest of the response": digest,
        },
        **{
            "response body": "marked-response",
            "response headers": "marked-type",
            "event": "marked-event",
        },
    }


def shown(value):
    text = (
        bytes(value).decode("latin-1")
        if isinstance(value, bytes | memoryview)
        else str(value)
    )
    return text.replace("-", "")  # a UUID may be written without


def where(marks):
    """The marks that are in each table of the database."""
    found = {}
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f"SELECT * FROM {connection.ops.quote_name(table)}")
            text = "\n".join(shown(value) for row in cursor.fetchall() for value in row)
            found[table] = {
                name for name, mark in marks.items() if mark.replace("-", "") in text
            }
    return {table: names for table, names in found.items() if names}


def documented(column):
    """By table, what the page says is left."""
    text = (
        (DOCS / "privacy.md")
        .read_text()
        .partition("### What stays")[2]
        .partition("\n## ")[0]
    )
    lines = [
        line.strip("|").split("|")
        for line in text.splitlines()
        if line.startswith("| `")
    ]
    listed = {cells[0].strip(" `"): cells[column].strip() for cells in lines}
    return {
        table: set(what.split(", "))
        for table, what in listed.items()
        if what != "nothing"
    }


@pytest.mark.parametrize(
    ("bodies", "column"), [(False, 1), (True, 2)], ids=["erased", "bodies"]
)
def test_an_erasure_leaves_what_the_page_on_privacy_lists(marks, bodies, column):
    before = where(marks)
    assert set().union(*before.values()) == set(marks) - {"reason"}, (
        "or it would not be looked for"
    )
    assert erase(SCOPE, bodies=bodies).complete
    assert where(marks) == documented(column)


def test_the_reason_of_a_hold_is_erased_with_the_bodies(db):
    ended("marked-key", Fail(REASON, on_hold=True), scope=SCOPE)
    assert "reason" in where({"reason": REASON})["django_idempotency_record"]
    assert erase(SCOPE, bodies=True, on_hold=True).complete
    assert where({"reason": REASON}) == {}
