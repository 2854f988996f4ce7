"""Callers at a steady pace, a thread each: what each of them was answered, and when."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from typing import NamedTuple
from uuid import uuid4

import httpx

from tests.support.servers import NO_KEEPALIVE
from tests.support.waiting import eventually

PAUSE = 0.2  # seconds of each caller, between two requests
REMEMBERED = 200  # keys of each caller that it asks for again


class Answer(NamedTuple):
    """When a request was sent, and when it was answered, by the monotonic clock; and how."""

    sent: float
    answered: float
    how: str


@dataclass(frozen=True)
class Callers:
    """``answers``: those of each caller, in order."""

    answers: list[list[Answer]]

    def since(self, begun: float, ended: float) -> list[Answer]:
        """What was under way between two times, by the answer; waits until every caller is served again."""
        eventually(lambda: all(of_one and of_one[-1].sent > ended for of_one in self.answers), within=120, every=0.2)
        under_way = [
            answer
            for of_one in self.answers
            for answer in list(of_one)
            if answer.sent < ended and answer.answered > begun
        ]
        return sorted(under_way, key=lambda answer: answer.answered)


@contextmanager
def calling(url: str, *, callers: int) -> Iterator[Callers]:
    """First requests and replays in turns, for as long as the block runs. A key without a response is retried."""
    ends, called = threading.Event(), Callers([[] for _ in range(callers)])
    with ThreadPoolExecutor(callers) as pool:
        calls = [pool.submit(_call, url, answers, ends) for answers in called.answers]
        try:
            yield called
        finally:
            ends.set()
    for call in calls:
        call.result()


def _call(url: str, answers: list[Answer], ends: threading.Event) -> None:
    bodies: deque[tuple[str, bytes]] = deque(maxlen=REMEMBERED)
    open_key = ""
    with httpx.Client(base_url=url, timeout=600, limits=NO_KEEPALIVE, trust_env=False) as http:
        for turn in count():
            if ends.wait(PAUSE):
                return
            again = bool(turn % 2 and bodies)
            key, body = random.choice(bodies) if again else (open_key or uuid4().hex, None)
            sent = time.monotonic()
            how, received = _charge(http, key)
            if again and received not in (None, body):
                how = "another response"
            answers.append(Answer(sent, time.monotonic(), how))
            if received is not None and not again:
                bodies.append((key, received))
            if not again:
                open_key = "" if received is not None else key


def _charge(http: httpx.Client, key: str) -> tuple[str, bytes | None]:
    """What was answered, and its body if it is the charge."""
    headers = {"Idempotency-Key": f'"{key}"', "Authorization": "Token alice-token"}
    payload = {"amount": 1, "currency": "EUR", "reference": key}
    try:
        response = http.post("/api/charges/", json=payload, headers=headers)
    except httpx.HTTPError as error:
        return type(error).__name__, None
    if response.status_code != 201:
        return str(response.status_code), None
    return "replayed" if response.headers.get("Idempotent-Replayed") == "true" else "201", response.content


# --- What they saw ---------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """``silence``: the longest time in which nobody was answered; ``slowest``: the slowest answer."""

    answers: Counter[str]
    silence: float
    slowest: float


def seen(answers: list[Answer], begun: float) -> Seen:
    """What the callers saw from ``begun`` on; ``answers`` by the time of the answer."""
    times = [begun, *(answer.answered for answer in answers)]
    return Seen(
        Counter(answer.how for answer in answers),
        max((after - before for before, after in pairwise(times)), default=0.0),
        max((answer.answered - answer.sent for answer in answers), default=0.0),
    )
