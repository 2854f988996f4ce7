"""What an operator decides about one record, in any store: run it again, fail it, give
it a response, extend its lease.

No live owner loses a claim by a decision. A record is refused if its row is locked or
its lease has not run out. In a database, a decision is one short transaction under the
row's lock. Another store gives the record to a new token, whose owner is the operator,
and ends that claim. Either way, an owner that comes back can change nothing. Times are
the store's. The history entry is written first, in a transaction that ends after the
decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, TypedDict, Unpack, cast
from uuid import UUID, uuid4

from django.db import DatabaseError
from django.db.models import TextChoices
from django.db.models.functions import Greatest
from django.utils import translation
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop

from django_idempotency import signals
from django_idempotency.conf import conf, of_project
from django_idempotency.engine.decisions import LEASE_LAPSED
from django_idempotency.engine.digests import response_digest
from django_idempotency.maintenance import history
from django_idempotency.maintenance.companions import companions
from django_idempotency.maintenance.reaper import have_it_watched
from django_idempotency.maintenance.records import (
    ended,
    locked,
    operation_of,
    record_of,
    records,
)
from django_idempotency.maintenance.sweep import in_transaction
from django_idempotency.models import (
    LIVE,
    DatabaseNow,
    IdempotencyRecord,
    Status,
    check_move,
    in_utc,
)
from django_idempotency.reporting.events import send
from django_idempotency.stores import Store
from django_idempotency.stores.base import Unlocked
from django_idempotency.stores.codec import binding_of, encrypted
from django_idempotency.stores.database import ahead
from django_idempotency.stores.errors import is_conflict
from django_idempotency.values.exceptions import StoreConflict
from django_idempotency.values.outcomes import (
    Claimed,
    Operation,
    Snapshot,
    StoredResponse,
    is_storable,
)
from django_idempotency.values.policy import Atomic, Body, Lease
from django_idempotency.values.problems import MARKED_FAILED
from django_idempotency.values.response_headers import WITHOUT_BODY, may_be_stored
from django_idempotency.values.rules import LONGEST
from django_idempotency.values.scopes import is_own

ALLOWED = gettext_noop("retry allowed by hand")


class Act(StrEnum):
    ALLOW_RETRY = "allow_retry"
    FAIL = "fail"
    RESOLVE = "resolve"
    EXTEND = "extend"

    @property
    def permission(self) -> str:
        """The permission that a user needs for it."""
        return f"django_idempotency.{self}_idempotencyrecord"


# In the history.
ENTRIES = {
    Act.ALLOW_RETRY: "Retry allowed.",
    Act.FAIL: "Marked as failed with the response {status}.",
    Act.RESOLVE: "Resolved with the response {status}.",
    Act.EXTEND: "Lease extended to {seconds:g} s from then.",
}


class Refusal(TextChoices):
    """Why nothing was done."""

    ABSENT = "absent", _("This record no longer exists.")
    BUSY = (
        "busy",
        _("Its row is locked: its owner is alive, or another session is changing it."),
    )
    LIVE = "live", _("Its lease has not run out: its owner may be alive.")
    LAPSED = (
        "lapsed",
        _(
            "Its lease ran out, but its owner may still renew it: try again after a"
            " third of the lease’s length."
        ),
    )
    HAS_RESPONSE = "has_response", _("It already has its response.")
    FREE = "free", _("It is already free to retry.")
    ENDED = "ended", _("It is not running.")
    NO_LEASE = (
        "no_lease",
        _(
            "In atomic mode there is no lease to extend: only a lock on its row shows"
            " that its owner is alive."
        ),
    )
    CHANGED = "changed", _("It has changed since you last saw it.")
    NOT_ENCRYPTED = (
        "not_encrypted",
        _("The response could not be encrypted; the log says why."),
    )
    NO_NOTE = "no_note", _("A note that says why is required.")
    OWN_KEY = "own_key", _("The key is your own: another operator has to decide.")
    PROPOSED = (
        "proposed",
        _("It is now proposed. Another operator has to make the same decision."),
    )
    NO_SECOND = (
        "no_second",
        _(
            "Two operators have to make the same decision, each as a user, and their"
            " history must be kept."
        ),
    )


class Terms(TypedDict, total=False):
    """The arguments that all decisions take.

    - ``as_seen``: refuse unless the record's ``version()`` is still this one.
    - ``using``: the alias of the record's database; default: the settings'.
    - ``store``: the record's store, if it is outside the database.
    - ``note``: why, for the history; required by ``DECISIONS``.
    - ``by``: the user who decides, or a name. A user is refused if the record is of
      their own scope. The decision is written to the record's history; the admin's log
      has only what users decide.
    """

    as_seen: str | None
    using: str | None
    store: Store | None
    note: str
    by: Any


def allow_retry(id: UUID, **terms: Unpack[Terms]) -> IdempotencyRecord | Refusal:
    """Let the next request with the key run again, because the operation did **not**
    take place.

    For a record that is on hold, or whose lease has run out and whose row is not
    locked. Returns it as it was, or a ``Refusal`` if nothing was done. ``id``: the
    record's id. The other arguments are ``Terms``.
    """
    return OperatorDecision(id=id, act=Act.ALLOW_RETRY, **terms).carry_out()


def fail(
    id: UUID, *, detail: str = "", status: int = 410, **terms: Unpack[Terms]
) -> IdempotencyRecord | Refusal:
    """End the key with a failure: every retry gets a problem response with ``status``
    and ``detail``.

    For a record without a response and without a live owner. The other arguments are
    those of ``allow_retry``. Raises ``ValueError`` if ``status`` is not from 400 to
    599.
    """
    if not 400 <= status <= 599:
        raise ValueError(f"status is {status}; it must be from 400 to 599.")
    return OperatorDecision(
        id=id, act=Act.FAIL, response=_harmless(marked_failed(status, detail)), **terms
    ).carry_out()


def resolve(
    id: UUID, response: StoredResponse, **terms: Unpack[Terms]
) -> IdempotencyRecord | Refusal:
    """End the key with ``response``, which is then replayed. For an operation that did
    take place.

    ``response``: what the operation should have returned. For a record without a
    response and without a live owner. The other arguments are those of ``allow_retry``.
    Raises ``ValueError`` if the status is not from 200 to 599, if a header can't be
    sent or is never stored, if the status allows no body but there is one, or if the
    content type of the body is not among ``RESOLVE_CONTENT_TYPES``.
    """
    _check_given(response)
    return OperatorDecision(
        id=id, act=Act.RESOLVE, response=_harmless(response), **terms
    ).carry_out()


def extend(
    id: UUID, seconds: float, **terms: Unpack[Terms]
) -> IdempotencyRecord | Refusal:
    """Make the lease last at least ``seconds`` from now, for an owner that is well but
    does not renew it.

    For a record in lease mode that is started or processing. Its owner keeps its token,
    and a lease is never shortened. The other arguments are those of ``allow_retry``.
    Raises ``ValueError`` if ``seconds`` is less than 1 or more than a century.
    """
    if not 1 <= seconds <= LONGEST:
        raise ValueError(f"seconds is {seconds}; it must be from 1 to {LONGEST}.")
    return OperatorDecision(id=id, act=Act.EXTEND, seconds=seconds, **terms).carry_out()


# --- What may be decided --------------------------------------------------------------

# The body of such a response was typed by an operator, so a browser must not run
# anything in it.
HARMLESS = (
    ("Content-Security-Policy", "sandbox"),
    ("X-Content-Type-Options", "nosniff"),
)


def marked_failed(status: int, detail: str) -> StoredResponse:
    """Return the response for a key that an operator has marked as failed.

    It is in the project's language, because it is for the client.
    """
    base = conf().problem_type_base_url
    problem = replace(
        MARKED_FAILED, status=status, detail=detail or MARKED_FAILED.detail
    )
    if detail and base is None:  # the detail is all there is to say
        problem = replace(problem, title="")
    with translation.override(of_project("LANGUAGE_CODE")):
        return problem.response(base)


def _harmless(response: StoredResponse) -> StoredResponse:
    return replace(response, headers=(*response.headers, *HARMLESS))


def _check_given(response: StoredResponse) -> None:
    """Raise ``ValueError`` if an operator can't give this response."""
    if not 200 <= response.status <= 599:
        raise ValueError(f"status is {response.status}; it must be from 200 to 599.")
    if not is_storable(response):
        raise ValueError(
            "The response has a header that can't be sent, or a body that is not bytes."
        )
    if response.body and response.status in WITHOUT_BODY:
        raise ValueError(f"A response with status {response.status} has no body.")
    if unstored := [
        name for name, _value in response.headers if not may_be_stored(name)
    ]:
        raise ValueError(
            f"The response has the header {unstored[0]}, which is never stored."
        )
    kinds = [
        value for name, value in response.headers if name.lower() == "content-type"
    ]
    if response.body and not (kinds and all(map(may_be_given, kinds))):
        raise ValueError(
            f"The response is {' and '.join(kinds) or 'of no type'}, which"
            " RESOLVE_CONTENT_TYPES does not allow."
        )


