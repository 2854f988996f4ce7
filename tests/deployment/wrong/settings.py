from __future__ import annotations

import sys
import uuid

import pytest

from django_idempotency.http.placement import idempotency_exempt, idempotent
from django_idempotency.values.policy import Atomic, Body, Key, Lease, Limits
from tests.deployment.wrong import Given, table, view, wrong

ENCRYPTED = Body(encrypt=True)
KEY = "n3rI0Q4m0tX1m9cP5yq0kSxJcF5YH0b3tq6bS0XoBqs="
RUNNERS = "tests.messages.test_running"
MEMORY = {"memory": {"BACKEND": "tests.stores.memory.MemoryStore"}}
MISSPELT = {"redsi": {"BACKEND": "django_idempotency.stores.DatabaseStore"}}
guessable, long = Key(min_length=15), Key(min_length=16)
WAITS = (
    "late: its lease of 60 s is not shorter than the 30 s after which its broker"
    " redelivers."
)
FORGETS = (
    "late: a message is remembered for 86400 s, but can be redelivered for 604800 s."
)
MIDDLEWARE = (
    "REQUIRED is on, but anonymous callers of the views that only IdempotencyMiddleware"
    " covers"
)


def views(**policy):
    return Given(idempotent(**policy)(view))


table(
    (
        "E001",
        Given(LEESE=5),
        Given(LEASE=Lease(seconds=5)),
        "Unknown name 'LEESE': did you mean 'LEASE'?",
    ),
    (
        "E001",
        Given(LEASE=5),
        Given(LEASE=Lease(seconds=5)),
        '["LEASE"] is 5; it must be a Lease(…).',
    ),
    (
        "E001",
        Given(EXEMPT_PATHS=["("]),
        Given(EXEMPT_PATHS=["^/"]),
        "it must be a list of regular expressions.",
    ),
    (
        "E002",
        Given(MODE=Lease(seconds=61), RETENTION=60),
        Given(MODE=Lease(seconds=60), RETENTION=60),
        (
            "The IDEMPOTENCY setting: a lease of 61 s is longer than the retention of"
            " 60 s."
        ),
    ),
    (
        "E002",
        views(wait=11, mode=Lease(seconds=50), retention=60),
        views(mode=Lease(seconds=50), retention=60),
        (
            "wrong.view: the retention of 60 s is shorter than the lease and the wait"
            " together."
        ),
    ),
    (
        "E003",
        Given(BODY=ENCRYPTED),
        Given(BODY=ENCRYPTED, ENCRYPTION_KEYS=[KEY]),
        "there is no encryption key: no response is",
    ),
    (
        "E005",
        views(scope="public", store_cookies=True),
        views(scope=repr, store_cookies=True),
        'wrong.view: scope is "public" and store_cookies is on',
    ),
    (
        "W006",
        views(scope="public", key=guessable),
        views(scope="public", key=long),
        "and any key is accepted",
    ),
    (
        "W006",
        views(scope="public"),
        views(scope="public", key=Key(pattern="[0-9a-f-]{36}")),
        "another caller's response is only a guess away",
    ),
    (
        "W007",
        Given(REQUIRED=True, FAIL_OPEN=True),
        Given(FAIL_OPEN=True),
        "with FAIL_OPEN a request runs unprotected",
    ),
    (
        "W008",
        views(required=True, anonymous="ignore"),
        views(required=True, anonymous="refuse"),
        'wrong.view: required is on, but with anonymous "ignore"',
    ),
    (
        "W008",
        Given(REQUIRED=True),
        Given(REQUIRED=True, ANONYMOUS="refuse"),
        MIDDLEWARE,
    ),
    (
        "W009",
        views(mode=Lease(seconds=4.9)),
        views(mode=Lease(seconds=5)),
        "wrong.view: a lease of 4.9 s may lapse because its process",
    ),
    (
        "W012",
        Given(ENABLED=False),
        Given(),
        "ENABLED is off in the IDEMPOTENCY setting: keys of requests are ignored",
    ),
    (
        "W012",
        Given(DASHBOARD={"OBSERVE": 60}),
        Given(),
        "makes entry points only observe requests, so retries run again.",
    ),
    (
        "E023",
        Given(STORES=MISSPELT, STORE="redis"),
        Given(),
        "STORES has no 'redis': did you mean 'redsi'?",
    ),
    (
        "E023",
        views(using="ledger"),
        views(using="default"),
        "using is 'ledger', which is not in DATABASES.",
    ),
    (
        "E023",
        Given(SHARDS=["defualt"]),
        Given(SHARDS=["default"]),
        "SHARDS names the database 'defualt'",
    ),
    (
        "E023",
        Given(USING=str),
        Given(USING=str, SHARDS=["default"]),
        "USING is a callable, and SHARDS names no database",
    ),
    (
        "E002",
        views(wait=11, retention=10),
        views(wait=10, retention=10),
        "wrong.view: the retention of 10 s is shorter than the wait.",
    ),
    (
        "E023",
        Given(LIMITS_CACHE="defualt", ADMIT=Limits(new_keys=1)),
        Given(LIMITS_CACHE="defualt"),
        "LIMITS_CACHE is 'defualt', which is not in CACHES",
    ),
    (
        "E024",
        Given(idempotent(store="memory")(view), STORES=MEMORY),
        Given(idempotent(store="memory", mode="lease")(view), STORES=MEMORY),
        (
            "wrong.view: The policy is in atomic mode, but the store 'memory'"
            " (MemoryStore) can't commit"
        ),
    ),
    (
        "E037",
        Given(CONSUMERS=["nowhere.at.all"]),
        Given(CONSUMERS=[]),
        "nowhere.at.all: No module named 'nowhere'",
    ),
    (
        "W038",
        Given(CONSUMERS=[f"{RUNNERS}.late"]),
        Given(CONSUMERS=[f"{RUNNERS}.memory"]),
        f"{RUNNERS}.{WAITS}",
    ),
    (
        "W038",
        Given(CONSUMERS=[f"{RUNNERS}.late"]),
        Given(CONSUMERS=[f"{RUNNERS}.memory"]),
        f"{RUNNERS}.{FORGETS}",
    ),
)


