"""``Policy``: every option of a view or a consumer, with its default. Those that belong together are groups."""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import (
    Any,
    ClassVar,
    Generic,
    Literal,
    ParamSpec,
    TypeVar,
    get_args,
    overload,
)
from uuid import UUID

from asgiref.sync import iscoroutinefunction
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest

from django_idempotency.values.keys import MAX_LENGTH
from django_idempotency.values.outcomes import Operation, StoredRecord, StoredResponse
from django_idempotency.values.rules import (
    BOOLEAN,
    CALLABLE,
    Kept,
    Options,
    Rule,
    Seconds,
    an,
    is_expression,
    many,
    number,
    one_of,
    option,
    or_callable,
    or_none,
    seconds,
    text,
    validate,
)

REQUIRE = "require"

Claim = Literal["record", "lock"]
OnRelease = Literal["neutral", "rollback"]
OnCrash = Literal["retry", "hold"]
Encrypt = bool | Literal["require"]
Redact = Callable[[StoredResponse], StoredResponse]
Word = Literal["atomic", "lease"]
Anonymous = Literal["refuse", "ignore"]
Scope = Callable[[HttpRequest], str | int | UUID | None]
FingerprintBy = Callable[[HttpRequest], bytes]
MayReplay = Callable[[Any, StoredRecord], bool | Awaitable[bool]]
Admit = Callable[[Operation], bool | float | Awaitable[bool | float]]
Using = Callable[[Operation], str]

