"""The record of a key, and the only table of the moves from one status to another."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, models
from django.db.models import F, Func, Q, Value
from django.db.models.functions import Now
from django.utils.timezone import get_default_timezone
from django.utils.translation import gettext_lazy as _

from django_idempotency.values.exceptions import IllegalMove
from django_idempotency.values.keys import id_range, is_record_id
from django_idempotency.values.policy import Atomic, Lease
from django_idempotency.values.printable import printable
from django_idempotency.values.rules import LONGEST

if not apps.is_installed("django_idempotency"):
    raise ImproperlyConfigured(
        "Add 'django_idempotency' to INSTALLED_APPS and run migrate: what was imported,"
        " such as IdempotencyMiddleware, needs its table."
    )


class Status(models.TextChoices):
    STARTED = "started", _("started")
    PROCESSING = "processing", _("processing")
    COMPLETED = "completed", _("completed")
    FAILED = "failed", _("failed")


MODES = {Atomic.word: _("atomic"), Lease.word: _("lease")}
LIVE = (Status.STARTED, Status.PROCESSING)
TERMINAL = (Status.COMPLETED, Status.FAILED)

# From each status to those that may follow. A record that has expired and is used again
# moves from a terminal status to PROCESSING.
MOVES: Mapping[str, tuple[Status, ...]] = {
    Status.STARTED: (Status.PROCESSING, Status.FAILED),
    Status.PROCESSING: (Status.PROCESSING, Status.COMPLETED, Status.FAILED),
    Status.FAILED: (Status.PROCESSING,),
    Status.COMPLETED: (),
}
# The moves of a record without a response when an operator gives it one.
MOVES_BY_DECISION: Mapping[str, tuple[Status, ...]] = {
    Status.STARTED: (Status.COMPLETED,),
    Status.FAILED: (Status.COMPLETED, Status.FAILED),
}


def check_move(
    before: str, after: str, *, expired: bool = False, decided: bool = False
) -> None:
    """Raise ``IllegalMove`` unless a record may move from status ``before`` to
    ``after``.

    ``decided``: the record has no response yet, and an operator has decided on one.
    """
    legal = MOVES[Status(before)] + (
        MOVES_BY_DECISION.get(before, ()) if decided else ()
    )
    if after not in legal and not (
        expired and before in TERMINAL and after == Status.PROCESSING
    ):
        raise IllegalMove(f"A record can't go from {before} to {after}.")


def in_utc(value: datetime, using: str) -> datetime:
    """Return a time that was read from the database ``using`` in UTC, so that it can be
    compared with others.

    Python compares two times in the same zone by their local time, which shows one hour
    twice in autumn. With ``USE_TZ = False`` times have no zone. A time from PostgreSQL
    is still unambiguous, because of its ``fold``. Other databases have no zones:
    ``DatabaseNow`` writes UTC there, so the time read is UTC, whatever its ``tzinfo``
    says.
    """
    if value.tzinfo is UTC:
        return value
    if connections[using].vendor != "postgresql":
        return value.replace(tzinfo=UTC)
    zoned = value if value.tzinfo else value.replace(tzinfo=get_default_timezone())
    return zoned.astimezone(UTC)


class DatabaseNow(Now):
    """The time of the database's clock at the start of the statement, in UTC on every
    database.
    """

    def as_mysql(self, compiler, connection, **extra):  # type: ignore[no-untyped-def]
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **extra)

    def as_sqlite(self, compiler, connection, **extra):  # type: ignore[no-untyped-def]
        # As Django writes times. SQLite compares text, and "12:00:05.000" is more than
        # "12:00:05".
        time = "STRFTIME('%%%%Y-%%%%m-%%%%d %%%%H:%%%%M:%%%%f000', 'NOW')"
        template = f"REPLACE({time}, '.000000', '')"
        return self.as_sql(compiler, connection, template=template, **extra)


class RowLocked(Func):
    """Whether a running transaction has locked the record's row. Always false on
    databases other than PostgreSQL.

    On PostgreSQL a locked row has the number of the locking transaction in ``xmax``,
    and a running transaction holds a lock on its own number. This expression therefore
    takes no lock and blocks no request. On the other databases, only an attempt to lock
    the row could tell.
    """

    template = "FALSE"
    output_field = models.BooleanField()

    def __init__(self) -> None:
        super().__init__(F("id"))

    def as_postgresql(
        self, compiler: Any, connection: Any, **extra: Any
    ) -> tuple[str, list[Any]]:
        (column,) = self.get_source_expressions()
        running = (
            "SELECT transactionid FROM pg_locks WHERE locktype = 'transactionid' AND"
            " granted"
        )
        # its name before Django 6.1
        quote = (
            getattr(compiler, "quote_name", None) or compiler.quote_name_unless_alias
        )
        return f"({quote(column.alias)}.xmax IN ({running}))", []


class RecordQuerySet(models.QuerySet["IdempotencyRecord"]):
    def with_key(self, key: str) -> RecordQuerySet:
        """Return the records of a raw key in every scope, which are one range of the
        primary key.
        """
        return self.filter(pk__range=id_range(key), key=key)

    def with_id(self, id: UUID) -> RecordQuerySet:
        """Return the record with an id, if that is one that a record can have: MariaDB
        refuses some others.
        """
        return self.filter(pk=id) if is_record_id(id) else self.none()

    def live(self) -> RecordQuerySet:
        return self.filter(status__in=LIVE)

    def stuck(self, older_than: float = 0) -> RecordQuerySet:
        """Return those whose lease lapsed more than ``older_than`` seconds ago, oldest
        first.

        They include the records of owners in atomic mode that are still alive.
        """
        lapsed = DatabaseNow() - Value(timedelta(seconds=older_than))
        return self.live().filter(locked_until__lt=lapsed).order_by("locked_until")

    def abandoned(self) -> RecordQuerySet:
        """Return those that are ``stuck`` and whose row no running transaction has
        locked, so no owner is at work.
        """
        return self.stuck().filter(~Q(RowLocked()))

    def awaiting_operator(self) -> RecordQuerySet:
        undecided = Q(status=Status.FAILED, response_status__isnull=True)
        return self.filter(undecided, on_hold=True).order_by("updated_at")

    def purgeable(self) -> RecordQuerySet:
        """Return those that may be deleted. Records on hold wait for an operator
        without a time limit.
        """
        return self.filter(
            status__in=TERMINAL, purge_at__lt=DatabaseNow(), on_hold=False
        )

    def kept_for_good(self) -> RecordQuerySet:
        century = DatabaseNow() + Value(timedelta(seconds=LONGEST))
        return self.filter(status__in=TERMINAL, purge_at__gt=century)

    def with_needless_body(self) -> RecordQuerySet:
        """Return those past ``expires_at`` that are kept for audit and still have a
        body.
        """
        kept_for_audit = Q(response_body__isnull=False, purge_at__gt=F("expires_at"))
        return self.filter(kept_for_audit, expires_at__lt=DatabaseNow())


def _exactly(condition: Q, *, names: tuple[str, ...]) -> Q:
    """Return the condition that all ``names`` are set if ``condition`` holds, and that
    all are NULL otherwise.
    """
    all_set = Q(**{f"{name}__isnull": False for name in names})
    none_set = Q(**{f"{name}__isnull": True for name in names})
    return (condition & all_set) | (~condition & none_set)


class IdempotencyRecord(models.Model):
    """One key of one scope: who may run it, and the result.

    The columns that never change come first, because PostgreSQL logs only what follows
    the first changed byte of an updated row.
    """

    id = models.UUIDField(primary_key=True, editable=False)
    scope = models.TextField(_("scope"))
    key = models.CharField(_("key"), max_length=255)
    method = models.CharField(_("method"), max_length=32)
    path = models.TextField(_("path"))
    fingerprint = models.BinaryField(_("fingerprint"), max_length=36)
    mode = models.CharField(_("mode"), max_length=16, choices=MODES)
    hold_on_crash = models.BooleanField(_("hold on crash"), db_default=False)
    created_at = models.DateTimeField(_("created at"))
    status = models.CharField(_("status"), max_length=16, choices=Status)
    attempts = models.IntegerField(_("attempts"), db_default=1)
    on_hold = models.BooleanField(_("on hold"), db_default=False)
    reason = models.TextField(_("reason"), db_default="")
    token = models.UUIDField(_("fencing token"), null=True)
    locked_at = models.DateTimeField(_("locked at"), null=True)
    locked_until = models.DateTimeField(_("locked until"), null=True)
    updated_at = models.DateTimeField(_("updated at"))
    expires_at = models.DateTimeField(_("expires at"))
    purge_at = models.DateTimeField(_("purge at"))
    replays = models.BigIntegerField(_("replays"), db_default=0)
    last_replayed_at = models.DateTimeField(_("last replayed at"), null=True)
    response_status = models.SmallIntegerField(_("response status"), null=True)
    response_headers = models.JSONField(_("response headers"), null=True)
    response_body = models.BinaryField(_("response body"), null=True)

    objects = RecordQuerySet.as_manager()

    class Meta:
        verbose_name = _("idempotency record")
        verbose_name_plural = _("idempotency records")
        db_table = "django_idempotency_record"
        default_permissions = ("view",)
        permissions = [
            ("view_response_idempotencyrecord", "Can view the stored response body"),
            ("allow_retry_idempotencyrecord", "Can allow a key to be retried"),
            ("fail_idempotencyrecord", "Can mark a key as failed for good"),
            ("resolve_idempotencyrecord", "Can resolve a key on hold with a response"),
            ("extend_idempotencyrecord", "Can extend the lease of a key"),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(status__in=Status.values), name="idempotency_record_status"
            ),
            models.CheckConstraint(
                condition=Q(mode__in=[*MODES]), name="idempotency_record_mode"
            ),
            models.CheckConstraint(
                condition=_exactly(
                    Q(status__in=LIVE), names=("token", "locked_at", "locked_until")
                ),
                name="idempotency_record_claim",
            ),
            models.CheckConstraint(
                condition=(
                    Q(
                        status__in=TERMINAL,
                        response_status__isnull=False,
                        response_headers__isnull=False,
                    )
                    | Q(
                        status__in=[*LIVE, Status.FAILED],
                        response_status__isnull=True,
                        response_headers__isnull=True,
                        response_body__isnull=True,
                    )
                ),
                name="idempotency_record_response",
            ),
            models.CheckConstraint(
                condition=Q(on_hold=False)
                | Q(status=Status.FAILED, response_status__isnull=True),
                name="idempotency_record_on_hold",
            ),
            models.CheckConstraint(
                condition=Q(attempts__gte=1) & Q(purge_at__gte=F("expires_at")),
                name="idempotency_record_sane",
            ),
        ]
        indexes = [
            # Records on hold have no locked_until and come last. So this index has all
            # that makes a partition stay.
            models.Index(
                fields=["locked_until"],
                condition=Q(status__in=LIVE) | Q(on_hold=True),
                name="idempotency_record_reap",
            ),
            models.Index(
                fields=["purge_at"],
                condition=Q(status__in=TERMINAL),
                name="idempotency_record_purge",
            ),
            # Empty, and therefore free, unless a policy keeps records for audit after
            # they expire.
            models.Index(
                fields=["expires_at"],
                condition=Q(response_body__isnull=False, purge_at__gt=F("expires_at")),
                name="idempotency_record_bodies",
            ),
            # Records that wait for an operator or a retry. A record with a response is
            # never in it.
            models.Index(
                fields=["on_hold", "updated_at"],
                condition=Q(status=Status.FAILED, response_status__isnull=True),
                name="idempotency_record_undecided",
            ),
        ]

    def __str__(self) -> str:
        return printable(f"{self.scope} {self.key}")
