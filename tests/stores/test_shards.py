"""Records by tenant in three databases: each with the tenant's effects, and each for
itself when another one dies.
"""

from __future__ import annotations

import json
import re
from uuid import uuid4

import pytest
from django.contrib import admin
from django.contrib.auth import get_user_model
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import CommandError, SystemCheckError
from django.db import DatabaseError, connections
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.urls import path

from django_idempotency import engine
from django_idempotency.conf import conf
from django_idempotency.contrib.dashboard.counters import counters
from django_idempotency.contrib.dashboard.models import IdempotencyCounter
from django_idempotency.http.placement import idempotent
from django_idempotency.instrumentation import metrics
from django_idempotency.maintenance.passes import run_pass
from django_idempotency.messages import AlreadyDone, Consumer, Done, Message
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.stores import store_for, stores_of
from django_idempotency.stores.connections import databases, record_database
from django_idempotency.values.outcomes import Claimed, Operation
from django_idempotency.values.policy import Policy
from tests.support.callers import stop_heartbeat
from tests.support.shards import ALIASES, by_tenant, running_shards
from tests.support.sql import run_sql, value_of

pytestmark = [pytest.mark.postgresql, pytest.mark.usefixtures("sharded")]
TENANTS = (1, 2, 3)
SHARDED = {
    "USING": f"{by_tenant.__module__}.{by_tenant.__qualname__}",
    "SHARDS": list(ALIASES),
}


@pytest.fixture(scope="module")
def servers(django_db_setup, django_db_blocker):
    with django_db_blocker.unblock(), running_shards() as running:
        yield running


@pytest.fixture
def sharded(settings, servers, transactional_db):
    settings.IDEMPOTENCY = SHARDED
    yield servers
    stop_heartbeat()
    counters._reset()
    metrics._tables.clear()
    for alias in ALIASES:
        if servers[alias].runs:
            for model in (IdempotencyRecord, IdempotencyCounter):
                model.objects.using(alias).all().delete()
        connections[alias].close()


@pytest.fixture(scope="class")
def killed(servers):
    """The second of the three is dead for all tests of a class."""
    victim = servers["shard2"]
    victim.kill()
    yield victim
    victim.start()


def by_first_letter(operation: Operation) -> str:
    return f"shard{'abc'.index(operation.key[0]) + 1}"


def pay_into(alias: str, reference: str) -> None:
    run_sql("INSERT INTO effect VALUES (%s)", [reference], alias)


def pay(request):
    pay_into(request.idempotency.database, request.idempotency.key)
    if "fails" in request.GET:
        raise ZeroDivisionError
    return HttpResponse(request.idempotency.database, status=201)


def asked(tenant: int, key: str, query: str = "", **policy):
    view = idempotent(scope=lambda _request: f"tenant:{tenant}", **policy)(pay)
    return view(
        RequestFactory().post(f"/pay/{query}", headers={"Idempotency-Key": key})
    )


def effects(alias: str, key: str) -> int:
    count = "SELECT count(*) FROM effect WHERE reference = %s"
    return value_of(count, [key], alias)


def records(alias: str):
    return IdempotencyRecord.objects.using(alias)


def stuck(tenant: int, key: str = "stuck") -> Claimed:
    """A claim whose owner died an hour ago."""
    operation = Operation(f"tenant:{tenant}", key, b"1" * 32, "POST", "/pay/")
    claim = engine.claim(operation, Policy().over(Policy(using=f"shard{tenant}")))
    assert isinstance(claim, Claimed)
    run_sql(
        "UPDATE django_idempotency_record SET locked_at = locked_at - interval '1"
        " hour', locked_until = locked_until - interval '1 hour' WHERE id = %s",
        [claim.id],
        f"shard{tenant}",
    )
    return claim


