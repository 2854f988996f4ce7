"""Imports run one way, settings are read in one place, and the package stands without its extras."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import pytest

PACKAGE = "django_idempotency"
ROOT = Path(__file__).parents[2] / PACKAGE
# Each layer may import from those before it. Names are modules or sub-packages of the package.
LAYERS = [
    {"printable", "moments", "outcomes", "keys", "scopes", "fingerprints", "exceptions"},
    {"options", "policy", "conf", "log_ids", "logs", "cache_guard", "digests", "signals", "events", "traces"},
    {"models"},
    {"stores"},
    {"engine", "celery_exit"},
    {"http"},
    {"ninja", "wrapping", "decorators", "middleware", "rest_framework", "forms", "consumers"},
    {"outbox"},
    {"stats", "partitions"},
    {"maintenance"},
    {"instrumentation"},
    {"testing", "pytest_plugin"},
    {"client"},
    {
        *("management", "templatetags", "jobs", "tasks", "contrib", "admin"),
        *("checks", "apps", "migrations"),
    },
]
# Inside a layer, from the lowest.
ORDERED = [
    ["logs", "signals"],
    ["signals", "events"],
    ["options", "policy"],
    ["policy", "conf"],
    ["conf", "log_ids"],
    ["log_ids", "logs"],
    ["logs", "digests"],
    ["conf", "traces"],
    ["engine", "celery_exit"],
    ["wrapping", "decorators"],
    ["wrapping", "middleware"],
    ["rest_framework", "wrapping"],
    ["ninja", "wrapping"],
    ["decorators", "forms"],
]
ENTRY_POINTS = LAYERS[6]
NAMED_FOR_NOTHING = {"utils", "util", "helpers", "core", "common", "misc"}
EXTRAS = [
    *("rest_framework", "celery", "kombu", "redis", "environ", "psycopg_pool", "cryptography"),
    *("prometheus_client", "opentelemetry", "amqp", "nats", "confluent_kafka", "boto3", "botocore", "drf_spectacular"),
    *("standardwebhooks", "pytest", "schemathesis", "requests", "httpx", "mcp", "anyio"),
]
NEEDS_AN_EXTRA = {
    *(
        "rest_framework",
        "contrib.openapi",
        "celery_exit",
        "tasks",
        "pytest_plugin",
        *("client.httpx", "client.requests"),
        "testing.rest_framework",
        "testing.schemathesis",
    ),
    *(
        f"consumers.{name}"
        for name in ("celery", "celery_requests", "kafka", "mcp", "nats", "rabbitmq", "sqs", "webhooks")
    ),
    *("instrumentation.prometheus", "instrumentation.opentelemetry"),
    *(f"outbox.publishers.{broker}" for broker in ("celery", "kafka", "nats", "rabbitmq", "sqs")),
    "outbox.tasks",
    *("stores.encryption", "stores.redis", "stores.redis_client"),
}
NEEDS_A_LATER_DJANGO = {"contrib.django_tasks"}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").rstrip("."): path
    for path in sorted(ROOT.rglob("*.py"))
}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


def imported(module: str) -> set[str]:
    """The modules of the package that ``module`` imports, wherever it does, type checking aside."""
    skipped = {
        inner
        for node in ast.walk(tree(module))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in node.body
        for inner in ast.walk(child)
    }
    names = set()
    for node in ast.walk(tree(module)):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(f"{_source(module, node)}.{alias.name}" for alias in node.names)
    own = {name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(f"{PACKAGE}.")}
    return {_existing(name) for name in own} - {module}


def _source(module: str, node: ast.ImportFrom) -> str:
    parent = module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    return resolve_name("." * node.level + (node.module or ""), f"{PACKAGE}.{parent}".rstrip("."))


def _existing(name: str) -> str:
    """The module that ``name`` is, or is defined in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def top(module: str) -> str:
    return module.partition(".")[0]


def layer(module: str) -> int | None:
    """That of its package; commands are of the highest, whatever app they belong to."""
    room = "management" if "management" in module.split(".") else top(module)
    return next((height for height, names in enumerate(LAYERS) if room in names), None)


def test_a_module_imports_only_from_its_own_layer_and_those_below():
    placed = {module: height for module in MODULES if (height := layer(module)) is not None}
    assert set(MODULES) - set(placed) == {""}, "a module without a layer: give it one"
    upwards = [
        f"{module} imports {other}"
        for module, height in placed.items()
        for other in imported(module)
        if other in placed and placed[other] > height
    ]
    assert not upwards


@pytest.mark.parametrize(("lower", "upper"), ORDERED)
def test_inside_a_layer_imports_run_one_way_too(lower, upper):
    assert upper not in {top(other) for module in MODULES if top(module) == lower for other in imported(module)}


def test_entry_points_do_not_import_stores():
    entry_points = [module for module in MODULES if top(module) in ENTRY_POINTS]
    assert not [
        entry_point for entry_point in entry_points if "stores" in {top(other) for other in imported(entry_point)}
    ]


def test_no_circle_of_imports():
    finished: set[str] = set()
    path: list[str] = []

    def visit(module):
        assert module not in path, " → ".join([*path, module])
        if module not in finished:
            path.append(module)
            for other in imported(module):
                visit(other)
            finished.add(path.pop())

    for module in MODULES:
        visit(module)


def test_only_conf_reads_the_settings():
    readers = {
        module
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ImportFrom | ast.Import) and "django.conf" in ast.unparse(node)
        if "settings" in ast.unparse(node) or isinstance(node, ast.Import)
    }
    assert readers == {"conf"}


