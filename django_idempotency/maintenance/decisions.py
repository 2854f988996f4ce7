"""What an operator decides about one record, in any store: run it again, fail it, give it a response, extend its lease.

No live owner loses a claim by a decision. A record is refused if its row is locked or its lease has not run out. In a
database, a decision is one short transaction under the row's lock. Another store gives the record to a new token, whose
owner is the operator, and ends that claim. Either way, an owner that comes back can change nothing. Times are the
store's. The history entry is written first, in a transaction that ends after the decision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from functools import partial
from typing import Any, TypedDict, Unpack, cast
from uuid import UUID, uuid4

from django.db import DatabaseError
from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop

from django_idempotency import signals
from django_idempotency.conf import conf
from django_idempotency.engine.decisions import LEASE_LAPSED
from django_idempotency.engine.digests import response_digest
from django_idempotency.exceptions import StoreConflict
from django_idempotency.http.problems import marked_failed
from django_idempotency.maintenance import history
from django_idempotency.maintenance.given_responses import check_given, harmless
from django_idempotency.maintenance.reaper import have_it_watched
from django_idempotency.maintenance.records import kept_again, locked, operation_of, record_of, records
from django_idempotency.maintenance.sweep import in_transaction
from django_idempotency.models import LIVE, DatabaseNow, IdempotencyRecord, Status, check_move, in_utc
from django_idempotency.policy import Body, Lease, Mode
from django_idempotency.reporting.events import send
from django_idempotency.stores import Store
from django_idempotency.stores.base import Unlocked
from django_idempotency.stores.codec import encrypted, life_of
from django_idempotency.stores.connections import record_database
from django_idempotency.stores.database import ahead
from django_idempotency.stores.errors import is_conflict
from django_idempotency.values.options import LONGEST
from django_idempotency.values.outcomes import Claimed, Operation, Snapshot, StoredResponse
from django_idempotency.values.scopes import is_own

ALLOWED = gettext_noop("retry allowed by hand")
NO_CLAIM = {"token": None, "locked_at": None, "locked_until": None}


class Act(StrEnum):
    ALLOW_RETRY = "allow_retry"
    FAIL = "fail"
    RESOLVE = "resolve"
    EXTEND = "extend"

    @property
    def permission(self) -> str:
        """The permission that a user needs for it."""
        return f"django_idempotency.{self}_idempotencyrecord"


class Refusal(TextChoices):
    """Why nothing was done."""

    ABSENT = "absent", _("This record no longer exists.")
    BUSY = "busy", _("Its row is locked: its owner is alive, or another session is changing it.")
    LIVE = "live", _("Its lease has not run out: its owner may be alive.")
    LAPSED = (
        "lapsed",
        _("Its lease ran out, but its owner may still renew it: try again after a third of the lease’s length."),
    )
    HAS_RESPONSE = "has_response", _("It already has its response.")
    FREE = "free", _("It is already free to retry.")
    ENDED = "ended", _("It is not running.")
    NO_LEASE = (
        "no_lease",
        _("In atomic mode there is no lease to extend: only a lock on its row shows that its owner is alive."),
    )
    CHANGED = "changed", _("It has changed since you last saw it.")
    NOT_ENCRYPTED = "not_encrypted", _("The response could not be encrypted; the log says why.")
    NO_NOTE = "no_note", _("A note that says why is required.")
    OWN_KEY = "own_key", _("The key is your own: another operator has to decide.")
    PROPOSED = "proposed", _("It is now proposed. Another operator has to make the same decision.")
    NO_SECOND = (
        "no_second",
        _("Two operators have to make the same decision, each as a user, and their history must be kept."),
    )


@dataclass(frozen=True, slots=True)
class Done:
    """The decision was carried out.

    ``record``: as it was before. ``digest``: of the response that was given, by ``response_digest``; empty if none was.
    """

    record: IdempotencyRecord
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was done."""

    why: Refusal


