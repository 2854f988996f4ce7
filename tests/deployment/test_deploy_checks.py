"""Each check of a deployment speaks when the real thing is wrong, with a hint, and is silent when it is not."""

from __future__ import annotations

import json
import subprocess
import sys

import psycopg
import pytest
from django.core import checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection, connections
from psycopg import IsolationLevel

from django_idempotency.checks import deployment
from django_idempotency.checks.deployment import (
    LONGEST_LOCK,
    STANDBYS,
    check_beat_schedule,
    check_server,
    is_remote,
    noticed_after,
)
from django_idempotency.maintenance.cleaner import cleanup
from django_idempotency.maintenance.reaper import is_overdue, reap
from django_idempotency.maintenance.records import records
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Policy
from tests.deployment.test_checks import OUTBOX
from tests.support.callers import Gate, claim, entry_point, paying, shift
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("payer")
postgresql = pytest.mark.postgresql

OURS = "django_idempotency."
HOUR, DAY = 3600, 24 * 3600
TABLE = "django_idempotency_record"
SOUND = {
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "client_connection_check_interval": "10s",
}


@pytest.fixture
def remote(monkeypatch):
    """The server seems to be on another host; there is none here."""
    monkeypatch.setattr(deployment, "is_remote", lambda _client, _server: True)


def found(databases=("default",), deploy=True):
    """What ``check --deploy`` finds, by id without its prefix."""
    messages = checks.run_checks(include_deployment_checks=deploy, databases=databases)
    ids = {message.id.removeprefix(OURS): message for message in messages if message.id.startswith(OURS)}
    return {id: message for id, message in ids.items() if id not in OUTBOX}


def execute(statement):
    with connection.cursor() as cursor:
        cursor.execute(statement)


@pytest.fixture
def server(settings):
    """Set parameters for new sessions of this database; ``server(fsync="off")``. Sound ones to begin with."""
    settings.DEBUG = True  # SQLite is not what these tests are about
    name = connection.ops.quote_name(connection.settings_dict["NAME"])
    changed = set()

    def have(**parameters):
        for parameter, value in parameters.items():
            execute(f"ALTER DATABASE {name} SET {parameter} = '{value}'")
        changed.update(parameters)
        connection.close()

    have(**SOUND)
    yield have
    for parameter in changed:
        execute(f"ALTER DATABASE {name} RESET {parameter}")
    connection.close()


def test_without_a_database_to_ask_nothing_is_asked(django_assert_num_queries):
    with django_assert_num_queries(0):
        assert check_server(None) == []
        assert check_server(None, databases=[]) == []


@postgresql
def test_a_server_in_order_hears_nothing(server):
    assert found() == {}


@postgresql
def test_they_are_no_part_of_an_ordinary_check(server, remote):
    server(client_connection_check_interval="0")
    assert "W014" in found()
    assert "W014" not in found(deploy=False)


@postgresql
def test_the_command_line_that_the_page_tells_of_runs_them(server, remote, capsys):
    server(client_connection_check_interval="0")
    call_command("check", "--deploy", "--database", "default")
    assert f"{OURS}W014" in capsys.readouterr().err
    call_command("check", "--deploy")
    assert f"{OURS}W014" not in capsys.readouterr().err
    with pytest.raises(SystemCheckError, match=f"{OURS}W014"):
        call_command("check", "--deploy", "--database", "default", "--fail-level", "WARNING")


@postgresql
def test_a_table_that_is_not_there_yet_is_not_asked_about(server, remote):
    execute(f"ALTER TABLE {TABLE} RENAME TO elsewhere")
    try:
        server(client_connection_check_interval="0")
        assert found() == {}
    finally:
        execute(f"ALTER TABLE elsewhere RENAME TO {TABLE}")


# --- The server ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "seconds"),
    [
        ({}, 60),
        ({"tcp_keepalives_count": "9"}, 120),
        ({"tcp_user_timeout": "20000"}, 40),
        ({"tcp_user_timeout": "900000"}, 900),
        ({"idle_in_transaction_session_timeout": "45000"}, 45),
        ({"transaction_timeout": "50000"}, 50),
        ({"idle_in_transaction_session_timeout": "600000"}, 60),
    ],
)
def test_when_a_dead_host_is_noticed(changed, seconds):
    names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count")
    settings = {name: SOUND[name] for name in names}
    timeouts = {"tcp_user_timeout": "0", "idle_in_transaction_session_timeout": "0"}
    assert noticed_after(settings | timeouts | changed) == seconds


