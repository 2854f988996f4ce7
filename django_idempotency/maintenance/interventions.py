"""What an operator decides about one record: run it again, fail it for good, give it a response, extend its lease.

No live owner loses a claim by it. A record whose row is locked, or whose lease has not run out, is refused. What is
done is one short transaction under the row's lock, and the token of a claim that it ends is gone: an owner that comes
back can change nothing. Times are the database's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any
from uuid import UUID

from django.db import DatabaseError
from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop

from django_idempotency import signals
from django_idempotency.conf import conf
from django_idempotency.digests import response_digest
from django_idempotency.engine import leases
from django_idempotency.http.problems import marked_failed
from django_idempotency.http.responses import WITHOUT_BODY, may_be_stored
from django_idempotency.maintenance import proposals
from django_idempotency.maintenance.batches import in_transaction
from django_idempotency.maintenance.records import kept_again, locked, operation_of
from django_idempotency.models import LIVE, DatabaseNow, IdempotencyRecord, Status, check_move, in_utc
from django_idempotency.outcomes import StoredResponse, is_storable
from django_idempotency.policy import LONGEST, Mode
from django_idempotency.scopes import is_own
from django_idempotency.stores import store_for
from django_idempotency.stores.codec import encrypted, life_of
from django_idempotency.stores.connections import record_database
from django_idempotency.stores.database import ahead
from django_idempotency.stores.errors import is_conflict

# The body was typed by an operator: a browser must run nothing in it.
HARMLESS = (("Content-Security-Policy", "sandbox"), ("X-Content-Type-Options", "nosniff"))
ALLOWED = gettext_noop("retry allowed by hand")
NO_CLAIM = {"token": None, "locked_at": None, "locked_until": None}


class Act(StrEnum):
    ALLOW_RETRY = "allow_retry"
    FAIL = "fail"
    RESOLVE = "resolve"
    EXTEND = "extend"


class Refusal(TextChoices):
    """Why nothing was done."""

    ABSENT = "absent", _("There is no such record any more.")
    BUSY = "busy", _("Its row is locked: its owner is alive, or another session is changing it.")
    LIVE = "live", _("Its lease has not run out: its owner may be alive.")
    HAS_RESPONSE = "has_response", _("It has its response.")
    FREE = "free", _("It is free to retry already.")
    ENDED = "ended", _("It is not running.")
    NO_LEASE = "no_lease", _("In atomic mode there is no lease to extend: the lock of its row is the proof of life.")
    CHANGED = "changed", _("It is no longer as it was when you looked at it.")
    NOT_ENCRYPTED = "not_encrypted", _("The response could not be encrypted; the log says why.")
    NO_NOTE = "no_note", _("A note that says why is required.")
    OWN_KEY = "own_key", _("It is a key of your own: somebody else has to decide.")
    PROPOSED = "proposed", _("It is proposed now. Another operator has to decide the same.")
    NO_SECOND = "no_second", _("Two operators have to decide the same, each as a user, and their history must be kept.")


@dataclass(frozen=True, slots=True)
class Done:
    """It was done. ``record``: as it was before. ``digest``: of the response that was given, by ``response_digest``."""

    record: IdempotencyRecord
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was done."""

    why: Refusal


