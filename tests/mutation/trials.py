"""Trials of mutants: the tests run in a process of its own for each, up to the first that fails.

Which tests run which lines is found out first, with nothing changed, and kept until a file changes. A mutant is tried
on those that run its statement: the others can't notice it. Most mutants need not be imported: the tests are collected
once, and each trial is forked off there and has the code of one function exchanged. What a module does when it is
imported, and functions that ran before the first test, are tried on all tests, which are collected anew.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import inspect
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

from tests.mutation.mutants import Mutant

ROOT = Path(__file__).parent.parent.parent
PACKAGE = "django_idempotency"
KEPT = ROOT / ".mutants"

PLUGINS = ("pytest_django.plugin", "_hypothesis_pytestplugin")
OPTIONS = ("-q", "-x", "-m", "not server", "-p", "no:cacheprovider", "--hypothesis-seed=1")
LEAST_TIME, TIMES_AS_LONG = 20.0, 3.0  # before a test is taken to hang
# The third where a module of the tests could not be imported, the last where Django could not even be set up.
PASSED, FAILED, INTERRUPTED, INTERNAL_ERROR = range(4)


def path_of(module: str) -> Path:
    return ROOT / PACKAGE / module


@dataclass(frozen=True)
class Outcome:
    """``test`` is the one that noticed."""

    killed: bool = False
    hung: bool = False
    test: str = ""


@dataclass
class Touched:
    """By test: the seconds it takes, and the lines in functions of the package that it runs."""

    seconds: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # by module, then by test

    def touching(self, module: str, first: int, last: int) -> set[str]:
        by_test = self.lines.get(module, {})
        return {test for test, lines in by_test.items() if any(first <= line <= last for line in lines)}


BEFORE_TESTS = ""  # in the place of a test


def outcomes(mutants: Sequence[Mutant], files: Sequence[str], in_database: str) -> Iterator[tuple[Mutant, Outcome]]:
    """What becomes of each, in some order. The database is made anew for those of the module ``in_database``."""
    touched = _touched(files)
    plans = [plan(mutant, touched) for mutant in mutants]
    yield from _forked_off([each for each in plans if each.function], files, touched)
    for each in plans:
        if not each.function:
            yield each.mutant, _imported(each, files, touched, makes_database=each.mutant.module == in_database)


# --- Which tests -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """``function``: the one that alone is changed, by its qualified name, if it may be exchanged."""

    mutant: Mutant
    tests: Sequence[str]
    function: str | None


def plan(mutant: Mutant, touched: Touched) -> Plan:
    tree = ast.parse(path_of(mutant.module).read_text())
    statement, around = _places(tree, mutant.line)
    function = changed_function(path_of(mutant.module).read_text(), mutant.source)
    if function and BEFORE_TESTS in touched.touching(mutant.module, *around):
        function = None
    nearest, near = (touched.touching(mutant.module, *place) for place in (statement, around))
    tests = (nearest if function else set(touched.seconds)) - {BEFORE_TESTS}
    order = sorted(tests, key=lambda test: (test not in nearest, test not in near, touched.seconds[test]))
    return Plan(mutant, order, function)


Lines = tuple[int, int]


def _places(tree: ast.Module, line: int) -> tuple[Lines, Lines]:
    """The lines of the statement that ``line`` is in, and of the function that this is in, if it is."""
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.stmt) and line in range(*_lines(node, 1))]
    outermost_first = sorted(statements, key=lambda node: -len(range(*_lines(node))))
    functions = [node for node in outermost_first if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    innermost = outermost_first[-1]
    return _lines(innermost), _lines((*functions, innermost)[0])


def _lines(node: ast.stmt, beyond: int = 0) -> Lines:
    assert node.end_lineno is not None
    return node.lineno, node.end_lineno + beyond


def changed_function(before: str, after: str) -> str | None:
    """The qualified name of the one function, of the module or a class, that two sources differ in, if that is all."""
    codes = [compile(source, "", "exec", dont_inherit=True) for source in (before, after)]
    return _differing(*codes)


def _differing(before: CodeType, after: CodeType) -> str | None:
    inner = [_inner(code) for code in (before, after)]
    if _own(before) != _own(after) or len(inner[0]) != len(inner[1]):
        return None
    different = [pair for pair in zip(*inner, strict=True) if not _same(*pair)]
    if len(different) != 1:
        return None
    ((old, new),) = different
    if not old.co_flags & inspect.CO_OPTIMIZED:
        return _differing(old, new)
    replaceable = (old.co_freevars, old.co_argcount) == (new.co_freevars, new.co_argcount)
    return old.co_qualname if replaceable else None


def _same(before: CodeType, after: CodeType) -> bool:
    pairs = zip(_inner(before), _inner(after), strict=False)
    return _own(before) == _own(after) and all(_same(*pair) for pair in pairs)


def _inner(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _own(code: CodeType) -> object:
    """All but where its lines are, and what is inside of others."""
    constants = [None if isinstance(value, CodeType) else (type(value), repr(value)) for value in code.co_consts]
    exceptions = getattr(code, "co_exceptiontable", b"")
    names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return code.co_code, exceptions, code.co_flags, names, constants


# --- What the tests touch --------------------------------------------------------------------------------------------


def _touched(files: Sequence[str]) -> Touched:
    """As it was the last time, if no file has changed since. The tests have to pass with nothing changed."""
    _make_database()
    whose = hashlib.sha256(" ".join(files).encode()).hexdigest()[:8]
    kept = KEPT / f"{whose}-{_state()}.json"
    if not kept.exists():
        KEPT.mkdir(exist_ok=True)
        for old in KEPT.glob(f"{whose}-*"):
            old.unlink()
        _trace(files, kept)
    return Touched(**json.loads(kept.read_text()))


def _state() -> str:
    """A digest of all that the tests run on."""
    digest = hashlib.sha256(f"{sys.version} {os.environ['DATABASE_URL']}".encode())
    for directory in (PACKAGE, "testproject", "tests"):
        for path in sorted((ROOT / directory).rglob("*.py")):
            if path.parent != Path(__file__).parent or path == Path(__file__):
                digest.update(f"{path} {path.stat().st_size} ".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _trace(files: Sequence[str], kept: Path) -> None:
    """In the order they are written in; then, to see that this does not matter, in that of the time they take."""
    tracing = _Tracing()

    def trace(_told: int) -> int:
        tracing.begin()
        code = _pytest(files, tracing)
        if code == PASSED:
            tracing.keep(kept)
        return code

    def control(told: int) -> int:
        touched = Touched(**json.loads(kept.read_text()))
        return _pytest(files, _Chosen(sorted(touched.seconds, key=touched.seconds.__getitem__), touched, told))

    for run in (trace, control):
        with tempfile.TemporaryFile("w+") as output:
            code, test = _ended(*_forked(run, output.fileno()))
            if code != PASSED:
                kept.unlink(missing_ok=True)
                output.seek(0)
                sys.exit(f"{output.read()}\nThe tests do not pass as it is: {code} {test}")


class _Tracing:
    """Notes how long each test takes, and what it touches."""

    def __init__(self) -> None:
        self.touched = Touched()
        self.modules = {str(file): str(file.relative_to(ROOT / PACKAGE)) for file in (ROOT / PACKAGE).rglob("*.py")}
        self.lines: dict[str, dict[str, set[int]]] = {module: {} for module in self.modules.values()}
        self.test: str | None = BEFORE_TESTS

    def begin(self) -> None:
        """Before pytest does: its plugin for Django imports the package, which runs some functions then."""
        threading.settrace(self._trace)
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        module = self.modules.get(frame.f_code.co_filename)
        if module is None or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return None
        by_test = self.lines[module]

        def note(frame: FrameType, event: str, arg: Any) -> Any:
            if self.test is not None:
                by_test.setdefault(self.test, set()).add(frame.f_lineno)
            return note

        return note(frame, event, arg)

    def pytest_collection_finish(self) -> None:
        self.test = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        for function in _caching():  # who only finds what is kept from an earlier test, runs it, too, if it is alone
            function.cache_clear()
        self.test, began = item.nodeid, time.monotonic()
        try:
            return (yield)
        finally:
            self.touched.seconds[item.nodeid] = time.monotonic() - began
            self.test = None

    def keep(self, path: Path) -> None:
        for module, by_test in self.lines.items():
            self.touched.lines[module] = {test: sorted(lines) for test, lines in by_test.items()}
        path.write_text(json.dumps(asdict(self.touched)))


def _caching() -> list[Any]:
    """The package's functions that keep what they have returned."""
    kept = type(lru_cache(len))
    return [thing for thing in gc.get_objects() if type(thing) is kept and thing.__module__.startswith(PACKAGE)]


