"""Records that no run has made, such as many at once, or one with texts that no client can send."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import factory

from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.values.keys import record_id

DAY = timedelta(days=1)


class RecordFactory(factory.django.DjangoModelFactory[IdempotencyRecord]):
    """A completed record without a body, which expires tomorrow."""

    class Meta:
        model = IdempotencyRecord

    class Params:
        held = factory.Trait(
            mode="lease",
            hold_on_crash=True,
            status=Status.FAILED,
            on_hold=True,
            response_status=None,
            response_headers=None,
        )

    scope = "s"
    key = factory.Sequence("k{}".format)
    id = factory.LazyAttribute(lambda record: record_id(record.scope, record.key))
    method = "POST"
    path = "/pay/"
    fingerprint = bytes(32)
    mode = "atomic"
    status = Status.COMPLETED
    created_at = factory.LazyFunction(lambda: datetime.now(UTC))
    updated_at = factory.SelfAttribute("created_at")
    expires_at = factory.LazyAttribute(lambda record: record.created_at + DAY)
    purge_at = factory.SelfAttribute("expires_at")
    response_status = 200
    response_headers = factory.LazyFunction(list)
