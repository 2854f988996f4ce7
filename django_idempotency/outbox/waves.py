"""Keep the order by key while many events are being sent: at most one of a key at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from django_idempotency.outbox.publishers.base import Event


def waves(events: Iterable[Event]) -> list[list[Event]]:
    """Divide ``events``, in order, so that no part has two of a key and a key's events are in successive parts."""
    parts: list[list[Event]] = []
    met: dict[str, int] = defaultdict(int)
    for event in events:
        number = met[event.key] if event.key else 0
        if event.key:
            met[event.key] += 1
        if number == len(parts):
            parts.append([])
        parts[number].append(event)
    return parts


def without_keys(events: Sequence[Event], keys: set[str]) -> list[Event]:
    """Return the ``events`` whose key is not in ``keys``: an earlier event of these keys is not published yet."""
    return [event for event in events if event.key not in keys]