@pytest.mark.parametrize("tenant", TENANTS)
def test_record_and_effects_share_the_shards_transaction(tenant):
    key = str(uuid4())
    first, again = asked(tenant, key), asked(tenant, key)
    assert (
        (first.status_code, first.content)
        == (again.status_code, again.content)
        == (201, f"shard{tenant}".encode())
    )
    assert again.headers["Idempotent-Replayed"] == "true"
    for alias in ALIASES:
        here = int(alias == f"shard{tenant}")
        assert (effects(alias, key), records(alias).filter(key=key).count()) == (
            here,
            here,
        )


def test_the_effects_of_a_failed_request_are_undone_on_its_shard():
    key = str(uuid4())
    with pytest.raises(ZeroDivisionError):
        asked(2, key, "?fails")
    assert effects("shard2", key) == 0
    assert records("shard2").get().status == Status.FAILED


def test_batched_messages_are_recorded_on_their_own_shards():
    def handle(message, context):
        pay_into(context.database, message.id)

    consumer = Consumer("c", handle, policy=Policy(using=by_first_letter))
    keys = [f"{letter}-{uuid4()}" for letter in "abcbc"]
    together = consumer.consume_many([Message("queue", key) for key in keys])
    again = [consumer.consume(Message("queue", key)) for key in keys]
    assert {type(delivery) for delivery in together} == {Done}
    assert {type(delivery) for delivery in again} == {AlreadyDone}
    for key in keys:
        shard = f"shard{'abc'.index(key[0]) + 1}"
        assert [effects(alias, key) for alias in ALIASES] == [
            int(alias == shard) for alias in ALIASES
        ]
        assert [records(alias).filter(key=key).count() for alias in ALIASES] == [
            int(a == shard) for a in ALIASES
        ]


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_a_tenant_that_moves_keeps_the_claims_database(mode):
    """Or effects would be committed outside of the record's transaction, or the record
    stay without a response.
    """
    choices = iter(["shard2", "shard1", "shard3"])

    def moving(operation):
        return next(choices)

    key = str(uuid4())
    assert asked(2, key, mode=mode, using=moving).content == b"shard2"
    assert [effects(alias, key) for alias in ALIASES] == [0, 1, 0]
    assert records("shard2").get(key=key).status == Status.COMPLETED
    assert asked(2, key, mode=mode).headers["Idempotent-Replayed"] == "true"


def test_a_store_outside_the_database_is_not_sharded(settings):
    settings.IDEMPOTENCY = {
        **SHARDED,
        "STORES": {
            "memory": {"BACKEND": "tests.stores.memory.MemoryStore"},
            "cached": {"BACKEND": "django_idempotency.contrib.cached.CachedStore"},
        },
    }
    policy = conf().policy.derive(mode="lease")
    assert [store.name for store in stores_of(policy.derive(store="cached"))] == list(
        ALIASES
    )
    assert [store.name for store in stores_of(policy.derive(store="memory"))] == [
        "memory"
    ]


def test_a_database_that_shards_does_not_name_is_refused():
    with pytest.raises(
        ImproperlyConfigured,
        match=r"chose the database 'shard9', which is not in SHARDS \['shard1'",
    ):
        asked(9, "k")


def test_a_call_that_needs_one_database_says_that_there_are_several():
    assert databases() == ALIASES
    with pytest.raises(
        ImproperlyConfigured, match="The records are in several databases: pass using="
    ):
        record_database()
    with pytest.raises(ImproperlyConfigured, match="there is no operation here"):
        store_for(Policy(using=by_tenant))


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        (
            {"USING": SHARDED["USING"]},
            r"USING is a callable, and SHARDS names no database",
        ),
        (
            {**SHARDED, "SHARDS": ["shard1", "shrad2"]},
            r"(?s)SHARDS names the database 'shrad2'.*did you mean 'shard2'",
        ),
        ({"USING": "shard7"}, r"setting: USING is 'shard7', which is not in DATABASES"),
    ],
)
def test_a_check_finds_databases_that_are_not_there(settings, stated, told):
    settings.IDEMPOTENCY = stated
    with pytest.raises(SystemCheckError, match=told) as found:
        call_command("check")
    assert "django_idempotency.E023" in str(found.value)


