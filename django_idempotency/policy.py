"""Policy: every knob of a view or a consumer, and its default, once."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest

from django_idempotency.outcomes import StoredResponse


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


LONGEST = 100 * 365 * 24 * 60 * 60  # a century; far beyond it Python's calendar ends

Scope = Callable[[HttpRequest], str | None]
Fingerprint = Callable[[HttpRequest], bytes]
Redact = Callable[[StoredResponse], StoredResponse]


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
    ``late_after``: seconds; refuse a request first sent longer ago than that, of whose key nothing is known any more.
    ``scope``: ``None`` for the user's primary key, ``"public"`` for one scope shared by all, or a callable.
    ``strict``: take the header only as the draft writes it, a quoted string.
    ``lock``: how a row that may change hands is locked, ``"nowait"`` or ``"skip_locked"``.
    ``max_body``: bytes; a larger answer is stored without its body.
    ``store_body``: store and replay the answer's body.
    ``store_cookies``: store and replay ``Set-Cookie``.
    ``redact``: a callable that gets the answer and gives what is stored of it and replayed; no queries in it.
    ``encrypt``: encrypt what is stored, with the newest of ``ENCRYPTION_KEYS``.
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
    grace: float = 0.5
    on_crash: str = OnCrash.RETRY
    in_flight: str = WhenInFlight.REJECT
    wait: float = 10
    retention: float = 24 * 60 * 60
    audit: float | None = None
    late_after: float | None = None
    scope: str | Scope | None = None
    strict: bool = False
    lock: str = Lock.NOWAIT
    max_body: int = 1024 * 1024
    store_body: bool = True
    store_cookies: bool = False
    redact: Redact | None = None
    encrypt: bool = False
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
        for name, choices in CHOICES.items():
            if getattr(self, name) not in tuple(choices):
                raise ImproperlyConfigured(
                    f"{name} is {getattr(self, name)!r}; {nearest(getattr(self, name), choices)}"
                )
        for name, (is_right, what) in RULES.items():
            if not is_right(getattr(self, name)):
                raise ImproperlyConfigured(f"{name} is {getattr(self, name)!r}; it must be {what}.")
        for name in ("methods", "fingerprint_fields", "fingerprint_exclude", "release_statuses", "retry_statuses"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, frozenset(getattr(self, name)))

    def over(self, defaults: Policy) -> Policy:
        """This policy, with ``defaults`` for whatever it does not state."""
        stated: frozenset[str] = self._stated  # type: ignore[attr-defined]
        return replace(defaults, **{name: getattr(self, name) for name in stated})

    @property
    def kept_for(self) -> float:
        """Seconds from the answer to the end of the audit copy."""
        return self.retention if self.audit is None else max(self.audit, self.retention)


NAMES = frozenset(field.name for field in fields(Policy))


CHOICES: Mapping[str, type[StrEnum]] = {"mode": Mode, "on_crash": OnCrash, "in_flight": WhenInFlight, "lock": Lock}

Rule = tuple[Callable[[Any], bool], str]


def _number(smallest: int, largest: float) -> Rule:
    def is_right(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and smallest <= value <= largest

    return is_right, f"a number from {smallest} to {largest}"


def _all(is_right: Callable[[Any], bool], what: str) -> Rule:
    def are_right(values: Any) -> bool:
        return isinstance(values, Collection) and not isinstance(values, str | bytes) and all(map(is_right, values))

    return are_right, f"a list, tuple or set of {what}"


def _or_none(rule: Rule) -> Rule:
    is_right, what = rule
    return lambda value: value is None or is_right(value), f"{what}, or None"


_BOOLEAN: Rule = (lambda value: isinstance(value, bool), "True or False")
_TEXTS = _all(lambda value: isinstance(value, str), "names")
_STATUSES = _all(lambda value: isinstance(value, int) and 100 <= value <= 599, "HTTP statuses")

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("required", "strict", "store_body", "store_cookies", "encrypt", "fail_open"), _BOOLEAN),
    **dict.fromkeys(("lease", "retention"), _number(1, LONGEST)),
    **dict.fromkeys(("wait", "grace"), _number(0, LONGEST)),
    **dict.fromkeys(("release_statuses", "retry_statuses"), _STATUSES),
    **dict.fromkeys(("audit", "late_after"), _or_none(_number(1, LONGEST))),
    "max_body": _number(0, math.inf),
    "methods": _all(lambda value: isinstance(value, str) and value.isupper(), "HTTP methods in upper case"),
    "scope": (lambda value: value is None or value == "public" or callable(value), 'None, "public" or a callable'),
    "using": _or_none((lambda value: isinstance(value, str), "the alias of a database")),
    **dict.fromkeys(("fingerprint", "redact"), _or_none((callable, "a callable"))),
    "fingerprint_fields": _or_none(_TEXTS),
    "fingerprint_exclude": _TEXTS,
}


def retention_for(
    *,
    attempts: int,
    base: float,
    factor: float = 2.0,
    cap: float = math.inf,
    timeout: float = 0.0,
    margin: float = 60.0,
) -> float:
    """The ``retention`` that outlasts a client's retries: seconds from its first request to its last, and a margin.

    The client sends ``attempts`` requests in all and waits up to ``timeout`` seconds for each answer; it pauses
    ``base`` seconds before the first retry and ``factor`` times longer before each next, but at most ``cap``.
    ``margin``: for jitter, clocks, and requests that are long on their way.
    """
    if attempts < 1 or min(base, factor, cap, timeout, margin) < 0:
        raise ValueError("attempts must be at least 1, and no time negative.")
    pause, pauses = base, 0.0
    for _retry in range(attempts - 1):
        pauses += min(pause, cap)
        pause *= factor
    return attempts * timeout + pauses + margin


def nearest(wrong: object, right: Iterable[str]) -> str:
    """A sentence that names the right word for a wrong one, in whatever case."""
    words = {word.lower(): str(word) for word in sorted(right)}
    if close := difflib.get_close_matches(str(wrong).lower(), words, n=1, cutoff=0.5):
        return f"did you mean {words[close[0]]!r}?"
    return f"it must be one of {', '.join(words.values())}."


def unknown_names(options: Mapping[str, Any], known: Iterable[str]) -> list[str]:
    """A sentence for each name in ``options`` that is not ``known``."""
    known = sorted(known)
    return [f"Unknown name {name!r}: {nearest(name, known)}" for name in options if name not in known]
