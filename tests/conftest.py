"""Which tests run here, and the real servers that they run against."""

from __future__ import annotations

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest
from django.apps import apps
from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import connection, connections
from django.test import override_settings

from tests.support import brokers, distributed, partitioned
from tests.support.aliases import another_alias
from tests.support.callers import PAYER, stop_heartbeat
from tests.support.databases import create_database, database_url, drop_database
from tests.support.pgbouncer import running_pgbouncer
from tests.support.private_servers import free_port
from tests.support.proxy import Proxy, running_proxy
from tests.support.requirements import (
    REQUIREMENTS,
    lacking,
    missing_import,
    without_extras,
)
from tests.support.threads import OtherThread

if TYPE_CHECKING:
    from django.contrib.auth.models import User
    from django.test import Client
    from pytest_django import DjangoDbBlocker
    from pytest_django.fixtures import SettingsWrapper
    from selenium.webdriver import Chrome

    from tests.support.browser import Browser
    from tests.support.servers import Server
    from tests.support.views import Caller

IN_CI = os.environ.get("CI") == "true"
# labels of the apps, the wings' among them, begin so
OURS = ("django_idempotency", "testproject")
# tests, by the marker whose requirement is not met
LEFT_OUT = pytest.StashKey[Counter[str]]()
# modules that import what is not installed
LEFT_OUT_MODULES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEFT_OUT] = Counter()
    config.stash[LEFT_OUT_MODULES] = []
    for name, requirement in REQUIREMENTS.items():
        config.addinivalue_line("markers", f"{name}: {requirement.meaning}")


@pytest.hookimpl(trylast=True)  # after --ignore
def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    package = (
        missing_import(collection_path) if collection_path.match("test_*.py") else None
    )
    if package:
        config.stash[LEFT_OUT_MODULES].append(
            f"{collection_path.name} (needs {package})"
        )
    return True if package else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Tests are collected faster while no garbage is; nor do they become any later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        # its import would miss references from what is frozen
        if "hypothesis" in sys.modules:
            gc.freeze()


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        lacks = lacking({mark.name for mark in item.iter_markers()})
        config.stash[LEFT_OUT].update(lacks)
        (left_out if lacks else kept).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = _longest_first(kept)


