"""The events that wait to be published, and which relay publishes them."""

from __future__ import annotations

from typing import ClassVar

from django.db import models
from django.db.models import Q
from django.utils.translation import gettext_lazy as _

from django_idempotency.extending.stores import DatabaseNow

LANES = 64


class Status(models.TextChoices):
    PENDING = "pending", _("pending")
    DEAD = "dead", _("dead letter")


TRIED = Q(attempts__gte=1, status__in=[Status.PENDING, Status.DEAD])


class OutboxEvent(models.Model):
    """An event, from the transaction that published it until its publisher has
    confirmed it. Then it is deleted.

    ``id`` orders the events of a key. Consumers know the event by its ``event_id``.
    """

    id = models.BigAutoField(primary_key=True)
    event_id = models.UUIDField(_("event id"), unique=True, editable=False)
    publisher = models.CharField(_("publisher"), max_length=64)
    lane = models.SmallIntegerField(_("lane"))
    topic = models.CharField(_("topic"), max_length=255)
    key = models.CharField(_("key"), max_length=255, blank=True)
    payload = models.BinaryField(_("payload"))
    content_type = models.CharField(_("content type"), max_length=255)
    headers = models.JSONField(_("headers"), default=dict)
    status = models.CharField(
        _("status"), max_length=16, choices=Status, default=Status.PENDING
    )
    attempts = models.PositiveIntegerField(_("failed attempts"), default=0)
    error = models.TextField(_("last error"), blank=True)
    created_at = models.DateTimeField(_("created at"), db_default=DatabaseNow())
    available_at = models.DateTimeField(_("next attempt at"), null=True)
    given_up_at = models.DateTimeField(_("given up at"), null=True)

    objects: ClassVar[models.Manager[OutboxEvent]] = models.Manager()

    class Meta:
        verbose_name = _("outbox event")
        verbose_name_plural = _("outbox events")
        db_table = "django_idempotency_outbox_event"
        indexes = [
            models.Index(
                "publisher",
                "lane",
                "id",
                name="outbox_event_pending",
                condition=Q(status=Status.PENDING, attempts=0),
            ),
            # The others have only events that have failed, however many of them wait
            # for their next attempt. Each has a condition that fits its own statements
            # only: by the statistics of a table that is empty most of the time,
            # PostgreSQL would take the wrong one.
            models.Index(
                "publisher",
                "lane",
                "available_at",
                name="outbox_event_due",
                condition=Q(status=Status.PENDING, attempts__gt=0),
            ),
            models.Index(
                "publisher",
                "lane",
                "key",
                "id",
                name="outbox_event_failed",
                condition=Q(attempts__gt=0, status__in=[Status.PENDING, Status.DEAD])
                & ~Q(key=""),
            ),
            models.Index(
                "publisher",
                "status",
                "lane",
                "id",
                name="outbox_event_tried",
                condition=TRIED,
            ),
        ]
        constraints = [
            models.CheckConstraint(
                condition=Q(status__in=Status.values), name="outbox_event_status"
            ),
            models.CheckConstraint(
                condition=Q(lane__range=(0, LANES - 1)), name="outbox_event_lane"
            ),
            models.CheckConstraint(
                condition=Q(status=Status.PENDING, given_up_at__isnull=True)
                | Q(status=Status.DEAD, given_up_at__isnull=False),
                name="outbox_event_given_up_at",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.topic} {self.event_id}"


class Relay(models.Model):
    """A relay at work for one publisher. Its ``id`` is the fencing token of its lanes.

    Without this row, the relay has no lanes. One row is renewed, however many lanes it
    has.
    """

    id = models.UUIDField(primary_key=True, editable=False)
    publisher = models.CharField(max_length=64)
    lease_until = models.DateTimeField()

    objects: ClassVar[models.Manager[Relay]] = models.Manager()

    class Meta:
        db_table = "django_idempotency_outbox_relay"

    def __str__(self) -> str:
        return f"{self.publisher} {self.id}"


class Lane(models.Model):
    """One of the parts that a publisher's events are divided into by key. One relay at
    a time publishes its events.
    """

    publisher = models.CharField(max_length=64)
    number = models.SmallIntegerField()
    relay_id = models.UUIDField(null=True)

    objects: ClassVar[models.Manager[Lane]] = models.Manager()

    class Meta:
        db_table = "django_idempotency_outbox_lane"
        constraints = [
            models.UniqueConstraint(
                fields=["publisher", "number"], name="outbox_lane_number"
            )
        ]

    def __str__(self) -> str:
        return f"{self.publisher} {self.number}"
