"""``make faults``: run every scenario against the real service, and print what was done
and what came of it.

Exits with an error if a law is broken, or if a fault did not bite often enough to prove
anything.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from testproject.interrupts import end_on_signals
from tests.faults import scenarios
from tests.faults.cluster import Cluster
from tests.faults.scenarios import SCENARIOS, Outcome, Scenario

OPERATIONS, EACH, PATIENCE = 10_000, 20, 1200
FOR_THE_MODELS = ("spin", "gcc")  # which make faults checks afterwards


def main() -> int:
    os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
    # This database does not exist: every scenario has a server of its own.
    os.environ["DATABASE_URL"] = "postgres://nobody@127.0.0.1:1/none"
    end_on_signals()
    arguments = _arguments()
    seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
    chosen = [scenario for scenario in SCENARIOS if arguments.only in scenario.name]
    if lacks := [] if arguments.only else _lacking_programs():
        print(f"make faults needs {' and '.join(lacks)}: apt-get install them first.")
        return 1
    print(f"seed {seed}, {arguments.operations} operations\n\n{_row(HEAD)}", flush=True)
    played = []
    with scenarios.ground() as common:
        for number, scenario in enumerate(chosen):
            if lacks := scenarios.lacking(scenario):
                print(f"{scenario.name}: left out, this machine lacks {lacks}")
                continue
            operations = round(arguments.operations * scenario.share)
            played.append(_play(scenario, common, operations, seed + number, arguments))
            _print_line(*played[-1])
    return _conclude([outcome for outcome, _seconds in played], least=arguments.each)


def _lacking_programs() -> list[str]:
    return [name for name in FOR_THE_MODELS if shutil.which(name) is None]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, help="decide as an earlier run did")
    parser.add_argument(
        "--operations",
        type=int,
        default=OPERATIONS,
        help="requests in all, retries not counted",
    )
    parser.add_argument(
        "--each", type=int, default=EACH, help="how often each fault has to bite"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE,
        help="seconds in which a scenario is repeated until it bit",
    )
    parser.add_argument("--only", default="", help="scenarios with this in their names")
    return parser.parse_args()


def _play(
    scenario: Scenario,
    common: tuple[Cluster, Path],
    operations: int,
    seed: int,
    arguments: argparse.Namespace,
) -> tuple[Outcome, float]:
    began = time.monotonic()
    own = scenario.own_cluster or scenario.own_disk
    with (
        scenarios.ground(scenario.own_disk) if own else nullcontext(common) as (
            cluster,
            directory,
        )
    ):
        outcome = scenarios.run(
            scenario,
            cluster,
            directory,
            operations=operations,
            seed=seed,
            least=arguments.each,
            patience=arguments.patience,
        )
    return outcome, time.monotonic() - began


# --- The report -----------------------------------------------------------------------

HEAD = ("scenario", "requests", "ok", "fail", "info", "keys", "violations", "seconds")
WIDTHS = (28, 9, 7, 7, 7, 7, 11, 8)


def _row(cells: Sequence[object]) -> str:
    name, *numbers = (str(cell) for cell in cells)
    return name.ljust(WIDTHS[0]) + "".join(
        text.rjust(width) for text, width in zip(numbers, WIDTHS[1:], strict=False)
    )


def _print_line(outcome: Outcome, seconds: float) -> None:
    counts = outcome.counts
    ends = (counts["ok"], counts["fail"], counts["info"])
    keys = sum(verdict.keys for verdict in outcome.verdicts)
    print(
        _row(
            (
                outcome.scenario.name,
                counts.total(),
                *ends,
                keys,
                len(outcome.violations),
                round(seconds),
            )
        ),
        flush=True,
    )
    for verdict in outcome.verdicts:
        if not verdict.holds:
            print(verdict, flush=True)


def _conclude(outcomes: Sequence[Outcome], *, least: int) -> int:
    hits: Counter[tuple[str, str]] = sum(
        (outcome.hits for outcome in outcomes), Counter()
    )
    print("\nhits at each point")
    _print_matrix(hits)
    print(f"\nwhat bit (it takes {least} of each)")
    for outcome in outcomes:
        _print_bites(outcome)
    requests = sum(outcome.counts.total() for outcome in outcomes)
    faults = sum(
        outcome.bitten[name]
        for outcome in outcomes
        for name in outcome.scenario.must_bite
    )
    violations = sum(len(outcome.violations) for outcome in outcomes)
    print(f"\n{requests} requests, {faults} faults, {violations} violations")
    for outcome in outcomes:
        for name in outcome.toothless(least):
            print(f"did not bite often enough: {name} in {outcome.scenario.name}")
    return (
        1 if violations or any(outcome.toothless(least) for outcome in outcomes) else 0
    )


def _print_matrix(hits: Counter[tuple[str, str]]) -> None:
    actions = sorted({action for action, _point in hits})
    print("  " + "".ljust(18) + "".join(action.rjust(11) for action in actions))
    for point in sorted({point for _action, point in hits}):
        print(
            "  "
            + point.ljust(18)
            + "".join(str(hits[action, point] or "·").rjust(11) for action in actions)
        )


def _print_bites(outcome: Outcome) -> None:
    print(f"  {outcome.scenario.name}")
    wanted = (*outcome.scenario.must_bite, *outcome.scenario.must_show)
    for name in sorted({*outcome.bitten, *wanted}):
        by_the_way = "" if name in wanted else "   (by the way)"
        print(f"    {name.ljust(40)}{str(outcome.bitten[name]).rjust(6)}{by_the_way}")


if __name__ == "__main__":
    sys.exit(main())
