"""The record of a key, and the one table of the moves it can make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from django.db import models
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils.translation import gettext_lazy as _

from django_idempotency import privacy
from django_idempotency.exceptions import IllegalMove
from django_idempotency.keys import id_range
from django_idempotency.outcomes import StoredResponse
from django_idempotency.policy import Mode


class Status(models.TextChoices):
    STARTED = "started", _("started")
    PROCESSING = "processing", _("processing")
    COMPLETED = "completed", _("completed")
    FAILED = "failed", _("failed")


ABSENT = None
LIVE = (Status.STARTED, Status.PROCESSING)
TERMINAL = (Status.COMPLETED, Status.FAILED)

# From what to what. A record that is expired and comes to life again moves from a terminal status to PROCESSING.
MOVES: Mapping[Status | None, frozenset[Status | None]] = {
    ABSENT: frozenset({Status.STARTED, Status.PROCESSING}),
    Status.STARTED: frozenset({Status.PROCESSING, Status.FAILED}),
    Status.PROCESSING: frozenset({Status.PROCESSING, Status.COMPLETED, Status.FAILED, ABSENT}),
    Status.FAILED: frozenset({Status.PROCESSING}),
    Status.COMPLETED: frozenset(),
}
MOVES_ONCE_EXPIRED = frozenset({Status.PROCESSING, ABSENT})
# Of a record without an answer, when a person gives it one.
MOVES_BY_DECISION: Mapping[str | None, frozenset[str | None]] = {
    Status.STARTED: frozenset({Status.COMPLETED}),
    Status.FAILED: frozenset({Status.COMPLETED, Status.FAILED}),
}


def check_move(before: str | None, after: str | None, *, expired: bool = False, decided: bool = False) -> None:
    """Raise ``IllegalMove`` unless a record may go from the one status to the other (``None``: no record).

    ``decided``: it has no answer yet, and a person has decided on one.
    """
    legal = MOVES[before if before is None else Status(before)]
    if after in legal or (expired and before in TERMINAL and after in MOVES_ONCE_EXPIRED):
        return
    if decided and after in MOVES_BY_DECISION.get(before, ()):
        return
    raise IllegalMove(f"A record can't go from {before or 'absent'} to {after or 'absent'}.")


class DatabaseNow(Now):
    """The database's clock at the start of the statement, in UTC on every database."""

    def as_mysql(self, compiler, connection, **extra):  # type: ignore[no-untyped-def]
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **extra)


class RecordQuerySet(models.QuerySet["IdempotencyRecord"]):
    def with_key(self, key: str) -> RecordQuerySet:
        """The records of a raw key in every scope: one range of the primary key."""
        return self.filter(pk__range=id_range(key), key=key)

    def live(self) -> RecordQuerySet:
        return self.filter(status__in=LIVE)

    def terminal(self) -> RecordQuerySet:
        return self.filter(status__in=TERMINAL)


def _exactly(condition: Q, *, names: tuple[str, ...]) -> Q:
    """Each of ``names`` is set where ``condition`` holds and NULL where it does not."""
    all_set = Q(**{f"{name}__isnull": False for name in names})
    none_set = Q(**{f"{name}__isnull": True for name in names})
    return (condition & all_set) | (~condition & none_set)


