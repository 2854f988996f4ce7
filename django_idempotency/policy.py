"""``Policy``: every knob of a view or a consumer, with its default."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import InitVar, dataclass, replace
from enum import StrEnum
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction
from django.http import HttpRequest

from django_idempotency.keys import MAX_LENGTH
from django_idempotency.options import (
    BOOLEAN,
    CALLABLE,
    CallableRule,
    Rule,
    is_expression,
    many,
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
from django_idempotency.outcomes import Operation, StoredRecord, StoredResponse


class Anonymous(StrEnum):
    REFUSE = "refuse"
    IGNORE = "ignore"


class Mode(StrEnum):
    ATOMIC = "atomic"
    LEASE = "lease"


class ClaimBy(StrEnum):
    RECORD = "record"
    LOCK = "lock"


class OnCrash(StrEnum):
    RETRY = "retry"
    HOLD = "hold"


class OnConflict(StrEnum):
    REJECT = "reject"
    WAIT = "wait"


class OnRelease(StrEnum):
    NEUTRAL = "neutral"
    ROLLBACK = "rollback"


class RowLock(StrEnum):
    NOWAIT = "nowait"
    SKIP_LOCKED = "skip_locked"


REQUIRE = "require"

Scope = Callable[[HttpRequest], str | None]
Fingerprint = Callable[[HttpRequest], bytes]
Redact = Callable[[StoredResponse], StoredResponse]
MayReplay = Callable[[Any, StoredRecord], bool | Awaitable[bool]]
Admit = Callable[[Operation], bool | float | Awaitable[bool | float]]
Using = Callable[[Operation], str]

_METHODS = many("HTTP methods in upper case", lambda value: isinstance(value, str) and value.isupper())
_FIELDS = many("names", lambda value: isinstance(value, str))
_HEADERS = many("names of headers", lambda value: isinstance(value, str) and bool(re.fullmatch("[A-Za-z0-9-]+", value)))
_PATTERN = Rule("a regular expression", is_expression, re.compile)
_STATUSES = many("HTTP statuses", lambda value: isinstance(value, int) and 100 <= value <= 599)
_ENCRYPT = Rule('True, False or "require"', lambda value: isinstance(value, bool) or value == REQUIRE)
_USING = CallableRule(
    "None, the alias of a database or a callable",
    lambda value: value is None or isinstance(value, str) or callable(value),
)
_SCOPE = CallableRule(
    'None, "public" or a callable', lambda value: value is None or value == "public" or callable(value)
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Policy:
    """How one view or consumer treats its keys. Options that are not set come from the ``IDEMPOTENCY`` setting.

    ``required``: refuse requests without a key (400).
    ``methods``: the HTTP methods for which the header is read.
    ``mode``: ``"atomic"`` (effects are in the record's database) or ``"lease"`` (they are not).
    ``claim``: atomic mode: what shows others that a run is in progress, a committed ``"record"`` or, on PostgreSQL, a
        ``"lock"``. After a crash nothing is left of a lock.
    ``lease``: seconds for which a claim is valid without renewal.
    ``takeover_grace``: seconds after a claim, before its row lock, during which no takeover is allowed.
    ``on_crash``: lease mode: ``"retry"`` runs again after the lease has lapsed, ``"hold"`` waits for an operator.
    ``on_conflict``: ``"reject"`` refuses a concurrent duplicate with 409, ``"wait"`` waits first.
    ``wait_timeout``: maximum number of seconds to wait.
    ``max_waiters``: maximum number of callers in one process that wait for one key; others are refused at once.
    ``admit``: a callable, sync or async, that takes the ``Operation`` of a new key and returns ``True`` to admit it, or
        the seconds after which to ask again. Anything else refuses it for a minute.
    ``max_new_keys``: maximum number of new keys of one scope that are admitted in a minute.
    ``max_stored_bytes``: bytes of responses that one scope may store within the time for which they are kept; after
        that no new key is admitted.
    ``retention``: seconds after the response during which duplicates are recognised.
    ``audit_retention``: seconds after the response for which the record is kept; ``None``: as long as ``retention``.
    ``max_request_age``: seconds; refuse a request that was first sent longer ago than this if nothing is known about
        its key any more.
    ``scope``: ``None`` for the user's primary key, ``"public"`` for one scope shared by all, or a callable.
    ``anonymous``: what happens to a key from a caller without a scope. With ``"refuse"`` the request gets 400, with
        ``"ignore"`` the view runs as if there were no key. ``None``: ``"ignore"`` if only the middleware covers the
        view, else ``"refuse"``.
    ``key_pattern``: a regular expression that the whole key must match.
    ``min_key_length``: minimum number of characters of a key.
    ``strict_header``: accept the header only as the draft defines it, as a quoted string.
    ``lock``: how to lock a row that may change owner, ``"nowait"`` or ``"skip_locked"``.
    ``max_body_size``: bytes; a larger response is stored without its body.
    ``store_body``: store and replay the response's body.
    ``store_cookies``: store and replay ``Set-Cookie``.
    ``cacheable_replays``: replay ``Cache-Control`` and similar headers as stored, instead of ``no-store``.
    ``may_replay``: a callable, sync or async, that takes the request and a ``StoredRecord`` and returns whether the
        caller may have its response. Anything but ``True`` refuses with 403.
    ``redact``: a callable that takes the response and returns what to store and replay. It must not make queries.
    ``encrypt``: encrypt what is stored, with the newest of ``ENCRYPTION_KEYS``. With ``"require"``, never replay a
        response that was not encrypted.
    ``encrypt_padding``: bytes; pad what is encrypted to a multiple of this, so that its length reveals less.
    ``fail_open``: run unprotected when the store can't be reached, instead of responding with 503.
    ``store``: alias in ``STORES`` of the store that keeps the records; ``"default"`` is the database unless defined.
    ``using``: alias of the database of the records, or a callable that takes an operation and returns one of
        ``SHARDS``; ``None`` asks the routers.
    ``fingerprint``: a callable that returns the bytes that identify the request, instead of the whole request.
    ``fingerprint_fields``, ``fingerprint_exclude``: body fields that are compared, or not; nested as ``card.cvv``.
    ``fingerprint_headers``: request headers that are compared too, such as one that selects the account.
    ``release_statuses``: statuses that are not stored and release the key.
    ``on_release``: atomic mode: whether the view's writes before its key is released are kept or undone as without a
        key (``"neutral"``), or undone in any case (``"rollback"``).
    ``retry_statuses``: statuses that are not stored and after which a retry may run again.

    Raises ``TypeError`` for an unknown option, and ``ImproperlyConfigured`` for an invalid value.
    """

    if not TYPE_CHECKING:  # not an option; the first field: see Note [What a policy states]
        _stated: InitVar[frozenset[str]] = frozenset()

    required: bool = option(False, BOOLEAN)
    methods: Collection[str] = option(frozenset({"POST", "PUT", "PATCH", "DELETE"}), _METHODS)
    mode: str = option(Mode.ATOMIC, one_of(Mode))
    claim: str = option(ClaimBy.RECORD, one_of(ClaimBy))
    lease: float = option(60, seconds(1))
    takeover_grace: float = option(0.5, seconds(0))
    on_crash: str = option(OnCrash.RETRY, one_of(OnCrash))
    on_conflict: str = option(OnConflict.REJECT, one_of(OnConflict))
    wait_timeout: float = option(10, seconds(0))
    max_waiters: int = option(4, number(0, 1_000_000))
    admit: Admit | None = option(None, or_none(CALLABLE))
    max_new_keys: int | None = option(None, or_none(number(1, 1_000_000_000)))
    max_stored_bytes: int | None = option(None, or_none(number(1, math.inf)))
    retention: float = option(24 * 60 * 60, seconds(1))
    audit_retention: float | None = option(None, or_none(seconds(1)))
    max_request_age: float | None = option(None, or_none(seconds(1)))
    scope: str | Scope | None = option(None, _SCOPE)
    anonymous: str | None = option(None, or_none(one_of(Anonymous)))
    key_pattern: str | re.Pattern[str] | None = option(None, or_none(_PATTERN))
    min_key_length: int = option(1, number(1, MAX_LENGTH))
    strict_header: bool = option(False, BOOLEAN)
    lock: str = option(RowLock.NOWAIT, one_of(RowLock))
    max_body_size: int = option(1024 * 1024, number(0, math.inf))
    store_body: bool = option(True, BOOLEAN)
    store_cookies: bool = option(False, BOOLEAN)
    cacheable_replays: bool = option(False, BOOLEAN)
    may_replay: MayReplay | None = option(None, or_none(CALLABLE))
    redact: Redact | None = option(None, or_none(CALLABLE))
    encrypt: bool | str = option(False, _ENCRYPT)
    encrypt_padding: int = option(0, number(0, 2**24))
    fail_open: bool = option(False, BOOLEAN)
    store: str = option("default", text("an alias in STORES"))
    using: str | Using | None = option(None, _USING)
    fingerprint: Fingerprint | None = option(None, or_none(CALLABLE))
    fingerprint_fields: Collection[str] | None = option(None, or_none(_FIELDS))
    fingerprint_exclude: Collection[str] = option(frozenset(), _FIELDS)
    fingerprint_headers: Collection[str] = option(frozenset(), _HEADERS)
    release_statuses: Collection[int] = option(frozenset({400, 401, 403, 404, 405, 406, 415, 422, 429}), _STATUSES)
    on_release: str = option(OnRelease.NEUTRAL, one_of(OnRelease))
    retry_statuses: Collection[int] = option(frozenset(range(500, 600)), _STATUSES)

    def __new__(cls, **options: Any) -> Policy:
        if wrong := unknown_names(options, NAMES | {"_stated"}):
            raise TypeError("Policy: " + " ".join(wrong))
        self = super().__new__(cls)
        object.__setattr__(self, "_stated", _stated_by(options))
        return self

    def __post_init__(self, *_copied: frozenset[str]) -> None:
        validate(self)

    def derive(self, **changes: Any) -> Policy:
        """Return a copy of this policy with ``changes``. Options that neither sets still come from the settings.

        Raises ``TypeError`` for an unknown option.
        """
        return replace(self, **changes)

    def over(self, defaults: Policy) -> Policy:
        """Return this policy, with ``defaults`` for the options that it does not set."""
        return replace(defaults, **{name: getattr(self, name) for name in vars(self)["_stated"]})

    @property
    def kept_for(self) -> float:
        """Seconds after the response for which the record is kept."""
        return self.retention if self.audit_retention is None else max(self.audit_retention, self.retention)

    @property
    def claims_by_lock(self) -> bool:
        """Whether a claim is a lock. In lease mode it is always a record."""
        return self.mode == Mode.ATOMIC and self.claim == ClaimBy.LOCK

    @property
    def by_record(self) -> Policy:
        """This policy, with claims by record."""
        return self.derive(claim=ClaimBy.RECORD) if self.claims_by_lock else self

    @property
    def holds_on_crash(self) -> bool:
        """Whether a dead owner's record is put on hold. In atomic mode there is nothing for an operator to decide."""
        return self.mode == Mode.LEASE and self.on_crash == OnCrash.HOLD


# Note [What a policy states]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A view that sets an option to its default overrides the settings; a view that does not set the option doesn't. So a
# policy remembers the names it was made with. dataclasses.replace() passes every field, but must not make a policy that
# states them all. It passes the replaced fields first and then the others in the order of their declaration, of which
# _stated is the first: options before _stated are stated now, those after it are copies.
def _stated_by(options: Mapping[str, Any]) -> frozenset[str]:
    copied: frozenset[str] = options.get("_stated", frozenset())
    return copied.union(takewhile(lambda name: name != "_stated", options))


NAMES = frozenset(rules(Policy))


def is_async(function: Any) -> bool:
    """Return whether a call of ``function``, which may be any callable object, must be awaited."""
    return iscoroutinefunction(function) or iscoroutinefunction(type(function).__call__)


def retention_for(
    *,
    attempts: int,
    base: float,
    factor: float = 2.0,
    cap: float = math.inf,
    timeout: float = 0.0,
    margin: float = 60.0,
) -> float:
    """Return the ``retention`` that outlasts a client's retries: seconds from first to last request, plus a margin.

    The client sends ``attempts`` requests in total and waits up to ``timeout`` seconds for each response. It pauses for
    ``base`` seconds before the first retry and ``factor`` times longer before each further one, but at most ``cap``.
    ``margin`` allows for jitter, clock differences and slow requests. All times are in seconds.

    Raises ``ValueError`` for less than one attempt and for negative times.
    """
    if attempts < 1 or min(base, factor, cap, timeout, margin) < 0:
        raise ValueError("attempts must be at least 1, and no time may be negative.")
    pause, pauses = base, 0.0
    for _retry in range(attempts - 1):
        pauses += min(pause, cap)
        pause *= factor
    return attempts * timeout + pauses + margin