def test_the_checks_find_nothing_wrong_and_cover_every_shard(settings):
    settings.ROOT_URLCONF = ()
    call_command("check", databases=list(ALIASES), fail_level="ERROR")
    with connections["shard3"].cursor() as cursor:
        cursor.execute("ALTER FUNCTION django_idempotency_claim RENAME TO mislaid")
        try:
            with pytest.raises(SystemCheckError, match=r"W029\) The database 'shard3'"):
                call_command("check", databases=list(ALIASES), fail_level="WARNING")
        finally:
            cursor.execute("ALTER FUNCTION mislaid RENAME TO django_idempotency_claim")


def test_with_one_shard_killed_the_tenants_of_the_others_go_on(sharded):
    before = [asked(tenant, "before").content for tenant in TENANTS]
    victim = sharded["shard2"]
    victim.kill()
    try:
        assert [asked(tenant, "before").content for tenant in (1, 3)] == [
            before[0],
            before[2],
        ]
        assert [asked(tenant, "meanwhile").status_code for tenant in TENANTS] == [
            201,
            503,
            201,
        ]
        assert asked(2, "before").headers["Retry-After"]
    finally:
        victim.start()
    assert [asked(tenant, "before").content for tenant in TENANTS] == before
    assert asked(2, "meanwhile").status_code == 201
    assert effects("shard2", "meanwhile") == 1


COMMANDS = {
    "idempotency_reap": (),
    "idempotency_cleanup": (),
    "idempotency_stats": (),
    "idempotency_keys list": (),
    "idempotency_privacy erase": ("--scope", "tenant:1"),
    "idempotency_partitions": ("status",),
}


def test_erasing_goes_on_after_an_id_in_one_database_only(capsys):
    start = ("--scope", "tenant:1", "--after", str(uuid4()), "--json")
    with pytest.raises(SystemExit):
        call_command("idempotency_privacy", "erase", *start)
    assert capsys.readouterr().err.count("Pass --database to say in which") == 3
    call_command("idempotency_privacy", "erase", *start, database="shard1")


@pytest.fixture
def by_anna():
    """Who decides, as a command is told."""
    return f"--by={get_user_model().objects.create_superuser('anna').username}"


