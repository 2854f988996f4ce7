"""Describe a record to operators: what it is, what happens by itself, and what is safe to do now."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connections
from django.db.models import TextChoices
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from django_idempotency.maintenance.formatting import age
from django_idempotency.models import LIVE, IdempotencyRecord, Status
from django_idempotency.policy import Mode
from django_idempotency.values.outcomes import Snapshot
from django_idempotency.values.printable import printable


class Standing(TextChoices):
    """How a record stands, for an operator. The value is for programs, the label for people."""

    RUNNING = "running", gettext_lazy("running")
    LAPSED = "lapsed", gettext_lazy("lapsed")
    ON_HOLD = "on hold", gettext_lazy("on hold")
    RETRYABLE = "free to retry", gettext_lazy("free to retry")
    FAILED = "failed", gettext_lazy("failed")
    COMPLETED = "completed", gettext_lazy("completed")


def standing(record: Snapshot | IdempotencyRecord) -> Standing:
    """Return how ``record``, which has ``now``, stands. Pure."""
    if record.status in LIVE:
        assert record.locked_until is not None  # by contract
        now: datetime = record.now  # type: ignore[union-attr]
        return Standing.LAPSED if record.locked_until < now else Standing.RUNNING
    if record.on_hold:
        return Standing.ON_HOLD
    if record.response_status is None:
        return Standing.RETRYABLE
    return Standing(record.status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Printable sentences: ``what`` a record is, what happens ``by_itself``, and what is ``safe`` to do now."""

    what: str
    by_itself: str
    safe: str


def standing_of(record: Any) -> Standing:
    """Return the standing of a record that was read with ``now`` and ``locked`` (``RowLocked``).

    A locked row means that an owner is at work.
    """
    found = standing(record)
    return Standing.RUNNING if found is Standing.LAPSED and record.locked else found


def shown_reason(record: Any) -> str:
    """Return the reason of ``record``, printable and in the active language; empty if it has none.

    Reasons are stored and logged in English.
    """
    return printable(_(record.reason))


def advice(record: Any) -> Advice:
    """Return what an operator should know about a record that was read with ``now`` and ``locked``."""
    match standing_of(record):
        case Standing.ON_HOLD:
            return _on_hold(record)
        case Standing.RETRYABLE:
            return _retryable(record)
        case Standing.FAILED | Standing.COMPLETED:
            return _ended(record)
        case _ if record.mode == Mode.LEASE:
            return _leased(record)
        case _:
            return _atomic(record)


def _on_hold(record: Any) -> Advice:
    reason = shown_reason(record) or _("no reason is known")
    return Advice(
        what=_("On hold for %(age)s: it is not known whether the operation took place (%(reason)s).")
        % {"age": _ago(record, "updated_at"), "reason": reason},
        by_itself=_("Nothing. It never runs again and is never deleted. Retries get 409 until an operator decides."),
        safe=_(
            "Find out whether the operation took place. If it did, resolve it with its response. If it did not, "
            "allow a retry. If it must no longer take place, mark it as failed."
        ),
    )


def _retryable(record: Any) -> Advice:
    reason = shown_reason(record) or _("no reason is known")
    return Advice(
        what=_("Free to retry: the last run failed %(age)s ago (%(reason)s).")
        % {"age": _ago(record, "updated_at"), "reason": reason},
        by_itself=_("The next request with the key runs again. Without one, the record is deleted eventually."),
        safe=_("Nothing has to be done. If it must never run again, mark it as failed or resolve it."),
    )


def _ended(record: Any) -> Advice:
    what = _("It got its response, %(status)s, %(age)s ago.") % {
        "status": record.response_status,
        "age": _ago(record, "updated_at"),
    }
    if record.expires_at > record.now:
        left = age((record.expires_at - record.now).total_seconds())
        by_itself = _("Every retry gets this response for another %(left)s.") % {"left": left}
    else:
        by_itself = _("The key has expired: the next request with it runs as new.")
    return Advice(
        what=what, by_itself=by_itself, safe=_("Nothing has to be done, and nothing can be done: it has ended.")
    )


def _leased(record: Any) -> Advice:
    claimed, lease = _ago(record, "locked_at"), record.locked_until - record.now
    if lease >= timedelta(0):
        what = _("In flight for %(claimed)s; its lease ends in %(left)s, so its owner may be alive.")
        what %= {"claimed": claimed, "left": age(lease.total_seconds())}
        return Advice(
            what=what,
            by_itself=_("The owner renews the lease while it runs, and then ends. If it does not: %(lapsed)s")
            % {"lapsed": _when_lapsed(record)},
            safe=_("Wait. If the owner is well but does not renew its lease, extend the lease."),
        )
    what = _("Stuck: in flight for %(claimed)s, and its lease ran out %(late)s ago. Its owner is gone, or cut off.")
    return Advice(
        what=what % {"claimed": claimed, "late": age(-lease.total_seconds())},
        by_itself=_when_lapsed(record),
        safe=_(
            "If that is soon, wait for it. Before you allow a retry, resolve it or mark it as failed, find out "
            "whether the operation took place."
        ),
    )


def _when_lapsed(record: Any) -> str:
    if record.hold_on_crash:
        return _("The next request with the key, or the reaper, puts it on hold.")
    return _("The next request with the key runs again; without one, the reaper frees it.")


def _atomic(record: Any) -> Advice:
    claimed = {"claimed": _ago(record, "locked_at")}
    if record.status == Status.STARTED:
        what = _("Accepted %(claimed)s ago, but not started.")
    elif record.locked:
        return Advice(
            what=_("In flight for %(claimed)s: a transaction has its row locked, so its owner is alive.") % claimed,
            by_itself=_("When that transaction ends, the response is stored, or nothing is left of the run."),
            safe=_("Wait. To stop it, end its transaction: nothing that it wrote in this database remains."),
        )
    elif connections[record._state.db].vendor != "postgresql":
        return Advice(
            what=_("In flight for %(claimed)s. This database does not show whether its owner is alive.") % claimed,
            by_itself=_("If its owner is gone, the next request with the key runs again, or the reaper frees it."),
            safe=_("Wait. Allowing a retry is refused while its owner has the row locked."),
        )
    elif record.locked_until >= record.now:
        what = _("In flight for %(claimed)s, and its row is not locked: its owner is about to begin, or is gone.")
    else:
        what = _("Stuck: in flight for %(claimed)s, and its row is not locked. Its owner is gone.")
    return Advice(
        what=what % claimed,
        by_itself=_("The next request with the key runs again; without one, the reaper frees it."),
        safe=_(
            "Nothing has to be done. A retry is safe as far as this database goes: what the owner wrote here was rolled"
            " back."
        ),
    )


def _ago(record: Any, column: str) -> str:
    return age((record.now - getattr(record, column)).total_seconds())