@wrong("E001", "IDEMPOTENCY is ['LEASE']; it must be a dict.")
def no_dict(project):
    project.settings.IDEMPOTENCY = ["LEASE"]
    yield
    project()


@wrong(
    "E001",
    "Is an app that reads it missing from INSTALLED_APPS?",
)
def options_of_an_outbox_that_is_not_installed(project):
    installed = project.settings.INSTALLED_APPS
    project.settings.INSTALLED_APPS = [
        app for app in installed if app != "django_idempotency.contrib.outbox"
    ]
    project(OUTBOX={"BATCH": 1})
    yield
    project.settings.INSTALLED_APPS = installed


@wrong(
    "E003",
    "wrong.view: encrypt is set, but the package cryptography is not installed",
)
def encryption_without_the_package(project):
    project(ENCRYPTION_KEYS=["A" * 43 + "="])
    project.views(idempotent(body=Body(encrypt=True))(view))
    project.patch.setitem(sys.modules, "cryptography", None)  # not to be found
    yield
    project.patch.undo()


@wrong("E004", "the database 'lite' is sqlite, where claims are made by record.")
def lock_elsewhere_than_in_postgresql(project):
    project(ATOMIC=Atomic(claim="lock"), USING=project.second_database())
    project.views()
    yield
    project(ATOMIC=Atomic(claim="lock"), USING="lite", MODE="lease")


@wrong(
    "W039", f"{RUNNERS}.by_lock: a message that kills its process is never given up."
)
def crashes_that_nothing_counts(project):
    project(CONSUMERS=[f"{RUNNERS}.by_lock"])
    yield
    project.patch.setattr(f"{RUNNERS}.Memory.tells_redeliveries", True)


@wrong("E001", "Nothing reads the setting IDEMPOTENCY_RETENTION.")
def flat_settings(project):
    project.settings.IDEMPOTENCY_RETENTION = 60
    yield
    del project.settings.IDEMPOTENCY_RETENTION


@wrong("W018", "CORS_ALLOW_HEADERS of django-cors-headers lacks 'idempotency-key'")
def keys_that_browsers_may_not_send(project):
    project.settings.MIDDLEWARE = ["corsheaders.middleware.CorsMiddleware"]
    project.settings.CORS_ALLOW_HEADERS = ["content-type"]
    project.settings.CORS_EXPOSE_HEADERS = ["Idempotent-Replayed"]
    yield
    project.settings.CORS_ALLOW_HEADERS = ["content-type", "Idempotency-Key"]


@wrong("W018", "so scripts of other origins can't tell replays.")
def replays_that_browsers_can_not_see(project):
    project.settings.MIDDLEWARE = ["corsheaders.middleware.CorsMiddleware"]
    project.settings.CORS_ALLOW_HEADERS = ["idempotency-key"]
    yield
    project.settings.CORS_EXPOSE_HEADERS = ["idempotent-replayed"]


@wrong("W017", "drf-spectacular describes the API, but not its keys")
def an_api_document_without_keys(project):
    installed = project.settings.INSTALLED_APPS
    wing = "django_idempotency.contrib.openapi"
    apps = {*installed, "drf_spectacular"} - {wing}
    project.settings.INSTALLED_APPS = sorted(apps)
    project()
    yield
    project.settings.INSTALLED_APPS = sorted({*apps, wing})


@wrong(
    "W017",
    "Django Ninja describes the API, but not its keys",
    pytest.mark.openapi,
)
def a_document_of_ninja_without_keys(project):
    from ninja import NinjaAPI

    def mounted(operation, **options):
        api = NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None, **options)
        api.post("/pay", auth=bool)(operation)
        return api.urls

    left_out = {"drf_spectacular", "django_idempotency.contrib.openapi"}
    apps = {*project.settings.INSTALLED_APPS} - left_out
    project.settings.INSTALLED_APPS = sorted(apps)
    project.views(mounted(idempotent(view)))
    yield
    exempt = idempotency_exempt(lambda request: None)
    project.views(mounted(exempt), mounted(idempotent(view), openapi_url=None))