def test_what_the_page_on_deployment_recommends_is_soon_enough():
    settings = {"tcp_user_timeout": "0"} | {name: value for name, value in SOUND.items() if name.startswith("tcp")}
    assert noticed_after(settings) <= LONGEST_LOCK


@pytest.mark.parametrize(
    ("client", "server_", "expected"),
    [
        ("10.0.0.1", "10.0.0.2", True),
        ("2001:db8::1", "2001:db8::2", True),
        ("10.0.0.1", "10.0.0.1", False),
        ("127.0.0.1", "127.0.0.1", False),
        ("127.0.0.1", "127.0.0.2", False),
        ("::1", "::1", False),
        (None, None, False),
    ],
)
def test_a_server_on_the_same_host_is_not_remote(client, server_, expected):
    assert is_remote(client, server_) is expected


@postgresql
def test_w013_and_w014_are_silent_about_a_server_on_the_same_host(server):
    server(client_connection_check_interval="0", tcp_keepalives_idle="7200")
    assert found() == {}


@postgresql
@pytest.mark.server
def test_the_hints_of_w013_and_w014_can_be_pasted(on, clusters, remote):
    primary, _standby = clusters
    look = on(primary)
    try:
        for id in ("W013", "W014"):
            for statement in look()[id].hint.partition(": ")[2].rstrip(";").split(";"):
                primary.execute(statement)
        eventually(lambda: look().keys() == {"W017"})
    finally:
        primary.execute("ALTER SYSTEM RESET ALL")
        primary.execute("SELECT pg_reload_conf()")
        eventually(lambda: {"W013", "W014"} <= look().keys())


@postgresql
def test_w014_a_server_that_does_not_look_after_its_clients(server, remote):
    server(client_connection_check_interval="0")
    assert "client_connection_check_interval" in found()["W014"].hint


@postgresql
def test_e015_an_unlogged_table(server):
    execute(f"ALTER TABLE {TABLE} SET UNLOGGED")
    try:
        message = found()["E015"]
    finally:
        execute(f"ALTER TABLE {TABLE} SET LOGGED")
    assert isinstance(message, checks.Error)
    assert message.hint == f"ALTER TABLE {TABLE} SET LOGGED"
    assert found() == {}


@postgresql
def test_w016_commits_that_do_not_wait_for_the_disk(server):
    server(synchronous_commit="off")
    assert "a crash of the server may lose responses" in found()["W016"].msg
    server(synchronous_commit="local")
    assert found() == {}, "there is no standby to wait for"


@postgresql
def test_a_claim_of_ours_does_not_make_it_look_so(server):
    assert entry_point(paying)().status_code == 201
    assert found() == {}


@postgresql
def test_w019_serializable_transactions(server, monkeypatch):
    server(default_transaction_isolation="serializable")
    assert "retry" in found()["W019"].hint
    options = connection.settings_dict["OPTIONS"]
    with monkeypatch.context() as patch:
        stated = options | {"isolation_level": IsolationLevel.READ_COMMITTED}
        patch.setitem(connection.settings_dict, "OPTIONS", stated)
        connection.close()
        assert found() == {}, "the application states its own"
        server(default_transaction_isolation="read committed")
        stated = options | {"isolation_level": IsolationLevel.SERIALIZABLE}
        patch.setitem(connection.settings_dict, "OPTIONS", stated)
        connection.close()
        assert list(found()) == ["W019"]
    connection.close()


@pytest.fixture(scope="module")
def clusters(tmp_path_factory):
    """A server whose settings can't be changed by session, and a standby that streams from it."""
    from tests.faults.cluster import Cluster, room, running_cluster

    with (
        room() as directory,
        running_cluster(
            directory / "primary",
            fsync="off",
            full_page_writes="off",
            wal_level="replica",
        ) as primary,
    ):
        yield primary, Cluster(directory / "standby")


@pytest.fixture
def on(settings, clusters):
    """Have the records in the cluster that is given."""
    import environ

    def use(cluster):
        url = environ.Env.db_url_config(cluster.url())
        connections.settings["other"] = connections.configure_settings({"default": {}, "other": url})["other"]
        settings.IDEMPOTENCY = {"USING": "other"}
        if TABLE not in connections["other"].introspection.table_names():
            with connections["other"].schema_editor() as editor:
                editor.create_model(IdempotencyRecord)

        def look():
            connections["other"].close()  # for settings by database hold for new sessions
            return {message.id.removeprefix(OURS): message for message in check_server(None, databases=["other"])}

        return look

    yield use
    connections["other"].close()
    del connections["other"]
    del connections.settings["other"]


