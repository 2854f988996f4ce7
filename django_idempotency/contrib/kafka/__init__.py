from __future__ import annotations

from django_idempotency.contrib.kafka.publisher import KafkaPublisher
from django_idempotency.contrib.kafka.runner import Kafka

__all__ = ["Kafka", "KafkaPublisher"]
