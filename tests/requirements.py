"""What a test can need of the machine it runs on, by marker; a test that lacks it is left out, and it is said."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from django.conf import settings

from tests import brokers, partitioned, pgbouncer

ROOT = Path(__file__).parent.parent
OURS = {"django_idempotency", "testproject", "tests"}


@dataclass(frozen=True)
class Requirement:
    """``met`` decides; ``remedy`` says how to have these tests run; ``always_in_ci``: CI fails where it is not met."""

    meaning: str
    met: Callable[[], bool]
    remedy: str
    always_in_ci: bool


def _engine() -> str:
    return settings.DATABASES["default"]["ENGINE"]


def without_extras() -> bool:
    """Whether this is the run that does without on purpose."""
    return settings.SETTINGS_MODULE == "tests.bare_settings"


def _on_database(meaning: str, met: Callable[[], bool]) -> Requirement:
    return Requirement(meaning, met, "make test", always_in_ci=False)


def _extra(meaning: str, *modules: str) -> Requirement:
    """Something that needs ``modules`` installed."""
    remedy = "pip install -e '.[dev]'"
    return Requirement(meaning, lambda: all(map(find_spec, modules)), remedy, always_in_ci=not without_extras())


def _broker(name: str, meaning: str) -> Requirement:
    return Requirement(meaning, lambda: brokers.reachable(name), brokers.how_to_include(name), always_in_ci=True)


REQUIREMENTS = {
    "postgresql": _on_database("only means something on PostgreSQL", lambda: "postgresql" in _engine()),
    "other_databases": _on_database("says what other databases lack", lambda: "postgresql" not in _engine()),
    "row_locks": _on_database("needs a database that locks rows", lambda: "sqlite" not in _engine()),
    "plain_table": Requirement(
        "says something of the table while it is not partitioned",
        lambda: not partitioned.WANTED,
        "make test without IDEMPOTENCY_PARTITIONED",
        always_in_ci=False,
    ),
    "drf": _extra("needs Django REST framework", "rest_framework"),
    "prometheus": _extra("needs prometheus-client", "prometheus_client"),
    "celery": _extra("needs Celery", "celery"),
    "cryptography": _extra("encrypts", "cryptography"),
    "django_tasks": Requirement(
        "needs the task framework of Django 6.0",
        lambda: bool(find_spec("django.tasks")),
        "pip install 'django>=6'",
        False,
    ),
    "server": _extra("starts the test project's server", "gunicorn", "httpx", "environ", "rest_framework"),
    "build": _extra("builds the package", "build"),
    "rabbitmq": _broker("rabbitmq", "needs a RabbitMQ server"),
    "redis": _broker("redis", "needs a Redis server"),
    "pgbouncer": Requirement(
        "starts the real PgBouncer",
        lambda: pgbouncer.program() is not None,
        "apt-get install pgbouncer && make test",
        always_in_ci=True,
    ),
    "browser": Requirement(
        "drives a real browser",
        lambda: bool(find_spec("selenium")) and all(map(shutil.which, ("chromium", "chromedriver"))),
        "pip install -e '.[dev]' && apt-get install chromium chromium-driver && make test",
        always_in_ci=not without_extras(),
    ),
    "promtool": Requirement(
        "has Prometheus look at the alert rules",
        lambda: shutil.which("promtool") is not None,
        "apt-get install prometheus && make test",
        always_in_ci=True,
    ),
    "spin": Requirement(
        "checks the model with spin",
        lambda: all(map(shutil.which, ("spin", "gcc"))),
        "apt-get install spin gcc && make test",
        always_in_ci=True,
    ),
}
IMPLIED = {"pgbouncer": {"postgresql"}, "rabbitmq": {"celery"}}


@cache
def is_met(marker: str) -> bool:
    return REQUIREMENTS[marker].met()


def lacking(markers: set[str]) -> set[str]:
    """Those of ``markers``, or of what they imply, that this machine can't meet."""
    wanted = markers.union(*(IMPLIED.get(marker, set()) for marker in markers)) & REQUIREMENTS.keys()
    return {marker for marker in wanted if not is_met(marker)}


def missing_import(module: Path) -> str | None:
    """A package that the test module imports at its top, itself or through our own modules, and that is not there."""
    return next((name for name in sorted(_foreign(module, set())) if not _installed(name)), None)


def _installed(name: str) -> bool:
    return name in sys.modules or find_spec(name) is not None  # kombu, once imported, has no spec


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
