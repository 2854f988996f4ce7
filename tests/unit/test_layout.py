"""Imports run one way, settings are read in one place, and the package stands without
its extras.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from importlib.util import resolve_name
from pathlib import Path

import pytest

import django_idempotency
from django_idempotency import extending

PACKAGE = "django_idempotency"
ROOT = Path(__file__).parents[2] / PACKAGE
WINGS = "contrib"
# Modules whose ``__all__`` is what users import.
FOR_USERS = ["messages", "maintenance"]
MOST_OFFERED = 184
EXTENDING = ROOT.parent / "docs" / "extending.md"
# Each layer may import from those before it. Names are modules or sub-packages of the
# package.
LAYERS = [
    {"values"},
    {"conf", "signals", "reporting"},
    {"models"},
    {"stores"},
    {"engine"},
    {"http", "messages", "maintenance"},
    {"forms", "middleware", "rest_framework", "webhooks"},
    {
        "instrumentation",
        "admin",
        "checks",
        "management",
        "tasks",
        "templatetags",
        "apps",
        "migrations",
    },
    {"extending"},
    {WINGS},
]
# Neighbours of a layer that never import each other.
APART = [
    {"http", "messages", "maintenance"},
    {"admin", "checks", "management", "instrumentation"},
]
ENTRY_POINTS = LAYERS[6] | {"http", "messages"}
EXTRAS = [
    *(
        "rest_framework",
        "celery",
        "kombu",
        "redis",
        "environ",
        "psycopg_pool",
        "cryptography",
    ),
    *(
        "prometheus_client",
        "opentelemetry",
        "amqp",
        "nats",
        "confluent_kafka",
        "boto3",
        "botocore",
        "drf_spectacular",
    ),
    *(
        "pytest",
        "requests",
        "httpx",
        "httpcore2",
        "mcp",
        "anyio",
        "ninja",
    ),
]
NEEDS_AN_EXTRA = {
    *("rest_framework", "http.rest_framework", "tasks", "messages.celery"),
    *("instrumentation.prometheus", "instrumentation.opentelemetry"),
    *("contrib.client.httpx", "contrib.client.requests", "contrib.mcp"),
    *("contrib.openapi.extension", "contrib.openapi.ninja"),
    *("contrib.kafka", "contrib.nats", "contrib.rabbitmq", "contrib.sqs"),
    *(
        "contrib.redis",
        "contrib.redis.client",
        "contrib.redis.scripts",
        "contrib.redis.store",
    ),
    *(
        "contrib.outbox.publishers.webhooks",
        "contrib.partitions.tasks",
    ),
    "contrib.testing.plugin",
}
NEEDS_A_LATER_DJANGO = {"contrib.django_tasks"}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    .removesuffix("__init__")
    .rstrip("."): path
    for path in sorted(ROOT.rglob("*.py"))
}


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(MODULES[module].read_text())


@cache
def running(module: str) -> list[ast.AST]:
    """The nodes of ``module``, but for what only type checkers read."""
    skipped = {
        inner
        for node in ast.walk(tree(module))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    return [node for node in ast.walk(tree(module)) if node not in skipped]


@cache
def imported(module: str) -> set[str]:
    """The modules of the package that ``module`` imports, wherever it does, type
    checking aside.
    """
    names = set()
    for node in running(module):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.update(
                f"{_source(module, node)}.{alias.name}" for alias in node.names
            )
    own = {
        name.removeprefix(f"{PACKAGE}.")
        for name in names
        if name.startswith(f"{PACKAGE}.")
    }
    return {_existing(name) for name in own} - {module}


def _source(module: str, node: ast.ImportFrom) -> str:
    parent = (
        module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]
    )
    return resolve_name(
        "." * node.level + (node.module or ""), f"{PACKAGE}.{parent}".rstrip(".")
    )


def _existing(name: str) -> str:
    """The module that ``name`` is, or is defined in."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def top(module: str) -> str:
    return module.partition(".")[0]


def layer(module: str) -> int | None:
    return next(
        (height for height, names in enumerate(LAYERS) if top(module) in names), None
    )


def wing(module: str) -> str | None:
    """The wing that ``module`` is in; ``None`` for the core."""
    first, *others = module.split(".")
    return others[0] if first == WINGS and others else None


def imports(
    importing: Callable[[str], bool], imported_by: Callable[[str, str], bool]
) -> list[str]:
    return [
        f"{module} imports {other}"
        for module in MODULES
        if importing(module)
        for other in imported(module)
        if imported_by(module, other)
    ]


def test_a_module_imports_only_from_its_own_layer_and_those_below():
    placed = {
        module: height for module in MODULES if (height := layer(module)) is not None
    }
    assert set(MODULES) - set(placed) == {""}, "a module without a layer: give it one"
    assert not imports(
        placed.__contains__, lambda module, other: placed.get(other, 0) > placed[module]
    )