class Terms(TypedDict, total=False):
    """The arguments that all decisions take.

    - ``as_seen``: refuse unless the record's ``version()`` is still this one.
    - ``using``: the alias of the record's database; default: the settings'.
    - ``store``: the record's store, if it is outside the database.
    - ``note``: why, for the history; required by ``DECISIONS``.
    - ``by``: the user who decides, or a name. A user is refused if the record is of their own scope. The decision is
      written to the record's history; the admin's log has only what users decide.
    """

    as_seen: str | None
    using: str | None
    store: Store | None
    note: str
    by: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What is decided. ``tells``: the sentence about it in the history."""

    act: Act
    tells: str
    response: StoredResponse | None = None
    seconds: float = 0.0

    @property
    def digest(self) -> str:
        return response_digest(self.response) if self.response else ""

    @property
    def status(self) -> Status:
        return Status.FAILED if self.response is None or self.response.status >= 400 else Status.COMPLETED

    def entry(self, note: str) -> str:
        """Return the text of the history entry, in English."""
        digest = history.DIGEST % {"digest": self.digest} if self.digest else ""
        return " ".join(filter(None, (self.tells, digest, note.strip())))


def allow_retry(id: UUID, **terms: Unpack[Terms]) -> Done | Refused:
    """Let the next request with the key run again, because the operation did **not** take place.

    For a record that is on hold, or whose lease has run out and whose row is not locked. Returns ``Done``, or
    ``Refused`` with the reason. ``id``: the record's id. The other arguments are ``Terms``.
    """
    return _decide(id, _Decision(act=Act.ALLOW_RETRY, tells=history.RETRY_ALLOWED), **terms)


def fail(id: UUID, *, detail: str = "", status: int = 410, **terms: Unpack[Terms]) -> Done | Refused:
    """End the key with a failure: every retry gets a problem response with ``status`` and ``detail``.

    For a record without a response and without a live owner. The other arguments are those of ``allow_retry``. Raises
    ``ValueError`` if ``status`` is not from 400 to 599.
    """
    if not 400 <= status <= 599:
        raise ValueError(f"status is {status}; it must be from 400 to 599.")
    tells = history.FAILED % {"status": status}
    return _decide(id, _Decision(act=Act.FAIL, tells=tells, response=harmless(marked_failed(status, detail))), **terms)


def resolve(id: UUID, response: StoredResponse, **terms: Unpack[Terms]) -> Done | Refused:
    """End the key with ``response``, which is then replayed. For an operation that did take place.

    ``response``: what the operation should have returned. For a record without a response and without a live owner. The
    other arguments are those of ``allow_retry``. Raises ``ValueError`` if the status is not from 200 to 599, if a
    header can't be sent or is never stored, if the status allows no body but there is one, or if the content type of
    the body is not among ``RESOLVE_CONTENT_TYPES``.
    """
    check_given(response)
    tells = history.RESOLVED % {"status": response.status}
    return _decide(id, _Decision(act=Act.RESOLVE, tells=tells, response=harmless(response)), **terms)


def extend(id: UUID, seconds: float, **terms: Unpack[Terms]) -> Done | Refused:
    """Make the lease last at least ``seconds`` from now, for an owner that is well but does not renew it.

    For a record in lease mode that is started or processing. Its owner keeps its token, and a lease is never
    shortened. The other arguments are those of ``allow_retry``. Raises ``ValueError`` if ``seconds``
    is less than 1 or more than a century.
    """
    if not 1 <= seconds <= LONGEST:
        raise ValueError(f"seconds is {seconds}; it must be from 1 to {LONGEST}.")
    tells = history.EXTENDED % {"seconds": f"{seconds:g}"}
    return _decide(id, _Decision(act=Act.EXTEND, tells=tells, seconds=seconds), **terms)


def objection(record: IdempotencyRecord, act: Act, now: datetime) -> Refusal | None:
    """Return why ``act`` can't be done to a record as it stands at ``now``, provided its row is not locked. Pure."""
    live = record.status in LIVE
    if act == Act.EXTEND:
        if not live:
            return Refusal.ENDED
        return Refusal.NO_LEASE if record.mode == Mode.ATOMIC else None
    if live:
        return _sign_of_life(record, now)
    if record.response_status is not None:
        return Refusal.HAS_RESPONSE
    return Refusal.FREE if act == Act.ALLOW_RETRY and not record.on_hold else None


