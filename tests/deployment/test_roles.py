"""The roles of the page on database roles: with its GRANTs each can do what the page
says, and no more.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command
from django.db import ProgrammingError, connection, transaction

from django_idempotency import engine
from django_idempotency.contrib.dashboard.activity import activity
from django_idempotency.contrib.dashboard.counters import counters
from django_idempotency.contrib.outbox.models import OutboxEvent
from django_idempotency.maintenance import allow_retry, cleanup, erase, reap
from django_idempotency.maintenance.stats import stats
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import store_for
from django_idempotency.stores.database import ahead
from django_idempotency.values.outcomes import (
    Claimed,
    Fail,
    Keep,
    Operation,
    Release,
    Replay,
    StoredResponse,
)
from django_idempotency.values.policy import Atomic, Lease, Policy
from tests.support.aliases import another_alias
from tests.support.callers import mode_of, settle
from tests.support.checks import ids_found
from tests.support.databases import create_database, drop_database
from tests.support.sql import run_sql

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("transactional_db")]

PAGE = Path(__file__).parents[2] / "docs" / "roles.md"
ROLES = ("owner", "app", "reader")
# roles belong to the server, which other runs of these tests may use now
NAME = f"shop_{uuid4().hex[:8]}"
BEFORE, GRANTS, *GRANTS_OF_WINGS, REVOKE = re.findall(
    r"^```sql\n(.*?)^```$",
    PAGE.read_text().replace("shop_", f"{NAME}_"),
    re.MULTILINE | re.DOTALL,
)


@pytest.fixture(scope="module")
def database(django_db_setup, django_db_blocker, tmp_path_factory):
    """A database that was set up by the page alone."""
    with django_db_blocker.unblock():
        url = create_database(NAME, tmp_path_factory.mktemp("roles"))
        try:
            with another_alias("super", NAME=NAME):
                run_sql(BEFORE, using="super")
            environment = os.environ | {
                "DATABASE_URL": f"{url}?options=-c%20role%3D{NAME}_owner"
            }
            migrate = [
                sys.executable,
                "-m",
                "testproject",
                "migrate",
                "--verbosity",
                "0",
            ]
            subprocess.run(migrate, env=environment, check=True, capture_output=True)
            with as_role("owner") as owner:
                run_sql(GRANTS, using=owner)
                for grants in GRANTS_OF_WINGS:
                    run_sql(grants, using=owner)
            yield NAME
        finally:
            drop_database(NAME)
            for role in ROLES:
                run_sql(f"DROP ROLE IF EXISTS {NAME}_{role}", using="default")


def as_role(role):
    """The alias of the database for one of the roles, of whatever user the tests
    have.
    """
    options = {
        **connection.settings_dict["OPTIONS"],
        "options": f"-c role={NAME}_{role}",
    }
    return another_alias(role, NAME=NAME, OPTIONS=options)


@pytest.fixture
def roles(database, settings):
    """``owner``, ``app`` and ``reader`` are aliases; counters are written by
    ``app``.
    """
    settings.IDEMPOTENCY = {"USING": "app"}
    with ExitStack() as stack:
        for role in ROLES:
            stack.enter_context(as_role(role))
        yield
        run_sql("DELETE FROM django_idempotency_record", using="app")


def claimed(policy):
    claim = engine.claim(Operation("s", uuid4().hex, bytes(32), "POST", "/"), policy)
    assert isinstance(claim, Claimed)
    return claim


def lapse(claim):
    IdempotencyRecord.objects.using("app").filter(pk=claim.id).update(
        locked_at=ahead(-99), locked_until=ahead(-99)
    )


def works():
    """Everything that the application does to records."""
    for mode in ("atomic", "lease"):
        policy = Policy(using="app", mode=mode_of(mode, on_crash="retry"))
        claim = claimed(policy)
        settle(claim, policy, Keep(StoredResponse(201, (), b"done")))
        assert engine.claim(claim.operation, policy) == Replay(
            StoredResponse(201, (), b"done")
        )
        # not in the background in a test run
        store_for(policy, claim.operation).count_replays({claim.id: 1})
        settle(claimed(policy), policy, Release())
        settle(claimed(policy), policy, Fail("ValueError"))
        dead = claimed(policy)
        lapse(dead)
        assert engine.claim(dead.operation, policy).taken_over
    lapse(claimed(Policy(using="app", mode="lease")))
    assert reap(using="app").done["failed"] == 1
    IdempotencyRecord.objects.using("app").filter(status="completed").update(
        expires_at=ahead(-9), purge_at=ahead(-9)
    )
    assert cleanup(using="app", pause=0).rows == 2
    counters.flush("app")
    assert activity(3600, using="app")["requests"]


def refused(statement, using):
    with (
        pytest.raises(ProgrammingError, match=r"permission denied|must be owner"),
        transaction.atomic(using=using),
    ):
        run_sql(statement, using=using)
    return True


def test_the_application_can_do_all_that_a_project_does(roles):
    works()
    hold = Policy(using="app", mode=Lease(on_crash="hold"))
    claim = claimed(hold)
    settle(claim, hold, Fail("unknown", on_hold=True))
    assert allow_retry(claim.id, using="app")
    assert erase("s", using="app").rows
    columns = (
        'action_time, "user", user_id, model, object_id, object_repr, change_message'
    )
    run_sql(
        f"INSERT INTO django_idempotency_audit ({columns}) VALUES (now(), 'anna', '',"
        " '', '', '', '')",
        using="app",
    )
    run_sql(
        "UPDATE django_idempotency_audit SET change_message = '(erased)'", using="app"
    )
    assert refused("UPDATE django_idempotency_audit SET \"user\" = 'bob'", "app")
    assert refused("DELETE FROM django_idempotency_audit", "app")
    assert ids_found("E027", "E028", "W029", databases=["app"]) == []


def test_the_application_can_not_change_the_tables(roles):
    for statement in (
        "DROP TABLE {}",
        "TRUNCATE {}",
        "ALTER TABLE {} ADD COLUMN x int",
        "ALTER TABLE {} OWNER TO {}",
    ):
        assert refused(
            statement.format("django_idempotency_record", f"{NAME}_app"), "app"
        )
    assert refused("CREATE TABLE mine (id int)", "app")


def test_the_application_publishes_events(roles):
    OutboxEvent.objects.using("app").create(
        event_id=uuid4(),
        publisher="default",
        lane=0,
        topic="t",
        payload=b"",
        content_type="text/plain",
    )
    assert OutboxEvent.objects.using("app").update(error="refused") == 1
    assert OutboxEvent.objects.using("app").all().delete()[0] == 1


def test_the_reader_sees_how_the_records_stand_without_secrets(roles, capsys):
    lapse(claimed(Policy(using="app", mode="lease")))
    call_command("idempotency_stats", "--json", database="reader")
    assert json.loads(capsys.readouterr().out)["stuck"] == 1
    run_sql(
        "REVOKE SELECT (scope, key, path) ON django_idempotency_record FROM"
        f" {NAME}_reader",
        using="owner",
    )
    call_command("idempotency_stats", "--check", stuck_for=1e6, database="reader")
    for column in ("response_body", "response_headers", "token", "fingerprint"):
        assert refused(f"SELECT {column} FROM django_idempotency_record", "reader")
    for statement in (
        "DELETE FROM {}",
        "UPDATE {} SET on_hold = true",
        "SELECT * FROM {} FOR UPDATE",
    ):
        assert refused(statement.format("django_idempotency_record"), "reader")
    assert refused("DELETE FROM django_idempotency_counter", "reader")


def test_the_reader_counts_what_runs_by_lock(roles):
    policy = Policy(using="app", mode=Atomic(claim="lock"))
    with engine.execution(claimed(policy), policy) as running:
        assert stats(using="reader")["pending_by_lock"] == 1
        running.verdict = Keep(StoredResponse(201))
    assert stats(using="reader")["pending_by_lock"] == 0


def test_the_claims_function_is_the_applications_alone(roles):
    values = (
        "gen_random_uuid(), '', '', '', '', '', gen_random_uuid(), 'lease', false, '1"
        " s', '1 s', '1 s'"
    )
    assert run_sql(
        f"SELECT claimed FROM django_idempotency_claim({values})", using="app"
    )[0][0]
    assert refused(f"SELECT django_idempotency_claim({values})", "reader")


def test_with_partitions_the_same_rights_are_enough(roles, capsys):
    with pytest.raises(CommandError, match="a grant on the column"):
        call_command("idempotency_partitions", "enable", yes=True, database="owner")
    run_sql(REVOKE, using="owner")
    call_command("idempotency_partitions", "enable", yes=True, database="owner")
    run_sql(GRANTS, using="owner")
    call_command("idempotency_partitions", "ensure", database="owner")
    works()
    call_command("idempotency_partitions", "status", database="owner")
    call_command("idempotency_stats", database="reader")