class IdempotencyRecord(models.Model):
    """One key of one scope: who may run it, and what came of it.

    The columns that never change come first: PostgreSQL logs only what follows the first changed byte of an update.
    """

    id = models.UUIDField(primary_key=True, editable=False)
    scope = models.TextField(_("scope"))
    key = models.CharField(_("key"), max_length=255)
    method = models.CharField(_("method"), max_length=32)
    path = models.TextField(_("path"))
    fingerprint = models.BinaryField(_("fingerprint"), max_length=32)
    mode = models.CharField(_("mode"), max_length=16, choices=[(mode.value, mode.value) for mode in Mode])
    hold_on_crash = models.BooleanField(_("hold on crash"), db_default=False)
    created_at = models.DateTimeField(_("created at"))
    status = models.CharField(_("status"), max_length=16, choices=Status)
    attempts = models.IntegerField(_("attempts"), db_default=1)
    held = models.BooleanField(_("held"), db_default=False)
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

    objects: ClassVar[models.Manager[IdempotencyRecord]] = RecordQuerySet.as_manager()

    class Meta:
        verbose_name = _("idempotency record")
        verbose_name_plural = _("idempotency records")
        db_table = "django_idempotency_record"
        default_permissions = ("view",)
        permissions = [
            ("view_response_body", "Can view the stored response body"),
            ("release_idempotencyrecord", "Can release a key to its next request"),
            ("fail_idempotencyrecord", "Can mark a key as failed for good"),
            ("resolve_idempotencyrecord", "Can resolve a held key with an answer"),
            ("extend_idempotencyrecord", "Can extend the lease of a key"),
        ]
        constraints = [
            models.CheckConstraint(condition=Q(status__in=Status.values), name="idempotency_record_status"),
            models.CheckConstraint(condition=Q(mode__in=[mode.value for mode in Mode]), name="idempotency_record_mode"),
            models.CheckConstraint(
                condition=_exactly(Q(status__in=LIVE), names=("token", "locked_at", "locked_until")),
                name="idempotency_record_claim",
            ),
            models.CheckConstraint(
                condition=(
                    Q(status=Status.COMPLETED, response_status__isnull=False, response_headers__isnull=False)
                    | Q(status=Status.FAILED, response_status__isnull=False, response_headers__isnull=False)
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
                condition=Q(held=False) | Q(status=Status.FAILED, response_status__isnull=True),
                name="idempotency_record_held",
            ),
            models.CheckConstraint(
                condition=Q(attempts__gte=1) & Q(purge_at__gte=F("expires_at")), name="idempotency_record_sane"
            ),
        ]
        indexes = [
            # The held ones come last in it, without a time: all that keeps a partition from going is in one index.
            models.Index(
                fields=["locked_until"],
                condition=Q(status__in=LIVE) | Q(held=True),
                name="idempotency_record_reap",
            ),
            models.Index(fields=["purge_at"], condition=Q(status__in=TERMINAL), name="idempotency_record_purge"),
            # Empty, and free, unless a policy keeps its records longer than it deduplicates by them.
            models.Index(
                fields=["expires_at"],
                condition=Q(response_body__isnull=False, purge_at__gt=F("expires_at")),
                name="idempotency_record_bodies",
            ),
            # What waits for a person or a retry; nothing that ended with an answer is ever in it.
            models.Index(
                fields=["held", "updated_at"],
                condition=Q(status=Status.FAILED, response_status__isnull=True),
                name="idempotency_record_undecided",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.scope} {self.key}"

    @property
    def answer(self) -> StoredResponse | None:
        """What a replay answers, decrypted if it is encrypted; ``None`` if there is no answer."""
        if self.response_status is None:
            return None
        headers = tuple((name, value) for name, value in self.response_headers or ())
        body = None if self.response_body is None else bytes(self.response_body)
        return privacy.opened(StoredResponse(self.response_status, headers, body), self.pk)


class IdempotencyTally(models.Model):
    """How often one thing happened at one view within five minutes; whose key it was, or which, is not in it."""

    pk = models.CompositePrimaryKey("since", "view", "event")
    since = models.DateTimeField(_("since"))
    view = models.CharField(_("view"), max_length=200)
    event = models.CharField(_("event"), max_length=32)
    count = models.BigIntegerField(_("count"))

    objects: ClassVar[models.Manager[IdempotencyTally]] = models.Manager()

    class Meta:
        verbose_name = _("idempotency tally")
        verbose_name_plural = _("idempotency tallies")
        db_table = "django_idempotency_tally"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.view} {self.event}: {self.count}"
