"""Query plans, as PostgreSQL explains them in JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

Plan = dict[str, Any]


def nodes(plan: Plan) -> Iterator[Plan]:
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


def buffers(plan: Plan) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])
