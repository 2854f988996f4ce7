"""Which fault a request meets, and where."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from tests.faults.payments import NO_TROUBLE, Choose, Trouble
from tests.faults.trials import Call

STEPS = ("claim", "effect", "complete", "commit")
COMMON = (
    "respond",
    *(f"{step}.{when}" for step in STEPS for when in ("before", "after")),
)
ATOMIC_POINTS = (*COMMON, "lock.before", "lock.after")
LEASED_POINTS = (*COMMON, "renew.before", "renew.after")
INSIDE = (
    "lock.after",
    "effect.before",
    "effect.after",
    "complete.before",
    "complete.after",
    "commit.before",
)

MATRIX = {"raise": 4, "terminate": 3, "cut": 3, "kill": 2, "stop": 1}


def anywhere(rate: float, actions: Mapping[str, int] = MATRIX) -> Choose:
    """Any action at any point that the request may come by."""

    def choose(decide: random.Random, call: Call, leased: bool) -> Trouble:
        if decide.random() > rate:
            return NO_TROUBLE
        (do,) = decide.choices([*actions], [*actions.values()])
        way = decide.choice(
            (_through, _through, _through, _failing, _releasing, _taking_over)
        )
        return way(decide, do, leased)

    return choose


def _through(decide: random.Random, do: str, leased: bool) -> Trouble:
    """On the straight way. What is to be hit while renewing has to take long enough to
    be renewed.
    """
    at = decide.choice(LEASED_POINTS if leased else ATOMIC_POINTS)
    return Trouble(
        [{"at": at, "do": do}],
        {"delay_ms": 700 if at.startswith("renew") else decide.choice((0, 0, 30))},
    )


def _around(step: str, **simulate: Any) -> Callable[..., Trouble]:
    def trouble(decide: random.Random, do: str, _leased: bool) -> Trouble:
        at = decide.choice((f"{step}.before", f"{step}.after"))
        return Trouble([{"at": at, "do": do}], simulate)

    return trouble


# the operation fails, and then that can't be written down either
_failing = _around("fail", **{"raise": True})
_releasing = _around("release", status=404)
# if somebody left something to take over
_taking_over = _around("reassign")


def one_of(rate: float, *faults: Mapping[str, Any]) -> Choose:
    """One of ``faults``, at one of its points."""

    def choose(decide: random.Random, _call: Call, _leased: bool) -> Trouble:
        if decide.random() > rate:
            return NO_TROUBLE
        fault = decide.choice(faults)
        return Trouble([{**fault, "at": decide.choice(fault["at"])}])

    return choose


def in_calls(rate: float, otherwise: Choose) -> Choose:
    """The gateway pays, but its response is lost, by its fault or the worker's end; or
    it does not pay, which the worker can't tell from that.
    """
    faults = (
        *({"gateway": fault} for fault in ("cut", "500", "503")),
        {"kill": "call"},
    )

    def choose(decide: random.Random, call: Call, leased: bool) -> Trouble:
        if decide.random() > rate:
            return otherwise(decide, call, leased)
        return Trouble(simulate=decide.choice(faults))

    return choose
