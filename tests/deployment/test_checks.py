"""Each system check speaks when something is wrong, with a hint, and is silent when nothing is."""

from __future__ import annotations

import sys

import pytest
from django.contrib.auth.models import User
from django.core import checks, mail
from django.db import connection, connections
from django.http import HttpResponse
from django.urls import include, path
from django.views.generic import CreateView

from django_idempotency.checks.databases import check_databases, check_row_locks
from django_idempotency.checks.middleware import MIDDLEWARE, check_cors, check_middleware
from django_idempotency.checks.settings import check_settings
from django_idempotency.checks.views import check_views
from django_idempotency.decorators import idempotent
from django_idempotency.middleware import IdempotencyMiddleware

OURS = "django_idempotency."
OUTBOX = {"E060", "E061", "W062", "W063"}  # tests/outbox is about these


@pytest.fixture
def found(db, settings):
    """What the checks that are registered with Django find, by id without its prefix."""
    settings.DEBUG = True  # SQLite is not what these tests are about

    def run(*views):
        settings.ROOT_URLCONF = (path("sub/", include([path(f"{n}/", view) for n, view in enumerate(views)])),)
        messages = checks.run_checks(include_deployment_checks=False, databases=["default"])
        ids = {message.id.removeprefix(OURS): message for message in messages if message.id.startswith(OURS)}
        return {id: message for id, message in ids.items() if id not in OUTBOX}

    return run


def view(request):
    return HttpResponse()


async def aview(request):
    return HttpResponse()


class Adding(CreateView):
    model = User
    fields = ("username",)


@pytest.fixture
def second_database(settings):
    """Another alias, on SQLite."""
    databases = connections.settings | {"lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
    connections.settings["lite"] = connections.configure_settings(databases)["lite"]
    yield "lite"
    del connections["lite"]
    del connections.settings["lite"]


def test_a_project_in_order_hears_nothing(found):
    assert found(idempotent(view), idempotent(mode="lease")(aview), idempotent(Adding).as_view(), view) == {}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"LEESE": 5}, "Unknown name 'LEESE': did you mean 'LEASE'?"),
        ({"LEASE": "5"}, "[\"LEASE\"] is '5'; it must be a number"),
        ({"EXEMPT_PATHS": ["("]}, "is not a regular expression"),
        (["LEASE"], "it must be a dict"),
    ],
)
def test_e001_unknown_or_impossible_settings(found, settings, wrong, sentence):
    settings.IDEMPOTENCY = wrong
    messages = found(idempotent(view))
    assert list(messages) == ["E001"]
    assert sentence in messages["E001"].msg
    assert "IDEMPOTENCY setting" in messages["E001"].hint


def test_e002_a_lease_longer_than_the_retention(found, settings):
    settings.IDEMPOTENCY = {"LEASE": 61, "RETENTION": 60}
    assert "RETENTION" in found()["E002"].hint
    settings.IDEMPOTENCY = {"LEASE": 60, "RETENTION": 60}
    assert found() == {}


def test_e002_on_a_view_names_the_view(found):
    messages = found(idempotent(lease=61, retention=60)(view))
    assert list(messages) == ["E002"]
    assert f"{__name__}.view" in messages["E002"].msg


def test_e003_a_retention_shorter_than_lease_and_wait(found, settings):
    settings.IDEMPOTENCY = {"LEASE": 50, "WAIT_TIMEOUT": 11, "ON_CONFLICT": "wait", "RETENTION": 60}
    assert "lengthen RETENTION" in found()["E003"].hint
    assert list(found(idempotent(view))) == ["E003"]
    settings.IDEMPOTENCY = {"LEASE": 50, "WAIT_TIMEOUT": 11, "RETENTION": 60}
    assert found() == {}, "nobody waits"
    assert list(found(idempotent(on_conflict="wait")(view))) == ["E003"]


def test_e010_a_limit_for_late_retries_longer_than_the_retention(found, settings):
    settings.IDEMPOTENCY = {"MAX_REQUEST_AGE": 61, "RETENTION": 60}
    assert "shorten MAX_REQUEST_AGE" in found()["E010"].hint
    settings.IDEMPOTENCY = {"MAX_REQUEST_AGE": 60, "RETENTION": 60}
    assert found() == {}


