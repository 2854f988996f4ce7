"""What handling a message once costs: the bare handler, ``consume()``, a duplicate, and ``consume_many()``.

``consume()`` is measured with claims by record and by lock. Beside it runs the handler with only the statements of each
kind, and nothing else of this package: the lower bound for ``consume()``.

    python -m testproject.benchmarks.consuming --messages 4000

All use one connection, to a test database beside ``DATABASE_URL``'s, and take turns in a random order. A rate is the
median of the rounds. So is its ratio to the bare handler's rate, with the quartiles: the ratio is taken in each round,
because other load on the machine changes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from statistics import median, quantiles
from typing import Any

import django
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext

from django_idempotency.policy import Atomic

ROUND = 200
DUPLICATED = {"duplicate": "consume", "duplicate by lock": "consume by lock"}

Handling = Callable[[Sequence[Any]], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=4000, help="of each kind")
    asked = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    django.setup()
    database = str(connection.settings_dict["NAME"])
    connection.creation.create_test_db(verbosity=0, autoclobber=True)
    try:
        print(json.dumps(measure(max(1, asked.messages // ROUND))), flush=True)
    finally:
        from django_idempotency.engine.background import background

        background.forget()  # its connection would prevent dropping the database
        background.join(10)
        connection.creation.destroy_test_db(database, verbosity=0)


def measure(rounds: int) -> dict[str, Any]:
    """Return messages a second of each kind, their ratio to the bare handler's, and statements a message."""
    from django_idempotency.conf import conf, resolve
    from django_idempotency.messages import Consumer, Message
    from django_idempotency.policy import Policy
    from django_idempotency.stores import store_for
    from django_idempotency.stores.base import TransactionalStore
    from django_idempotency.values.outcomes import Claimed, Operation, StoredResponse
    from testproject.models import Receipt

    def handle(message: Message, context: object) -> None:
        Receipt.objects.create(event=message.id, reference="bench")

    record = Consumer("bench", handle)
    lock = Consumer("bench", handle, policy=Policy(mode=Atomic(claim="lock")))
    result = StoredResponse(200, body=b"null")

    def bare(messages: Sequence[Message]) -> None:
        for message in messages:
            with transaction.atomic():
                handle(message, None)

    def statements_of_a_record(messages: Sequence[Message]) -> None:
        store = store_for(conf().policy)
        for message in messages:
            claimed = store.claim(Operation("bench", message.id, bytes(32)), uuid.uuid4())
            assert isinstance(claimed, Claimed)
            assert isinstance(store, TransactionalStore)
            with transaction.atomic():
                locked = store.lock(claimed)
                handle(message, None)
                assert locked
                assert store.complete(locked, result)

    def statements_of_a_lock(messages: Sequence[Message]) -> None:
        store = store_for(resolve(Policy(mode=Atomic(claim="lock"))))
        for message in messages:
            claimed = store.claim(Operation("bench", message.id, bytes(32)), uuid.uuid4())
            assert isinstance(claimed, Claimed)
            assert isinstance(store, TransactionalStore)
            with store.transaction(claimed):
                handle(message, None)
                assert store.complete(claimed, result)

    def each(consumer: Consumer) -> Handling:
        def once(messages: Sequence[Message]) -> None:
            for message in messages:
                consumer.consume(message)

        return once

    kinds: dict[str, Handling] = {
        "bare handler": bare,
        "statements of a record": statements_of_a_record,
        "statements of a lock": statements_of_a_lock,
        "consume": each(record),
        "duplicate": each(record),
        "consume by lock": each(lock),
        "duplicate by lock": each(lock),
        "consume_many": record.consume_many,
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        given = {kind: _messages() for kind in kinds}
        given |= {kind: given[DUPLICATED[kind]] for kind in DUPLICATED}
        for kind in _shuffled(kinds):
            begun = time.perf_counter()
            kinds[kind](given[kind])
            if number:  # the first round warms up
                seconds[kind].append(time.perf_counter() - begun)
    return {kind: _told(taken, seconds["bare handler"]) for kind, taken in seconds.items()} | {
        "statements": {"record": _statements(record), "lock": _statements(lock)}
    }


def _shuffled(kinds: Iterable[str]) -> list[str]:
    """Return a random order, but with duplicates after their first delivery."""
    order = [kind for kind in kinds if kind not in DUPLICATED]
    random.shuffle(order)
    for duplicate, first in DUPLICATED.items():
        order.insert(order.index(first) + 1, duplicate)
    return order


def _told(taken: Sequence[float], bare: Sequence[float]) -> dict[str, float]:
    parts = [reference / seconds for seconds, reference in zip(taken, bare, strict=True)]
    low, _middle, high = quantiles(parts, n=4) if len(parts) > 1 else parts * 3
    figures = {"of bare": median(parts), "low": low, "high": high}
    return {"/s": round(ROUND / median(taken))} | {name: round(part, 2) for name, part in figures.items()}


def _messages() -> list[Any]:
    from django_idempotency.messages import Message

    return [Message("bench", str(uuid.uuid4()), b'{"amount": 5}') for _number in range(ROUND)]


def _statements(consumer: Any) -> dict[str, int]:
    """Count the statements of a first delivery and of a duplicate, including the handler's own, BEGIN and COMMIT."""
    (message, *_others) = _messages()
    counts = []
    for _time in range(2):
        with CaptureQueriesContext(connection) as captured:
            consumer.consume(message)
        counts.append(len(captured))
    return {"first": counts[0], "duplicate": counts[1]}


if __name__ == "__main__":
    main()