# Who may touch what: modules or packages; nobody else does.
HTTP = {
    *("http", "wrapping", "decorators", "middleware", "ninja", "rest_framework", "forms", "fingerprints", "policy"),
    "admin",
    *("contrib.published_policy", "outbox.admin", "consumers.webhooks", "instrumentation.prometheus"),
}
DDL = {"partitions", "migrations", "outbox.migrations", "stores.claim_function", "checks.deployment"}  # a hint of it
THREADS = {
    *("engine.shielding", "engine.workers", "consumers.runner", "consumers.health", "consumers.nats", "testing"),
    *("outbox.lanes", "outbox.publishers.webhooks", "outbox.management"),
}
CLIENTS = {
    "celery": {"celery_exit", "tasks", "consumers.celery", "consumers.celery_requests", "outbox"},
    "kombu": {"consumers.celery", "consumers.rabbitmq", "outbox.publishers.celery", "outbox.publishers.rabbitmq"},
    "amqp": {"consumers.rabbitmq", "outbox.publishers.rabbitmq"},
    "nats": {"consumers.nats", "outbox.publishers.nats"},
    "confluent_kafka": {"consumers.kafka", "outbox.publishers.kafka"},
    "mcp": {"consumers.mcp"},
    "boto3": {"consumers.sqs", "outbox.publishers.sqs"},
    "botocore": {"consumers.sqs", "outbox.publishers.sqs"},
    "redis": {"stores.redis", "stores.redis_client", "stores.cached"},
    "psycopg": {"stores.prepared", "stores.postgresql", "outbox.wakeup"},
    "cryptography": {"stores.encryption"},
    "prometheus_client": {"instrumentation.prometheus", "consumers.health"},
    "pytest": {"pytest_plugin"},
    "schemathesis": {"testing.schemathesis"},
    "httpx": {"client.httpx"},
    "requests": {"client.requests", "testing.schemathesis"},
}
DEFINITION = re.compile(
    r"\b(CREATE|ALTER|DROP|TRUNCATE|ATTACH|DETACH)( OR REPLACE)? (TABLE|INDEX|FUNCTION|PARTITION)\b"
    r"|LOCK TABLE|pg_(try_)?advisory_(?!xact)lock"
)


def running(module: str) -> list[ast.AST]:
    """The nodes of ``module``, but for what only type checkers read."""
    skipped = {
        inner
        for node in ast.walk(tree(module))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    return [node for node in ast.walk(tree(module)) if node not in skipped]


def packages(module: str) -> set[str]:
    """What ``module`` imports that is not ours, in full."""
    nodes = running(module)
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}


def texts(module: str) -> list[str]:
    return [n.value for n in running(module) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def outside(modules: set[str], allowed: set[str]) -> set[str]:
    return {
        module for module in modules if not any(module == name or module.startswith(f"{name}.") for name in allowed)
    }


def test_requests_and_responses_are_for_entry_points_and_the_admin():
    users = {module for module in MODULES if any(name.startswith("django.http") for name in packages(module))}
    assert users
    assert not outside(users, HTTP)


def test_only_partitions_and_migrations_define_tables():
    users = {module for module in MODULES if any(map(DEFINITION.search, texts(module)))}
    assert "partitions.conversion" in users
    assert not outside(users, DDL)


def test_threads_are_started_in_few_places():
    names = {"threading.Thread", "Thread", "ThreadPoolExecutor"}
    users = {
        module
        for module in MODULES
        for node in running(module)
        if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in names
    }
    assert "engine.workers" in users
    assert not outside(users, THREADS)


@pytest.mark.parametrize("client", sorted(CLIENTS))
def test_a_client_is_imported_by_its_adapters_alone(client):
    users = {module for module in MODULES if client in {name.partition(".")[0] for name in packages(module)}}
    assert not outside(users, CLIENTS[client])


def test_no_module_is_named_for_nothing_in_particular():
    assert not {part for module in MODULES for part in module.split(".")} & NAMED_FOR_NOTHING


def test_imports_without_the_extras():
    """Every module that is no adapter to an extra imports while the extras can't be."""
    others = NEEDS_AN_EXTRA | NEEDS_A_LATER_DJANGO
    plain = sorted(m for m in MODULES if m not in others and not m.startswith(("migrations", "management", "outbox.m")))
    program = f"""
import importlib, os, sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))  # None: importing it raises ImportError
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.support.settings.bare"
import django.core.management
django.setup()
for name in {plain!r}:
    importlib.import_module(f"{PACKAGE}.{{name}}".rstrip("."))
django.core.management.call_command("check")
"""
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, cwd=ROOT.parent
    )
    assert run.returncode == 0, run.stderr


def test_an_adapter_without_its_extra_says_so():
    """Not a stand-in that does nothing: an ``ImportError``. Each is imported in a process of its own."""
    program = f"""
import importlib, os, sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.support.settings.bare"
import django
django.setup()
for name in {sorted(NEEDS_AN_EXTRA)!r}:
    if os.fork() == 0:
        try:
            importlib.import_module(f"{PACKAGE}.{{name}}")
        except ImportError as error:
            os._exit(not (error.name and error.name.partition(".")[0] in {EXTRAS!r}))
        finally:
            os._exit(1)
    _pid, status = os.wait()
    if status:
        print(name)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT.parent)
    assert (run.returncode, run.stdout) == (0, ""), run.stderr


def test_the_architecture_page_lists_every_layer_and_note():
    layers, _heading, rest = (ROOT.parent / "docs" / "architecture.md").read_text().partition("## Notes")
    listed = [set(re.findall(r"`(\w+)`", row)) for row in re.findall(r"^\| (`.*?) \|", layers, re.MULTILINE)]
    assert listed == LAYERS[::-1]
    notes = {title for path in MODULES.values() for title in re.findall(r"# Note \[(.+)\]", path.read_text())}
    assert notes == set(re.findall(r"^\| (.+) \| `", rest.partition("\n## ")[0], re.MULTILINE))
