"""The options of a policy that belong together, each group an object of its own. The settings take them too."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, Literal, get_args

from django.core.exceptions import ImproperlyConfigured

from django_idempotency.values.keys import MAX_LENGTH
from django_idempotency.values.options import (
    BOOLEAN,
    CallableRule,
    Kept,
    Options,
    Rule,
    is_expression,
    many,
    number,
    one_of,
    option,
    or_none,
    seconds,
)
from django_idempotency.values.outcomes import StoredResponse

REQUIRE = "require"

Seconds = float | timedelta
Claim = Literal["record", "lock"]
OnRelease = Literal["neutral", "rollback"]
OnCrash = Literal["retry", "hold"]
Encrypt = bool | Literal["require"]
Redact = Callable[[StoredResponse], StoredResponse]

_FIELDS = many("names", lambda value: isinstance(value, str))
_HEADERS = many("names of headers", lambda value: isinstance(value, str) and bool(re.fullmatch("[A-Za-z0-9-]+", value)))
_PATTERN = Rule("a regular expression", is_expression, re.compile)
_ENCRYPT = Rule('True, False or "require"', lambda value: isinstance(value, bool) or value == REQUIRE)
_REDACT = CallableRule(
    "a callable, or in the settings its dotted path",
    lambda value: callable(value) or (isinstance(value, str) and "." in value),
)
_LEASE, _GRACE = seconds(1), seconds(0)


@dataclass(frozen=True, kw_only=True)
class Atomic(Options):
    """The view runs in a transaction of the database that holds the record of its key.

    ``claim``: what shows others that a run is in progress, a committed ``"record"`` or, on PostgreSQL, a ``"lock"``.
        After a crash nothing is left of a lock.
    ``on_release``: whether the view's writes before its key is released are kept or undone as without a key
        (``"neutral"``), or undone in any case (``"rollback"``).
    ``takeover_grace``: seconds after a claim, before its row lock, during which no takeover is allowed.
    """

    claim: Claim = option("record", one_of(get_args(Claim)))
    on_release: OnRelease = option("neutral", one_of(get_args(OnRelease)))
    takeover_grace: Kept[Seconds, float] = option(0.5, _GRACE)

    # The rest is what a run in this mode has in place of the options of the other.
    word: ClassVar[str] = "atomic"
    seconds: ClassVar[float] = 60
    on_crash: ClassVar[OnCrash] = "retry"


@dataclass(frozen=True, kw_only=True)
class Lease(Options):
    """The view runs outside any transaction of this package, and its claim is renewed while its process lives.

    ``seconds``: how long a claim is valid without renewal.
    ``on_crash``: ``"retry"`` runs again after the lease has lapsed, ``"hold"`` waits for an operator.
    """

    seconds: Kept[Seconds, float] = option(60, _LEASE)
    on_crash: OnCrash = option("retry", one_of(get_args(OnCrash)))

    word: ClassVar[str] = "lease"
    claim: ClassVar[Claim] = "record"
    on_release: ClassVar[OnRelease] = "neutral"
    takeover_grace: ClassVar[float] = 0.5


@dataclass(frozen=True, kw_only=True)
class Keys(Options):
    """Which keys are accepted.

    ``pattern``: a regular expression that the whole key must match.
    ``min_length``: minimum number of characters of a key.
    ``strict``: accept the header only as the draft defines it, as a quoted string.
    """

    pattern: Kept[str | re.Pattern[str] | None, re.Pattern[str] | None] = option(None, or_none(_PATTERN))
    min_length: int = option(1, number(1, MAX_LENGTH))
    strict: bool = option(False, BOOLEAN)


@dataclass(frozen=True, kw_only=True)
class Fingerprint(Options):
    """What of a request is compared with the first one of its key.

    ``only``, ``exclude``: body fields that are compared, or not; nested as ``card.cvv``.
    ``headers``: request headers that are compared too, such as one that selects the account.
    """

    only: Collection[str] | None = option(None, or_none(_FIELDS))
    exclude: Collection[str] = option(frozenset(), _FIELDS)
    headers: Collection[str] = option(frozenset(), _HEADERS)


@dataclass(frozen=True, kw_only=True)
class Body(Options):
    """What is stored of a response.

    ``limit``: bytes; a larger response is stored without its body.
    ``store``: store and replay the response's body.
    ``redact``: a callable that takes the response and returns what to store and replay. It must not make queries.
    ``encrypt``: encrypt headers and body, with the newest of ``ENCRYPTION_KEYS``. With ``"require"``, run nothing that
        could not be encrypted, and never replay a response that was not.
    """

    limit: int = option(1024 * 1024, number(0, math.inf))
    store: bool = option(True, BOOLEAN)
    redact: Kept[Redact | str | None, Redact | None] = option(None, or_none(_REDACT))
    encrypt: Encrypt = option(False, _ENCRYPT)


@dataclass(frozen=True, kw_only=True)
class Limits(Options):
    """What one scope may use. After that, no new key is admitted until the time is over.

    ``new_keys``: new keys that are admitted in a minute.
    ``bytes``: bytes of responses that may be stored within the time for which they are kept.
    """

    new_keys: int | None = option(None, or_none(number(1, 1_000_000_000)))
    bytes: int | None = option(None, or_none(number(1, math.inf)))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_keys is None and self.bytes is None:
            raise ImproperlyConfigured("Limits() limits nothing; set new_keys, bytes or both.")