def _longest_first(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files with slow tests, then the others, the largest first: no worker is left with
    a long file at the end.
    """
    tests = Counter(item.path for item in items)
    slow = {
        item.path
        for item in items
        if {"slow", "exhaustive"} & {mark.name for mark in item.iter_markers()}
    }
    return sorted(
        items, key=lambda item: (item.path not in slow, -tests[item.path], item.path)
    )


def _faults_in_ci(config: pytest.Config) -> list[str]:
    """What may not be where every service is and nothing is skipped; one run does
    without the extras.
    """
    missing = [
        name for name in config.stash[LEFT_OUT] if REQUIREMENTS[name].always_in_ci
    ]
    missing += [] if without_extras() else config.stash[LEFT_OUT_MODULES]
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = [
        report
        for outcome in ("skipped", "xfailed")
        for report in reporter.stats.get(outcome, [])
    ]
    return missing + [f"{len(skipped)} skipped"] * bool(skipped)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if workeroutput := getattr(session.config, "workeroutput", None):
        workeroutput["left_out"] = dict(session.config.stash[LEFT_OUT])
        workeroutput["left_out_modules"] = session.config.stash[LEFT_OUT_MODULES]
    elif IN_CI and not session.exitstatus and _faults_in_ci(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Take over from one of pytest-xdist's workers what was left out; each of them
    collects every test.
    """
    if not error:
        node.config.stash[LEFT_OUT] = Counter(node.workeroutput["left_out"])
        node.config.stash[LEFT_OUT_MODULES] = node.workeroutput["left_out_modules"]


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for name, count in sorted(config.stash[LEFT_OUT].items()):
        wanted = REQUIREMENTS[name]
        terminalreporter.line(
            f"left out: {count} × {name} ({wanted.meaning}); to include them:"
            f" {wanted.remedy}"
        )
    for module in sorted(set(config.stash[LEFT_OUT_MODULES])):
        terminalreporter.line(f"left out: {module}")
    if IN_CI and (faults := _faults_in_ci(config)):
        terminalreporter.line(
            f"In CI every test has to run, but: {', '.join(faults)}", red=True
        )


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    django_db_modify_db_settings_parallel_suffix: None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """SQLite's test database in a file: the one in memory that threads share has no
    busy timeout.
    """
    if connection.vendor == "sqlite":
        connection.settings_dict["TEST"]["NAME"] = str(
            tmp_path_factory.mktemp("sqlite") / "test.sqlite3"
        )
    if distributed.WANTED:
        distributed.drop_by_force()


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> None:
    from django_idempotency.maintenance.records import is_sharded
    from django_idempotency.stores.connections import record_database

    with django_db_blocker.unblock():
        if partitioned.WANTED:
            partitioned.divide_finely()
        if distributed.WANTED:
            distributed.distribute()
        if distributed.STORE_WANTED:
            distributed.use_store()
        # each process tries it once: not while a test counts statements
        is_sharded(record_database())


@pytest.fixture
def db(request: pytest.FixtureRequest) -> None:
    """pytest-django's, which beside ``transactional_db`` does nothing: its flush would
    make every permission anew.
    """
    request.getfixturevalue(
        "transactional_db"
        if "transactional_db" in request.fixturenames
        else "_django_db_helper"
    )


def _empty_tables() -> None:
    """Delete what tests write: our rows, the users, and what refers to users. On
    PostgreSQL in one round trip.
    """
    user = get_user_model()
    models = apps.get_models(include_auto_created=True)
    ours = [each for each in models if each._meta.app_label.startswith(OURS)]
    theirs = [
        each
        for each in models
        if any(field.related_model is user for field in each._meta.concrete_fields)
    ]
    tables = dict.fromkeys(
        each._meta.db_table for each in (*theirs, *ours, user) if each._meta.managed
    )
    statements = [f"DELETE FROM {connection.ops.quote_name(table)}" for table in tables]
    if distributed.WANTED:
        if not connection.in_atomic_block:  # as in a TestCase
            connection.close()  # a test may have made its session read-only
        statements.insert(0, distributed.ONE_SHARD_AT_A_TIME)
    with connection.cursor() as cursor:
        for statement in (
            ["; ".join(statements)] if connection.vendor == "postgresql" else statements
        ):
            cursor.execute(statement)


@pytest.fixture
def transactional_db(
    django_db_setup: None, django_db_blocker: DjangoDbBlocker
) -> Iterator[None]:
    """pytest-django's, where commits are commits, but cleaned up in milliseconds: no
    TRUNCATE of every table.
    """
    with django_db_blocker.unblock():
        yield
        _empty_tables()
        for each in connections.all(initialized_only=True):
            if not each.in_atomic_block:
                each.close()  # with what the test has set on it


@pytest.fixture(autouse=True)
def nothing_was_logged() -> None:
    """A message that is logged once a minute is logged in every test."""
    from django_idempotency.reporting import logs

    logs._said.clear()


@pytest.fixture(scope="session", autouse=True)
def nobody_is_hurried() -> Iterator[None]:
    """A page or a scrape may ask the database for longer than a busy machine takes. A
    test of the limit sets its own.
    """
    from django_idempotency.admin import alarms, pages
    from django_idempotency.instrumentation import metrics

    with pytest.MonkeyPatch.context() as patch:
        for module, limit in (
            (pages, "SECONDS"),
            (alarms, "SECONDS"),
            (metrics, "LONGEST"),
        ):
            patch.setattr(module, limit, 60.0)
        yield


@pytest.fixture
def reference() -> str:
    """Serves as the key, too."""
    return uuid4().hex


@pytest.fixture(params=[True, False], ids=["ATOMIC_REQUESTS", "autocommit"])
def atomic_requests(
    request: pytest.FixtureRequest,
    transactional_db: None,
    monkeypatch: pytest.MonkeyPatch,
) -> bool:
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", request.param)
    return bool(request.param)


@pytest.fixture
def other_thread() -> Iterator[OtherThread]:
    thread = OtherThread()
    yield thread
    thread.close()


@pytest.fixture
def other_alias(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Another alias of the default database, while "default" leads nowhere."""
    with another_alias("elsewhere") as alias, monkeypatch.context() as patch:
        connection.close()
        patch.setitem(connection.settings_dict, "HOST", "127.0.0.1")
        patch.setitem(connection.settings_dict, "PORT", free_port())
        yield alias


@pytest.fixture(scope="session")
def server_database(
    django_db_setup: None,
    django_db_blocker: DjangoDbBlocker,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """The URL of the database that the test project's servers share, seeded, beside the
    test database.
    """
    from tests.support.servers import prepare_database

    name = f"{Path(str(connection.settings_dict['NAME'])).stem}_server"
    with django_db_blocker.unblock():
        url = create_database(name, tmp_path_factory.mktemp("database"))
    prepare_database(url)
    yield url
    with django_db_blocker.unblock():
        drop_database(name)


@pytest.fixture(scope="session")
def server(
    server_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """The test project's real server, one for the whole run; don't kill more of it than
    a worker.
    """
    from tests.support.servers import running_server

    with running_server(server_database, tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="session")
def lease_server(
    server_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Another one on the same database, with every view in lease mode."""
    from tests.support.servers import running_server

    directory = tmp_path_factory.mktemp("lease_server")
    with running_server(
        server_database,
        directory,
        DJANGO_SETTINGS_MODULE="tests.support.settings.lease",
    ) as running:
        yield running


@pytest.fixture
def short_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reaper that watches lapsed leases for a moment; tests/laws has what the watch
    is for.
    """
    from django_idempotency.maintenance import reaper

    monkeypatch.setattr(reaper, "LONGEST_WATCH", 0.1)


@pytest.fixture
def payer(transactional_db: None) -> Iterator[None]:
    """The user who pays in the views of ``tests.support.callers``; afterwards, the
    heartbeat is stopped.
    """
    get_user_model().objects.create_user(PAYER)
    yield
    stop_heartbeat()


@pytest.fixture
def proxy(payer: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Between the connections of this process and its database, for as long as the test
    lasts.
    """
    settings = connection.settings_dict
    plain = (
        {"sslmode": "disable", "gssencmode": "disable"}
        if connection.vendor == "postgresql"
        else {}
    )
    with running_proxy(settings) as running, monkeypatch.context() as patch:
        connection.close()
        patch.setitem(settings, "HOST", "127.0.0.1")
        patch.setitem(settings, "PORT", running.port)
        patch.setitem(settings, "OPTIONS", settings["OPTIONS"] | plain)
        yield running
        running.come_back()
        connection.close()


@pytest.fixture
def start_server(
    server_database: str, tmp_path: Path
) -> Iterator[Callable[..., Server]]:
    """Start a server of the test's own: ``start_server(ATOMIC_REQUESTS="1",
    database_url=…)``; stopped after it.
    """
    from tests.support.servers import running_server

    with ExitStack() as stack:

        def start(database_url: str = server_database, **environment: str) -> Server:
            return stack.enter_context(
                running_server(database_url, tmp_path, **environment)
            )

        yield start


@pytest.fixture(scope="session")
def pgbouncer(
    django_db_setup: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], str]]:
    """PgBouncer in transaction mode before the server under test: from a database's URL
    or name to its URL there.
    """
    settings = connection.settings_dict
    with running_pgbouncer(settings, tmp_path_factory.mktemp("pgbouncer")) as port:
        yield lambda url: database_url(
            settings, url.rpartition("/")[2], HOST="127.0.0.1", PORT=port
        )