# --- Trials ----------------------------------------------------------------------------------------------------------


def _imported(plan: Plan, files: Sequence[str], touched: Touched, *, makes_database: bool) -> Outcome:
    """With the mutant in the place of its module from the start."""
    if makes_database and not _make_database(plan.mutant):
        return Outcome(killed=True, test="migrate")

    def run(told: int) -> int:
        sys.meta_path.insert(0, _Changed(plan.mutant))
        return _pytest(files, _Chosen(plan.tests, touched, told))

    code, test = _ended(*_forked(run))
    if code == INTERNAL_ERROR and not test:  # with nothing changed there is none
        return Outcome(killed=True, test="import")
    outcome = _outcome(code, test)
    if makes_database or outcome.hung:
        _make_database()
    return outcome


def _forked_off(plans: Sequence[Plan], files: Sequence[str], touched: Touched) -> Iterator[tuple[Mutant, Outcome]]:
    """From where the tests are collected already. What hangs is ended wherever it is, and the database made anew."""
    left = list(plans)
    while left:
        reading, writing = os.pipe()
        nursery = _Nursery(left, touched, writing)
        pid, told = _forked(lambda _told, nursery=nursery: _pytest(files, nursery))
        os.close(writing)
        try:
            with os.fdopen(reading) as lines:
                for line in lines:
                    outcome = Outcome(**json.loads(line))
                    yield left.pop(0).mutant, outcome
        except BaseException:
            os.killpg(pid, signal.SIGKILL)
            raise
        finally:
            code, _test = _ended(pid, told)
        if code != PASSED:
            raise RuntimeError(f"The trials ended early: {code}")
        if outcome.hung:
            _make_database()


