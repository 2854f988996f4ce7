from __future__ import annotations

from django_idempotency.contrib.rabbitmq.publisher import RabbitMQPublisher
from django_idempotency.contrib.rabbitmq.runner import RabbitMQ

__all__ = ["RabbitMQ", "RabbitMQPublisher"]