@pytest.fixture(scope="session")
def rabbitmq_url() -> str:
    return brokers.url("rabbitmq")


@pytest.fixture(scope="session")
def redis_url() -> str:
    return brokers.url("redis")


@pytest.fixture(scope="session")
def nats_url() -> str:
    return brokers.url("nats")


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """One for the whole run."""
    from tests.support.browser import running_chromium

    with running_chromium(tmp_path_factory.mktemp("chromium")) as driver:
        yield driver


@pytest.fixture(scope="session")
def site(django_db_setup: None) -> Iterator[str]:
    """The URL of the project: threads of this process serve it, static files too, and
    let nothing inline through.
    """
    from pytest_django.live_server_helper import LiveServer

    with override_settings(
        MIDDLEWARE=["tests.support.browser.strict_csp", *settings.MIDDLEWARE]
    ):
        server = LiveServer("localhost")
    yield server.url
    server.stop()


@pytest.fixture
def browser(chromium: Chrome, site: str, transactional_db: None) -> Iterator[Browser]:
    """A window with nobody signed in. The test fails if the browser had anything to
    complain of.
    """
    from tests.support.browser import Browser

    window = Browser(chromium, site)
    window.forget()
    yield window
    assert window.complaints() == []


@pytest.fixture
def alice(django_user_model: type[User]) -> Iterator[User]:
    yield django_user_model.objects.create_user("alice")
    stop_heartbeat()


@pytest.fixture
def lock(request: pytest.FixtureRequest, settings: SettingsWrapper) -> str:
    """How rows that may change owner are locked, with ``row_locks_of_both_kinds``."""
    store = {
        "BACKEND": "django_idempotency.stores.DatabaseStore",
        "OPTIONS": {"row_lock": request.param},
    }
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "STORES": {"default": store}}
    return str(request.param)


@pytest.fixture
def client_sees_500(client: Client) -> None:
    """An exception that nobody caught is an answer, as it is to a real client."""
    client.raise_request_exception = False


@pytest.fixture
def call(client: Client, alice: User, settings: SettingsWrapper) -> Caller:
    """``call(view, {"amount": 1}, key="k")``: a POST to a view, as alice."""
    from tests.support.views import Caller

    client.force_login(alice)
    return Caller(client, settings)
