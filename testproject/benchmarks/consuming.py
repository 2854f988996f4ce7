"""What handling a message once costs: the bare handler, ``consume()``, a duplicate, and ``consume_many()``.

Beside them the handler with the record's three statements and nothing else of this package: what ``consume()`` can't
get below.

    python -m testproject.benchmarks.consuming --messages 4000

On one connection, ``DATABASE_URL``'s; they take turns in a random order. A rate is the median of the rounds, and so is
what part it is of the bare handler's, with the quartiles: each round has a part of its own, as the load of others
changes.
"""

from __future__ import annotations

import argparse
import json
import random
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from statistics import median, quantiles
from typing import Any

import django
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

ROUND = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=4000, help="of each kind")
    asked = parser.parse_args()
    django.setup()
    print(json.dumps(measure(max(1, asked.messages // ROUND))), flush=True)


def measure(rounds: int) -> dict[str, Any]:
    """Messages a second of each kind, what part of the bare handler's rate that is, and statements a message."""
    from django_idempotency.conf import conf
    from django_idempotency.consumers import Consumer, Message
    from django_idempotency.outcomes import Claimed, Operation, StoredResponse
    from django_idempotency.stores import store_for
    from testproject.models import Receipt

    def handle(message: Message, context: object) -> None:
        Receipt.objects.create(event=message.id, reference="bench")

    consumer = Consumer("bench", handle)

    def bare(messages: Sequence[Message]) -> None:
        for message in messages:
            with transaction.atomic():
                handle(message, None)

    def statements(messages: Sequence[Message]) -> None:
        store, result = store_for(conf().policy), StoredResponse(200, body=b"null")
        for message in messages:
            claimed = store.claim(Operation("bench", message.id, bytes(32)), uuid.uuid4())
            assert isinstance(claimed, Claimed)
            with transaction.atomic():
                locked = store.lock(claimed)
                handle(message, None)
                assert locked
                assert store.complete(locked, result)

    def once(messages: Sequence[Message]) -> None:
        for message in messages:
            consumer.consume(message)

    kinds: dict[str, Callable[[Sequence[Message]], object]] = {
        "bare handler": bare,
        "statements alone": statements,
        "consume": once,
        "duplicate": once,
        "consume_many": consumer.consume_many,
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        fresh = _messages()
        given = {kind: _messages() for kind in kinds} | {"consume": fresh, "duplicate": fresh}
        for kind in _shuffled(kinds):
            begun = time.perf_counter()
            kinds[kind](given[kind])
            if number:  # the first round warms up
                seconds[kind].append(time.perf_counter() - begun)
    return {kind: _told(taken, seconds["bare handler"]) for kind, taken in seconds.items()} | {
        "statements": _statements(consumer)
    }


def _shuffled(kinds: Iterable[str]) -> list[str]:
    """In a random order, but a duplicate after its first delivery."""
    order = [kind for kind in kinds if kind != "duplicate"]
    random.shuffle(order)
    order.insert(order.index("consume") + 1, "duplicate")
    return order


def _told(taken: Sequence[float], bare: Sequence[float]) -> dict[str, float]:
    parts = [reference / seconds for seconds, reference in zip(taken, bare, strict=True)]
    low, _middle, high = quantiles(parts, n=4) if len(parts) > 1 else parts * 3
    figures = {"of bare": median(parts), "low": low, "high": high}
    return {"/s": round(ROUND / median(taken))} | {name: round(part, 2) for name, part in figures.items()}


def _messages() -> list[Any]:
    from django_idempotency.consumers import Message

    return [Message("bench", str(uuid.uuid4()), b'{"amount": 5}') for _number in range(ROUND)]


def _statements(consumer: Any) -> dict[str, int]:
    (message, *_others) = _messages()
    counts = []
    for _time in range(2):
        with CaptureQueriesContext(connection) as captured:
            consumer.consume(message)
        counts.append(len(captured))
    return {"first": counts[0], "duplicate": counts[1]}


if __name__ == "__main__":
    main()
