"""Measure what the guarantees cost: run the whole benchmark, or the parts that are asked for.

``--against HEAD --rounds 20 --seconds 1`` shows the effect of a change that is not committed yet.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from testproject.benchmarks import contenders, private_redis, versions
from testproject.benchmarks.benchmark import EVERYTHING, RETENTION, Benchmark, Plan, say
from testproject.benchmarks.cluster import Cluster
from testproject.benchmarks.servers import DIRECTORY
from testproject.interrupts import end_on_signals

QUICK = {"scenarios": ("counts", "b", "c"), "rounds": 2, "seconds": 1}
AGAINST = {"scenarios": ("counts", "b", "c"), "contenders": ("unprotected", "atomic", "lock")}  # unless specified


def main() -> None:
    end_on_signals()
    options = vars(_parser().parse_args())
    json_file, quick, against = (options.pop(name) for name in ("json", "quick", "against"))
    if "retention" in options.get("scenarios", ()):
        options["scenarios"] += RETENTION
    plan = Plan(**{**(AGAINST if against else {}), **(QUICK if quick else {}), **options})
    if against:
        plan = replace(plan, contenders=contenders.with_versions(plan.contenders, unpacked(against)))
    with alone(), private_redis.running() as redis:
        results = Benchmark(plan, Cluster(DIRECTORY / "postgresql"), redis).run()
    if json_file:
        json_file.write_text(json.dumps(results, indent=1))
        say(f"\nEvery round's figures: {json_file}")


def unpacked(against: Sequence[str]) -> list[str]:
    try:
        return [versions.unpack_beside_project(version, DIRECTORY / "versions") for version in against]
    except versions.NoSuchVersion as error:
        sys.exit(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m testproject.benchmarks", description=__doc__, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--scenario", nargs="+", choices=[*EVERYTHING, "retention"], dest="scenarios")
    parser.add_argument("--contenders", nargs="+", choices=[*contenders.NAMES, *contenders.ON_REQUEST])
    parser.add_argument(
        "--against", nargs="+", metavar="VERSION", default=(), help="older versions of ours: commits, tags or wheels"
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--seconds", type=int, help="of each contender's turn in a round")
    parser.add_argument("--storms", type=int, help="in scenario d")
    parser.add_argument("--share", type=float, help="of the sizes in the scenarios of retention: 0.01 for a first look")
    parser.add_argument("--quick", action="store_true", default=False, help="the main scenarios, short")
    parser.add_argument("--json", type=Path, default=None)
    return parser


@contextmanager
def alone() -> Iterator[None]:
    """Refuse to run beside another benchmark: two at once would measure each other."""
    DIRECTORY.mkdir(exist_ok=True)
    (DIRECTORY / ".gitignore").write_text("*\n")
    with (DIRECTORY / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit("Another benchmark is running.")
        yield


if __name__ == "__main__":
    main()