def test_modules_do_not_import_each_other():
    """Not by way of others either. The package itself imports lazily."""
    TopologicalSorter(
        {module: imported(module) - {""} for module in MODULES if module}
    ).prepare()


@pytest.mark.parametrize("neighbours", APART, ids=lambda names: "-".join(sorted(names)))
def test_neighbours_of_a_layer_do_not_import_each_other(neighbours):
    def is_a_neighbour(module: str, other: str) -> bool:
        return top(other) in neighbours - {top(module)}

    assert not imports(lambda module: top(module) in neighbours, is_a_neighbour)


def test_the_core_imports_no_wing():
    assert not imports(
        lambda module: wing(module) is None,
        lambda _module, other: wing(other) is not None,
    )


def test_a_wing_imports_no_other_wing():
    assert not imports(
        wing, lambda module, other: wing(other) not in (None, wing(module))
    )


def facades() -> dict[str, set[str]]:
    """What wings may import, by module: what users import, and the facades."""
    modules = [name for name in MODULES if top(name) == "extending"]
    # imported before settings, or before Django
    early = {"tasks": {"beat_schedule"}, "values.lazily": {"lazily"}}
    return early | {
        name: set(import_module(f"{PACKAGE}.{name}".rstrip(".")).__all__)
        for name in ["", *FOR_USERS, *modules]
    }


def test_a_wing_imports_only_facades_and_what_users_import():
    offered = facades()
    strays = [
        f"{module} imports {name} from {source}"
        for module in filter(wing, MODULES)
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PACKAGE)
        if top(source := (node.module or "").removeprefix(PACKAGE)[1:]) != WINGS
        for name in sorted({alias.name for alias in node.names})
        if name not in offered.get(source, set())
    ]
    assert not strays


