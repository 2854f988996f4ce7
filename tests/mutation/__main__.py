"""``make mutants``: the package broken in one small way after another, and which of these no test notices.

Each mutant is tried in a process of its own, which is given the changed source when it imports the module; no file is
touched. Exits with an error if one survives that ``explained.toml`` does not explain.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType
from typing import Any
from urllib.parse import urlsplit

from testproject import embedded
from testproject.interrupts import end_on_signals
from tests.mutation.mutants import Mutant, mutants, replaced, unified

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PACKAGE = "django_idempotency"

# The modules that decide, with the tests that are about them: those that tell most mutants soonest come first.
TESTS: Mapping[str, Sequence[str]] = {
    "keys.py": ("test_keys.py", "test_retention.py"),
    "fingerprints.py": ("test_fingerprints.py",),
    "policy.py": ("test_policy.py", "test_conf.py", "test_retention.py"),
    "engine.py": (
        "test_engine.py",
        "test_decorators.py",
        "test_heartbeat.py",
        "test_retention.py",
        "test_stores.py",
        "test_laws.py",
    ),
    "stores/database.py": ("test_stores.py", "test_laws.py"),
    "stores/postgresql.py": ("test_stores.py", "test_statements.py", "test_laws.py"),
    "stores/claim_function.py": ("test_stores.py", "test_statements.py", "test_laws.py"),
}
IN_THE_DATABASE = "stores/claim_function.py"  # what it makes is there only after that is made anew
PLUGINS = ("pytest_django.plugin", "_hypothesis_pytestplugin")
ALREADY_THERE = (
    "pytest",
    "hypothesis.strategies",
    "django.contrib.auth",
    "django.test",
    "httpx",
    "psycopg",
)  # in a trial
LEAST_TIME, TIMES_AS_LONG = 20.0, 3.0  # before a mutant is taken to hang
PASSED, FAILED = 0, 1


@dataclass
class Count:
    """What came of a module's mutants."""

    mutants: int = 0
    killed: int = 0
    hung: int = 0
    explained: int = 0
    surviving: list[Mutant] = field(default_factory=list)


