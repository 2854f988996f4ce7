"""``make demo``: what can happen to a request, against the real server, and what each
line proves.

Exits with 0 only if every line holds.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from threading import Barrier
from typing import IO, Any
from urllib.parse import urlsplit

import django
import httpx
from django.conf import settings

from testproject import brokers
from testproject.interrupts import end_on_signals

COPIES = 50
LOG_LINES = 40
AT_ONCE = 1.0  # seconds that the retry after a crash may take; a lease would be 20
# tried if BROKER_URL names none
BROKERS = ("nats://127.0.0.1:4222", "amqp://guest:guest@127.0.0.1:5672//")
NO_BROKER = (
    "There is no broker here to be told of each charge. Start one, such as nats-server"
    " -js or rabbitmq-server; BROKER_URL names one elsewhere."
)
TOLD_WITHIN = 30.0  # seconds within which a receipt has to be there


@dataclass(frozen=True)
class Line:
    holds: bool
    scene: str
    response: str
    effects: str
    proves: str


class Api:
    """The charges of one run of the demo. Each run has its own keys and references, so
    that it can be repeated.
    """

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(
            base_url=url, timeout=30, limits=limits, trust_env=False, verify=False
        )

    def charge(
        self,
        key: str,
        *,
        user: str = "alice",
        amount: int = 4200,
        reference: str | None = None,
        path: str = "/api/charges/",
        **faults: Any,
    ) -> httpx.Response:
        return self.http.post(
            path,
            json={"amount": amount, "currency": "eur", "reference": reference or key},
            headers={
                "Authorization": f"Token {user}-token",
                "Idempotency-Key": f'"{key}"',
                **({"X-Simulate": json.dumps(faults)} if faults else {}),
            },
        )

    def effects(self, reference: str) -> int:
        return self._ledger(reference)["effects"]

    def receipts(self, reference: str) -> int:
        """Return how many receipts the consumer wrote for charges with this
        reference.
        """
        return self._ledger(reference)["receipts"]

    def payments(self, reference: str) -> int:
        """Return how often the gateway has paid."""
        return self._ledger(reference, "/api/gateway/")["payments"]

    def _ledger(self, reference: str, path: str = "/api/ledger/") -> dict[str, int]:
        response = self.http.get(
            path,
            params={"reference": reference},
            headers={"Authorization": "Token alice-token"},
        )
        return dict(response.raise_for_status().json())


def scenes(api: Api, broker: str) -> Iterator[Line]:
    yield from _retry(api, new_key())
    yield _duplicates(api, new_key())
    yield _other_body(api, new_key())
    yield _other_user(api, new_key())
    yield _crash(api, new_key())
    if settings.STEPS:
        yield _crash_between_steps(api, new_key())
    if broker:
        yield _receipt(api, new_key(), broker)


def _retry(api: Api, key: str) -> Iterator[Line]:
    first, effects = api.charge(key), api.effects(key)
    yield Line(
        (label(first), effects) == ("201", 1),
        "a charge",
        label(first),
        str(effects),
        "effect and response commit together",
    )
    again, effects = api.charge(key), api.effects(key)
    yield Line(
        (label(again), again.content, effects) == ("201 replayed", first.content, 1),
        "the same request again",
        label(again),
        str(effects),
        "the first response, byte for byte",
    )


def _duplicates(api: Api, key: str) -> Line:
    together = Barrier(COPIES)

    def copy(_number: int) -> str:
        together.wait()
        return label(api.charge(key, delay_ms=200))

    with ThreadPoolExecutor(COPIES) as pool:
        responses = Counter(pool.map(copy, range(COPIES)))
    effects = api.effects(key)
    return Line(
        (responses["201"], effects) == (1, 1)
        and responses.keys() <= {"201", "201 replayed", "409"},
        f"{COPIES} copies at once",
        f"{responses['201']} × 201, {responses['201 replayed']} replayed,"
        f" {responses['409']} × 409",
        str(effects),
        "only one of them ran",
    )


def _other_body(api: Api, key: str) -> Line:
    api.charge(key)
    response, effects = api.charge(key, amount=9900), api.effects(key)
    return Line(
        (label(response), effects) == ("422", 1),
        "the same key, another amount",
        label(response),
        str(effects),
        "a key stands for one request",
    )


def _other_user(api: Api, key: str) -> Line:
    hers, his = api.charge(key), api.charge(key, user="bob", reference=f"{key}-bob")
    effects = api.effects(key), api.effects(f"{key}-bob")
    return Line(
        (label(his), effects) == ("201", (1, 1))
        and his.json()["id"] != hers.json()["id"],
        "bob sends alice's key",
        label(his),
        f"{effects[0]} + {effects[1]}",
        "an operation of his own, not her response",
    )


def _crash(api: Api, key: str) -> Line:
    crashed = _never_answers(lambda: api.charge(key, kill="after"))
    started = time.monotonic()
    before = api.effects(key)
    response = api.charge(key)
    while response.status_code == 409 and time.monotonic() - started < AT_ONCE:
        response = api.charge(key)
    took = time.monotonic() - started
    effects = api.effects(key)
    return Line(
        crashed
        and (before, label(response), effects) == (0, "201", 1)
        and took < AT_ONCE,
        "SIGKILL mid-request, a retry",
        f"none, then {label(response)} in {took:.2f} s",
        f"{before} → {effects}",
        "nothing lost, nothing twice, no waiting",
    )


def _crash_between_steps(api: Api, key: str) -> Line:
    pay_out = partial(api.charge, key, path="/api/payouts/")
    crashed = _never_answers(partial(pay_out, kill="bank"))
    began, paid = time.monotonic(), api.payments(key)
    response = pay_out()
    while response.status_code == 409 and time.monotonic() - began < TOLD_WITHIN:
        time.sleep(0.2)
        response = pay_out()
    took = time.monotonic() - began
    effects, payments = api.effects(key), api.payments(key)
    return Line(
        crashed and (paid, label(response), effects, payments) == (1, "201", 1, 1),
        "SIGKILL between two steps",
        f"none, then {label(response)} in {took:.0f} s",
        f"{effects} + {payments}",
        "one payment, one entry: done steps stay done",
    )


def _receipt(api: Api, key: str, broker: str) -> Line:
    """Get a receipt by way of the outbox, relay, broker and consumer, which run in
    processes of their own.
    """
    responses = [label(api.charge(key)) for _time in range(3)]
    began = time.monotonic()
    while (
        receipts := api.receipts(key)
    ) == 0 and time.monotonic() - began < TOLD_WITHIN:
        time.sleep(0.02)
    took, effects = time.monotonic() - began, api.effects(key)
    return Line(
        (responses, effects, receipts)
        == (["201", "201 replayed", "201 replayed"], 1, 1),
        f"a charge, told by {urlsplit(broker).scheme}",
        f"its receipt in {took:.2f} s",
        f"{effects} + {receipts}",
        "charge, event and receipt: each once",
    )


def usable_broker() -> str:
    """Return the URL of a broker that lets us in: ``BROKER_URL``, or a usual one on
    this machine; else empty.
    """
    stated = os.environ.get("BROKER_URL")
    for url in [stated] if stated else BROKERS:
        if brokers.listens(url):
            # any client's errors: no permission, no JetStream, not installed
            with suppress(Exception):
                brokers.forget(url, new_key())
                return url
    return ""


def _never_answers(send: Callable[[], httpx.Response]) -> bool:
    try:
        send()
    except httpx.TransportError:
        return True
    return False


def new_key() -> str:
    return f"demo-{uuid.uuid4()}"


def label(response: httpx.Response) -> str:
    replayed = " replayed" if "Idempotent-Replayed" in response.headers else ""
    return f"{response.status_code}{replayed}"


class Table:
    """Coloured on a terminal, unless NO_COLOR is set; plain text elsewhere."""

    WIDTHS = (28, 31, 7)

    def __init__(self, out: IO[str]) -> None:
        self.out = out
        self.coloured = out.isatty() and not os.environ.get("NO_COLOR")

    def head(self, title: str, subtitle: str) -> None:
        self._print(self._paint("1", title))
        self._print(self._paint("2", subtitle) + "\n")
        self._print(
            "   "
            + self._paint(
                "2",
                self._columns("what happens", "response", "effects") + "what it proves",
            )
        )

    def line(self, line: Line) -> None:
        mark = self._paint("32", "✓") if line.holds else self._paint("1;31", "✗")
        self._print(
            f" {mark}"
            f" {self._columns(line.scene, line.response, line.effects)}"
            f"{self._paint('2', line.proves)}"
        )

    def note(self, text: str) -> None:
        self._print("\n" + self._paint("2", text))

    def foot(self, holds: bool) -> None:
        if holds:
            self._print(
                "\n"
                + self._paint("1;32", "All of it holds.")
                + " make serve shows the records in the admin."
            )
        else:
            self._print("\n" + self._paint("1;31", "Not all of it holds."))

    def _columns(self, *texts: str) -> str:
        return "".join(
            text.ljust(width) + " "
            for text, width in zip(texts, self.WIDTHS, strict=True)
        )

    def _paint(self, code: str, text: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.coloured else text

    def _print(self, text: str) -> None:
        print(text, file=self.out, flush=True)


def play(table: Table, log: IO[str]) -> bool:
    from django.db import connection

    from testproject.service import prepare, running

    prepare()
    broker, topic = usable_broker(), new_key()
    environ = {"SIMULATE": "1", "BROKER_URL": broker, "CHARGE_TOPIC": topic}
    environ["LEASE"] = "3"
    with ExitStack() as stack:
        stack.callback(brokers.forget, broker, topic)
        service = stack.enter_context(running(environ=environ, log=log))
        with connection.cursor() as cursor:
            cursor.execute("SHOW server_version")
            (version,) = cursor.fetchone()
        connection.close()
        table.head(
            "django-idempotency: one key, one effect",
            f"gunicorn, 2 workers × 8 threads, on {service.url}; PostgreSQL {version},"
            " embedded",
        )
        lines = []
        for line in scenes(Api(service.url), broker):
            table.line(line)
            lines.append(line)
        if not broker:
            table.note(NO_BROKER)
    return all(line.holds for line in lines)


def main() -> int:
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    # always the embedded one, so that the demo touches nobody's data
    os.environ.pop("DATABASE_URL", None)
    end_on_signals()
    table = Table(sys.stdout)
    with tempfile.TemporaryFile("w+") as log:
        try:
            django.setup()
            holds = play(table, log)
            table.foot(holds)
        except KeyboardInterrupt:
            return 130
        except httpx.HTTPError as error:
            table.foot(False)
            print(f"{error!r}", file=sys.stderr)
            holds = False
        if not holds:
            log.seek(0)
            sys.stderr.writelines(log.readlines()[-LOG_LINES:])
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