def test_e084_claims_by_lock_in_lease_mode(found, settings):
    messages = found(idempotent(mode="lease", claim="lock")(aview))
    assert f"{__name__}.aview" in messages["E084"].msg
    settings.IDEMPOTENCY = {"CLAIM": "lock"}  # of the views in atomic mode
    assert "E084" not in found(idempotent(mode="lease")(aview)) or connection.vendor != "postgresql"


def test_e084_claims_by_lock_elsewhere_than_in_postgresql(found):
    assert list(found(idempotent(claim="lock")(view))) == ["E084"] * (connection.vendor != "postgresql")


def test_e012_encryption_without_a_key_or_without_the_package(found, settings, monkeypatch):
    settings.IDEMPOTENCY = {"ENCRYPT": True}
    assert "Set ENCRYPTION_KEYS" in found()["E012"].hint
    settings.IDEMPOTENCY = {}
    assert f"{__name__}.view: encrypt is on" in found(idempotent(encrypt=True)(view))["E012"].msg
    settings.IDEMPOTENCY = {"ENCRYPT": True, "ENCRYPTION_KEYS": ["A" * 43 + "="]}
    monkeypatch.setitem(sys.modules, "cryptography", None)  # not to be found
    assert "[cryptography]" in found()["E012"].hint


PUBLIC = {"scope": "public", "min_key_length": 16}


@pytest.mark.parametrize(
    ("id", "combined", "harmless"),
    [
        ("W050", {"fail_open": True, "required": True}, {"fail_open": True}),
        (
            "E051",
            {"scope": "public", "store_cookies": True, "min_key_length": 16},
            {"scope": repr, "store_cookies": True},
        ),
        ("W058", {"scope": "public"}, {"scope": "public", "min_key_length": 16}),
        ("W058", {"scope": "public", "min_key_length": 15}, {"scope": "public", "key_pattern": "[0-9a-f-]{36}"}),
        ("W068", {"required": True, "anonymous": "ignore"}, {"required": True, "anonymous": "refuse"}),
        ("W052", {"methods": ["POST", "GET"]}, {"methods": ["POST", "LOCK"]}),
    ],
)
def test_dangerous_combinations(found, settings, id, combined, harmless):
    messages = found(idempotent(**combined)(view))
    assert list(messages) == [id]
    assert messages[id].msg.startswith(f"{__name__}.view: ")
    assert messages[id].hint
    assert found(idempotent(**harmless)(view)) == {}
    settings.IDEMPOTENCY = {name.upper(): value for name, value in combined.items()}
    assert found()[id].msg.startswith("The IDEMPOTENCY setting: ")


def test_w052_says_which_methods_are_safe(found):
    message = found(idempotent(methods=["POST", "GET", "HEAD"])(view))["W052"].msg
    assert message.endswith("methods includes GET, HEAD. Safe methods change nothing: a replay would be outdated.")


def test_a_view_is_not_told_again_what_it_has_from_the_setting(settings):
    settings.ROOT_URLCONF = (path("", idempotent(view)), path("own/", idempotent(retention=50)(view)))
    settings.IDEMPOTENCY = {"RETENTION": 30, "MAX_NEW_KEYS": 1, "LIMITS_CACHE": "defualt"}
    assert [message.id for message in check_settings(None)] == [f"{OURS}E002", f"{OURS}E064"]
    (message,) = check_views(None)
    assert message.msg == f"{__name__}.view: a lease of 60 s is longer than the retention of 50 s."


def test_e069_options_of_an_outbox_that_is_not_installed(found, settings):
    settings.IDEMPOTENCY = {"OUTBOX": {"BATCH": 1}}
    assert "E069" not in found()
    settings.INSTALLED_APPS = [app for app in settings.INSTALLED_APPS if app != "django_idempotency.outbox"]
    (message,) = check_settings(None)
    assert (message.id, "'django_idempotency.outbox'" in message.hint) == (f"{OURS}E069", True)
    settings.IDEMPOTENCY = {}
    assert check_settings(None) == []


