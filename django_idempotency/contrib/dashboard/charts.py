"""Turn series into bars: plain numbers that a template draws as SVG, whatever they mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

HEIGHT = 100.0
LEAST = 3.0  # height of the smallest bar, so that it can be seen
GAP = 0.2
ROUND = (1, 1.5, 2, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle, with its numbers as SVG takes them in any language, and the label that it shows on hover."""

    x: str
    y: str
    width: str
    height: str
    label: str


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a horizontal bar."""

    name: str
    x: str
    width: str


def top_of(values: Sequence[float], *, least: float = 1.0) -> float:
    """Return where the axis ends: one of ``ROUND`` times a power of ten, at or above all values and ``least``."""
    highest = max([*values, least])
    power = 10.0 ** math.floor(math.log10(highest))
    return next(round(step * power, 12) for step in ROUND if step * power >= highest * (1 - 1e-9))


def bars(values: Sequence[float], labels: Sequence[str], *, top: float) -> list[Bar]:
    """Return a bar for each value but zero, side by side. Each is one wide; one for ``top`` is ``HEIGHT`` high."""
    return [
        _bar(place, max(LEAST, value / top * HEIGHT), label)
        for place, (value, label) in enumerate(zip(values, labels, strict=True))
        if value
    ]


def _bar(place: int, height: float, label: str) -> Bar:
    return Bar(_shown(place + GAP / 2), _shown(HEIGHT - height), _shown(1 - GAP), _shown(height), label)


def level(value: float, *, top: float) -> str:
    """Return the ``y`` of a line at ``value``."""
    return _shown(HEIGHT - value / top * HEIGHT)


def segments(parts: Sequence[tuple[str, float]], *, whole: float) -> list[Segment]:
    """Return the parts of a bar that is 100 wide for ``whole``, one after the other; empty parts are left out."""
    found, x = [], 0.0
    for name, value in parts:
        width = value / whole * 100 if whole else 0.0
        if width:
            found.append(Segment(name, _shown(x), _shown(width)))
        x += width
    return found


def _shown(number: float) -> str:
    return f"{number:.3f}".rstrip("0").rstrip(".")
