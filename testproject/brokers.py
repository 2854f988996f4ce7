"""The broker that ``BROKER_URL`` names."""

from __future__ import annotations

import asyncio
import socket
from typing import Any
from urllib.parse import urlsplit

PORTS = {"amqp": 5672, "amqps": 5671, "nats": 4222, "kafka": 9092}
WINGS = "django_idempotency.contrib"


def publishers(url: str) -> dict[str, Any]:
    """Return the outbox's publishers. Without a URL there are none, and events are kept
    until there is one.
    """
    address = urlsplit(url)
    match address.scheme:
        case "":
            return {}
        case "amqp" | "amqps":
            return _default(f"{WINGS}.rabbitmq.RabbitMQPublisher", url=url)
        case "nats":
            return _default(f"{WINGS}.nats.NATSPublisher", servers=url)
        case "kafka":
            return _default(
                f"{WINGS}.kafka.KafkaPublisher",
                config={"bootstrap.servers": address.netloc},
            )
    raise ValueError(
        f"BROKER_URL is {url!r}; it must start with one of {', '.join(PORTS)}."
    )


def _default(backend: str, **options: Any) -> dict[str, Any]:
    return {"default": {"BACKEND": backend, "OPTIONS": options}}


def listens(url: str) -> bool:
    """Whether something listens at the broker's address (decided within a second)."""
    address = urlsplit(url)
    if not address.scheme:
        return False
    try:
        target = (
            address.hostname or "127.0.0.1",
            address.port or PORTS[address.scheme],
        )
        socket.create_connection(target, timeout=1).close()
    except OSError:
        return False
    return True


def forget(url: str, topic: str) -> None:
    """Delete the queue or the stream of the consumer of ``topic``, if it is there.
    Kafka's topics stay.
    """
    match urlsplit(url).scheme:
        case "amqp" | "amqps":
            _delete_queue(url, topic)
        case "nats":
            asyncio.run(_delete_stream(url, stream_of(topic)))


def stream_of(topic: str) -> str:
    """Return the name of the topic's stream, without dots: stream names have none."""
    return topic.replace(".", "-")


def _delete_queue(url: str, queue: str) -> None:
    import kombu

    with kombu.Connection(url, connect_timeout=2) as connection:
        channel: Any = connection.channel()
        channel.queue_delete(queue)


async def _delete_stream(url: str, stream: str) -> None:
    import nats
    from nats.js.errors import NotFoundError

    client = await nats.connect(
        url, connect_timeout=2, allow_reconnect=False, max_reconnect_attempts=1
    )
    try:
        await client.jetstream().delete_stream(stream)
    except NotFoundError:
        pass
    finally:
        await client.close()
