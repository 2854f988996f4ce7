"""The outbox beside two other packages, on the same work: events stored, then relayed to a function that does nothing.

    pip install django-reliable-outbox django-outbox-pattern
    python -m testproject.benchmarks.outbox_contenders --events 5000 --rounds 3

A package that is not installed is left out. Everything uses one database, ``DATABASE_URL``'s, in which the tables are
created and emptied. Each package has its own defaults, except for pauses. django-outbox-pattern speaks STOMP; here its
connection is one that accepts everything. It has neither keys nor confirmations.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

import django
from django.db import connections, transaction

KEYS = 499
PAYLOAD = {"amount": 5, "currency": "EUR", "note": "x" * 150}
LOCAL = "django_idempotency.contrib.outbox.publishers.local.LocalPublisher"


@dataclass(frozen=True)
class Contender:
    """``publish`` stores one event in the open transaction. ``relay`` relays all events in this thread."""

    name: str
    table: str
    publish: Callable[[int], object]
    relay: Callable[[], object]
    left: str  # the condition on rows that are still to be relayed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=5_000)
    parser.add_argument("--rounds", type=int, default=3, help="in each of which all take turns; the median is told")
    asked = parser.parse_args()
    contenders = list(_installed())
    print(json.dumps({"load before": round(os.getloadavg()[0], 1), "events": asked.events}), flush=True)
    rounds = [{one.name: _measured(one, asked.events) for one in contenders} for _ in range(asked.rounds)]
    for one in contenders:
        stored, relayed = (median(figures[one.name][place] for figures in rounds) for place in (0, 1))
        print(json.dumps({"outbox": one.name, "stored/s": round(stored), "relayed/s": round(relayed)}), flush=True)


def _measured(one: Contender, events: int) -> tuple[float, float]:
    """Return the events a second that are stored, each in a transaction, and that are relayed."""
    _execute(f"TRUNCATE {one.table}")
    begun = time.perf_counter()
    for number in range(events):
        with transaction.atomic():
            one.publish(number)
    stored = time.perf_counter() - begun
    _execute(f"VACUUM ANALYZE {one.table}")
    begun = time.perf_counter()
    one.relay()
    relayed = time.perf_counter() - begun
    (left,) = _execute(f"SELECT count(*) FROM {one.table} WHERE {one.left}")
    assert left == 0, f"{one.name} left {left} events behind"
    return events / stored, events / relayed


def _execute(statement: str) -> Any:
    with connections["default"].cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone() if cursor.description else None


# --- The contenders --------------------------------------------------------------------------------------------------


def _installed() -> Iterator[Contender]:
    makers = {
        "django_idempotency": _ours,
        "reliable_outbox": _reliable_outbox,
        "django_outbox_pattern": _outbox_pattern,
    }
    apps = [app for app in makers if find_spec(app)]
    _set_up([app for app in apps if app != "django_idempotency"])
    for app in apps:
        yield makers[app]()


def _set_up(more_apps: list[str]) -> None:
    from django.conf import settings
    from django.core.management import call_command

    publishers = {"default": {"BACKEND": LOCAL, "OPTIONS": {"handler": f"{__name__}.nothing"}}}
    settings.INSTALLED_APPS = [*settings.INSTALLED_APPS, *more_apps]
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "OUTBOX": {"PUBLISHERS": publishers}}
    settings.DJANGO_OUTBOX_PATTERN = {"DEFAULT_PRODUCER_WAITING_TIME": 0}
    django.setup()
    call_command("migrate", verbosity=0, skip_checks=True)


def nothing(_event: object) -> None:
    """Take an event, and do nothing with it."""


def _ours() -> Contender:
    from django_idempotency.contrib.outbox.publishing import publish
    from django_idempotency.contrib.outbox.relay import EventRelay

    return Contender(
        "django-idempotency",
        "django_idempotency_outbox_event",
        lambda number: publish("bench", PAYLOAD, key=f"key-{number % KEYS}"),
        lambda: EventRelay("default").run_once(),
        "status = 'pending'",
    )


def _reliable_outbox() -> Contender:
    from reliable_outbox import handler, publish  # type: ignore[import-not-found]
    from reliable_outbox.models import OutboxMessage  # type: ignore[import-not-found]
    from reliable_outbox.worker import Worker  # type: ignore[import-not-found]

    handler("bench")(nothing)
    return Contender(
        "django-reliable-outbox",
        OutboxMessage._meta.db_table,
        lambda number: publish("bench", PAYLOAD, key=f"key-{number % KEYS}"),
        lambda: Worker().run(burst=True),
        "status = 'pending'",
    )


class _Everything:
    """A connection that accepts what is sent, in place of a STOMP broker's."""

    def is_connected(self) -> bool:
        return True

    def send(self, **_message: Any) -> None:
        pass

    def disconnect(self) -> None:
        pass


def _outbox_pattern() -> Contender:
    from django_outbox_pattern.choices import StatusChoice  # type: ignore[import-not-found]
    from django_outbox_pattern.models import Published  # type: ignore[import-not-found]
    from django_outbox_pattern.producers import Producer  # type: ignore[import-not-found]

    producer = Producer(_Everything(), "", "")
    return Contender(
        "django-outbox-pattern",
        Published._meta.db_table,
        lambda _number: Published(destination="/queue/bench", body=PAYLOAD).save(),
        producer.publish_message_from_database,
        f"status = {StatusChoice.SCHEDULE.value}",
    )


if __name__ == "__main__":
    try:
        main()
    finally:
        connections.close_all()
