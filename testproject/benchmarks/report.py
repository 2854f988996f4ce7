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
GROWTH = {
    "claim": ("claim µs", "{:.0f}"),
    "claim_ratio": ("×", "{:.3f}"),
    "cpu": ("database ms", "{:.2f}"),
    "cpu_ratio": ("× ", "{:.3f}"),
    "wal": ("WAL bytes", "{:.0f}"),
    "images": ("page images", "{:.2f}"),
    "buffers": ("buffers", "{:.1f}"),
    "read": ("not in memory", "{:.2f}"),
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
PARTITIONS = {
    "partitions": ("partitions", "{}"),
    "claim": ("claim µs", "{:.0f}"),
    "claim_ratio": ("×", "{:.3f}"),
    "cpu": ("database ms", "{:.2f}"),
    "cpu_ratio": ("× ", "{:.3f}"),
    "buffers": ("buffers", "{:.1f}"),
}
STEPS = {"ms": ("ms", "{:.1f}")}
DROP = {name: CLEANUP[name] for name in ("keys", "p50", "p99", "longest")}
REAPER = {"buffers": ("buffers", "{}"), "ms": ("ms", "{:.1f}")}
DAYS = {
    "rows": ("rows", "{:.0f}"),
    "dead": ("dead", "{:.0f}"),
    "heap": ("heap MB", "{:.2f}"),
    "pkey": ("primary key MB", "{:.2f}"),
    "purge": ("finished MB", "{:.2f}"),
    "reap": ("live MB", "{:.2f}"),
    "total": ("in all MB", "{:.2f}"),
    "vacuums": ("vacuums", "{:.0f}"),
    "seconds": ("their s", "{:.2f}"),
    "changed": ("pages changed", "{:.0f}"),
    "vacuum_wal": ("their WAL MB", "{:.1f}"),
    "wal": ("WAL bytes a key", "{:.0f}"),
}


def curves(rows: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Return bytes of WAL a key, with page images a key in brackets, by the number of keys since the checkpoint."""
    told = {
        title: {str(point["keys"]): f"{point['wal']:.0f} ({point['images']:.2f})" for point in curve}
        for title, curve in rows.items()
    }
    columns = {keys: (f"{int(keys):,} keys", "{}") for keys in next(iter(told.values()))}
    return table(told, columns)


def table(rows: Mapping[str, Mapping[str, Any]], columns: Mapping[str, tuple[str, str]], *, first: str = "") -> str:
    """Return a table in Markdown, for the terminal and for the docs."""
    body = [[title, *_cells(figures, columns)] for title, figures in rows.items()]
    return "\n".join(_lines([[first, *(heading for heading, _ in columns.values())], *body]))


def _cells(figures: Mapping[str, Any], columns: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    for name, (_, form) in columns.items():
        yield "" if figures.get(name) is None else form.format(figures[name])


def _lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    heading, *body = (_line(row, widths) for row in rows)
    yield heading
    first, *others = widths
    yield "|" + "|".join(["-" * (first + 2), *("-" * (width + 1) + ":" for width in others)]) + "|"
    yield from body


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = zip(row, widths, strict=True)
    return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"
