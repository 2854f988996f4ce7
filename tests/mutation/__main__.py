"""``make mutants``: the package broken in one small way after another, and which of these no test notices.

Each mutant is tried in a process of its own (``trials.py``); no file is touched. Exits with an error if one survives
that ``explained.toml`` does not explain.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from testproject import embedded
from testproject.interrupts import end_on_signals
from tests.mutation.mutants import Mutant, mutants, replaced, unified
from tests.mutation.trials import Outcome, outcomes, path_of

HERE = Path(__file__).parent
ROOT = HERE.parent.parent

DATABASE = (
    "test_engine.py",
    "test_decorators.py",
    "test_consumers.py",
    "test_heartbeat.py",
    "test_retention.py",
    "test_signals.py",
    "test_privacy.py",
    "test_models.py",
    "test_stores.py",
    "test_statements.py",
    "test_prepared.py",
    "test_laws.py",
    "test_partitions.py::test_keys_are_claimed_and_replayed_at_every_isolation_level",
    "test_partitions.py::test_a_key_claimed_across_midnight_is_claimed_once",
    "test_partitions.py::test_above_read_committed_too_a_key_is_claimed_in_the_database_that_the_policy_states",
    "test_partitions.py::test_maintenance_goes_by_the_indexes_and_completion_into_one_partition",
)
# The modules that decide, with the tests that are about them.
TESTS: Mapping[str, Sequence[str]] = {
    "keys.py": ("test_keys.py", "test_retention.py"),
    "fingerprints.py": ("test_fingerprints.py",),
    "policy.py": ("test_policy.py", "test_conf.py", "test_retention.py"),
    "engine.py": DATABASE,
    "stores/database.py": DATABASE,
    "stores/postgresql.py": DATABASE,
    "stores/prepared.py": DATABASE,
    "stores/claim_function.py": DATABASE,
    "maintenance.py": (
        "test_maintenance.py",
        "test_partitions.py::test_what_is_at_the_same_place_in_another_partition_is_not_deleted",
    ),
}
ONLY_STATEMENTS = ("maintenance.py",)  # whose other mutants are not tried
IN_THE_DATABASE = "stores/claim_function.py"  # what it makes is there only after that is made anew
ALREADY_THERE = (
    "pytest",
    "hypothesis.strategies",
    "django.contrib.auth",
    "django.test",
    "httpx",
    "psycopg",
)  # in a trial


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
    explained = explanations()
    if gone := explained.keys() - {mutant.name for module in TESTS for mutant in all_mutants(module)}:
        sys.exit("\n".join(["These are explained, and there are no such mutants:", *sorted(gone)]))
    modules = arguments.modules or list(TESTS)
    chosen = {module: _chosen(all_mutants(module), explained, arguments) for module in modules}
    if arguments.list:
        print(*(mutant for found in chosen.values() for mutant in found), sep="\n")
        return 0
    _prepare_environment()
    for name in ALREADY_THERE:
        importlib.import_module(name)
    counts = {module: Count() for module in modules}
    for files in dict.fromkeys(TESTS[module] for module in modules):
        tried = [mutant for module in modules if TESTS[module] == files for mutant in chosen[module]]
        for mutant, outcome in outcomes(tried, files, IN_THE_DATABASE):
            _judge(mutant, outcome, counts[mutant.module], explained)
            if arguments.verbose:
                print(f"{mutant.name}\n    {outcome}", flush=True)
    return _conclude(counts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="module", help=f"of {', '.join(TESTS)}; all, if none is named")
    parser.add_argument("--only", default="", help="mutants with this in their names")
    parser.add_argument("--unexplained", action="store_true", help="leave out the explained ones")
    parser.add_argument("--sample", type=int, help="so many of each module's, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="of that choice")
    parser.add_argument("--list", action="store_true", help="name them only")
    parser.add_argument("--verbose", action="store_true", help="tell what became of each, and which test noticed")
    arguments = parser.parse_args()
    if unknown := set(arguments.modules) - TESTS.keys():
        parser.error(f"no tests are named for {', '.join(sorted(unknown))}")
    return arguments


def _prepare_environment() -> None:
    """A database of its own, beside that of the tests; examples that a mutant failed by are forgotten."""
    url = os.environ.get("DATABASE_URL") or embedded.start(ROOT / ".embedded-postgres")
    parts = urlsplit(url)
    os.environ["DATABASE_URL"] = parts._replace(path=f"{parts.path}_mutants").geturl()
    sys.path.insert(0, str(ROOT))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = tempfile.mkdtemp(prefix="mutants-")


def explanations() -> dict[str, str]:
    """Why it is right that no test notices: the reason by the mutant's name."""
    groups = tomllib.loads((HERE / "explained.toml").read_text())["explained"]
    return {name: group["why"] for group in groups for name in group["mutants"]}


def all_mutants(module: str) -> list[Mutant]:
    """Those found, and those of its statements."""
    source = path_of(module).read_text()
    by_hand = tomllib.loads((HERE / "statements.toml").read_text())["mutant"]
    return [
        *(() if module in ONLY_STATEMENTS else mutants(module, source)),
        *(
            replaced(module, one["where"], source, one["before"], one["after"])
            for one in by_hand
            if one["module"] == module
        ),
    ]


def _chosen(found: Sequence[Mutant], explained: Mapping[str, str], arguments: argparse.Namespace) -> list[Mutant]:
    chosen = [mutant for mutant in found if arguments.only in mutant.name]
    if arguments.unexplained:
        chosen = [mutant for mutant in chosen if mutant.name not in explained]
    if arguments.sample is None or arguments.sample >= len(chosen):
        return chosen
    places = random.Random(arguments.seed).sample(range(len(chosen)), arguments.sample)
    return [chosen[place] for place in sorted(places)]


# --- The report ------------------------------------------------------------------------------------------------------


def _judge(mutant: Mutant, outcome: Outcome, count: Count, explained: Mapping[str, str]) -> None:
    count.mutants += 1
    count.hung += outcome.hung
    count.killed += outcome.killed
    if outcome.killed or outcome.hung:
        if mutant.name in explained:
            print(f"explained, but {outcome.test} notices: {mutant.name}", flush=True)
        return
    if mutant.name in explained:
        count.explained += 1
    else:
        count.surviving.append(mutant)
        source = path_of(mutant.module).read_text()
        print(*unified(mutant, source), f"  name: {mutant.name}", "", sep="\n", flush=True)


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
