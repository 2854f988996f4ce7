"""The ``OUTBOX`` entry of the ``IDEMPOTENCY`` setting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from django_idempotency.extending import (
    BACKENDS,
    MAPPING,
    Options,
    nearest,
    number,
    option,
    options_of_app,
    or_none,
    seconds,
    text,
)
from django_idempotency.extending.brokers import Publisher

DEFAULT = "default"


_SECONDS = seconds(0.001)


@dataclass(frozen=True, kw_only=True)
class OutboxOptions(Options):
    """The options of the outbox, described in ``docs/outbox.md``. Times are in seconds,
    ``max_payload`` in bytes.
    """

    publishers: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict, repr=False, metadata={"rule": BACKENDS}
    )
    routes: Mapping[str, str] = field(default_factory=dict, metadata={"rule": MAPPING})
    using: str | None = option(None, or_none(text("the alias of a database")))
    batch: int = option(500, number(1, 100_000))
    lease: float = option(15.0, seconds(1))
    poll: float = option(0.2, _SECONDS)
    send_timeout: float = option(10.0, _SECONDS)
    max_attempts: int = option(20, number(1, 1_000_000))
    first_delay: float = option(1.0, _SECONDS)
    longest_delay: float = option(3600.0, _SECONDS)
    max_payload: int = option(1024 * 1024, number(1, 2**30))

    def __post_init__(self) -> None:
        super().__post_init__()
        for pattern, alias in self.routes.items():
            if alias not in self.publishers:
                raise ImproperlyConfigured(
                    f"OUTBOX: ROUTES sends {pattern!r} to {alias!r}, which is not in"
                    " PUBLISHERS."
                )

    def publisher_of(self, topic: str) -> str:
        """Return the alias of the publisher for ``topic``: that of the first route that
        fits, else ``"default"``.
        """
        return next(
            (
                alias
                for pattern, alias in self.routes.items()
                if fnmatchcase(topic, pattern)
            ),
            DEFAULT,
        )


def options() -> OutboxOptions:
    """Return the options in force. Raises ``ImproperlyConfigured``."""
    found: OutboxOptions = options_of_app("OUTBOX", OutboxOptions)
    return found


def make_publisher(alias: str) -> Publisher:
    """Return a new publisher by its alias. Raises ``ImproperlyConfigured`` if there is
    none or it can't be made.
    """
    publishers = options().publishers
    if alias not in publishers:
        raise ImproperlyConfigured(
            f"OUTBOX: PUBLISHERS has no {alias!r}: {nearest(alias, publishers)}"
        )
    stated = publishers[alias]
    names = ""
    try:
        backend = import_string(stated["BACKEND"])
        if not (isinstance(backend, type) and issubclass(backend, Publisher)):
            raise ImproperlyConfigured(
                f"OUTBOX: {stated['BACKEND']} is not a {Publisher.__qualname__}."
            )
        names = ", ".join(signature(backend).parameters)
        return backend(**stated.get("OPTIONS", {}))
    except (ImportError, TypeError) as error:
        raise ImproperlyConfigured(
            f"OUTBOX: the publisher {alias!r} can't be created:"
            f" {error}{names and f'. Its options: {names}'}."
        ) from error
