"""The Promela model of the protocol: the laws hold in it, and each mutant of it breaks one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.spin

MODEL = Path(__file__).parent / "model" / "claim.pml"
MODES = ("ATOMIC", "LEASE", "HOLD")
# Lease mode with on_crash="retry" may run again, and says so: there a mutant that only runs again breaks no law.
MUTANTS = (
    ("ATOMIC", "NO_FENCE"),
    ("LEASE", "NO_FENCE"),
    ("ATOMIC", "COUNTER_FENCE"),
    ("LEASE", "COUNTER_FENCE"),
    ("LEASE", "RELEASE_ON_ERROR"),
    ("HOLD", "RELEASE_ON_ERROR"),
    ("ATOMIC", "WAITER_DELETES"),
    ("LEASE", "WAITER_DELETES"),
    ("ATOMIC", "AGE_ONLY_REAPER"),
    ("HOLD", "AGE_ONLY_REAPER"),
    ("ATOMIC", "TAKEOVER_WITHOUT_LOCK"),
    ("ATOMIC", "COMPLETE_OUTSIDE"),
    ("LEASE", "NO_WATCH"),
    ("HOLD", "NO_WATCH"),
    ("LEASE", "WATCH_SURVIVES_OUTAGE"),
    ("HOLD", "WATCH_SURVIVES_OUTAGE"),
    ("LEASE", "SLOW_HEARTBEAT"),
    ("HOLD", "SLOW_HEARTBEAT"),
    ("LEASE", "REAPER_WITHOUT_WATCH"),
    ("HOLD", "REAPER_WITHOUT_WATCH"),
)
SAFETY = ("-O0", "-DSAFETY", "-DNOCLAIM")  # a mutant is found sooner than compiled any better
WHOLE = ("-O1", *SAFETY[1:])
LIVENESS = ("-O1", "-DNFAIR=8")


def verify(directory: Path, defines: list[str], compiled: tuple[str, ...], *options: str) -> str:
    """Search every reachable state; spin's report."""
    shutil.copy(MODEL, directory)
    for command in (
        ["spin", "-a", *(f"-D{define}" for define in defines), MODEL.name],
        ["gcc", "-w", "-DVECTORSZ=2048", *compiled, "-o", "pan", "pan.c"],
    ):
        subprocess.run(command, cwd=directory, check=True, capture_output=True)
    report = subprocess.run(
        ["./pan", "-m400000", "-w24", "-n", *options], cwd=directory, check=True, capture_output=True, text=True
    ).stdout
    assert "max search depth too small" not in report
    return report


def errors(report: str) -> int:
    (found,) = re.findall(r"errors: (\d+)", report)
    return int(found)


@pytest.mark.parametrize("mode", MODES)
def test_laws_hold_in_every_reachable_state(mode: str, tmp_path: Path) -> None:
    report = verify(tmp_path, [f"MODE={mode}"], WHOLE)
    assert errors(report) == 0, report
    assert "invalid end states\t+" in report


@pytest.mark.parametrize("size", [("REQUESTS=3", "OUTAGES=0"), ("REQUESTS=2", "OUTAGES=1")], ids="-".join)
@pytest.mark.parametrize("mode", MODES)
def test_a_key_that_is_retried_comes_to_an_end(mode: str, size: tuple[str, ...], tmp_path: Path) -> None:
    report = verify(tmp_path, [f"MODE={mode}", *size], LIVENESS, "-a", "-f", "-N", "ends")
    assert errors(report) == 0, report


@pytest.mark.parametrize(("mode", "mutant"), MUTANTS)
def test_a_mutant_breaks_a_law(mode: str, mutant: str, tmp_path: Path) -> None:
    report = verify(tmp_path, [f"MODE={mode}", mutant], SAFETY)
    assert "assertion violated" in report
