"""Callers at a steady pace, in processes of their own: what each of them was answered, and when."""

from __future__ import annotations

import multiprocessing
import random
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import httpx

from tests.support.servers import NO_KEEPALIVE
from tests.support.waiting import eventually

PAUSE = 0.2  # seconds of each caller, between two requests
FORK = multiprocessing.get_context("fork")
REMEMBERED = 200  # keys of each caller that it asks for again


class Answer(NamedTuple):
    """When a request was sent, and when it was answered, by the monotonic clock; and how."""

    sent: float
    answered: float
    how: str


@dataclass(frozen=True)
class Callers:
    """``files``: one of each caller, which it adds its answers to."""

    files: tuple[Path, ...]

    def answers(self) -> list[list[Answer]]:
        """Those of each caller, in order."""
        return [
            [_answer(line) for line in file.read_text().splitlines(keepends=True) if line[-1] == "\n"]
            for file in self.files
        ]

    def since(self, begun: float, ended: float) -> list[Answer]:
        """What was under way between two times, by the answer; waits until every caller is served again."""

        def served() -> bool:
            return all(answers and answers[-1].sent > ended for answers in self.answers())

        eventually(served, within=120, every=0.2)
        return sorted(
            (
                answer
                for of_one in self.answers()
                for answer in of_one
                if answer.sent < ended and answer.answered > begun
            ),
            key=lambda answer: answer.answered,
        )


def _answer(line: str) -> Answer:
    sent, answered, how = line.rstrip("\n").split(" ", 2)
    return Answer(float(sent), float(answered), how)


@contextmanager
def calling(url: str, directory: Path, *, callers: int) -> Iterator[Callers]:
    """First requests and replays in turns, for as long as the block runs. A key without a response is retried."""
    ends = FORK.Event()
    files = tuple(directory / f"caller-{number}" for number in range(callers))
    processes = [FORK.Process(target=_call, args=(url, file, ends), daemon=True) for file in files]
    for file, process in zip(files, processes, strict=True):
        file.touch()
        process.start()
    try:
        yield Callers(files)
    finally:
        ends.set()
        for process in processes:
            process.join(30)
            process.kill()


def _call(url: str, file: Path, ends: Any) -> None:
    bodies: deque[tuple[str, bytes]] = deque(maxlen=REMEMBERED)
    open_key = ""
    with (
        httpx.Client(base_url=url, timeout=600, limits=NO_KEEPALIVE, trust_env=False) as http,
        file.open("w", buffering=1) as told,
    ):
        for turn in count():
            if ends.wait(PAUSE):
                return
            again = bool(turn % 2 and bodies)
            key, body = random.choice(bodies) if again else (open_key or uuid4().hex, None)
            sent = time.monotonic()
            how, received = _charge(http, key)
            if again and received not in (None, body):
                how = "another response"
            told.write(f"{sent} {time.monotonic()} {how}\n")
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
