"""Measure what the guarantees cost: run the whole benchmark, or the parts that are
asked for.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from testproject.benchmarks import contenders, private_redis
from testproject.benchmarks.benchmark import EVERYTHING, RETENTION, Benchmark, Plan, say
from testproject.benchmarks.cluster import Cluster
from testproject.benchmarks.servers import DIRECTORY
from testproject.interrupts import end_on_signals

QUICK = {"scenarios": ("counts", "b", "c"), "rounds": 2, "seconds": 1}


def main() -> None:
    end_on_signals()
    options = vars(_parser().parse_args())
    json_file, quick = (options.pop(name) for name in ("json", "quick"))
    if "retention" in options.get("scenarios", ()):
        options["scenarios"] += RETENTION
    plan = Plan(**{**(QUICK if quick else {}), **options})
    with alone(), private_redis.running() as redis:
        results = Benchmark(plan, Cluster(DIRECTORY / "postgresql"), redis).run()
    if json_file:
        json_file.write_text(json.dumps(results, indent=1))
        say(f"\nEvery round's figures: {json_file}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m testproject.benchmarks",
        description=__doc__,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument(
        "--scenario", nargs="+", choices=[*EVERYTHING, "retention"], dest="scenarios"
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=[*contenders.NAMES, *contenders.ON_REQUEST]
    )
    parser.add_argument("--rounds", type=int)
    parser.add_argument(
        "--seconds", type=int, help="of each contender's turn in a round"
    )
    parser.add_argument("--storms", type=int, help="in scenario d")
    parser.add_argument(
        "--share",
        type=float,
        help="of the sizes in the scenarios of retention: 0.01 for a first look",
    )
    parser.add_argument(
        "--quick", action="store_true", default=False, help="the main scenarios, short"
    )
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
