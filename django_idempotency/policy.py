"""Policy: every knob of a view or a consumer, and its default, once."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest


class Mode(StrEnum):
    ATOMIC = "atomic"
    LEASE = "lease"


class OnCrash(StrEnum):
    RETRY = "retry"
    HOLD = "hold"


class WhenInFlight(StrEnum):
    REJECT = "reject"
    WAIT = "wait"


class Lock(StrEnum):
    NOWAIT = "nowait"
    SKIP_LOCKED = "skip_locked"


Scope = Callable[[HttpRequest], str | None]
Fingerprint = Callable[[HttpRequest], bytes]


@dataclass(frozen=True, kw_only=True, eq=False)
class Policy:
    """How one view or consumer treats its keys. What is not stated comes from the ``IDEMPOTENCY`` setting.

    ``required``: refuse requests without a key (400).
    ``methods``: the HTTP methods that heed the header.
    ``mode``: ``"atomic"`` (effects are in the record's database) or ``"lease"`` (they are not).
    ``lease``: seconds a claim is good for without a sign of life.
    ``grace``: seconds between a claim and its row lock within which nobody takes over.
    ``on_crash``: lease mode: ``"retry"`` runs again once the lease ran out, ``"hold"`` waits for a person.
    ``in_flight``: ``"reject"`` answers a concurrent duplicate with 409, ``"wait"`` waits first.
    ``wait``: seconds to wait at most.
    ``retention``: seconds, from the answer, in which the key is deduplicated.
    ``audit``: seconds, from the answer, that the record is kept; ``None`` for as long as ``retention``.
    ``scope``: ``None`` for the user's primary key, ``"public"`` for one scope shared by all, or a callable.
    ``strict``: take the header only as the draft writes it, a quoted string.
    ``lock``: how a row that may change hands is locked, ``"nowait"`` or ``"skip_locked"``.
    ``max_body``: bytes; a larger answer is stored without its body.
    ``store_cookies``: store and replay ``Set-Cookie``.
    ``fail_open``: run unprotected when the store can't be reached, instead of answering 503.
    ``using``: alias of the database of the records; ``None`` asks the routers.
    ``fingerprint``: a callable that gives the bytes that identify the request, instead of all of it.
    ``fingerprint_fields``, ``fingerprint_exclude``: top-level body fields that count, or don't.
    ``release_statuses``: statuses that are not stored and release the key.
    ``retry_statuses``: statuses that are not stored and leave a retry free to run again.

    Raises ``ImproperlyConfigured`` for a value that can't be meant.
    """

    required: bool = False
    methods: Collection[str] = ("POST", "PUT", "PATCH", "DELETE")
    mode: str = Mode.ATOMIC
    lease: float = 60
    grace: float = 0.1
    on_crash: str = OnCrash.RETRY
    in_flight: str = WhenInFlight.REJECT
    wait: float = 10
    retention: float = 24 * 60 * 60
    audit: float | None = None
    scope: str | Scope | None = None
    strict: bool = False
    lock: str = Lock.NOWAIT
    max_body: int = 1024 * 1024
    store_cookies: bool = False
    fail_open: bool = False
    using: str | None = None
    fingerprint: Fingerprint | None = None
    fingerprint_fields: Collection[str] | None = None
    fingerprint_exclude: Collection[str] = ()
    release_statuses: Collection[int] = (400, 401, 403, 404, 405, 406, 415, 422, 429)
    retry_statuses: Collection[int] = range(500, 600)

    def __new__(cls, **stated: Any) -> Policy:
        self = super().__new__(cls)
        object.__setattr__(self, "_stated", frozenset(stated))
        return self

    def __post_init__(self) -> None:
        _one_of("mode", self.mode, Mode)
        _one_of("on_crash", self.on_crash, OnCrash)
        _one_of("in_flight", self.in_flight, WhenInFlight)
        _one_of("lock", self.lock, Lock)
        for name in ("lease", "retention", "audit"):
            _at_least(name, getattr(self, name), smallest=1)
        for name in ("wait", "grace", "max_body"):
            _at_least(name, getattr(self, name), smallest=0)
        if not (self.scope is None or self.scope == "public" or callable(self.scope)):
            raise ImproperlyConfigured(f'scope is {self.scope!r}; it must be None, "public" or a callable.')
        for name in ("methods", "fingerprint_fields", "fingerprint_exclude", "release_statuses", "retry_statuses"):
            self._freeze(name)

    def _freeze(self, name: str) -> None:
        values = getattr(self, name)
        if isinstance(values, str):
            raise ImproperlyConfigured(f"{name} is the string {values!r}; it must be a list, tuple or set.")
        if values is not None:
            object.__setattr__(self, name, frozenset(values))

    def over(self, defaults: Policy) -> Policy:
        """This policy, with ``defaults`` for whatever it does not state."""
        stated: frozenset[str] = self._stated  # type: ignore[attr-defined]
        return replace(defaults, **{name: getattr(self, name) for name in stated})

    @property
    def kept_for(self) -> float:
        """Seconds from the answer to the end of the audit copy."""
        return self.retention if self.audit is None else max(self.audit, self.retention)


NAMES = frozenset(field.name for field in fields(Policy))


def _one_of(name: str, value: str, choices: type[StrEnum]) -> None:
    if value not in tuple(choices):
        raise ImproperlyConfigured(f"{name} is {value!r}; {nearest(value, choices)}")


def _at_least(name: str, value: float | None, *, smallest: float) -> None:
    if value is not None and value < smallest:
        raise ImproperlyConfigured(f"{name} is {value!r}; it must be at least {smallest}.")


def nearest(wrong: object, right: Iterable[str]) -> str:
    """A sentence that names the right word for a wrong one."""
    right = sorted(right)
    if close := difflib.get_close_matches(str(wrong), right, n=1, cutoff=0.5):
        return f"did you mean {close[0]!r}?"
    return f"it must be one of {', '.join(right)}."


def unknown_names(options: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """A sentence for each name in ``options`` that is not ``known``."""
    known = sorted(known)
    return [f"Unknown name {name!r}: {nearest(name, known)}" for name in options if name not in known]
