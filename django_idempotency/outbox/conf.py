"""The ``OUTBOX`` entry of the ``IDEMPOTENCY`` setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from django_idempotency.conf import conf
from django_idempotency.options import (
    BACKENDS,
    BOOLEAN,
    MAPPING,
    conform,
    nearest,
    number,
    one_of,
    option,
    or_none,
    rules,
    seconds,
    text,
    unknown_names,
    validate,
)
from django_idempotency.outbox.publishers.base import Publisher

DEFAULT = "default"


class DeadHead(StrEnum):
    """What a dead letter does to the later events of its key."""

    HOLD = "hold"
    FREE = "free"


_SECONDS = seconds(0.001)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the outbox, described in ``docs/outbox.md``. Times are in seconds, ``max_payload`` in bytes."""

    publishers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, metadata={"rule": BACKENDS})
    routes: Mapping[str, str] = field(default_factory=dict, metadata={"rule": MAPPING})
    using: str | None = option(None, or_none(text("the alias of a database")))
    batch: int = option(500, number(1, 100_000))
    lease: float = option(15.0, seconds(1))
    poll: float = option(1.0, _SECONDS)
    notify: bool = option(True, BOOLEAN)
    send_timeout: float = option(10.0, _SECONDS)
    max_attempts: int = option(20, number(1, 1_000_000))
    first_delay: float = option(1.0, _SECONDS)
    longest_delay: float = option(3600.0, _SECONDS)
    dead_head: DeadHead = option(DeadHead.HOLD, one_of(DeadHead))
    retention: float | None = option(None, or_none(_SECONDS))
    max_payload: int = option(1024 * 1024, number(1, 2**30))

    def __post_init__(self) -> None:
        validate(self)
        for pattern, alias in self.routes.items():
            if alias not in self.publishers:
                raise ImproperlyConfigured(f"ROUTES sends {pattern!r} to {alias!r}, which is not in PUBLISHERS.")

    def publisher_of(self, topic: str) -> str:
        """Return the alias of the publisher for ``topic``: that of the first route that fits, else ``"default"``."""
        return next((alias for pattern, alias in self.routes.items() if fnmatchcase(topic, pattern)), DEFAULT)


RULES = {name.upper(): rule for name, rule in rules(Options).items()}
NAMES = frozenset(RULES)


@lru_cache(maxsize=1)
def options() -> Options:
    """Return the options in force.

    Raises ``ImproperlyConfigured``. For an unknown name, its message gives the nearest valid one.
    """
    stated = conf().outbox
    if wrong := unknown_names(stated, NAMES):
        raise ImproperlyConfigured("OUTBOX: " + " ".join(wrong))
    conforming = {name.lower(): _conforming(name, value) for name, value in stated.items()}
    try:
        return Options(**conforming)
    except ImproperlyConfigured as error:
        raise ImproperlyConfigured(f"OUTBOX: {error}") from error


def _conforming(name: str, value: Any) -> Any:
    return conform(f'IDEMPOTENCY["OUTBOX"]["{name}"]', value, RULES[name])


def make_publisher(alias: str) -> Publisher:
    """Return a new publisher by its alias. Raises ``ImproperlyConfigured`` if there is none or it can't be made."""
    publishers = options().publishers
    if alias not in publishers:
        raise ImproperlyConfigured(f"OUTBOX: PUBLISHERS has no {alias!r}: {nearest(alias, publishers)}")
    stated = publishers[alias]
    try:
        made = import_string(stated["BACKEND"])(**stated.get("OPTIONS", {}))
    except (ImportError, TypeError) as error:
        raise ImproperlyConfigured(f"OUTBOX: the publisher {alias!r} can't be created: {error}") from error
    if not isinstance(made, Publisher):
        raise ImproperlyConfigured(f"OUTBOX: {stated['BACKEND']} is not a {Publisher.__qualname__}.")
    return made


def _forget(*, setting: str, **_named: object) -> None:
    if setting == "IDEMPOTENCY":
        options.cache_clear()


setting_changed.connect(_forget)