def test_allow_retry_finds_the_key_wherever_it_is(capsys, by_anna):
    stuck(3)
    call_command("idempotency_keys", "allow-retry", "stuck", "--json", by_anna)
    assert json.loads(capsys.readouterr().out) == {
        "database": "shard3",
        "allow_retry": ["tenant:3"],
    }
    call_command("idempotency_keys", "show", "stuck", "--json")
    (shown,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (shown["database"], shown["standing"]) == ("shard3", "free to retry")
    assert "anna" in {event["by"] for event in shown["events"]}
    stuck(1, "twice")
    stuck(2, "twice")
    with pytest.raises(CommandError, match="in several scopes"):
        call_command("idempotency_keys", "allow-retry", "twice", by_anna)


def test_events_are_counted_where_the_record_is(sharded):
    asked(1, "k")
    asked(3, "k")
    asked(3, "k")
    counters.flush()
    told = {
        alias: (
            IdempotencyCounter.objects.using(alias)
            .filter(event="response_replayed")
            .count()
        )
        for alias in ALIASES
    }
    assert told == {"shard1": 0, "shard2": 0, "shard3": 1}


LIST = "/admin/django_idempotency/idempotencyrecord/"


@pytest.fixture
def operator(settings):
    settings.ROOT_URLCONF = (path("admin/", admin.site.urls),)
    client = Client()
    client.force_login(get_user_model().objects.create_superuser("operator"))
    return client


def shown(page) -> list[str]:
    return [record.key for record in page.context["cl"].result_list]


def test_the_admin_shows_one_shard_at_a_time_and_acts_on_it(operator):
    stuck(1, "one")
    claim = stuck(3, "three")
    assert shown(operator.get(LIST)) == ["one"]
    page = operator.get(f"{LIST}?database=shard3")
    assert shown(page) == ["three"]
    assert re.search(
        rf'{claim.id}/change/\?[^"]*database=shard3"', page.content.decode()
    )
    assert (
        "three"
        in operator.get(f"{LIST}{claim.id}/change/?database=shard3").content.decode()
    )
    confirm = operator.get(
        f"{LIST}intervene/allow_retry/?id={claim.id}&database=shard3"
    ).content.decode()
    assert '<input type="hidden" name="database" value="shard3">' in confirm
    chosen = confirm.partition('name="record" value="')[2].partition('"')[0]
    operator.post(
        f"{LIST}intervene/allow_retry/", {"record": chosen, "database": "shard3"}
    )
    assert records("shard3").get().status == Status.FAILED


def test_the_dashboard_shows_one_shard_at_a_time(operator):
    stuck(3)
    page = operator.get(f"{LIST}dashboard/?database=shard3")
    assert page.context["databases"] == [
        ("shard1", False),
        ("shard2", False),
        ("shard3", True),
    ]
    assert "?range=7d&amp;database=shard3" in page.content.decode()


@pytest.mark.usefixtures("killed")
class TestOneKilled:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_a_command_reports_the_shard_that_is_dead_and_goes_on(
        self, command, capsys
    ):
        with pytest.raises(SystemExit) as ended:
            call_command(*command.split(), *COMMANDS[command], "--json")
        told = capsys.readouterr()
        facts = {
            line["database"]: line for line in map(json.loads, told.out.splitlines())
        }
        assert facts.keys() == set(ALIASES)
        assert {alias for alias in ALIASES if "error" in facts[alias]} == {"shard2"}
        assert "shard2: " in told.err
        assert ended.value.code == 1

    def test_the_reaper_frees_the_keys_of_the_shards_that_live(self):
        for tenant in (1, 3):
            stuck(tenant)
        with pytest.raises(ExceptionGroup) as failed:
            run_pass("reap", max_seconds=30)
        (error,) = failed.value.exceptions
        assert error.__notes__ == ["in 'shard2'"]
        assert [records(alias).get().status for alias in ("shard1", "shard3")] == [
            Status.FAILED
        ] * 2

    def test_allow_retry_refuses_while_a_shard_is_dead(self, by_anna):
        stuck(3)
        with pytest.raises(CommandError, match="may also be in other scopes"):
            call_command("idempotency_keys", "allow-retry", "stuck", by_anna)
        call_command(
            "idempotency_keys",
            "allow-retry",
            "stuck",
            by_anna,
            scope="tenant:3",
            verbosity=0,
        )
        assert records("shard3").get().status == Status.FAILED

    def test_show_says_that_a_shard_was_not_looked_at(self, capsys):
        stuck(3)
        with pytest.raises(CommandError, match="could not be searched"):
            call_command("idempotency_keys", "show", "stuck")
        assert "tenant:3 stuck" in capsys.readouterr().out
        with pytest.raises(
            CommandError,
            match=(
                "The key was not found, but a database or store could not be searched"
            ),
        ):
            call_command("idempotency_keys", "show", "unheard-of")

    def test_a_check_of_a_dead_shard_exits_with_3(self):
        with pytest.raises(SystemExit) as ended:
            call_command("idempotency_stats", "--check")
        assert ended.value.code == 3

    def test_the_figures_of_the_shards_that_live_are_reported(self):
        up = metrics.figures()[metrics.UP]
        assert {alias for alias in ALIASES if not up[alias]["records"]} == {"shard2"}

    def test_counts_wait_for_a_shard_that_is_dead(self):
        asked(2, "k")
        asked(3, "k")
        with pytest.raises(DatabaseError):
            counters.flush("shard2")
        counters.flush("shard3")
        assert set(counters._counts) == {"shard2"}
        assert IdempotencyCounter.objects.using("shard3").exists()
