"""A process whose work a signal's exception interrupts at random moments, as Celery's
soft time limit does.

After each interruption it does one thing undisturbed, which must succeed. Prints how
many things it has done, how often it was interrupted, and how many undisturbed things
failed. Exits with 1 if something that was reported as done is not there.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

ROUNDS = 200
FIRST = 10  # things done undisturbed, to learn how long one takes here and now


class Interrupted(Exception):
    pass


def interrupt(*_signal: Any) -> None:
    raise Interrupted


def main(kind: str) -> int:
    import django

    django.setup()
    from django.db import connection

    from tests.support.callers import effects

    do = {"message": _message, "request": _request}[kind]
    signal.signal(signal.SIGALRM, interrupt)
    chance = random.Random(20261122)
    done, interrupted, refused = [], 0, []
    taken = deque((_seconds(do, f"first {n}") for n in range(FIRST)), maxlen=FIRST)
    for number in range(ROUNDS):
        limit = chance.uniform(0.0002, 1.5 * median(taken))
        began = time.monotonic()
        try:
            if _hurried(do, f"hurried {number}", limit):
                taken.append(time.monotonic() - began)
                done.append(f"hurried {number}")
                continue
        except (
            Interrupted,
            Exception,
        ):  # MySQLdb raises an error of its own while it is interrupted
            pass
        interrupted += 1
        began = time.monotonic()
        (done if do(f"calm {number}") else refused).append(f"calm {number}")
        taken.append(time.monotonic() - began)
    connection.in_atomic_block = False
    connection.close()
    false = [reference for reference in done if effects(reference) != 1]
    print(len(done), interrupted, len(refused))
    print(f"told to be done: {false}; refused: {refused}", file=sys.stderr)
    return 1 if false else 0


def _seconds(do: Callable[[str], bool], reference: str) -> float:
    began = time.monotonic()
    assert do(reference)
    return time.monotonic() - began


def _hurried(do: Callable[[str], bool], reference: str, seconds: float) -> bool:
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        return do(reference)
    finally:  # the exception may strike here as well
        signal.setitimer(signal.ITIMER_REAL, 0)


def _message(reference: str) -> bool:
    from django_idempotency.messages import Ack, Message, consume
    from tests.support.callers import pay

    return isinstance(
        consume(Message("queue", reference), lambda *_handled: str(pay(reference).pk)),
        Ack,
    )


def _request(reference: str) -> bool:
    from django.http import HttpResponse

    from tests.support.callers import entry_point, pay

    return (
        entry_point(lambda request: HttpResponse(str(pay(reference).pk), status=201))(
            reference.replace(" ", "-")
        ).status_code
        == 201
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
