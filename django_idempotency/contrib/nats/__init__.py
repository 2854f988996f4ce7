from __future__ import annotations

from django_idempotency.contrib.nats.publisher import NATSPublisher
from django_idempotency.contrib.nats.runner import JetStream

__all__ = ["JetStream", "NATSPublisher"]