class _Nursery:
    """Once the tests are collected, tries the mutants, each in a process forked off here, until one hangs."""

    def __init__(self, plans: Sequence[Plan], touched: Touched, told: int) -> None:
        self.plans = plans
        self.touched = touched
        self.told = told

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        functions = [thing for thing in gc.get_objects() if type(thing) is FunctionType]
        for plan in self.plans:
            test = _nameless_file()
            pid = os.fork()
            if pid == 0:
                _exchange(plan, functions)
                chosen = _Chosen(plan.tests, self.touched, test)
                session.config.pluginmanager.register(chosen)
                return chosen.pytest_runtestloop(session)  # and then what follows in pytest
            outcome = _outcome(*_ended(pid, test))
            os.write(self.told, f"{json.dumps(asdict(outcome))}\n".encode())
            if outcome.hung:
                break
        return True


def _exchange(plan: Plan, functions: Sequence[FunctionType]) -> None:
    """The code of the function, wherever it is referred to."""
    path = str(path_of(plan.mutant.module))
    changed = compile(plan.mutant.source, path, "exec", dont_inherit=True)
    (new,) = [code for code in _all_codes(changed) if code.co_qualname == plan.function]
    for function in functions:
        code = function.__code__
        if code.co_filename == path and code.co_qualname == plan.function:
            function.__code__ = new
    assert new in [function.__code__ for function in functions]


def _all_codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in _inner(code):
        yield from _all_codes(inner)


