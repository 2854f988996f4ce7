"""The figures, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

COLUMNS = {
    "rate": ("req/s", "{:.0f}"),
    "ratio": ("× bare", "{:.3f}"),
    "ratio_low": ("lowest", "{:.3f}"),
    "ratio_high": ("highest", "{:.3f}"),
    "p50": ("p50 ms", "{:.1f}"),
    "p99": ("p99 ms", "{:.1f}"),
    "p99_more": ("p99 more", "{:+.1f}"),
    "server_cpu": ("server ms", "{:.2f}"),
    "database_cpu": ("database ms", "{:.2f}"),
    "cpu_ratio": ("× by CPU", "{:.3f}"),
    "wal_bytes": ("WAL bytes", "{:.0f}"),
    "refused": ("refused %", "{:.1f}"),
    "errors": ("errors", "{:.0f}"),
}
COUNTED = {
    "statements": ("statements", "{:.2f}"),
    "synchronous_commits": ("synchronous commits", "{:.2f}"),
    "wal_bytes": ("WAL bytes", "{:.0f}"),
    "wal_more": ("WAL more", "{:+.0f}"),
    "buffers": ("buffers", "{:.1f}"),
}
STORM = {
    "executions": ("executions", "{}"),
    "others_calm": ("others' req/s, calm", "{:.0f}"),
    "others": ("in the storm", "{:.0f}"),
    "ratio": ("×", "{:.3f}"),
    "slowest_refusal": ("slowest refusal ms", "{:.0f}"),
    "lasted": ("all answered after s", "{:.1f}"),
    "unanswered": ("unanswered", "{}"),
}
CLEANUP = {
    "seconds": ("s", "{:.0f}"),
    "keys": ("claims", "{:.0f}"),
    "p50": ("p50 ms", "{:.2f}"),
    "p99": ("p99 ms", "{:.2f}"),
    "ratio": ("×", "{:.2f}"),
    "longest": ("longest ms", "{:.0f}"),
    "whole_p99": ("p99 with completion ms", "{:.2f}"),
    "deleted_rate": ("rows deleted/s", "{:.0f}"),
    "wal": ("WAL MB/s", "{:.1f}"),
    "images": ("page images/s", "{:.0f}"),
}
REAPER = {"buffers": ("buffers", "{}"), "ms": ("ms", "{:.1f}")}


def table(
    rows: Mapping[str, Mapping[str, Any]],
    columns: Mapping[str, tuple[str, str]],
    *,
    first: str = "",
) -> str:
    """Return a table in Markdown, for the terminal and for the docs."""
    body = [[title, *_cells(figures, columns)] for title, figures in rows.items()]
    return "\n".join(
        _lines([[first, *(heading for heading, _ in columns.values())], *body])
    )


def _cells(
    figures: Mapping[str, Any], columns: Mapping[str, tuple[str, str]]
) -> Iterator[str]:
    for name, (_, form) in columns.items():
        yield "" if figures.get(name) is None else form.format(figures[name])


def _lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    heading, *body = (_line(row, widths) for row in rows)
    yield heading
    first, *others = widths
    yield (
        "|"
        + "|".join(["-" * (first + 2), *("-" * (width + 1) + ":" for width in others)])
        + "|"
    )
    yield from body


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    return (
        "| "
        + " | ".join(
            [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        )
        + " |"
    )
