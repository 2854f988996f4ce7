"""``Policy``: every option of a view or a consumer, with its default. Those that belong
together are groups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
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
from django.http.response import HttpResponseBase

from django_idempotency.values.keys import DEFAULT_HEADER, MAX_LENGTH
from django_idempotency.values.outcomes import Operation, StoredRecord, StoredResponse
from django_idempotency.values.problems import Problem
from django_idempotency.values.rules import (
    CALLABLE,
    Kept,
    Options,
    Rule,
    Seconds,
    instance_of,
    is_expression,
    many,
    number,
    one_of,
    option,
    or_callable,
    or_for_good,
    or_none,
    rules,
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
Source = str | Callable[[HttpRequest], str | int | UUID | None]
Problems = Callable[[Problem, HttpRequest], HttpResponseBase]
FingerprintBy = Callable[[HttpRequest], bytes]
MayReplay = Callable[[Any, StoredRecord], bool | Awaitable[bool]]
Admit = Callable[[Operation], bool | float | Awaitable[bool | float]]
Using = Callable[[Operation], str]

_FIELDS = many("names", lambda value: isinstance(value, str))
_HEADERS = many(
    "names of headers",
    lambda value: isinstance(value, str) and bool(re.fullmatch("[A-Za-z0-9-]+", value)),
)
_HEADER = text("the name of a header", re.compile("[A-Za-z0-9-]+").fullmatch)
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
_SOURCE = Rule(
    f"{_HEADER.what}, {_REDACT.what}",
    lambda value: _HEADER.accepts(value) or _REDACT.accepts(value),
    may_be_path=True,
)
_LEASE, _GRACE = seconds(1), seconds(0)


@dataclass(frozen=True, kw_only=True)
class Atomic(Options):
    """The view runs in a transaction of the database that holds the record of its key.

    ``claim``: what shows others that a run is in progress, a committed ``"record"`` or,
        on PostgreSQL, a ``"lock"``. After a crash nothing is left of a lock.
        ``on_release``: whether the view's writes before its key is released are kept or
        undone as without a key (``"neutral"``), or undone in any case (``"rollback"``).
        ``takeover_grace``: seconds after a claim, before its row lock, during which no
        takeover is allowed.
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
    """The view runs outside any transaction of this package, and its claim is renewed
    while its process lives.

    ``seconds``: how long a claim is valid without renewal. ``on_crash``: ``"retry"``
    runs again after the lease has lapsed, ``"hold"`` waits for an operator.
    """

    seconds: Kept[Seconds, float] = option(60, _LEASE)
    on_crash: OnCrash = option("retry", one_of(get_args(OnCrash)))

    word: ClassVar[str] = "lease"
    claim: ClassVar[Claim] = "record"
    on_release: ClassVar[OnRelease] = "neutral"
    takeover_grace: ClassVar[float] = 0.5


@dataclass(frozen=True, kw_only=True)
class Key(Options):
    """Where the key of a request is, and which keys are accepted.

    ``source``: the name of a header, or a callable that takes the request and returns
    its key or ``None``, such as ``body_field("reference")``.
    ``pattern``: a regular expression that the whole key must match.
    ``min_length``: minimum number of characters of a key.
    ``strict``: accept a header only as the draft defines it, as a quoted string.
    """

    source: Source = option(DEFAULT_HEADER, _SOURCE)
    pattern: Kept[str | re.Pattern[str] | None, re.Pattern[str] | None] = option(
        None, or_none(_PATTERN)
    )
    min_length: int = option(1, number(1, MAX_LENGTH))
    strict: bool = option(False)

    @cached_property
    def meta_name(self) -> str:
        """The header in ``request.META``; empty if the key is not in a header."""
        source = self.source
        return "" if callable(source) else "HTTP_" + source.upper().replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class Fingerprint(Options):
    """Which parts of a request are compared with the first request of its key.

    ``only``, ``exclude``: body fields that are compared, or not; nested as
    ``card.cvv``. ``headers``: request headers that are compared too, such as one that
    selects the account.
    """

    only: Collection[str] | None = option(None, or_none(_FIELDS))
    exclude: Collection[str] = option(frozenset(), _FIELDS)
    headers: Collection[str] = option(frozenset(), _HEADERS)

    def idle(self) -> str | None:
        inside = tuple(f"{name}." for name in self.only or ())
        for name in self.exclude:
            if self.only is not None and not name.startswith(inside):
                return f"exclude has {name!r}, which is not inside a field of only"
        return None