def may_be_given(content_type: str) -> bool:
    """Whether ``RESOLVE_CONTENT_TYPES`` allows this content type for an operator's own
    response.
    """
    kind = content_type.partition(";")[0].strip().lower()
    return (
        "application/json" if kind.endswith("+json") else kind
    ) in conf().resolve_content_types


def objection_to(act: Act, record: Any, by: Any = None) -> Refusal | None:
    """Return why ``by`` can't do ``act`` to a record that was read with ``now`` and
    ``locked``. Pure.
    """
    if is_own(record.scope, by):
        return Refusal.OWN_KEY
    why = _objection_to(act, record)
    return Refusal.BUSY if why is None and record.locked and act != Act.EXTEND else why


def _objection_to(act: Act, record: Any) -> Refusal | None:
    live = record.status in LIVE
    if act == Act.EXTEND:
        if not live:
            return Refusal.ENDED
        return Refusal.NO_LEASE if record.mode == Atomic.word else None
    if live:
        return _sign_of_life(record)
    if record.response_status is not None:
        return Refusal.HAS_RESPONSE
    return Refusal.FREE if act == Act.ALLOW_RETRY and not record.on_hold else None


def _sign_of_life(record: Any) -> Refusal | None:
    claimed_at, lease_ends, now = (
        in_utc(time, record._state.db)
        for time in (record.locked_at, record.locked_until, record.now)
    )
    if record.mode == Lease.word and lease_ends <= claimed_at:  # watched, and expired
        return None
    if lease_ends > now:
        return Refusal.LIVE
    # In lease mode, a lease that has only lapsed proves nothing yet: the store may have
    # been unavailable.
    return Refusal.LAPSED if record.mode == Lease.word else None


