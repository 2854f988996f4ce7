"""Sections that wings add to ``idempotency_stats``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Section:
    """``facts``: for ``--json``, by name. ``lines``: the same for people."""

    facts: Mapping[str, Any]
    lines: Sequence[str]


Source = Callable[[str], Section]
_sources: list[Source] = []


def register(source: Source) -> None:
    """Show the section that ``source`` returns for the alias of a database. Call this in the ``ready()`` of an app."""
    if source not in _sources:  # an AppConfig can get ready again
        _sources.append(source)


def sections(using: str) -> list[Section]:
    return [source(using) for source in _sources]