Witness = Callable[[Done], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What is decided, by whom and why; the arguments of ``allow_retry``."""

    act: Act
    as_seen: str | None
    witness: Witness | None
    using: str | None
    note: str
    by: Any
    digest: str = ""


def allow_retry(
    id: UUID,
    *,
    as_seen: str | None = None,
    witness: Witness | None = None,
    using: str | None = None,
    note: str = "",
    by: Any = None,
) -> Done | Refused:
    """Leave the key to its next request, which runs again: its operation did **not** take place.

    For a record that is on hold, or whose lease ran out and whose row is not locked. ``id``: the record's.
    ``as_seen``: refuse unless the record's ``version()`` is still this one. ``witness``: called with what will be
    returned, in the transaction that changes the record; its error undoes the change. ``using``: the database's alias,
    by default the settings'. ``note``: why, which ``REQUIRE_NOTE`` asks for; a witness keeps it. ``by``: the user who
    decides, or a name. A user is refused if the record is of their own scope.
    """

    def change(record: IdempotencyRecord) -> dict[str, Any]:
        if record.on_hold:
            return {"on_hold": False}
        check_move(record.status, Status.FAILED)
        return _kept() | {"status": Status.FAILED, "on_hold": False, "reason": ALLOWED} | NO_CLAIM

    decision = _Decision(act=Act.ALLOW_RETRY, as_seen=as_seen, witness=witness, using=using, note=note, by=by)
    return _intervene(id, change, decision)


def fail(
    id: UUID,
    *,
    detail: str = "",
    status: int = 410,
    as_seen: str | None = None,
    witness: Witness | None = None,
    using: str | None = None,
    note: str = "",
    by: Any = None,
) -> Done | Refused:
    """End the key with a failure that every retry gets, a problem response with ``status`` and ``detail``.

    For a record without a response and without a live owner. Other arguments as for ``allow_retry``. Raises
    ``ValueError`` for a status that is no error's.
    """
    if not 400 <= status <= 599:
        raise ValueError(f"status is {status}; it must be from 400 to 599.")
    decision = _Decision(act=Act.FAIL, as_seen=as_seen, witness=witness, using=using, note=note, by=by)
    return _give_response(id, marked_failed(status, detail), decision)


def resolve(
    id: UUID,
    response: StoredResponse,
    *,
    as_seen: str | None = None,
    witness: Witness | None = None,
    using: str | None = None,
    note: str = "",
    by: Any = None,
) -> Done | Refused:
    """End the key with ``response``, which is replayed: what the operation, which did take place, should have returned.

    For a record without a response and without a live owner. Other arguments as for ``allow_retry``. Raises
    ``ValueError`` for a status that is none, for headers that can't be sent or are never stored, for a body where the
    status has none, and for one whose content type is not among ``RESOLVE_CONTENT_TYPES``.
    """
    if not 200 <= response.status <= 599:
        raise ValueError(f"status is {response.status}; it must be from 200 to 599.")
    if not is_storable(response):
        raise ValueError("The response has a header that can't be sent, or a body that is no bytes.")
    if response.body and response.status in WITHOUT_BODY:
        raise ValueError(f"A response with status {response.status} has no body.")
    if unstored := [name for name, _value in response.headers if not may_be_stored(name)]:
        raise ValueError(f"The response has the header {unstored[0]}, which is never stored.")
    kinds = [value for name, value in response.headers if name.lower() == "content-type"]
    if response.body and not (kinds and all(map(may_be_given, kinds))):
        raise ValueError(f"The response is {' and '.join(kinds) or 'of no type'}; see RESOLVE_CONTENT_TYPES.")
    decision = _Decision(act=Act.RESOLVE, as_seen=as_seen, witness=witness, using=using, note=note, by=by)
    return _give_response(id, response, decision)


def may_be_given(content_type: str) -> bool:
    """Whether an operator's own response may be of this type, by ``RESOLVE_CONTENT_TYPES``."""
    kind = content_type.partition(";")[0].strip().lower()
    return ("application/json" if kind.endswith("+json") else kind) in conf().resolve_content_types


def extend(
    id: UUID,
    seconds: float,
    *,
    as_seen: str | None = None,
    witness: Witness | None = None,
    using: str | None = None,
    note: str = "",
    by: Any = None,
) -> Done | Refused:
    """See that the lease lasts ``seconds`` from now at least, for an owner that is well but does not renew.

    For a record in lease mode that is started or processing. Its owner keeps its token, and a lease is never
    shortened. Other arguments as for ``allow_retry``. Raises ``ValueError`` unless ``seconds`` are at least 1.
    """
    if not 1 <= seconds <= LONGEST:
        raise ValueError(f"seconds is {seconds}; it must be at least 1.")

    def change(record: Any) -> dict[str, Any]:
        return {"locked_until": ahead(seconds)} if _lease_left(record, record.now).total_seconds() < seconds else {}

    decision = _Decision(act=Act.EXTEND, as_seen=as_seen, witness=witness, using=using, note=note, by=by)
    return _intervene(id, change, decision)


def objection(record: IdempotencyRecord, act: Act, now: datetime) -> Refusal | None:
    """Why ``act`` can't be done to a record as it stands at ``now``, provided its row is not locked. Pure."""
    live = record.status in LIVE
    if act == Act.EXTEND:
        if not live:
            return Refusal.ENDED
        return Refusal.NO_LEASE if record.mode == Mode.ATOMIC else None
    if live:
        return Refusal.LIVE if _may_be_alive(record, now) else None
    if record.response_status is not None:
        return Refusal.HAS_RESPONSE
    return Refusal.FREE if act == Act.ALLOW_RETRY and not record.on_hold else None


def _may_be_alive(record: IdempotencyRecord, now: datetime) -> bool:
    """In lease mode a lease that has only lapsed says nothing yet: the store may have been away."""
    assert record.locked_at is not None  # by constraint
    since = record.locked_at if record.mode == Mode.LEASE else now
    return _lease_left(record, since) > timedelta(0)


def _lease_left(record: IdempotencyRecord, since: datetime) -> timedelta:
    using = record._state.db or record_database()
    assert record.locked_until is not None  # by constraint
    return in_utc(record.locked_until, using) - in_utc(since, using)


def _have_it_watched(record: IdempotencyRecord) -> None:
    """See whether its owner renews its lease; if not, the next attempt will not be refused."""
    store = store_for(replace(conf().policy, using=record._state.db))
    if snapshot := store.read(record.pk):
        leases.suspect(snapshot, store)


def version(record: IdempotencyRecord) -> str:
    """What changes whenever something happens to a record, replays of its response and renewals of its lease aside."""
    return f"{record.status} {record.on_hold:d} {record.attempts} {record.updated_at.isoformat()}"


def _give_response(id: UUID, response: StoredResponse, decision: _Decision) -> Done | Refused:
    status = Status.FAILED if response.status >= 400 else Status.COMPLETED
    response = replace(response, headers=(*response.headers, *HARMLESS))

    def change(record: IdempotencyRecord) -> dict[str, Any]:
        check_move(record.status, status, decided=True)
        # Whatever the policy of the key's view may be: where there is a key to encrypt with, it may be needed.
        padding = conf().policy.encrypt_padding
        stored = encrypted(response, life_of(record), padding) if conf().encryption else response
        if stored is None:
            raise _NotEncryptedError
        given = {
            "response_status": stored.status,
            "response_headers": stored.headers,
            "response_body": stored.body,
        }
        return _kept() | {"status": status, "on_hold": False, "reason": ""} | NO_CLAIM | given

    try:
        return _intervene(id, change, replace(decision, digest=response_digest(response)))
    except _NotEncryptedError:
        return Refused(Refusal.NOT_ENCRYPTED)


class _NotEncryptedError(Exception):
    pass


def _kept() -> dict[str, Any]:
    # First, because on MariaDB what is set later sees what was set before.
    return {"expires_at": kept_again("expires_at"), "purge_at": kept_again("purge_at"), "updated_at": DatabaseNow()}


def _lacks_second(record: Any, decision: _Decision) -> Refusal | None:
    """Why a decision that two operators have to make is not done yet; the first one's is kept as a proposal."""
    if not conf().require_second or decision.act == Act.EXTEND:
        return None
    if getattr(decision.by, "pk", None) is None:
        return Refusal.NO_SECOND
    what = " ".join(filter(None, (decision.act, version(record), decision.digest)))
    permission = f"django_idempotency.{decision.act}_idempotencyrecord"
    if proposals.is_seconded(record, decision.by, what, permission):
        return None
    return Refusal.PROPOSED if proposals.propose(record, decision.by, what, decision.note) else Refusal.NO_SECOND


def _intervene(id: UUID, change: Callable[[IdempotencyRecord], dict[str, Any]], decision: _Decision) -> Done | Refused:
    if conf().require_note and not decision.note.strip():
        return Refused(Refusal.NO_NOTE)
    rows = IdempotencyRecord.objects.using(record_database(decision.using)).filter(pk=id)

    def run() -> Done | Refused:
        record: Any = locked(rows.defer("response_body").annotate(now=DatabaseNow())).first()
        if record is None:  # SKIP LOCKED can't tell a locked row from none
            return Refused(Refusal.BUSY if rows.exists() else Refusal.ABSENT)
        if decision.as_seen is not None and decision.as_seen != version(record):
            return Refused(Refusal.CHANGED)
        if is_own(record.scope, decision.by):
            return Refused(Refusal.OWN_KEY)
        if why := objection(record, decision.act, record.now):
            if why is Refusal.LIVE and record.mode == Mode.LEASE:
                _have_it_watched(record)
            return Refused(why)
        if why := _lacks_second(record, decision):
            return Refused(why)
        if values := change(record):
            rows.update(**values)
        done = Done(record, decision.digest)
        if decision.witness is not None:
            decision.witness(done)
        return done

    try:
        outcome = in_transaction(rows.db, run)
    except DatabaseError as error:
        if not is_conflict(error):
            raise
        return Refused(Refusal.BUSY)
    if isinstance(outcome, Done):
        operation = operation_of(outcome.record)
        signals.send(signals.operator_decided, operation, act=decision.act, by=decision.by, digest=decision.digest)
    return outcome
