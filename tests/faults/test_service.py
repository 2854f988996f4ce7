"""The short form of ``make faults``: the real service on a database of its own, under
faults from a fixed seed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.faults import scenarios
from tests.faults.scenarios import (
    CRASHES,
    CRASHES_OF_THE_DATABASE,
    DATABASE_CRASHES,
    MIXED,
)
from tests.faults.troubles import MATRIX, anywhere, one_of

MORE_CRASHES = replace(
    CRASHES, choose=anywhere(0.7, dict.fromkeys(MATRIX, 1)), environment=MIXED
)
MORE_DATABASE_CRASHES = replace(
    DATABASE_CRASHES, choose=one_of(0.2, *CRASHES_OF_THE_DATABASE)
)

pytestmark = [pytest.mark.server, pytest.mark.postgresql, pytest.mark.slow]


@pytest.fixture(scope="module")
def ground():
    with scenarios.ground() as cluster_and_directory:
        yield cluster_and_directory


@pytest.mark.parametrize(
    ("scenario", "operations", "bites"),
    [
        (MORE_CRASHES, 120, {*MATRIX, "cut before COMMIT", "cut after COMMIT"}),
        (MORE_DATABASE_CRASHES, 80, {"crash"}),
    ],
    ids=["workers and wires", "the database"],
)
def test_every_law_holds_whatever_is_done_to(scenario, operations, bites, ground):
    scenario = replace(scenario, must_bite=sorted(bites))
    outcome = scenarios.run(
        scenario, *ground, operations=operations, seed=1, least=1, patience=300
    )
    assert not outcome.violations, outcome.verdicts
    assert not outcome.toothless(1)