def _sign_of_life(record: IdempotencyRecord, now: datetime) -> Refusal | None:
    """In lease mode, a lease that has only lapsed proves nothing yet: the store may have been away."""
    assert record.locked_at is not None  # by constraint
    if record.mode == Mode.LEASE and _lease_left(record, record.locked_at) <= timedelta(0):  # watched, and expired
        return None
    if _lease_left(record, now) > timedelta(0):
        return Refusal.LIVE
    return Refusal.LAPSED if record.mode == Mode.LEASE else None


def _lease_left(record: IdempotencyRecord, since: datetime) -> timedelta:
    using = record._state.db or record_database()
    assert record.locked_until is not None  # by constraint
    return in_utc(record.locked_until, using) - in_utc(since, using)


def version(record: IdempotencyRecord) -> str:
    """Return a text that changes with every event of a record, except replays and renewals of its lease."""
    return f"{record.status} {record.on_hold:d} {record.attempts} {record.updated_at.isoformat()}"


# --- Carrying it out -------------------------------------------------------------------------------------------------


def _decide(
    id: UUID,
    decision: _Decision,
    *,
    as_seen: str | None = None,
    using: str | None = None,
    store: Store | None = None,
    note: str = "",
    by: Any = None,
) -> Done | Refused:
    if history.lacks_note(note):
        return Refused(Refusal.NO_NOTE)

    def refusal(record: Any) -> Refusal | None:
        if as_seen is not None and as_seen != version(record):
            return Refusal.CHANGED
        if is_own(record.scope, by):
            return Refusal.OWN_KEY
        if why := objection(record, decision.act, record.now):
            if why is Refusal.LAPSED:
                have_it_watched(record, store)
            return why
        if decision.act == Act.EXTEND:
            return None
        what = " ".join(filter(None, (decision.act, version(record), decision.digest)))
        return lacks_second(record, what, decision.act.permission, by=by, note=note)

    def write_history(record: Any) -> None:
        history.write_entry(record, by, decision.entry(note))

    carry_out = partial(_in_database, id, using) if store is None else partial(_in_store, id, store)
    try:
        outcome = carry_out(decision, refusal, write_history)
    except (StoreConflict, DatabaseError) as error:
        if not (isinstance(error, StoreConflict) or is_conflict(error)):
            raise
        return Refused(Refusal.BUSY)
    except _NotEncryptedError:
        return Refused(Refusal.NOT_ENCRYPTED)
    if isinstance(outcome, Refusal):
        return Refused(outcome)
    send(signals.operator_decided, operation_of(outcome), act=decision.act, by=by, digest=decision.digest)
    return Done(outcome, decision.digest)


def lacks_second(record: Any, what: str, permission: str, *, by: Any, note: str) -> Refusal | None:
    """Return why a decision that takes two operators is not made yet. The first one's is kept as a proposal.

    ``record``: of any model, read with ``now``. ``what``: the decision, and the state of the record that it is about.
    """
    if "second_operator" not in conf().decisions:
        return None
    if getattr(by, "pk", None) is None or not history.is_kept():
        return Refusal.NO_SECOND
    if history.is_seconded(record, by, what, permission):
        return None
    history.propose(record, by, what, note)
    return Refusal.PROPOSED


Examine = Callable[[Any], Refusal | None]
Write = Callable[[Any], None]


class _NotEncryptedError(Exception):
    pass