def test_facades_offer_few_names_and_only_those_that_wings_import():
    used = {
        (node.module, alias.name)
        for module in filter(wing, MODULES)
        for node in ast.walk(tree(module))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    offered = {
        (f"{PACKAGE}.{module}", name)
        for module, names in facades().items()
        if top(module) == "extending"
        for name in names
    }
    assert offered <= used
    assert len(offered) <= MOST_OFFERED


def test_the_page_about_extending_lists_what_a_wing_registers():
    page, _heading, table = EXTENDING.read_text().partition("| Argument of `register`")
    rows = re.findall(r"^\| (`.+?`) \|", table, re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert listed == {"checks", "page", *extending.REGISTRIES}
    modules = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert {f"extending.{name}" for name in modules} == {
        name for name in MODULES if name.startswith("extending.")
    }


def test_a_wing_uses_only_the_templates_on_that_page():
    wings = "".join(path.read_text() for path in (ROOT / WINGS).rglob("*.html"))
    used = re.findall(
        r"{% (?:extends|include)"
        r' "admin/django_idempotency/idempotencyrecord/(\w+\.html)"',
        wings,
    )
    assert set(used) == set(re.findall(r"`(\w+\.html)`", EXTENDING.read_text()))


def test_entry_points_do_not_import_stores():
    assert not imports(
        lambda module: top(module) in ENTRY_POINTS,
        lambda _module, other: top(other) == "stores",
    )


def test_the_package_offers_its_public_names():
    for name in django_idempotency.__all__:
        assert getattr(django_idempotency, name).__module__.startswith(PACKAGE)
    with pytest.raises(AttributeError, match="no attribute 'charge'"):
        _ = django_idempotency.charge


def test_imports_have_no_cycle():
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
        if isinstance(node, ast.ImportFrom | ast.Import)
        and "django.conf" in ast.unparse(node)
        if "settings" in ast.unparse(node) or isinstance(node, ast.Import)
    }
    assert readers == {"conf"}


# Who may touch what: modules or packages; nobody else does.
HTTP = {
    *(
        "http",
        "middleware",
        "forms",
        "values.fingerprints",
        "values.policy",
    ),
    *("admin", "webhooks", "instrumentation.prometheus"),
    *(
        "contrib.audit.admin",
        "contrib.openapi",
        "contrib.operations",
        "contrib.outbox.admin",
        "contrib.testing",
        "contrib.dashboard",
        "contrib.profiles",
    ),
}
DDL = {
    "contrib.partitions",
    "contrib.dashboard.migrations",
    "contrib.outbox.migrations",
    "migrations",
    "stores.claim_function",
}
THREADS = {
    *("engine.background", "messages.health", "messages.runner"),
    *("contrib.nats", "contrib.outbox", "contrib.testing"),
}
CLIENTS = {
    "celery": {
        "tasks",
        "messages.celery",
        "contrib.partitions",
    },
    "kombu": {"messages.celery", "contrib.rabbitmq"},
    "amqp": {"contrib.rabbitmq"},
    "nats": {"contrib.nats"},
    "confluent_kafka": {"contrib.kafka"},
    "mcp": {"contrib.mcp"},
    "boto3": {"contrib.sqs"},
    "botocore": {"contrib.sqs"},
    "redis": {"contrib.redis", "contrib.cached"},
    "psycopg": {"stores.pipeline", "stores.postgresql"},
    "cryptography": {"stores.codec"},
    "prometheus_client": {"instrumentation.prometheus", "messages.health"},
    "pytest": {"contrib.testing"},
    "httpx": {"contrib.client.httpx"},
    "requests": {"contrib.client.requests"},
}
DEFINITION = re.compile(
    r"\b(CREATE|ALTER|DROP|TRUNCATE|ATTACH|DETACH)( OR REPLACE)?"
    r" (TABLE|INDEX|FUNCTION|PARTITION)\b"
    r"|LOCK TABLE|pg_(try_)?advisory_(?!xact)lock"
)


@cache
def packages(module: str) -> set[str]:
    """What ``module`` imports that is not ours, in full."""
    nodes = running(module)
    names = {
        alias.name
        for node in nodes
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    return names | {
        node.module or ""
        for node in nodes
        if isinstance(node, ast.ImportFrom) and not node.level
    }


def texts(module: str) -> list[str]:
    return [
        n.value
        for n in running(module)
        if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]


def outside(modules: set[str], allowed: set[str]) -> set[str]:
    return {
        module
        for module in modules
        if not any(module == name or module.startswith(f"{name}.") for name in allowed)
    }


def test_requests_and_responses_are_for_entry_points_and_the_admin():
    users = {
        module
        for module in MODULES
        if any(name.startswith("django.http") for name in packages(module))
    }
    assert users
    assert not outside(users, HTTP)


def test_only_partitions_and_migrations_define_tables():
    users = {module for module in MODULES if any(map(DEFINITION.search, texts(module)))}
    assert "contrib.partitions.conversion" in users
    assert not outside(users, DDL)


def test_threads_are_started_in_few_places():
    names = {"threading.Thread", "Thread", "ThreadPoolExecutor"}
    users = {
        module
        for module in MODULES
        for node in running(module)
        if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in names
    }
    assert "engine.background" in users
    assert not outside(users, THREADS)


@pytest.mark.parametrize("client", sorted(CLIENTS))
def test_a_client_is_imported_by_its_adapters_alone(client):
    users = {
        module
        for module in MODULES
        if client in {name.partition(".")[0] for name in packages(module)}
    }
    assert not outside(users, CLIENTS[client])


# Django's own notes about a connection, of which its documentation says nothing.
NOTES_OF_DJANGO = {
    "_thread_ident",
    "atomic_blocks",
    "closed_in_transaction",
    "commit_on_exit",
    "errors_occurred",
    "needs_rollback",
    "rollback_exc",
    "run_commit_hooks_on_set_autocommit_on",
    "run_on_commit",
    "savepoint_ids",
}


def test_a_single_module_touches_djangos_state_of_a_connection():
    users = {
        module
        for module in MODULES
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Attribute) and node.attr in NOTES_OF_DJANGO
    }
    assert users == {"stores.django_state"}


def run_without_extras(program):
    """What ``program`` prints in a project where no extra can be imported."""
    begin = f"""
import importlib, os, sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))  # None: importing it raises ImportError
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.support.settings.bare"
import django.core.management
django.setup()
"""
    command = [sys.executable, "-W", "error", "-c", begin + program]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_imports_without_the_extras():
    """Every module that is no adapter to an extra imports while the extras can't be."""
    others = NEEDS_AN_EXTRA | NEEDS_A_LATER_DJANGO
    plain = sorted(
        m
        for m in MODULES
        if m not in others and not {"migrations", "management"} & set(m.split("."))
    )
    run_without_extras(f"""
for name in {plain!r}:
    importlib.import_module(f"{PACKAGE}.{{name}}".rstrip("."))
django.core.management.call_command("check")
""")


def test_the_architecture_page_lists_every_layer_and_note():
    page = (ROOT.parent / "docs" / "architecture.md").read_text()
    layers, _heading, rest = page.partition("## Layers")[2].partition("## Notes")
    listed = [
        set(re.findall(r"`(\w+)`", row))
        for row in re.findall(r"^\| (`.*?) \|", layers, re.MULTILINE)
    ]
    assert listed == LAYERS[::-1]
    notes = {
        title
        for path in MODULES.values()
        for title in re.findall(r"# Note \[(.+)\]", path.read_text())
    }
    assert notes == set(
        re.findall(r"^\| (.+) \| `", rest.partition("\n## ")[0], re.MULTILINE)
    )
