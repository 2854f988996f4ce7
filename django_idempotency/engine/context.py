"""What running code sees of its claim, or of there being none."""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Literal
from uuid import UUID, uuid4

from django_idempotency.engine import digests
from django_idempotency.stores import Store, store_for
from django_idempotency.values.exceptions import ClaimLost
from django_idempotency.values.outcomes import (
    Claimed,
    Operation,
    Unprotected,
)
from django_idempotency.values.policy import Policy


@dataclass(slots=True, eq=False)
class Context:
    """What the view that runs a claim sees as ``request.idempotency``.

    ``running``: true from its first line to its last. ``responding``: true while its
    response is made afterwards. ``thread``: the one that began the run. ``notes``: what
    wings know of the operation, by their names.
    """

    claim: Claimed
    policy: Policy
    running: bool = False
    responding: bool = False
    thread: int = field(default_factory=get_ident)
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.claim.operation.key

    @property
    def scope(self) -> str:
        return self.claim.operation.scope

    @property
    def record_id(self) -> UUID:
        """The id of the key's record, which is a digest of scope and key."""
        return self.claim.id

    @property
    def attempt(self) -> int:
        """1 for the first run of this key, and one more for each run after a crash or a
        failure.
        """
        return self.claim.attempt

    @property
    def database(self) -> str | None:
        """The alias of the record's database, which the effects should go to; ``None``
        if the store has none.
        """
        return self.store.name if self.store.transactional else None

    @property
    def store(self) -> Store:
        """The store that keeps the record."""
        return store_for(self.policy, self.claim.operation)

    def child_key(self, name: str) -> str:
        """Return a key to send downstream: the same on every attempt, another for each
        ``name``, never the raw key.
        """
        return digests.child_key(self.claim.operation, name)

    def renew(self) -> None:
        """Extend the lease now. Only work that keeps the heartbeat's thread from
        running needs this.

        Raises ``ClaimLost`` if another attempt has taken over: stop, and cause no
        further effect.
        """
        if not self.policy.is_atomic:
            store = self.store
            # false while the row is locked
            renewed = self.claim.token in store.renew([self.claim])
            if not renewed and not store.leases_left({self.claim.token: self.claim.id}):
                raise ClaimLost


@dataclass(slots=True, eq=False)
class Unclaimed:
    """What a view that runs without a claim sees as ``request.idempotency``: it is
    false.

    ``operation``: what the request asks for, if the policy sets ``fail_open`` and the
    store can't be reached. ``unprotected``: why its key will have protected nothing,
    as far as known; ``None`` without a key.
    """

    operation: Operation | None = None
    unprotected: Unprotected | None = None
    child_keys: dict[str, str] = field(default_factory=dict)

    running = False
    key = scope = ""
    record_id = database = None
    attempt = 1

    def __bool__(self) -> Literal[False]:
        return False

    def child_key(self, name: str) -> str:
        """Return a fresh UUID, one and the same for each ``name`` within the request.

        That of an ``operation`` is the same on every attempt, as with a claim.
        """
        if self.operation is not None:
            return digests.child_key(self.operation, name)
        return self.child_keys.setdefault(name, str(uuid4()))

    def renew(self) -> None:
        """Do nothing: there is no lease."""


_current: ContextVar[Context | Unclaimed | None] = ContextVar(
    "django_idempotency_current", default=None
)


def current() -> Context | Unclaimed:
    """Return the context of the view, handler, task or function that is running: what
    a view has as ``request.idempotency``. It is false without a claim.

    It follows calls, ``asyncio`` tasks and ``sync_to_async``. A thread of your own has
    it if it is started with ``contextvars.copy_context().run``.
    """
    found = _current.get()
    is_over = found is None or (isinstance(found, Context) and not found.running)
    return Unclaimed() if is_over else found  # type: ignore[return-value]


# not a generator, which would cost more
class entered:
    """Have ``current()`` return ``context`` inside the block: its code is running."""

    token: Token[Context | Unclaimed | None]

    def __init__(self, context: Context | Unclaimed) -> None:
        self.context = context

    def __enter__(self) -> None:
        self.token = _current.set(self.context)
        if isinstance(self.context, Context):
            self.context.running = True

    def __exit__(self, *_raised: object) -> None:
        if isinstance(self.context, Context):
            self.context.running = False
        _current.reset(self.token)
