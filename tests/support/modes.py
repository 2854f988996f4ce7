"""Modes of policies for tests that are run in both."""

from __future__ import annotations

from typing import Any

from django_idempotency.policy import Atomic, Lease
from django_idempotency.values.options import rules

GROUPS = {"atomic": Atomic, "lease": Lease}


def mode_of(word: str, **options: Any) -> Atomic | Lease:
    """Return the mode called ``word``, with those of ``options`` that it has; ``lease`` are the seconds of a lease."""
    group: type[Atomic | Lease] = GROUPS[word]
    if "lease" in options:
        options["seconds"] = options.pop("lease")
    return group(**{name: options[name] for name in options.keys() & rules(group).keys()})