@dataclass(frozen=True, kw_only=True)
class Body(Options):
    """What is stored of a response.

    ``limit``: bytes; a larger response is stored without its body. ``store``: store and
    replay the response's body. ``redact``: a callable that takes the response and
    returns what to store and replay. It must not make queries. ``encrypt``: encrypt
    headers and body, with the newest of ``ENCRYPTION_KEYS``. With ``"require"``, run
    nothing that could not be encrypted, and never replay a response that was not.
    """

    limit: int = option(1024 * 1024, number(0, math.inf))
    store: bool = option(True)
    redact: Kept[Redact | str | None, Redact | None] = option(None, or_none(_REDACT))
    encrypt: Encrypt = option(False, _ENCRYPT)

    def idle(self) -> str | None:
        idle = not self.store and "limit" in self.stated
        return "limit has no effect without store" if idle else None


@dataclass(frozen=True, kw_only=True)
class Limits(Options):
    """How much one scope may use. Beyond that, no new key is admitted until the period
    is over.

    ``new_keys``: new keys that are admitted in a minute. ``bytes``: bytes of responses
    that may be stored within the time for which they are kept.
    """

    new_keys: int | None = option(None, or_none(number(1, 1_000_000_000)))
    bytes: int | None = option(None, or_none(number(1, math.inf)))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.new_keys is None and self.bytes is None:
            raise ImproperlyConfigured(
                "Limits() limits nothing; set new_keys, bytes or both."
            )


# --- The policy -----------------------------------------------------------------------

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
    "statuses of errors, 400 to 599",
    lambda value: isinstance(value, int) and 400 <= value <= 599,
)
_FINGERPRINT = or_callable(instance_of(Fingerprint))
_BODY = Rule(
    "a Body(…), and its redact a callable",
    lambda value: isinstance(value, Body) and not isinstance(value.redact, str),
)
_ADMIT = or_callable(or_none(instance_of(Limits)))
_USING = or_callable(or_none(text("the alias of a database")))
_IN_POLICY = or_callable(_HEADER)
_KEY = Rule(
    "the name of a header, a callable, or a Key(…) with either as its source",
    lambda value: _IN_POLICY.accepts(value.source if isinstance(value, Key) else value),
    lambda value: value if isinstance(value, Key) else Key(source=value),
    may_be_path=True,
)
_SCOPE = or_callable(Rule('None, "public"', lambda value: value in (None, "public")))