COUNTERS = "django.core.cache.backends"


@pytest.mark.parametrize("limit", ["max_new_keys", "max_stored_bytes"])
def test_e064_limits_without_a_cache_to_count_in(found, settings, limit):
    settings.IDEMPOTENCY = {"LIMITS_CACHE": "defualt"}
    assert found(idempotent(view)) == {}
    assert "did you mean 'default'?" in found(idempotent(**{limit: 1})(view))["E064"].hint


@pytest.mark.parametrize("backend", ["dummy.DummyCache", "db.DatabaseCache", "filebased.FileBasedCache"])
def test_w065_a_cache_that_does_not_count(found, settings, backend):
    settings.CACHES = {"default": {"BACKEND": f"{COUNTERS}.{backend}", "LOCATION": "/nowhere"}}
    assert list(found(idempotent(max_new_keys=1)(view))) == ["W065"]
    assert found(idempotent(view)) == {}


def test_w065_local_memory_outside_debug(settings, monkeypatch):
    settings.CACHES = {"default": {"BACKEND": f"{COUNTERS}.locmem.LocMemCache"}}
    settings.IDEMPOTENCY = {"MAX_NEW_KEYS": 1}
    settings.DEBUG = False
    assert check_settings(None) == [], "a test run, which turns DEBUG off"
    monkeypatch.delattr(mail, "outbox")
    (message,) = check_settings(None)
    assert (message.id, "each process counts separately" in message.msg) == (f"{OURS}W065", True)
    settings.DEBUG = True
    assert check_settings(None) == []


@pytest.mark.cors
def test_w053_cors_headers_that_browsers_need(found, settings):
    from corsheaders.defaults import default_headers

    assert found() == {}, "django-cors-headers is not in INSTALLED_APPS"
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, "corsheaders"]
    settings.IDEMPOTENCY = {"REQUEST_TIME_HEADER": "X-Sent-At"}
    allowed, exposed = check_cors(None)
    assert (allowed.id, exposed.id) == (f"{OURS}W053", f"{OURS}W053")
    assert allowed.hint == "Add 'Idempotency-Key', 'X-Sent-At' to CORS_ALLOW_HEADERS."
    assert exposed.hint == "Add 'Idempotent-Replayed', 'Retry-After', 'X-Should-Retry' to CORS_EXPOSE_HEADERS."
    settings.CORS_ALLOW_HEADERS = [*default_headers, "idempotency-key", "x-sent-at"]
    settings.CORS_EXPOSE_HEADERS = ["idempotent-replayed", "retry-after", "x-should-retry"]
    assert check_cors(None) == []


def test_e004_a_middleware_that_looks_at_views_after_ours(found, settings):
    csrf, sessions = "django.middleware.csrf.CsrfViewMiddleware", "django.contrib.sessions.middleware.SessionMiddleware"
    settings.MIDDLEWARE = [sessions, MIDDLEWARE, csrf]
    message = found()["E004"]
    assert csrf in message.msg
    assert "last in MIDDLEWARE" in message.hint
    for right in ([csrf, MIDDLEWARE], [csrf, MIDDLEWARE, sessions], [csrf, sessions]):
        settings.MIDDLEWARE = right
        assert check_middleware(None) == []


@pytest.mark.django_prometheus
def test_w054_a_middleware_that_counts_by_view_after_ours(found, settings):
    prometheus, csrf = (
        "django_prometheus.middleware.PrometheusAfterMiddleware",
        "django.middleware.csrf.CsrfViewMiddleware",
    )
    settings.MIDDLEWARE = [csrf, MIDDLEWARE, prometheus]
    messages = found()
    assert list(messages) == ["W054"]
    assert "doesn't count those requests by view" in messages["W054"].msg
    settings.MIDDLEWARE = [csrf, prometheus, MIDDLEWARE]
    assert found() == {}


class Ours(IdempotencyMiddleware):
    """What a project makes of it."""