def _in_database(
    id: UUID, using: str | None, decision: _Decision, refusal: Examine, write_history: Write
) -> IdempotencyRecord | Refusal:
    """Carry out a decision in one transaction, and return the record as it was before, or why it was refused."""
    rows = records(using).filter(pk=id)

    def run() -> IdempotencyRecord | Refusal:
        record: Any = locked(rows.defer("response_body").annotate(now=DatabaseNow())).first()
        if record is None:  # SKIP LOCKED can't tell a locked row from none
            return Refusal.BUSY if rows.exists() else Refusal.ABSENT
        if why := refusal(record):
            return why
        if values := _values(record, decision):
            rows.update(**values)
        write_history(record)
        return cast(IdempotencyRecord, record)

    return in_transaction(rows.db, run)


def _values(record: Any, decision: _Decision) -> dict[str, Any]:
    if decision.act == Act.EXTEND:
        left = _lease_left(record, record.now).total_seconds()
        return {"locked_until": ahead(decision.seconds)} if left < decision.seconds else {}
    if decision.act == Act.ALLOW_RETRY and record.on_hold:
        return {"on_hold": False}
    check_move(record.status, decision.status, decided=decision.response is not None)
    # The times come first, because on MariaDB later assignments see the new values of earlier ones.
    kept = {"expires_at": kept_again("expires_at"), "purge_at": kept_again("purge_at"), "updated_at": DatabaseNow()}
    ended = kept | {"status": decision.status, "on_hold": False} | NO_CLAIM
    if decision.response is None:
        return ended | {"reason": ALLOWED}
    # The policy of the key's view is not known here, so encrypt whenever there is a key to encrypt with.
    padding = conf().policy.body.padding
    stored = encrypted(decision.response, life_of(record), padding) if conf().encryption else decision.response
    if stored is None:
        raise _NotEncryptedError
    return ended | {
        "reason": "",
        "response_status": stored.status,
        "response_headers": stored.headers,
        "response_body": stored.body,
    }


def _in_store(
    id: UUID, store: Store, decision: _Decision, refusal: Examine, write_history: Write
) -> IdempotencyRecord | Refusal:
    """Carry out a decision in a store outside the database.

    The record belongs to the operator for a moment. If this process dies just then, its lease runs out and the key is
    put on hold.
    """
    # The policy of the key's view is not known here, so encrypt whenever there is a key to encrypt with.
    body = store.policy.body.derive(encrypt=True) if conf().encryption else Body()
    seconds = decision.seconds if decision.act == Act.EXTEND else store.policy.mode.seconds
    store = replace(store, policy=store.policy.derive(mode=Lease(seconds=seconds, on_crash="hold"), body=body))
    with store.try_lock(id) as seen:
        if isinstance(seen, Unlocked):
            return Refusal.BUSY if seen is Unlocked.BUSY else Refusal.ABSENT
        record = record_of(seen)
        if why := refusal(record):
            return why
        with history.transactions():
            write_history(record)
            if not _change(store, seen, decision):
                raise StoreConflict(f"The record {id} changed while an operator decided about it.")
        return cast(IdempotencyRecord, record)


def _change(store: Store, seen: Snapshot, decision: _Decision) -> bool:
    """Change a record in a store outside the database; return false if it has changed since."""
    operation = Operation(seen.scope, seen.key, seen.fingerprint, trace=seen.trace)
    if decision.act == Act.EXTEND:
        assert seen.locked_until is not None  # by contract, both
        assert seen.token is not None
        if (seen.locked_until - seen.now).total_seconds() >= decision.seconds:
            return True
        return seen.token in store.renew([Claimed(operation, seen.token, seen.attempts)])
    claim = store.reassign(seen, operation, uuid4())
    if decision.response is None:
        return store.fail(claim, ALLOWED)
    stored = store.encode(decision.response, claim)
    if decision.response.has_content and not stored.has_content:
        store.fail(claim, seen.reason or LEASE_LAPSED, on_hold=True)
        raise _NotEncryptedError
    return store.complete(claim, stored, failure=decision.status == Status.FAILED)
