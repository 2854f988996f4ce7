"""Clients in Python, for the storm of duplicates and for machines without wrk.

They speak only as much HTTP as needed: a request costs them a tenth of what it costs
the server.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[bytes, bytes]
    seconds: float

    @property
    def replayed(self) -> bool:
        return self.headers.get(b"idempotent-replayed", b"").lower() == b"true"


class Client:
    """One connection, which is kept open."""

    def __init__(self, url: str) -> None:
        self.url = urlsplit(url)
        self.target = self.url.path + (f"?{self.url.query}" if self.url.query else "")

    async def connect(self) -> None:
        self.reader, self.writer = await asyncio.open_connection(
            self.url.hostname, self.url.port
        )

    async def post(self, key: str, body: str) -> Answer:
        begun = time.perf_counter()
        self.writer.write(
            f"POST {self.target} HTTP/1.1\r\nHost:"
            f" {self.url.netloc}\r\nIdempotency-Key: {key}\r\nContent-Type:"
            f" application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        head, *lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(b":") for line in lines)
        }
        await self.reader.readexactly(int(headers.get(b"content-length", 0)))
        return Answer(int(head.split()[1]), headers, time.perf_counter() - begun)


@dataclass
class Crowd:
    """A number of clients, each of which sends its next request once it has the answer
    to the last.
    """

    url: str
    plan: str
    run: str
    body: str
    sent: int = 0
    times: list[float] = field(default_factory=list)
    refused: int = 0
    errors: int = 0

    async def drive(self, clients: int, seconds: float) -> dict[str, Any]:
        begun = time.perf_counter()
        await asyncio.gather(*(self._client(begun + seconds) for _ in range(clients)))
        times = sorted(self.times)
        return {
            "requests": len(times),
            "seconds": time.perf_counter() - begun,
            "p50": percentile(times, 50) * 1000,
            "p99": percentile(times, 99) * 1000,
            "refused": self.refused,
            "errors": self.errors,
        }

    async def _client(self, until: float) -> None:
        client = Client(self.url)
        await client.connect()
        while time.perf_counter() < until:
            try:
                answer = await client.post(self._key(), self.body)
            except (OSError, EOFError):
                self.errors += 1
                await client.connect()
            else:
                self.times.append(answer.seconds)
                self.refused += answer.status >= 400

    def _key(self) -> str:
        """Return the next key, as ``keys.lua`` does."""
        self.sent += 1
        number = self.sent
        if self.plan == "replays":
            number %= 100
        elif self.plan == "mixed" and self.sent > 200 and self.sent % 10 == 0:
            number -= 195
        return f"{self.run}-0000-4000-8000-{number:012x}"


def percentile(ordered: list[float], share: float) -> float:
    return (
        ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))]
        if ordered
        else 0.0
    )


def main(url: str, clients: str, seconds: str) -> None:
    crowd = Crowd(url, os.environ["PLAN"], os.environ["RUN"], os.environ["BODY"])
    print(json.dumps(asyncio.run(crowd.drive(int(clients), float(seconds)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