# The groups that an option takes. ``mode`` is that of a lease, which has more options.
PARTS: Mapping[str, type[Options]] = {
    "mode": Lease,
    "key": Key,
    "fingerprint": Fingerprint,
    "body": Body,
    "admit": Limits,
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Policy(Options):
    """How one view or consumer treats its keys. What is not set, in groups too, comes
    from ``IDEMPOTENCY``.

    ``required``: refuse requests without a key (400). ``methods``: the HTTP methods for
    which keys are read. ``mode``: ``"atomic"`` (effects are in the record's database)
    or ``"lease"`` (they are not), with the settings ``ATOMIC`` or ``LEASE``; or
    ``Atomic(…)`` or ``Lease(…)``, whose options override these. ``wait``: how long a
    concurrent duplicate waits before it is refused (409), in seconds; ``None``: not at
    all. ``retention``: seconds after the response during which duplicates are
    recognised; ``None``: for good. ``audit_retention``: seconds after the response for
    which the record is kept; ``None``: as long as ``retention``. ``scope``: ``None``
    for the user's primary key, ``"public"`` for one scope shared by all, or a callable
    that takes the request. ``anonymous``: what happens to a key from a caller without a
    scope. With ``"refuse"`` the request gets 400, with ``"ignore"`` the view runs as if
    there were no key. ``None``: ``"ignore"`` if only the middleware covers the view,
    else ``"refuse"``. ``key``: where the key is, the name of a header or a callable
    that takes the request; or a ``Key(…)``, which also says which keys are accepted.
    ``fingerprint``: which parts of a request are compared, a ``Fingerprint(…)``; or a
    callable that takes the request and returns the bytes that identify it. ``body``:
    what is stored of a response, a ``Body(…)``. ``store_cookies``: store and replay
    ``Set-Cookie``. ``may_replay``: a callable, sync or async, that takes the request
    and a ``StoredRecord`` and returns whether the caller may have its response.
    Anything but ``True`` refuses with 403. ``admit``: what one scope may use,
    ``Limits(…)``; or a callable, sync or async, that takes the ``Operation`` of a new
    key and returns ``True`` to admit it, or the seconds after which to ask again.
    Anything else refuses it for a minute. ``release_statuses``: statuses of errors that
    are not stored and release the key. ``retry_statuses``: statuses of errors that are
    not stored and after which a retry may run again. ``fail_open``: run unprotected
    when the store can't be reached, instead of responding with 503. ``store``: alias in
    ``STORES`` of the store that keeps the records; ``"default"`` is the database unless
    defined. ``using``: alias of the database of the records, or a callable that takes
    an operation and returns one of ``SHARDS``; ``None`` asks the routers. ``problems``:
    a callable that takes a ``Problem`` and the request and returns the response that
    refuses it; headers that it does not set are those of the problem. ``echo_key``: put
    the key on every response. ``scope_path``: add the path to the scope, so that the
    same key at another path is another operation.

    Raises ``TypeError`` for an unknown option, and ``ImproperlyConfigured`` for an
    invalid value.
    """

    required: bool = option(False)
    methods: Collection[str] = option(
        frozenset({"POST", "PUT", "PATCH", "DELETE"}), _METHODS
    )
    mode: Kept[Word | Atomic | Lease, Atomic | Lease] = option("atomic", _MODE)
    wait: Kept[Seconds | None, float | None] = option(None, or_none(seconds(0.001)))
    retention: Kept[Seconds | None, float] = option(
        24 * 60 * 60, or_for_good(seconds(1))
    )
    audit_retention: Kept[Seconds | None, float | None] = option(
        None, or_none(seconds(1))
    )
    scope: Literal["public"] | Scope | None = option(None, _SCOPE)
    anonymous: Anonymous | None = option(None, or_none(one_of(get_args(Anonymous))))
    key: Kept[Source | Key, Key] = option(Key(), _KEY)
    fingerprint: FingerprintBy | Fingerprint = option(Fingerprint(), _FINGERPRINT)
    body: Body = option(Body(), _BODY)
    store_cookies: bool = option(False)
    may_replay: MayReplay | None = option(None, or_none(CALLABLE))
    admit: Admit | Limits | None = option(None, _ADMIT)
    release_statuses: Collection[int] = option(
        frozenset({400, 401, 403, 404, 405, 406, 415, 422, 429}), _STATUSES
    )
    retry_statuses: Collection[int] = option(frozenset(range(500, 600)), _STATUSES)
    fail_open: bool = option(False)
    store: str = option("default", text("an alias in STORES"))
    using: str | Using | None = option(None, _USING)
    problems: Problems | None = option(None, or_none(CALLABLE))
    echo_key: bool = option(False)
    scope_path: bool = option(False)

    def __post_init__(self) -> None:
        validate(self)
        # the name of a header is merged as a group, unlike the word for a mode
        if "key" in (stated := vars(self)["_stated"]):
            stated["key"] = self.key
        self.refuse_idle()

    @classmethod
    def elsewhere(cls) -> Mapping[str, str]:
        return {
            name: f"{option}={group.__name__}({name}=…)"
            for option, group in PARTS.items()
            for name in rules(group)
        }

    def idle(self) -> str | None:
        if self.scope == "public" and self.anonymous is not None:
            return 'anonymous has no effect with scope="public", which all callers have'
        if self.required and not self.methods:
            return "required has no effect without methods"
        audited = self.audit_retention is not None and "retention" in self.stated
        if audited and (self.audit_retention or 0) < self.retention:
            return "audit_retention has no effect if it is shorter than retention"
        return None

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What others have worked out of this policy, to do so once."""
        return {}

    @cached_property
    def kept_for(self) -> float:
        """Seconds after the response for which the record is kept."""
        return (
            self.retention
            if self.audit_retention is None
            else max(self.audit_retention, self.retention)
        )

    @cached_property
    def is_atomic(self) -> bool:
        return isinstance(self.mode, Atomic)

    @cached_property
    def claims_by_lock(self) -> bool:
        """Whether a claim is a lock. In lease mode it is always a record."""
        return self.mode.claim == "lock"

    @cached_property
    def by_record(self) -> Policy:
        return (
            self.derive(mode=self.mode.derive(claim="record"))
            if self.claims_by_lock
            else self
        )

    @cached_property
    def holds_on_crash(self) -> bool:
        """Whether a dead owner's record is put on hold. In atomic mode there is nothing
        for an operator to decide.
        """
        return self.mode.on_crash == "hold"

    @cached_property
    def compared_headers(self) -> Collection[str]:
        return (
            self.fingerprint.headers
            if isinstance(self.fingerprint, Fingerprint)
            else ()
        )


F = TypeVar("F", bound=Callable[..., Any])
Stated = ParamSpec("Stated")


class Decorator(Generic[Stated]):
    """A decorator of views or of tasks: bare, with ``policy=``, or with any options of
    ``Policy``.

    ``options``: taken for the types of its arguments only, those of ``Policy`` and
    ``own``. ``protect``: takes the function, ``policy`` and the options in ``own`` that
    are set, and returns the protected function.
    """

    def __init__(
        self,
        options: Callable[Stated, Policy],
        protect: Callable[..., Any],
        name: str,
        *own: str,
    ) -> None:
        self._protect, self._name, self._own = protect, name, own

    @overload
    def __call__(self, function: F, /) -> F: ...
    @overload
    def __call__(self, *, policy: Policy, **own: Any) -> Callable[[F], F]: ...
    @overload
    def __call__(
        self, *args: Stated.args, **options: Stated.kwargs
    ) -> Callable[[F], F]: ...
    def __call__(self, *function: Any, **options: Any) -> Any:
        if not function:
            own = {name: options.pop(name) for name in self._own if name in options}
            return partial(self._protect, policy=_policy_of(options), **own)
        if isinstance(function[0], Policy):
            raise TypeError(f"Pass a policy by keyword: @{self._name}(policy=…).")
        # one of Django's, which can't be called
        is_task = hasattr(function[0], "enqueue")
        if len(function) > 1 or options or not (callable(function[0]) or is_task):
            usage = (
                f"{self._name} takes a function or keyword options, such as"
                f" @{self._name}(required=True)"
            )
            raise TypeError(f"{usage}; got {function[0]!r}.")
        return self._protect(function[0], policy=Policy())


def _policy_of(options: dict[str, Any]) -> Policy:
    """Return the policy that a decorator got as ``policy=`` or as options. Raises
    ``TypeError`` for both.
    """
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
    """Return whether a call of ``function``, which may be any callable object, must be
    awaited.
    """
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
    """Return the ``retention`` that outlasts a client's retries: seconds from first to
    last request, plus a margin.

    The client sends ``attempts`` requests in total and waits up to ``timeout`` seconds
    for each response. It pauses for ``base`` seconds before the first retry and
    ``factor`` times longer before each further one, but at most ``cap``. ``margin``
    allows for jitter, clock differences and slow requests. All times are in seconds.

    Raises ``ValueError`` for less than one attempt and for negative times.
    """
    if attempts < 1 or min(base, factor, cap, timeout, margin) < 0:
        raise ValueError("attempts must be at least 1, and no time may be negative.")
    pause, pauses = base, 0.0
    for _retry in range(attempts - 1):
        pauses += min(pause, cap)
        pause *= factor
    return attempts * timeout + pauses + margin