def version(record: IdempotencyRecord) -> str:
    """Return a text that changes with every event of a record, except replays and
    renewals of its lease.
    """
    return (
        f"{record.status} {record.on_hold:d} {record.attempts}"
        f" {record.updated_at.isoformat()}"
    )


# --- Carrying it out ------------------------------------------------------------------


def lacks_second(
    record: Any, what: str, permission: str, *, by: Any, note: str
) -> Refusal | None:
    """Return why a decision that takes two operators is not made yet. The first one's
    is kept as a proposal.

    ``record``: of any model, read with ``now``. ``what``: the decision, and the state
    of the record that it is about.
    """
    if "second_operator" not in conf().decisions:
        return None
    if getattr(by, "pk", None) is None or not history.is_kept():
        return Refusal.NO_SECOND
    if history.is_seconded(record, by, what, permission):
        return None
    history.propose(record, by, what, note)
    return Refusal.PROPOSED


class _NotEncryptedError(Exception):
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDecision:
    """What is decided about a record, under ``Terms``. A wing's decisions extend this
    one.

    ``act``: has a ``permission``. ``digest``: of what is given, if anything is.
    """

    id: UUID
    act: Any
    response: StoredResponse | None = None
    seconds: float = 0.0
    as_seen: str | None = None
    using: str | None = None
    store: Store | None = None
    note: str = ""
    by: Any = None

    @property
    def digest(self) -> str:
        return response_digest(self.response) if self.response else ""

    @property
    def status(self) -> Status:
        return (
            Status.FAILED
            if self.response is None or self.response.status >= 400
            else Status.COMPLETED
        )

    def carry_out(self) -> IdempotencyRecord | Refusal:
        if history.lacks_note(self.note):
            return Refusal.NO_NOTE
        try:
            outcome = (
                self._in_database()
                if self.store is None
                else self._in_store(self.store)
            )
        except (StoreConflict, DatabaseError) as error:
            if not (isinstance(error, StoreConflict) or is_conflict(error)):
                raise
            return Refusal.BUSY
        except _NotEncryptedError:
            return Refusal.NOT_ENCRYPTED
        if isinstance(outcome, TextChoices):
            return outcome
        send(
            signals.operator_decided,
            operation_of(outcome),
            act=self.act,
            by=self.by,
            digest=self.digest,
        )
        return outcome

    def objection(self, record: Any) -> Any:
        """Return why it can't be decided about the record."""
        return objection_to(self.act, record, self.by)

    def entry(self) -> str:
        """Return what the history says that was done."""
        return ENTRIES[self.act].format(
            status=self.response and self.response.status, seconds=self.seconds
        )

    def _refusal(self, record: Any) -> Refusal | None:
        if self.as_seen is not None and self.as_seen != version(record):
            return Refusal.CHANGED
        why: Refusal | None = self.objection(record)  # or one of a wing's own
        if why:
            if why is Refusal.LAPSED:
                have_it_watched(record, self.store)
            return why
        if self.act == Act.EXTEND:
            return None
        what = " ".join(filter(None, (self.act, version(record), self.digest)))
        return lacks_second(
            record, what, self.act.permission, by=self.by, note=self.note
        )

    def _write_history(self, record: Any) -> None:
        digest = f"Digest {self.digest}." if self.digest else ""
        texts = (self.entry(), digest, self.note.strip())
        history.write_entry(record, self.by, " ".join(filter(None, texts)))

    def _in_database(self) -> IdempotencyRecord | Refusal:
        """Carry it out in one transaction, and return the record as it was before, or
        why it was refused.
        """
        rows = records(self.using).filter(pk=self.id)

        def run() -> IdempotencyRecord | Refusal:
            record: Any = locked(
                rows.defer("response_body").annotate(now=DatabaseNow())
            ).first()
            if record is None:  # SKIP LOCKED can't tell a locked row from none
                return Refusal.BUSY if rows.exists() else Refusal.ABSENT
            record.locked = False  # by nobody else
            if why := self._refusal(record):
                return why
            rows.update(**self.changed(record))
            for companion in companions:
                companion.decided(record, self.act)
            self._write_history(record)
            return cast(IdempotencyRecord, record)

        return in_transaction(rows.db, run)

    def changed(self, record: Any) -> dict[str, Any]:
        """Return the record's columns as they become, under its lock."""
        if self.act == Act.EXTEND:
            return {"locked_until": Greatest("locked_until", ahead(self.seconds))}
        if self.response is None and record.on_hold:
            return {"on_hold": False}
        check_move(record.status, self.status, decided=self.response is not None)
        decided = ended(self.status) | {"on_hold": False}
        if self.response is None:
            return decided | {"reason": ALLOWED}
        stored = (
            encrypted(self.response, binding_of(record))
            if conf().encryption
            else self.response
        )
        if stored is None:
            raise _NotEncryptedError
        return decided | {
            "reason": "",
            "response_status": stored.status,
            "response_headers": stored.headers,
            "response_body": stored.body,
        }

    def _in_store(self, store: Store) -> IdempotencyRecord | Refusal:
        """Carry it out in a store outside the database.

        The record belongs to the operator for a moment. If this process dies just then,
        its lease runs out and the key is put on hold.
        """
        # The policy of the key's view is not known here, so encrypt whenever there is a
        # key to encrypt with.
        body = store.policy.body.derive(encrypt=True) if conf().encryption else Body()
        seconds = self.seconds if self.act == Act.EXTEND else store.policy.mode.seconds
        store = replace(
            store,
            policy=store.policy.derive(
                mode=Lease(seconds=seconds, on_crash="hold"), body=body
            ),
        )
        with store.try_lock(self.id) as seen:
            if isinstance(seen, Unlocked):
                return Refusal.BUSY if seen is Unlocked.BUSY else Refusal.ABSENT
            record = record_of(seen)
            if why := self._refusal(record):
                return why
            with history.transactions():
                self._write_history(record)
                if not self._change(store, seen):
                    raise StoreConflict(
                        f"The record {self.id} changed while an operator decided"
                        " about it."
                    )
            return cast(IdempotencyRecord, record)

    def _change(self, store: Store, seen: Snapshot) -> bool:
        """Change a record in a store outside the database; return false if it has
        changed since.
        """
        operation = Operation(seen.scope, seen.key, seen.fingerprint)
        if self.act == Act.EXTEND:
            assert seen.locked_until is not None  # by contract, both
            assert seen.token is not None
            if (seen.locked_until - seen.now).total_seconds() >= self.seconds:
                return True
            return seen.token in store.renew(
                [Claimed(operation, seen.token, seen.attempts)]
            )
        claim = store.reassign(seen, operation, uuid4())
        if self.response is None:
            return store.fail(claim, ALLOWED)
        stored = store.encode(self.response, claim)
        if self.response.has_content and not stored.has_content:
            store.fail(claim, seen.reason or LEASE_LAPSED, on_hold=True)
            raise _NotEncryptedError
        return store.complete(claim, stored, failure=self.status == Status.FAILED)
