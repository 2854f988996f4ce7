"""Each system check fires when something is wrong, and is silent when it is not."""

from __future__ import annotations

import pytest
from django.apps import apps
from django.core import checks
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connections
from django.utils.decorators import method_decorator

from django_idempotency import engine
from django_idempotency.checks.catalogue import CHECKS
from django_idempotency.checks.registry import DOCS, TAG
from django_idempotency.http.placement import idempotent
from django_idempotency.values.outcomes import Keep, StoredResponse
from django_idempotency.values.policy import Lease, Policy
from django_idempotency.values.scopes import has_schemas
from tests.deployment.wrong import WRONG, Page, Project, aview, view
from tests.deployment.wrong import databases as _databases  # noqa: F401 (registers)
from tests.deployment.wrong import settings as _settings  # noqa: F401 (registers)
from tests.deployment.wrong.databases import HOUR
from tests.deployment.wrong.views import Adding, Policed
from tests.support.aliases import another_alias
from tests.support.callers import claim, shift
from tests.support.checks import CORE, found, ids_found

pytestmark = pytest.mark.usefixtures("payer")


@pytest.fixture
def project(settings, monkeypatch):
    settings.DEBUG = True  # SQLite is not what most tests are about
    settings.IDEMPOTENCY = {}
    project = Project(settings, monkeypatch)
    project.views()
    return project


@pytest.mark.parametrize(("id", "sentence", "steps"), WRONG)
def test_a_check_fires_and_is_silent(project, id, sentence, steps):
    case = steps(project)
    next(case)
    message = next((each for each in found(id) if sentence in each.msg), None)
    assert message, found(id)
    assert (message.id, message.level) == (
        f"{CORE}.{id}",
        {"E": checks.ERROR, "W": checks.WARNING}[id[0]],
    )
    assert message.hint.endswith(f" See {DOCS}/checks/#{id.lower()}")
    next(case, None)
    assert found(id) == []
    next(case, None)


def test_each_check_has_a_case_that_fires():
    assert {case.values[0] for case in WRONG} == {check.id for check in CHECKS}


def ours(*, deploy=False, **options):
    """What Django finds with the checks that are registered with it, the outbox's
    aside.
    """
    messages = checks.run_checks(include_deployment_checks=deploy, **options)
    return [message.id for message in messages if message.id.startswith(f"{CORE}.")]


def test_a_project_in_order_passes_every_check(project):
    project.views(
        idempotent(view),
        idempotent(mode="lease")(aview),
        idempotent(Adding).as_view(),
        view,
    )
    assert ours(deploy=True, databases=["default"]) == []


def test_checks_that_query_run_only_with_databases(project, django_assert_num_queries):
    with django_assert_num_queries(0):
        assert ours(deploy=True) == ours(deploy=True, databases=[]) == []


def test_a_misspelt_setting_is_one_error_of_the_package(project):
    project(LEESE=5)
    messages = checks.run_checks(include_deployment_checks=True, databases=["default"])
    assert [message.id for message in messages if message.id.startswith(CORE)] == [
        f"{CORE}.E001"
    ]


def test_deployment_checks_run_only_when_asked_for(project, capsys):
    project(ENABLED=False)
    assert ours() == []
    call_command("check", "--deploy", "--tag", TAG)
    assert f"{CORE}.W012" in capsys.readouterr().err
    with pytest.raises(SystemCheckError, match=f"{CORE}.W012"):
        call_command("check", "--deploy", "--tag", TAG, "--fail-level", "WARNING")


def test_checks_run_once_however_often_the_apps_get_ready(project):
    project(MODE=Lease(seconds=61), RETENTION=60)
    apps.get_app_config(CORE).ready()
    assert ours() == [f"{CORE}.E002"]


def test_e027_is_silent_about_tenants_and_once_migrated(project):
    project(USING="lite")
    with another_alias(
        "lite", ENGINE="django.db.backends.sqlite3", NAME=":memory:", OPTIONS={}
    ):
        assert ids_found("E027", databases=["default"]) == [], "it holds no records"
        assert ids_found("E027", databases=["lite"]) == ["E027"]
        with project.patch.context() as patch:
            # as with django-tenants
            patch.setattr(connections["lite"], "schema_name", None, raising=False)
            has_schemas.cache_clear()
            assert ids_found("E027", databases=["lite"]) == []
        has_schemas.cache_clear()
        call_command("migrate", "django_idempotency", database="lite", verbosity=0)
        assert ids_found("E027", databases=["lite"]) == []


def test_a_project_without_urls_passes_the_checks(project):
    """It only consumes messages."""
    del project.settings.ROOT_URLCONF
    assert ours() == []


@pytest.mark.postgresql
def test_w035_does_not_report_a_live_owner_in_atomic_mode(other_thread):
    claimed = claim(policy=Policy())
    shift(locked_until=-2 * HOUR)
    with engine.execution(claimed, Policy()) as run:
        assert other_thread(ids_found, "W035") == []
        run.verdict = Keep(StoredResponse(201))
    claim("dead", policy=Policy())
    shift("dead", locked_until=-2 * HOUR)
    assert ids_found("W035") == ["W035"]


def test_a_view_is_not_reported_for_what_it_has_from_the_setting(project):
    project.views(
        idempotent(view), idempotent(retention=50)(view), idempotent(retention=50)(view)
    )
    project(MODE="lease", RETENTION=30)
    assert [message.msg for message in found("E002")] == [
        (
            "The IDEMPOTENCY setting: a lease of 60 s is longer than the retention of"
            " 30 s."
        ),
        (
            "tests.deployment.wrong.view: a lease of 60 s is longer than the retention"
            " of 50 s."
        ),
    ]


def test_hints_write_options_as_their_place_does(project):
    project(MODE=Lease(seconds=61), RETENTION=60)
    project.views(idempotent(retention=50)(view))
    of_setting, of_view = (message.hint for message in found("E002"))
    assert of_setting.startswith("Shorten the lease or lengthen RETENTION.")
    assert of_view.startswith("Shorten the lease or lengthen retention.")


def both():
    return type("Both", (Page,), {"put": Page.post})


CLASSES = {
    "method": (
        lambda once: method_decorator(once, name="post")(both()).as_view(),
        "Both.post",
    ),
    "dispatch": (
        lambda once: method_decorator(once, name="dispatch")(both()).as_view(),
        "Both",
    ),
    "class": (lambda once: once(both()).as_view(), "Both"),
}


@pytest.mark.parametrize(("make", "name"), CLASSES.values(), ids=CLASSES)
def test_the_policy_of_a_class_is_checked_wherever_it_is_stated(project, make, name):
    project.views(make(idempotent(required=True, fail_open=True)))
    (message,) = found("W007")
    assert message.msg.startswith(f"{__name__}.{name}: required is on")


def test_two_methods_of_a_class_may_have_two_policies(project):
    decorated = method_decorator(idempotent(required=True, fail_open=True), name="put")(
        both()
    )
    project.views(
        method_decorator(idempotent(mode=Lease(seconds=61), retention=60), name="post")(
            decorated
        ).as_view()
    )
    assert ["Both.post" in message.msg for message in found("E002")] == [True]
    assert ["Both.put" in message.msg for message in found("W007")] == [True]


def test_a_class_is_reported_once_however_many_routes_it_has(project):
    project.views(Policed.as_view(), Policed.as_view())
    assert ids_found("E015") == ["E015"]
