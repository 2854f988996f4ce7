"""What a person decides about one record: run it again, fail it for good, answer in its place, extend its lease.

Nobody alive loses a claim by it. A record whose row is locked, or whose lease has not run out, is refused. What is
done is one short transaction under the row's lock, and the token of a claim that it ends is gone: a holder that comes
back can change nothing. Times are the database's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any
from uuid import UUID

from django.db import DatabaseError
from django.db.models import TextChoices
from django.utils.translation import gettext_lazy as _

from django_idempotency import signals
from django_idempotency.conf import conf
from django_idempotency.maintenance import database, in_transaction, kept_again, locked, operation_of
from django_idempotency.models import LIVE, DatabaseNow, IdempotencyRecord, Status, check_move
from django_idempotency.outcomes import StoredResponse
from django_idempotency.policy import LONGEST, Mode
from django_idempotency.privacy import encrypted, is_storable
from django_idempotency.responses import WITHOUT_BODY, marked_failed
from django_idempotency.stores.database import ahead, is_conflict

NO_CLAIM = {"token": None, "locked_at": None, "locked_until": None}


class Act(StrEnum):
    RELEASE = "release"
    FAIL = "fail"
    RESOLVE = "resolve"
    EXTEND = "extend"


class Refusal(TextChoices):
    """Why nothing was done."""

    ABSENT = "absent", _("There is no such record any more.")
    BUSY = "busy", _("Its row is locked: its holder is alive, or somebody else is at it just now.")
    LIVE = "live", _("Its lease has not run out: its holder may be alive.")
    ANSWERED = "answered", _("It has its answer.")
    FREE = "free", _("It is free to retry already.")
    ENDED = "ended", _("Nobody is running it.")
    NO_LEASE = "no_lease", _("In atomic mode there is no lease to extend: the lock of its row is the proof of life.")
    CHANGED = "changed", _("It is no longer as it was when you looked at it.")
    NOT_ENCRYPTED = "not_encrypted", _("The answer could not be encrypted; the log says why.")


@dataclass(frozen=True, slots=True)
class Done:
    """It was done. ``record``: as it was before."""

    record: IdempotencyRecord


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing was done."""

    why: Refusal


Witness = Callable[[IdempotencyRecord], object]


def release(
    id: UUID, *, as_seen: str | None = None, witness: Witness | None = None, using: str | None = None
) -> Done | Refused:
    """Leave the key to its next request, which runs again: its operation did **not** take place.

    For a record that is held, or whose lease ran out and whose row nobody has locked. ``as_seen``: refuse unless the
    record's ``version()`` is still this one. ``witness``: called with the record as it was, in the transaction that
    changes it; its error undoes the change.
    """

    def change(record: IdempotencyRecord) -> dict[str, Any]:
        if record.held:
            return {"held": False}
        check_move(record.status, Status.FAILED)
        return _kept() | {"status": Status.FAILED, "held": False, "reason": "released by hand"} | NO_CLAIM

    return _intervene(Act.RELEASE, id, change, as_seen, witness, using)


def fail(
    id: UUID,
    *,
    detail: str = "",
    status: int = 410,
    as_seen: str | None = None,
    witness: Witness | None = None,
    using: str | None = None,
) -> Done | Refused:
    """End the key with a failure that every retry gets, a problem answer with ``status`` and ``detail``.

    For a record without an answer that nobody alive has. Other arguments as for ``release``. Raises ``ValueError`` for
    a status that is no error's.
    """
    if not 400 <= status <= 599:
        raise ValueError(f"status is {status}; it must be from 400 to 599.")
    return _answer(Act.FAIL, id, marked_failed(status, detail), as_seen, witness, using)


def resolve(
    id: UUID,
    response: StoredResponse,
    *,
    as_seen: str | None = None,
    witness: Witness | None = None,
    using: str | None = None,
) -> Done | Refused:
    """End the key with ``response``, which is replayed: what the operation, which did take place, should have answered.

    For a record without an answer that nobody alive has. Other arguments as for ``release``. Raises ``ValueError`` for
    a status that is none, for headers that can't be sent, and for a body where the status has none.
    """
    if not 200 <= response.status <= 599:
        raise ValueError(f"status is {response.status}; it must be from 200 to 599.")
    if not is_storable(response):
        raise ValueError("The answer has a header that can't be sent, or a body that is no bytes.")
    if response.body and response.status in WITHOUT_BODY:
        raise ValueError(f"An answer with status {response.status} has no body.")
    return _answer(Act.RESOLVE, id, response, as_seen, witness, using)


