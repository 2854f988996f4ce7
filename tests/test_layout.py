"""Imports run one way, settings are read in one place, and the package stands without its extras."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from importlib.util import resolve_name
from pathlib import Path

import pytest

PACKAGE = "django_idempotency"
ROOT = Path(__file__).parent.parent / PACKAGE
# Each layer may import from those before it. Names are modules or sub-packages of the package.
LAYERS = [
    {"outcomes", "keys", "fingerprints", "exceptions", "signals", "logs", "events"},
    {"policy", "conf", "encryption", "privacy"},
    {"models"},
    {"stores"},
    {"heartbeat", "tallies", "responses", "engine", "celery_exit"},
    {"doors"},
    {"placement", "decorators", "middleware", "rest_framework", "consumers"},
    {"maintenance"},
    {"interventions", "situations", "timeline", "readable"},
    {"stats", "partition_layout", "partitions", "conversion"},
    {"figures", "charts"},
    {"instrumentation"},
    {"testing"},
    {
        *("management", "tasks", "builtin_tasks", "dashboard", "confirmations", "admin"),
        *("checks", "deploy_checks", "apps", "migrations"),
    },
]
# Inside a layer, from the lowest.
ORDERED = [
    ["logs", "signals"],
    ["signals", "events"],
    ["policy", "conf"],
    ["conf", "privacy"],
    ["encryption", "privacy"],
    ["heartbeat", "engine"],
    ["heartbeat", "tallies"],
    ["heartbeat", "celery_exit"],
    ["dashboard", "admin"],
    ["checks", "deploy_checks"],
    ["confirmations", "admin"],
    ["placement", "decorators"],
    ["placement", "middleware"],
    ["rest_framework", "placement"],
    ["partition_layout", "partitions"],
    ["partitions", "conversion"],
]
DOORS = LAYERS[6]
NAMED_FOR_NOTHING = {"utils", "util", "helpers", "core", "common", "misc"}
EXTRAS = [
    *("rest_framework", "celery", "kombu", "redis", "environ", "psycopg_pool", "cryptography"),
    *("prometheus_client", "opentelemetry"),
]
NEEDS_AN_EXTRA = {
    *("rest_framework", "consumers.celery", "celery_exit", "encryption", "tasks"),
    *("instrumentation.prometheus", "instrumentation.opentelemetry"),
}
NEEDS_A_LATER_DJANGO = {"builtin_tasks"}

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
    return next((height for height, names in enumerate(LAYERS) if top(module) in names), None)


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


def test_doors_do_not_import_stores():
    doors = [module for module in MODULES if top(module) in DOORS]
    assert not [door for door in doors if "stores" in {top(other) for other in imported(door)}]


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


def test_no_module_is_named_for_nothing_in_particular():
    assert not {part for module in MODULES for part in module.split(".")} & NAMED_FOR_NOTHING


def test_imports_without_the_extras():
    """Every module that is no adapter to an extra imports while the extras can't be."""
    others = NEEDS_AN_EXTRA | NEEDS_A_LATER_DJANGO
    plain = sorted(m for m in MODULES if m not in others and not m.startswith(("migrations", "management")))
    program = f"""
import importlib, os, sys
sys.modules.update(dict.fromkeys({EXTRAS!r}))  # None: importing it raises ImportError
os.environ["DJANGO_SETTINGS_MODULE"] = "tests.bare_settings"
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


@pytest.mark.parametrize("module", sorted(NEEDS_AN_EXTRA))
def test_an_adapter_without_its_extra_says_so(module):
    """Not a stand-in that does nothing: an ``ImportError``."""
    program = f"import sys; sys.modules.update(dict.fromkeys({EXTRAS!r})); import {PACKAGE}.{module}"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT.parent)
    assert run.returncode == 1
    assert "ImportError" in run.stderr or "ModuleNotFoundError" in run.stderr