_FIELDS = many("names", lambda value: isinstance(value, str))
_HEADERS = many(
    "names of headers",
    lambda value: isinstance(value, str) and bool(re.fullmatch("[A-Za-z0-9-]+", value)),
)
_PATTERN = Rule("a regular expression", is_expression, re.compile)
_ENCRYPT = Rule(
    'True, False or "require"',
    lambda value: isinstance(value, bool) or value == REQUIRE,
)
_REDACT = Rule(
    "a callable, or in the settings its dotted path",
    lambda value: callable(value) or (isinstance(value, str) and "." in value),
    may_be_path=True,
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

    pattern: Kept[str | re.Pattern[str] | None, re.Pattern[str] | None] = option(
        None, or_none(_PATTERN)
    )
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
            raise ImproperlyConfigured(
                "Limits() limits nothing; set new_keys, bytes or both."
            )


# --- The policy ------------------------------------------------------------------------------------------------------

MODES: dict[str, Atomic | Lease] = {"atomic": Atomic(), "lease": Lease()}

_METHODS = many(
    "HTTP methods in upper case",
    lambda value: isinstance(value, str) and value.isupper(),
)
_MODE = Rule(
    '"atomic", "lease", Atomic(…) or Lease(…)',
    lambda value: (
        isinstance(value, Atomic | Lease) or (isinstance(value, str) and value in MODES)
    ),
    lambda value: MODES[value] if isinstance(value, str) else value,
)
_STATUSES = many(
    "HTTP statuses", lambda value: isinstance(value, int) and 100 <= value <= 599
)
_FINGERPRINT = or_callable(an(Fingerprint))
_BODY = Rule(
    "a Body(…), and its redact a callable",
    lambda value: isinstance(value, Body) and not isinstance(value.redact, str),
)
_ADMIT = or_callable(or_none(an(Limits)))
_USING = or_callable(or_none(text("the alias of a database")))
_SCOPE = or_callable(Rule('None, "public"', lambda value: value in (None, "public")))


@dataclass(frozen=True, kw_only=True, eq=False)
class Policy(Options):
    """How one view or consumer treats its keys. What is not set, in groups too, comes from ``IDEMPOTENCY``.

    ``required``: refuse requests without a key (400).
    ``methods``: the HTTP methods for which the header is read.
    ``mode``: ``"atomic"`` (effects are in the record's database) or ``"lease"`` (they are not), as the settings
        ``ATOMIC`` and ``LEASE`` have it; or ``Atomic(…)`` or ``Lease(…)`` over what they have.
    ``wait``: how long a concurrent duplicate waits before it is refused (409), in seconds; ``None``: not at all.
    ``retention``: seconds after the response during which duplicates are recognised.
    ``audit_retention``: seconds after the response for which the record is kept; ``None``: as long as ``retention``.
    ``scope``: ``None`` for the user's primary key, ``"public"`` for one scope shared by all, or a callable that takes
        the request.
    ``anonymous``: what happens to a key from a caller without a scope. With ``"refuse"`` the request gets 400, with
        ``"ignore"`` the view runs as if there were no key. ``None``: ``"ignore"`` if only the middleware covers the
        view, else ``"refuse"``.
    ``keys``: which keys are accepted, a ``Keys(…)``.
    ``fingerprint``: what of a request is compared, a ``Fingerprint(…)``; or a callable that takes the request and
        returns the bytes that identify it.
    ``body``: what is stored of a response, a ``Body(…)``.
    ``store_cookies``: store and replay ``Set-Cookie``.
    ``may_replay``: a callable, sync or async, that takes the request and a ``StoredRecord`` and returns whether the
        caller may have its response. Anything but ``True`` refuses with 403.
    ``admit``: what one scope may use, ``Limits(…)``; or a callable, sync or async, that takes the ``Operation`` of a
        new key and returns ``True`` to admit it, or the seconds after which to ask again. Anything else refuses it for
        a minute.
    ``release_statuses``: statuses that are not stored and release the key.
    ``retry_statuses``: statuses that are not stored and after which a retry may run again.
    ``fail_open``: run unprotected when the store can't be reached, instead of responding with 503.
    ``store``: alias in ``STORES`` of the store that keeps the records; ``"default"`` is the database unless defined.
    ``using``: alias of the database of the records, or a callable that takes an operation and returns one of
        ``SHARDS``; ``None`` asks the routers.

    Raises ``TypeError`` for an unknown option, and ``ImproperlyConfigured`` for an invalid value.
    """

    required: bool = option(False, BOOLEAN)
    methods: Collection[str] = option(
        frozenset({"POST", "PUT", "PATCH", "DELETE"}), _METHODS
    )
    mode: Kept[Word | Atomic | Lease, Atomic | Lease] = option("atomic", _MODE)
    wait: Kept[Seconds | None, float | None] = option(None, or_none(seconds(0.001)))
    retention: Kept[Seconds, float] = option(24 * 60 * 60, seconds(1))
    audit_retention: Kept[Seconds | None, float | None] = option(
        None, or_none(seconds(1))
    )
    scope: Literal["public"] | Scope | None = option(None, _SCOPE)
    anonymous: Anonymous | None = option(None, or_none(one_of(get_args(Anonymous))))
    keys: Keys = option(Keys(), an(Keys))
    fingerprint: FingerprintBy | Fingerprint = option(Fingerprint(), _FINGERPRINT)
    body: Body = option(Body(), _BODY)
    store_cookies: bool = option(False, BOOLEAN)
    may_replay: MayReplay | None = option(None, or_none(CALLABLE))
    admit: Admit | Limits | None = option(None, _ADMIT)
    release_statuses: Collection[int] = option(
        frozenset({400, 401, 403, 404, 405, 406, 415, 422, 429}), _STATUSES
    )
    retry_statuses: Collection[int] = option(frozenset(range(500, 600)), _STATUSES)
    fail_open: bool = option(False, BOOLEAN)
    store: str = option("default", text("an alias in STORES"))
    using: str | Using | None = option(None, _USING)

    def __post_init__(self) -> None:
        validate(self)

    @property
    def kept_for(self) -> float:
        """Seconds after the response for which the record is kept."""
        return (
            self.retention
            if self.audit_retention is None
            else max(self.audit_retention, self.retention)
        )

    @property
    def is_atomic(self) -> bool:
        return isinstance(self.mode, Atomic)

    @property
    def claims_by_lock(self) -> bool:
        """Whether a claim is a lock. In lease mode it is always a record."""
        return self.mode.claim == "lock"

    @property
    def by_record(self) -> Policy:
        return (
            self.derive(mode=self.mode.derive(claim="record"))
            if self.claims_by_lock
            else self
        )

    @property
    def holds_on_crash(self) -> bool:
        """Whether a dead owner's record is put on hold. In atomic mode there is nothing for an operator to decide."""
        return self.mode.on_crash == "hold"

    @property
    def compared_headers(self) -> Collection[str]:
        return (
            self.fingerprint.headers
            if isinstance(self.fingerprint, Fingerprint)
            else ()
        )


F = TypeVar("F", bound=Callable[..., Any])
Stated = ParamSpec("Stated")


class Decorator(Generic[Stated]):
    """A decorator of views or of tasks: bare, with ``policy=``, or with any options of ``Policy``.

    ``options``: taken for the types of its arguments only, those of ``Policy`` and ``limit``.
    ``protect``: takes the function, ``policy`` and maybe ``limit``, and returns the protected function.
    """

    def __init__(
        self,
        options: Callable[Stated, Policy],
        protect: Callable[..., Any],
        name: str,
        limit: str = "",
    ) -> None:
        self._protect, self._name, self._limit = protect, name, limit

    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(self, *, policy: Policy, **limit: int) -> Callable[[F], F]: ...
    @overload
    def __call__(
        self, *args: Stated.args, **options: Stated.kwargs
    ) -> Callable[[F], F]: ...
    def __call__(self, *function: Any, **options: Any) -> Any:
        if not function:
            limit = (
                {self._limit: options.pop(self._limit)}
                if self._limit in options
                else {}
            )
            return partial(self._protect, policy=_policy_of(options), **limit)
        if isinstance(function[0], Policy):
            raise TypeError(f"Pass a policy by keyword: @{self._name}(policy=…).")
        is_task = hasattr(
            function[0], "enqueue"
        )  # one of Django's, which can't be called
        if len(function) > 1 or options or not (callable(function[0]) or is_task):
            usage = f"{self._name} takes a function or keyword options, such as @{self._name}(required=True)"
            raise TypeError(f"{usage}; got {function[0]!r}.")
        return self._protect(function[0], policy=Policy())


def _policy_of(options: dict[str, Any]) -> Policy:
    """Return the policy that a decorator got as ``policy=`` or as options. Raises ``TypeError`` for both."""
    policy = options.pop("policy", None)
    if policy is None:
        return Policy(**options)
    if not isinstance(policy, Policy):
        raise TypeError(f"policy is {policy!r}; write policy=Policy(…).")
    if options:
        raise TypeError(
            f"policy= replaces all other options: move {', '.join(options)} into it."
        )
    return policy


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