def main() -> int:
    end_on_signals()
    arguments = _arguments()
    _prepare_environment()
    sys.path.insert(0, str(ROOT))
    for name in ALREADY_THERE:
        importlib.import_module(name)
    explained = explanations()
    counts = {module: _try_all(module, explained, arguments) for module in arguments.modules or TESTS}
    return _conclude(counts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="module", help=f"of {', '.join(TESTS)}; all, if none is named")
    parser.add_argument("--only", default="", help="mutants with this in their names")
    parser.add_argument("--unexplained", action="store_true", help="leave out the explained ones")
    parser.add_argument("--sample", type=int, help="so many of each module's, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="of that choice")
    parser.add_argument("--list", action="store_true", help="name them only")
    arguments = parser.parse_args()
    if unknown := set(arguments.modules) - TESTS.keys():
        parser.error(f"no tests are named for {', '.join(sorted(unknown))}")
    return arguments


def _prepare_environment() -> None:
    """A database of its own, beside that of the tests; examples that a mutant failed by are forgotten."""
    url = os.environ.get("DATABASE_URL") or embedded.start(ROOT / ".embedded-postgres")
    parts = urlsplit(url)
    os.environ["DATABASE_URL"] = parts._replace(path=f"{parts.path}_mutants").geturl()
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.mkdtemp(prefix="mutants-")


def explanations() -> dict[str, str]:
    """Why it is right that no test notices: the reason by the mutant's name."""
    groups = tomllib.loads((HERE / "explained.toml").read_text())["explained"]
    return {name: group["why"] for group in groups for name in group["mutants"]}


def all_mutants(module: str) -> list[Mutant]:
    """Those found, and those of its statements."""
    source = (ROOT / PACKAGE / module).read_text()
    by_hand = tomllib.loads((HERE / "statements.toml").read_text())["mutant"]
    return [
        *mutants(module, source),
        *(
            replaced(module, one["where"], source, one["before"], one["after"])
            for one in by_hand
            if one["module"] == module
        ),
    ]


# --- Trying ----------------------------------------------------------------------------------------------------------


def _try_all(module: str, explained: Mapping[str, str], arguments: argparse.Namespace) -> Count:
    chosen = _chosen(all_mutants(module), explained, arguments)
    if arguments.list:
        print(*chosen, sep="\n")
        return Count(len(chosen))
    bound = _time_unchanged(module)
    count = Count()
    source = (ROOT / PACKAGE / module).read_text()
    for mutant in chosen:
        outcome = _tried(mutant, bound)
        count.mutants += 1
        count.hung += outcome is None
        count.killed += outcome not in (None, PASSED)
        if outcome == PASSED and mutant.name in explained:
            count.explained += 1
        elif outcome == PASSED:
            count.surviving.append(mutant)
            print(*unified(mutant, source), f"  name: {mutant.name}", "", sep="\n", flush=True)
    return count


def _chosen(found: Sequence[Mutant], explained: Mapping[str, str], arguments: argparse.Namespace) -> list[Mutant]:
    chosen = [mutant for mutant in found if arguments.only in mutant.name]
    if arguments.unexplained:
        chosen = [mutant for mutant in chosen if mutant.name not in explained]
    if arguments.sample is None or arguments.sample >= len(chosen):
        return chosen
    places = random.Random(arguments.seed).sample(range(len(chosen)), arguments.sample)
    return [chosen[place] for place in sorted(places)]


def _time_unchanged(module: str) -> float:
    """How long a mutant's trial may take; the tests have to pass with nothing changed."""
    source = (ROOT / PACKAGE / module).read_text()
    unchanged = Mutant(module, "", "", "", source, 0)
    with tempfile.TemporaryFile("w+") as output:
        began = time.monotonic()
        outcome = _tried(unchanged, 600, output=output.fileno(), new_database=True)
        if outcome != PASSED:
            output.seek(0)
            sys.exit(f"{output.read()}\nThe tests of {module} do not pass as it is.")
    took = time.monotonic() - began
    print(f"{module}: {took:.0f} s unchanged", flush=True)
    return max(LEAST_TIME, TIMES_AS_LONG * took)


def _tried(mutant: Mutant, bound: float, *, output: int | None = None, new_database: bool = False) -> int | None:
    """How pytest ended with the mutant in place; ``None`` if it did not end within ``bound`` seconds."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(_run_tests(mutant, output, new_database))
        finally:
            os._exit(FAILED)
    return _ended(pid, time.monotonic() + bound)


def _ended(pid: int, deadline: float) -> int | None:
    try:
        while time.monotonic() < deadline:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)  # there is no event to wait for: waitpid() takes no timeout, and pidfds are Linux's alone
        return None
    finally:
        _end_group(pid)


def _end_group(pid: int) -> None:
    """The trial, and whatever it started."""
    try:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _run_tests(mutant: Mutant, output: int | None, new_database: bool) -> int:
    import pytest

    os.setpgid(0, 0)
    os.nice(10)
    silent = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silent if output is None or stream == 0 else output, stream)
    os.chdir(ROOT)
    sys.meta_path.insert(0, _Changed(mutant))
    database = "--create-db" if new_database or mutant.module == IN_THE_DATABASE else "--reuse-db"
    tests = [f"tests/{name}" for name in TESTS[mutant.module]]
    plugins = [option for plugin in PLUGINS for option in ("-p", plugin)]
    options = ["-q", "-x", "-m", "not server", "-p", "no:cacheprovider", "--hypothesis-seed=1", database]
    return int(pytest.main([*plugins, *options, *tests]))


class _Changed:
    """Imports the mutant in the place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self.name = f"{PACKAGE}.{mutant.module.removesuffix('.py').replace('/', '.')}"
        self.path = str(ROOT / PACKAGE / mutant.module)
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


# --- The report ------------------------------------------------------------------------------------------------------

HEAD = ("module", "mutants", "killed", "hung", "explained", "survive")


def _conclude(counts: Mapping[str, Count]) -> int:
    print("".join([HEAD[0].ljust(40), *(text.rjust(10) for text in HEAD[1:])]))
    for module, count in counts.items():
        print(_row(module, count))
    return 1 if any(count.surviving for count in counts.values()) else 0


def _row(module: str, count: Count) -> str:
    numbers = (count.mutants, count.killed, count.hung, count.explained, len(count.surviving))
    return module.ljust(40) + "".join(str(number).rjust(10) for number in numbers)


if __name__ == "__main__":
    sys.exit(main())