class _Chosen:
    """Some tests, in this order. Ends the process by a signal if one hangs; tells which is run."""

    def __init__(self, tests: Sequence[str], touched: Touched, told: int) -> None:
        self.tests = tests
        self.touched = touched
        self.told = told

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        items = {item.nodeid: item for item in session.items}
        session.items = [items[test] for test in self.tests]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        os.write(self.told, f"{item.nodeid}\n".encode())
        signal.setitimer(signal.ITIMER_REAL, max(LEAST_TIME, TIMES_AS_LONG * self.touched.seconds[item.nodeid]))


def _outcome(code: int, test: str) -> Outcome:
    if code == -signal.SIGALRM:
        return Outcome(hung=True, test=test)
    if code > INTERRUPTED:  # no test has noticed anything
        raise RuntimeError(f"A trial could not be made: {code}, at {test or 'no test'}")
    return Outcome(killed=code != PASSED, test=test)


# --- Processes -------------------------------------------------------------------------------------------------------


def _forked(run: Callable[[int], int], output: int | None = None) -> tuple[int, int]:
    """The process that runs it, and a file for what it tells."""
    told = _nameless_file()
    pid = os.fork()
    if pid:
        return pid, told
    try:
        os.setpgid(0, 0)
        os.nice(10)
        silent = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(silent if output is None or stream == 0 else output, stream)
        os.chdir(ROOT)
        os._exit(run(told))
    finally:
        os._exit(1)


def _nameless_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _ended(pid: int, told: int) -> tuple[int, str]:
    """How it ended, and the last line that it told. Whatever is left of its group is ended too."""
    try:
        _pid, status = os.waitpid(pid, 0)
    finally:
        with suppress(ProcessLookupError):  # it has no group of its own, or nobody is left in it
            os.killpg(pid, signal.SIGKILL)
    with os.fdopen(told) as lines:
        lines.seek(0)
        last = lines.read().splitlines()[-1:]
    return os.waitstatus_to_exitcode(status), "".join(last)


def _pytest(files: Sequence[str], plugin: object) -> int:
    plugins = [option for plugin in PLUGINS for option in ("-p", plugin)]
    return int(pytest.main([*plugins, *OPTIONS, *(f"tests/{name}" for name in files)], [_Database(), plugin]))


class _Changed:
    """Imports the mutant in the place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = f"{PACKAGE}.{mutant.module.removesuffix('.py').replace('/', '.')}"
        self.path = str(path_of(mutant.module))
        self.source = mutant.source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        return spec_from_file_location(name, self.path, loader=_ChangedLoader(name, self.path, self.source))


class _ChangedLoader(SourceFileLoader):
    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        """Compiled here: what is cached on the disk is the real one."""
        return compile(self.source, self.path, "exec", dont_inherit=True)


# --- The database ----------------------------------------------------------------------------------------------------


def _make_database(mutant: Mutant | None = None) -> bool:
    """Anew, by the migrations; says whether they went through."""

    def run(_told: int) -> int:
        import django
        from django.test.utils import setup_databases

        if mutant:
            sys.meta_path.insert(0, _Changed(mutant))
        os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
        django.setup()
        setup_databases(verbosity=0, interactive=False)
        return PASSED

    code, _line = _ended(*_forked(run, None if mutant else 2))
    if code != PASSED and not mutant:
        sys.exit("The database could not be made.")
    return code == PASSED


EMPTY = """
SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid();
TRUNCATE django_idempotency_record, django_idempotency_tally, testproject_ledgerentry, auth_user CASCADE
"""


class _Database:
    """Has the tests find that database, nobody in it, and nothing left of the trial before."""

    def pytest_configure(self) -> None:
        import django.test.utils

        django.test.utils.setup_databases = self._use

    def _use(self, **_named: Any) -> list[object]:
        from django.db import connection

        connection.settings_dict["NAME"] = connection.creation._get_test_db_name()
        with connection.cursor() as cursor:
            cursor.execute(EMPTY)
        return []  # that would have to be put away
