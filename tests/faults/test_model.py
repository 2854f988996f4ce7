"""The laws hold in the Promela models of the two kinds of claim, and each mutant of a
model breaks a law.

The models are smaller than those of the page on correctness, which ``ALL_STATES=1`` in
the environment searches.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spin, pytest.mark.slow]

RECORD, LOCK = (
    Path(__file__).parent / "model" / name for name in ("claim.pml", "lock_claim.pml")
)
ALL = "ALL_STATES" in os.environ
MODES = ("ATOMIC", "LEASE", "HOLD")
# In lease mode, time is part of the state: two requests and one outage have a tenth of
# the states of three and two.
LAWS = (
    [(mode, ()) for mode in MODES]
    if ALL
    else [("ATOMIC", ()), ("HOLD", ()), ("LEASE", ("REQUESTS=2", "OUTAGES=1"))]
)
ENDS = (
    [("REQUESTS=3", "OUTAGES=0"), ("REQUESTS=2", "OUTAGES=1")]
    if ALL
    else [("REQUESTS=2", "OUTAGES=0")]
)
# Lease mode with on_crash="retry" may run again, and says so, so a mutant that only
# runs again breaks no law there.
MUTANTS = (
    ("NO_FENCE", "ATOMIC", "LEASE"),
    ("COUNTER_FENCE", "ATOMIC", "LEASE"),
    ("RELEASE_ON_ERROR", "LEASE", "HOLD"),
    ("WAITER_DELETES", "ATOMIC", "LEASE"),
    ("AGE_ONLY_REAPER", "ATOMIC", "HOLD"),
    ("TAKEOVER_WITHOUT_LOCK", "ATOMIC"),
    ("COMPLETE_OUTSIDE", "ATOMIC"),
    ("NO_WATCH", "LEASE", "HOLD"),
    ("WATCH_SURVIVES_OUTAGE", "LEASE", "HOLD"),
    ("SLOW_HEARTBEAT", "LEASE", "HOLD"),
    ("REAPER_WITHOUT_WATCH", "LEASE", "HOLD"),
)
LOCK_MODES = ("TROUBLES=1", "TROUBLES=1 REQUESTS=2 REPEATABLE")
if ALL:
    LOCK_MODES += ("ONLY_LOCKS", "TROUBLES=1 NO_INDEX", "ONLY_LOCKS REPEATABLE")
else:
    LOCK_MODES += ("TROUBLES=1 REQUESTS=2 NO_INDEX", "TROUBLES=1 ONLY_LOCKS REPEATABLE")
LOCK_ENDS = ("TROUBLES=1 REQUESTS=2", *(("TROUBLES=1 ONLY_LOCKS",) if ALL else ()))
LOCK_MUTANTS = {
    "NO_KEY_LOCK": "at_work",
    "NO_REQUEST_LOCK": "body_of",
    "NO_LOOK_AT_OWNER": "body_of",
    "LOOK_FIRST NO_INDEX": "effects",
    "REPEATABLE NO_INDEX": "effects",
    "RECORD_WITHOUT_LOCK": "at_work",
    "SHARE_ENDS_EARLY": "effects|at_work",
    "NO_NUMBER ONLY_LOCKS": "effects",
    "LOOK_WITHOUT_LOCKS ONLY_LOCKS": "committing",
    "LOOK_ONCE REPEATABLE ONLY_LOCKS": "committing",
}
# finding a mutant takes less time than optimizing would
SAFETY = ("-O0", "-DSAFETY", "-DNOCLAIM")
WHOLE = ("-O1", *SAFETY[1:])
LIVENESS = ("-O1", "-DNFAIR=12")


def verify(
    directory: Path,
    defines: list[str],
    compiled: tuple[str, ...],
    *options: str,
    model: Path = RECORD,
) -> str:
    """Search every reachable state; spin's report."""
    shutil.copy(model, directory)
    for command in (
        ["spin", "-a", *(f"-D{define}" for define in defines), model.name],
        ["gcc", "-w", "-DVECTORSZ=2048", *compiled, "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=directory, check=True, capture_output=True)
    report = subprocess.run(
        ["./pan", "-m400000", "-w24", "-n", *options],
        cwd=directory,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "max search depth too small" not in report
    return report


def errors(report: str) -> int:
    (found,) = re.findall(r"errors: (\d+)", report)
    return int(found)


@pytest.mark.parametrize(("mode", "size"), LAWS)
def test_laws_hold_in_every_reachable_state(
    mode: str, size: tuple[str, ...], tmp_path: Path
) -> None:
    report = verify(tmp_path, [f"MODE={mode}", *size], WHOLE)
    assert errors(report) == 0, report
    assert "invalid end states\t+" in report


@pytest.mark.parametrize("size", ENDS, ids="-".join)
@pytest.mark.parametrize("mode", MODES)
def test_a_key_that_is_retried_comes_to_an_end(
    mode: str, size: tuple[str, ...], tmp_path: Path
) -> None:
    report = verify(
        tmp_path, [f"MODE={mode}", *size], LIVENESS, "-a", "-f", "-N", "ends"
    )
    assert errors(report) == 0, report


@pytest.mark.parametrize(
    ("mutant", "mode"),
    [(name, mode) for name, *modes in MUTANTS for mode in modes[: 2 if ALL else 1]],
)
def test_a_mutant_breaks_a_law(mode: str, mutant: str, tmp_path: Path) -> None:
    report = verify(tmp_path, [f"MODE={mode}", mutant], SAFETY)
    assert "assertion violated" in report


@pytest.mark.parametrize("mode", LOCK_MODES)
def test_laws_hold_where_claims_are_locks(mode: str, tmp_path: Path) -> None:
    report = verify(tmp_path, mode.split(), WHOLE, model=LOCK)
    assert errors(report) == 0, report
    assert "invalid end states\t+" in report


@pytest.mark.parametrize("size", LOCK_ENDS)
def test_a_key_that_is_locked_comes_to_an_end(size: str, tmp_path: Path) -> None:
    report = verify(tmp_path, size.split(), LIVENESS, "-a", "-f", model=LOCK)
    assert errors(report) == 0, report


@pytest.mark.parametrize("mutant", LOCK_MUTANTS)
def test_a_mutant_of_the_locks_breaks_a_law(mutant: str, tmp_path: Path) -> None:
    report = verify(tmp_path, ["TROUBLES=1", *mutant.split()], SAFETY, model=LOCK)
    assert re.search(rf"assertion violated .*({LOCK_MUTANTS[mutant]})", report), report