def extend(
    id: UUID,
    seconds: float,
    *,
    as_seen: str | None = None,
    witness: Witness | None = None,
    using: str | None = None,
) -> Done | Refused:
    """See that the lease lasts ``seconds`` from now at least, for a holder that is well but does not renew.

    For a record in lease mode that is started or processing. Its holder keeps its token, and a lease is never
    shortened. Other arguments as for ``release``. Raises ``ValueError`` unless ``seconds`` are at least 1.
    """
    if not 1 <= seconds <= LONGEST:
        raise ValueError(f"seconds is {seconds}; it must be at least 1.")

    def change(record: Any) -> dict[str, Any]:
        lasts = (record.locked_until - record.now).total_seconds()
        return {"locked_until": ahead(seconds)} if lasts < seconds else {}

    return _intervene(Act.EXTEND, id, change, as_seen, witness, using)


def objection(record: IdempotencyRecord, act: Act, now: datetime) -> Refusal | None:
    """Why ``act`` can't be done to a record as it stands at ``now``, should nobody have its row locked. Pure."""
    live = record.status in LIVE
    if act == Act.EXTEND:
        if not live:
            return Refusal.ENDED
        return Refusal.NO_LEASE if record.mode == Mode.ATOMIC else None
    if live:
        assert record.locked_until is not None  # by constraint
        return Refusal.LIVE if now < record.locked_until else None
    if record.response_status is not None:
        return Refusal.ANSWERED
    return Refusal.FREE if act == Act.RELEASE and not record.held else None


def version(record: IdempotencyRecord) -> str:
    """What changes whenever something happens to a record, replays of its answer and renewals of its lease aside."""
    return f"{record.status} {record.held:d} {record.attempts} {record.updated_at.isoformat()}"


def _answer(
    act: Act, id: UUID, response: StoredResponse, as_seen: str | None, witness: Witness | None, using: str | None
) -> Done | Refused:
    status = Status.FAILED if response.status >= 400 else Status.COMPLETED
    # Whatever the policy of the key's view may be: where there is a key to encrypt with, it may be needed.
    stored = encrypted(response, id) if conf().encryption else response
    if stored is None:
        return Refused(Refusal.NOT_ENCRYPTED)

    def change(record: IdempotencyRecord) -> dict[str, Any]:
        check_move(record.status, status, decided=True)
        answer = {
            "response_status": stored.status,
            "response_headers": stored.headers,
            "response_body": stored.body,
        }
        return _kept() | {"status": status, "held": False, "reason": ""} | NO_CLAIM | answer

    return _intervene(act, id, change, as_seen, witness, using)


def _kept() -> dict[str, Any]:
    # First, because on MariaDB what is set later sees what was set before.
    return {"expires_at": kept_again("expires_at"), "purge_at": kept_again("purge_at"), "updated_at": DatabaseNow()}


def _intervene(
    act: Act,
    id: UUID,
    change: Callable[[IdempotencyRecord], dict[str, Any]],
    as_seen: str | None,
    witness: Witness | None,
    using: str | None,
) -> Done | Refused:
    rows = IdempotencyRecord.objects.using(database(using)).filter(pk=id)

    def run() -> Done | Refused:
        record: Any = locked(rows.defer("response_body").annotate(now=DatabaseNow())).first()
        if record is None:  # SKIP LOCKED can't tell a locked row from none
            return Refused(Refusal.BUSY if rows.exists() else Refusal.ABSENT)
        if as_seen is not None and as_seen != version(record):
            return Refused(Refusal.CHANGED)
        if why := objection(record, act, record.now):
            return Refused(why)
        if values := change(record):
            rows.update(**values)
        if witness is not None:
            witness(record)
        return Done(record)

    try:
        outcome = in_transaction(rows.db, run)
    except DatabaseError as error:
        if not is_conflict(error):
            raise
        return Refused(Refusal.BUSY)
    if isinstance(outcome, Done):
        signals.send(signals.intervened, operation_of(outcome.record), act=act)
    return outcome