@postgresql
@pytest.mark.server
def test_w013_w017_and_w018_on_a_server_that_is_as_wrong_as_can_be(on, clusters, remote):
    primary, standby = clusters
    look = on(primary)
    assert look().keys() == {"W013", "W014", "W017"}
    assert "keeps the row locks of a dead host for" in look()["W013"].msg
    assert "tcp_keepalives_idle" in look()["W013"].hint
    assert "fsync and full_page_writes off" in look()["W017"].msg
    primary.execute("ALTER DATABASE postgres SET idle_in_transaction_session_timeout = '60s'")
    assert look().keys() == {"W014", "W017"}
    standby.copy(primary)
    standby.start()
    try:
        eventually(lambda: look().keys() == {"W014", "W017", "W018"})
        assert "synchronous_standby_names" in look()["W018"].hint
        primary.execute("CREATE ROLE application LOGIN")
        assert count_standbys(primary, "application") == 1, "whoever may see no more than that they are there"
        primary.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
        primary.execute("ALTER DATABASE postgres SET synchronous_commit = 'local'")
        primary.execute("SELECT pg_reload_conf()")
        eventually(lambda: look().keys() == {"W014", "W016", "W017"})
        assert "a failover may lose responses" in look()["W016"].msg
    finally:
        standby.stop()


def count_standbys(primary, role):
    with psycopg.connect(primary.url().replace("postgres@", f"{role}@")) as connection:
        return connection.execute(STANDBYS).fetchone()[0]


def test_w055_keys_that_are_not_heeded(settings):
    settings.DEBUG = True
    assert "W055" not in found()
    settings.IDEMPOTENCY = {"ENABLED": False}
    assert "retries run again" in found()["W055"].msg


# --- Maintenance -----------------------------------------------------------------------------------------------------


def left():
    return {id for id in found() if id in ("W020", "W021")}


def test_w020_records_that_have_been_due_for_more_than_a_day(settings):
    settings.DEBUG = True
    entry_point(paying)()
    shift(expires_at=-2 * DAY, purge_at=-DAY + HOUR)
    assert left() == set(), "not long enough to tell"
    shift(purge_at=-DAY - HOUR)
    assert left() == {"W020"}
    assert "idempotency_cleanup" in found()["W020"].hint
    cleanup()
    assert left() == set()


def test_w021_owners_that_have_been_gone_for_more_than_an_hour(settings):
    settings.DEBUG = True
    claim(policy=Policy(mode="lease"))
    shift(locked_until=-HOUR + 60)
    assert left() == set()
    shift(locked_until=-HOUR - 60)
    assert left() == {"W021"}
    assert "idempotency_reap" in found()["W021"].hint
    reap()
    assert left() == set()


@pytest.mark.row_locks
def test_a_live_atomic_owner_is_not_reported_as_gone():
    gate = Gate()
    with gate.running():
        assert records(None).stuck(-HOUR).count() == 1
        assert not is_overdue(older_than=-HOUR)
    claim("dead", policy=Policy())
    assert is_overdue(older_than=-HOUR)


BEAT = """
import json, sys, celery
from django.conf import settings
settings.configure()
app = celery.Celery("shop")
app.conf.beat_schedule = json.loads(sys.argv[1])
import django
settings.INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "django_idempotency"]
django.setup()
from django_idempotency.checks import deployment
from django_idempotency.checks.deployment import check_beat_schedule
print(json.dumps([[message.id, message.msg, message.hint] for message in check_beat_schedule(None)]))
"""


def with_schedule(*tasks):
    schedule = {task: {"task": task, "schedule": 60} for task in tasks}
    run = [sys.executable, "-c", BEAT, json.dumps(schedule)]
    return json.loads(subprocess.run(run, capture_output=True, text=True, check=True).stdout)


@pytest.mark.celery
def test_w022_a_beat_schedule_without_our_maintenance():
    ((id, sentence, hint),) = with_schedule("shop.report", "django_idempotency.reap")
    assert (id, "django_idempotency.cleanup" in sentence) == (f"{OURS}W022", True)
    assert "BEAT_SCHEDULE" in hint
    assert with_schedule("shop.report", "django_idempotency.reap", "django_idempotency.cleanup") == []
    assert with_schedule() == [], "beat is not used"


@pytest.mark.celery
def test_w022_is_silent_about_the_schedule_of_the_test_project():
    assert check_beat_schedule(None) == []
