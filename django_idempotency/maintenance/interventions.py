"""What an operator decides about one record: run it again, fail it for good, give it a response, or extend its lease.

No live owner loses a claim by a decision. A record is refused if its row is locked or its lease has not run out. A
decision is one short transaction under the row's lock. It removes the token of a claim that it ends, so an owner that
comes back can change nothing. Times are the database's.
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
from django_idempotency.options import LONGEST
from django_idempotency.outcomes import StoredResponse, is_storable
from django_idempotency.policy import Mode
from django_idempotency.scopes import is_own
from django_idempotency.stores import store_for
from django_idempotency.stores.codec import encrypted, life_of
from django_idempotency.stores.connections import record_database
from django_idempotency.stores.database import ahead
from django_idempotency.stores.errors import is_conflict

# The body was typed by an operator, so a browser must not run anything in it.
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
    CHANGED = "changed", _("It has changed since you looked at it.")
    NOT_ENCRYPTED = "not_encrypted", _("The response could not be encrypted; the log says why.")
    NO_NOTE = "no_note", _("A note that says why is required.")
    OWN_KEY = "own_key", _("The key is your own: somebody else has to decide.")
    PROPOSED = "proposed", _("It is proposed now. Another operator has to make the same decision.")
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


Witness = Callable[[Done], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Decision:
    """What is decided, by whom and why; see the arguments of ``allow_retry``."""

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
    """Let the next request with the key run again, because the operation did **not** take place.

    For a record that is on hold, or whose lease has run out and whose row is not locked. Returns ``Done``, or
    ``Refused`` with the reason.

    ``id``: the record's id. ``as_seen``: refuse unless the record's ``version()`` is still this one. ``witness``:
    called with what will be returned, in the transaction that changes the record; an error that it raises undoes the
    change. ``using``: the database's alias; default: the settings'. ``note``: why; required by ``REQUIRE_NOTE``, and
    kept by the witness. ``by``: the user who decides, or a name. A user is refused if the record is of their own scope.
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
    """End the key with a failure: every retry gets a problem response with ``status`` and ``detail``.

    For a record without a response and without a live owner. The other arguments are those of ``allow_retry``. Raises
    ``ValueError`` if ``status`` is not from 400 to 599.
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
    """End the key with ``response``, which is then replayed. For an operation that did take place.

    ``response``: what the operation should have returned. For a record without a response and without a live owner. The
    other arguments are those of ``allow_retry``. Raises ``ValueError`` if the status is not from 200 to 599, if a
    header can't be sent or is never stored, if the status allows no body but there is one, or if the content type of
    the body is not among ``RESOLVE_CONTENT_TYPES``.
    """
    if not 200 <= response.status <= 599:
        raise ValueError(f"status is {response.status}; it must be from 200 to 599.")
    if not is_storable(response):
        raise ValueError("The response has a header that can't be sent, or a body that is not bytes.")
    if response.body and response.status in WITHOUT_BODY:
        raise ValueError(f"A response with status {response.status} has no body.")
    if unstored := [name for name, _value in response.headers if not may_be_stored(name)]:
        raise ValueError(f"The response has the header {unstored[0]}, which is never stored.")
    kinds = [value for name, value in response.headers if name.lower() == "content-type"]
    if response.body and not (kinds and all(map(may_be_given, kinds))):
        raise ValueError(
            f"The response is {' and '.join(kinds) or 'of no type'}, which RESOLVE_CONTENT_TYPES does not allow."
        )
    decision = _Decision(act=Act.RESOLVE, as_seen=as_seen, witness=witness, using=using, note=note, by=by)
    return _give_response(id, response, decision)


def may_be_given(content_type: str) -> bool:
    """Whether ``RESOLVE_CONTENT_TYPES`` allows this content type for an operator's own response."""
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
    """Make the lease last at least ``seconds`` from now, for an owner that is well but does not renew it.

    For a record in lease mode that is started or processing. Its owner keeps its token, and a lease is never
    shortened. The other arguments are those of ``allow_retry``. Raises ``ValueError`` if ``seconds``
    is less than 1 or more than a century.
    """
    if not 1 <= seconds <= LONGEST:
        raise ValueError(f"seconds is {seconds}; it must be from 1 to {LONGEST}.")

    def change(record: Any) -> dict[str, Any]:
        return {"locked_until": ahead(seconds)} if _lease_left(record, record.now).total_seconds() < seconds else {}

    decision = _Decision(act=Act.EXTEND, as_seen=as_seen, witness=witness, using=using, note=note, by=by)
    return _intervene(id, change, decision)


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


def have_it_watched(record: IdempotencyRecord) -> None:
    """Watch whether the owner renews its lapsed lease. If it does not, a later attempt will not be refused."""
    store = store_for(replace(conf().policy, using=record._state.db))
    if snapshot := store.read(record.pk):
        leases.suspect(snapshot, store)


def version(record: IdempotencyRecord) -> str:
    """Return a text that changes with every event of a record, except replays and renewals of its lease."""
    return f"{record.status} {record.on_hold:d} {record.attempts} {record.updated_at.isoformat()}"


def _give_response(id: UUID, response: StoredResponse, decision: _Decision) -> Done | Refused:
    status = Status.FAILED if response.status >= 400 else Status.COMPLETED
    response = replace(response, headers=(*response.headers, *HARMLESS))

    def change(record: IdempotencyRecord) -> dict[str, Any]:
        check_move(record.status, status, decided=True)
        # The policy of the key's view is not known here, so encrypt whenever there is a key to encrypt with.
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
    # These come first, because on MariaDB later assignments see the new values of earlier ones.
    return {"expires_at": kept_again("expires_at"), "purge_at": kept_again("purge_at"), "updated_at": DatabaseNow()}


def _lacks_second(record: Any, decision: _Decision) -> Refusal | None:
    """Return why a decision that takes two operators is not done yet. The first one's is kept as a proposal."""
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
            if why is Refusal.LAPSED:
                have_it_watched(record)
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