def test_e004_knows_a_middleware_that_is_made_of_ours(found, settings):
    csrf = "django.middleware.csrf.CsrfViewMiddleware"
    settings.MIDDLEWARE = [f"{__name__}.Ours", csrf]
    assert csrf in found()["E004"].msg
    settings.MIDDLEWARE = [csrf, f"{__name__}.Ours"]
    assert found() == {}


def test_e005_effects_in_another_database_than_the_record(found, second_database):
    elsewhere = type("Adding", (Adding,), {"queryset": User.objects.using(second_database)})
    message = found(idempotent(elsewhere).as_view())["E005"]
    assert "writes to 'lite' while its records are in 'default'" in message.msg
    assert 'mode="lease"' in message.hint
    assert found(idempotent(mode="lease")(elsewhere).as_view()) == {}
    assert found(idempotent(using=second_database)(elsewhere).as_view()) == {}


def test_e006_an_async_view_in_atomic_mode(found, settings):
    message = found(idempotent(aview))["E006"]
    assert f"{__name__}.aview is an async view" in message.msg
    assert 'mode="lease"' in message.hint
    settings.IDEMPOTENCY = {"MODE": "lease"}
    assert found(idempotent(aview)) == {}


def test_e006_an_async_class(found):
    async def post(self, request):
        return HttpResponse()

    base = type("AsyncAdding", (Adding.__mro__[-2],), {"post": post})
    assert list(found(idempotent(base).as_view())) == ["E006"]


def test_e007_sqlite_outside_debug(settings, second_database, monkeypatch):
    settings.IDEMPOTENCY = {"USING": second_database}
    settings.DEBUG = False
    assert check_databases(None) == [], "a test run, which turns DEBUG off"
    monkeypatch.delattr(mail, "outbox")
    (message,) = check_databases(None)
    assert (message.id, "'lite'" in message.msg) == (f"{OURS}E007", True)
    assert "PostgreSQL" in message.hint
    settings.DEBUG = True
    assert check_databases(None) == []


@pytest.mark.postgresql
def test_e007_is_silent_on_postgresql(settings):
    settings.DEBUG = False
    assert check_databases(None) == []


@pytest.mark.row_locks
@pytest.mark.parametrize("lacking", ["has_select_for_update_skip_locked", "has_select_for_update_nowait"])
def test_e008_a_database_without_skip_locked_or_nowait(db, monkeypatch, lacking):
    assert check_row_locks(None, databases=["default"]) == []
    monkeypatch.setattr(connection.features, lacking, False)
    (message,) = check_row_locks(None, databases=["default"])
    assert (message.id, "MariaDB 10.6 or later" in message.hint) == (f"{OURS}E008", True)
    assert check_row_locks(None, databases=[]) == [], "only databases that may be asked"


def test_one_wrong_setting_leaves_other_checks_running(settings):
    settings.IDEMPOTENCY = {"LEESE": 1}
    assert [message.id for message in check_settings(None)] == [f"{OURS}E001"]
    assert check_databases(None) == []


@pytest.mark.drf
def test_w009_anonymous_callers_without_a_scope(found):
    from rest_framework.permissions import AllowAny, IsAuthenticated
    from rest_framework.views import APIView

    def protected(*permissions, **policy):
        attributes = {"permission_classes": permissions}
        return idempotent(**policy)(type("Open", (APIView,), attributes)).as_view()

    for permissions in ((AllowAny,), ()):
        message = found(protected(*permissions))["W009"]
        assert "Open lets anonymous callers in" in message.msg
        assert 'scope="public"' in message.hint
        assert isinstance(message, checks.Warning)
    assert (
        found(
            protected(AllowAny, **PUBLIC),
            protected(AllowAny, anonymous="ignore"),
            protected(IsAuthenticated),
            protected(AllowAny, IsAuthenticated),
        )
        == {}
    )


def test_a_project_without_urls_passes_the_checks(settings):
    """It only consumes messages."""
    del settings.ROOT_URLCONF
    ours = {message.id for message in checks.run_checks() if message.id.startswith(OURS)}
    assert {id for id in ours if id.removeprefix(OURS) not in OUTBOX} == set()
