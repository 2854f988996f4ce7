"""The campaign of messages: its verdict on made-up histories, and the verdict on
chains; and that campaigns start.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.faults.chains import told
from tests.faults.deliveries import Published, Seen, judged
from tests.support.servers import ROOT

EVENTS = [
    Published(f"{key}{number}", key, number) for number in range(2) for key in "ab"
]
IDS = [event.id for event in EVENTS]
TWICE_EACH = dict.fromkeys(IDS, 2)


def broken(*, arrivals=(), deliveries=TWICE_EACH, effects=IDS, order_of_effects=True):
    seen = Seen(EVENTS, arrivals or [*IDS, *IDS], deliveries, effects)
    found = judged(seen, order_of_effects=order_of_effects, copies=2)
    return {name for name, count in found.items() if count}


@pytest.mark.parametrize(
    ("history", "promises"),
    [
        ({}, set()),
        ({"arrivals": ["a0", "a0", "a1", "a0", "b0", "b1"]}, set()),
        ({"arrivals": ["a1", "a0", "a1", "b0", "b1"]}, {"published out of order"}),
        ({"effects": ["a0", "b0", "a1"]}, {"lost"}),
        ({"effects": [*IDS, "a0"]}, {"twice"}),
        ({"effects": [*IDS, "c0"]}, {"from nowhere"}),
        ({"effects": ["a1", "b0", "a0", "b1"]}, {"effects out of order"}),
        ({"effects": ["a1", "b0", "a0", "b1"], "order_of_effects": False}, set()),
        ({"deliveries": TWICE_EACH | {"a0": 1}}, {"delivered too rarely"}),
        ({"deliveries": {}}, {"delivered too rarely"}),
    ],
)
def test_a_history_is_held_to_each_promise(history, promises):
    assert broken(**history) == promises


@pytest.mark.parametrize(
    ("charges", "receipts", "effects"),
    [
        (["a"], 1, ["a"]),
        (["a"], 2, ["a", "a"]),
        (["a"], 0, []),
        ([], 1, ["no charge"]),
        ([], 0, []),
    ],
)
def test_the_effects_of_a_charge_are_counted_from_charges_and_receipts(
    charges, receipts, effects
):
    assert told(charges, receipts) == effects


def test_campaigns_start_in_a_shell_where_nothing_is_configured():
    code = (
        "import tests.faults.__main__, tests.faults.deliveries, tests.gameday.__main__"
    )
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("DJANGO", "DATABASE"))
    }
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)
