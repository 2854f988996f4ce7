"""A trial of an endpoint: clients that retry at random, a history of what they saw, and
a verdict on it.

``check`` only judges, for a history that was recorded in another way.
"""

from __future__ import annotations

import hashlib
import math
import random
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import count

MISMATCHES = {422, 400}  # 400 of the endpoint that is like Stripe's
OTHER_BODIES = 0.05  # of the requests
REPEATS = (0, 0, 1, 3)
PAUSE = 0.05  # seconds between the tries of one request


class Kind(StrEnum):
    """How a request ended.

    ``OK``: the operation is done, and this is its response. ``FAIL``: the request was
    refused and changed nothing. ``INFO``: unknown. There was no response, or an error
    of the server; the operation may have happened, or happen yet.
    """

    OK = "ok"
    FAIL = "fail"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Call:
    """One request of one client. ``variant`` 0 is the operation; other variants send
    another body with its key.

    ``number`` and ``retry`` identify the request in a plan, and ``index`` its key. They
    are the same for the same seed. ``draining``: the faults are over, and this request
    should be answered.
    """

    key: str
    index: int = 0
    variant: int = 0
    client: int = 0
    number: int = 0
    retry: int = 0
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Response:
    """What came back. ``effect``: the name of the effect that the body tells of, if
    effects have names.
    """

    status: int
    body: bytes = b""
    effect: str = ""

    @property
    def kind(self) -> Kind:
        if self.status < 400:
            return Kind.OK
        return Kind.FAIL if self.status < 500 else Kind.INFO


@dataclass(slots=True)
class Exchange:
    """A request, and its end if it had one. ``begun`` and ``ended`` are places in
    time.
    """

    call: Call
    begun: int
    ended: float = math.inf
    kind: Kind = Kind.INFO
    status: int | None = None
    digest: str = ""
    effect: str = ""
    detail: str = ""

    def __str__(self) -> str:
        text = " ".join(
            filter(
                None, (str(self.status or ""), self.digest, self.effect, self.detail)
            )
        )
        times = f"{self.begun}–{self.ended if self.ended < math.inf else ''}"
        return (
            f"{times:>13}  client {self.call.client:<3} body {self.call.variant} "
            f" {self.kind:<5} {text}".rstrip()
        )


class History:
    """What clients saw. Any thread may write."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times = count()
        self.exchanges: list[Exchange] = []

    def begin(self, call: Call) -> Exchange:
        with self._lock:
            exchange = Exchange(call, next(self._times))
            self.exchanges.append(exchange)
        return exchange

    def end(
        self, exchange: Exchange, response: Response | None, detail: str = ""
    ) -> Kind:
        """Record the end of a request. ``response``: ``None`` if there was none."""
        exchange.detail = detail
        if response is not None:
            exchange.kind, exchange.status, exchange.effect = (
                response.kind,
                response.status,
                response.effect,
            )
            exchange.digest = hashlib.sha256(response.body).hexdigest()[:16]
        with self._lock:
            exchange.ended = next(self._times)
        return exchange.kind


# --- The judge ------------------------------------------------------------------------

Effects = Mapping[str, int | Collection[str]]


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken law. ``evidence``: the smallest part of the key's history that shows
    it.
    """

    key: str
    law: str
    evidence: Sequence[Exchange]

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.key}: {self.law}",
                *(f"  {exchange}" for exchange in self.evidence),
            ]
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a trial has shown. ``seed``: gives the same decisions again, but not the
    same timing.
    """

    violations: tuple[Violation, ...]
    counts: Counter[Kind]
    keys: int
    seed: int | None = None

    @property
    def holds(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        ends = ", ".join(f"{self.counts[kind]} {kind}" for kind in Kind)
        text = f"{self.counts.total()} requests with {self.keys} keys ({ends})"
        if self.holds:
            return f"{text}: no violations"
        return "\n".join(
            [
                f"{text}: {len(self.violations)} violations, seed {self.seed}",
                *map(str, self.violations),
            ]
        )


def check(
    history: Iterable[Exchange],
    effects: Effects,
    *,
    drained: bool = True,
    seed: int | None = None,
) -> Verdict:
    """Check a history against the effects that there are in the end, by key: their
    number, or their names. Pure.

    - A key takes effect at most once, and only if one of its requests was not refused.
    - A caller that got a success got that effect (by its name, if effects have names),
      in the same bytes, for the same request.
    - After that, the same request is not taken for another.
    - ``drained``: in the end every key got a response.

    ``seed``: the seed of the trial, for the verdict to name.
    """
    exchanges: dict[str, list[Exchange]] = defaultdict(list)
    for exchange in sorted(history, key=lambda one: one.ended):
        exchanges[exchange.call.key].append(exchange)
    violations = [
        Violation(key, law, sorted(evidence, key=lambda one: one.begun))
        for key in sorted(exchanges.keys() | effects.keys())
        for law, evidence in _broken(
            exchanges.get(key, []), effects.get(key, 0), drained
        )
    ]
    counts = Counter(
        exchange.kind for of_key in exchanges.values() for exchange in of_key
    )
    return Verdict(tuple(violations), counts, len(exchanges), seed)


Broken = Iterator[tuple[str, Sequence[Exchange]]]


def _broken(
    exchanges: Sequence[Exchange], effects: int | Collection[str], drained: bool
) -> Broken:
    number = effects if isinstance(effects, int) else len(effects)
    successes = [one for one in exchanges if one.kind == Kind.OK]
    possible = [one for one in exchanges if one.kind != Kind.FAIL]
    if number > 1:
        yield f"took effect {number} times", possible
    if number and not possible:
        yield "took effect, although every request was refused", exchanges
    if successes and not number:
        yield "succeeded, but did not take effect", successes[:1]
    if drained and not successes:
        yield "never got a response", exchanges[-1:]
    responses = {(one.status, one.digest): one for one in reversed(successes)}
    if len(responses) > 1:
        yield "got different responses", [*responses.values()]
    variants = {one.call.variant: one for one in reversed(successes)}
    if len(variants) > 1:
        yield "got a response for different requests", [*variants.values()]
    if not isinstance(effects, int) and effects:
        wrong = [one for one in successes if one.effect not in effects]  # or names none
        if wrong:
            yield (
                (
                    "got a response with an effect that is not there (there is"
                    f" {', '.join(effects)})"
                ),
                wrong[:1],
            )
    # before it, the key may have been that of another request, whose claim was released
    for first in successes[:1]:
        later = [
            one
            for one in exchanges
            if one.begun > first.ended and one.call.variant == first.call.variant
        ]
        if refused := [one for one in later if one.status in MISMATCHES]:
            yield (
                "was refused as different from the request that got the response",
                [first, refused[0]],
            )


LOST = "key lost by a failover"


def without_losses(verdict: Verdict, counts: Counter[str]) -> Verdict:
    """Count the keys that ran twice as lost, and judge the others: a store may lose
    what it has acknowledged.
    """
    lost = {
        violation.key
        for violation in verdict.violations
        if violation.law.startswith("took effect ")
    }
    counts[LOST] += len(lost)
    return replace(
        verdict,
        violations=tuple(one for one in verdict.violations if one.key not in lost),
    )


# --- The trial ------------------------------------------------------------------------

Send = Callable[[Call], Response | None]
FindEffects = Callable[[str], int | Collection[str]]
Nemesis = Callable[[random.Random, threading.Event], object]


def plan(
    seed: int, *, clients: int, keys: int, operations: int, run: str = ""
) -> list[list[tuple[Call, int]]]:
    """Return each client's requests, and how often it repeats each at most while it has
    no response. Pure.

    All clients move through the keys at one pace, so that several use a key at a time,
    and use it again later.

    ``seed``: the same seed makes the same plan. ``operations``: the number of requests
    of all clients together. ``run``: the beginning of every key.
    """
    return [
        _plan_of(client, seed, clients, keys, operations, run)
        for client in range(clients)
    ]


def _plan_of(
    client: int, seed: int, clients: int, keys: int, operations: int, run: str
) -> list[tuple[Call, int]]:
    decide = random.Random(f"{seed}:{client}")
    numbers = range(client, operations, clients)
    reach = math.ceil(2 * keys / max(1, len(numbers)))
    planned = []
    for number in numbers:
        index = min(keys - 1, number * keys // operations + decide.randrange(reach))
        variant = int(decide.random() < OTHER_BODIES)
        planned.append(
            (
                Call(f"{run}-{index}", index, variant, client, number),
                decide.choice(REPEATS),
            )
        )
    return planned


def exercise(
    send: Send,
    count_effects: FindEffects,
    *,
    clients: int = 8,
    keys: int = 50,
    operations: int = 400,
    seed: int | None = None,
    nemesis: Nemesis | None = None,
    drain: float = 60,
    settle: float = 0,
) -> Verdict:
    """Have ``clients`` threads send ``operations`` requests with ``keys`` keys, all
    meant to succeed, and judge.

    ``send`` sends one request and returns its response; an exception or ``None`` means
    that there was none. ``count_effects`` returns the effects of a key at the end, as
    their number or their names. ``nemesis`` is called in a thread of its own with a
    random generator and an event, to do harm until the event is set. Then every key is
    retried until it is answered, or ``drain`` seconds have passed. After another
    ``settle`` seconds each answered key is asked for once more, and the effects are
    counted. Another ``seed`` makes other decisions; ``None`` chooses one.
    """
    seed = random.randrange(2**32) if seed is None else seed
    plans = plan(
        seed,
        clients=clients,
        keys=keys,
        operations=operations,
        run=uuid.uuid4().hex[:12],
    )
    history = History()
    over = threading.Event()
    with ThreadPoolExecutor(clients + 1) as pool:
        harm = (
            pool.submit(nemesis, random.Random(f"{seed}:nemesis"), over)
            if nemesis
            else None
        )
        try:
            _all(pool, lambda planned: _work(planned, send, history), plans)
        finally:
            over.set()
        if harm is not None:
            harm.result()
        deadline = time.monotonic() + drain
        _all(
            pool,
            lambda calls: _drain(calls, send, history, deadline),
            _last_calls(plans),
        )
        time.sleep(settle)
        _all(
            pool,
            lambda calls: _drain(calls, send, history, deadline=0),
            _answered(history, clients),
        )
    effects = {
        key: count_effects(key)
        for key in dict.fromkeys(one.call.key for one in history.exchanges)
    }
    return check(history.exchanges, effects, seed=seed)


def _all(
    pool: ThreadPoolExecutor, work: Callable[..., None], parts: Sequence[object]
) -> None:
    for done in [pool.submit(work, part) for part in parts]:
        done.result()


def _work(planned: Sequence[tuple[Call, int]], send: Send, history: History) -> None:
    for call, repeats in planned:
        for retry in range(repeats + 1):
            if _exchange(replace(call, retry=retry), send, history) == Kind.OK:
                break


def _last_calls(plans: Sequence[Sequence[tuple[Call, int]]]) -> list[list[Call]]:
    """Return each key with each body that was sent with it, shared out among the
    clients.
    """
    used = {
        (call.key, call.variant): call
        for planned in plans
        for call, _repeats in planned
    }
    by_key: dict[str, list[Call]] = defaultdict(list)
    for call in used.values():
        by_key[call.key].append(replace(call, draining=True))
    shares: list[list[Call]] = [[] for _ in plans]
    for number, calls in enumerate(by_key.values()):
        shares[number % len(plans)] += [
            replace(call, client=number % len(plans)) for call in calls
        ]
    return shares


def _answered(history: History, clients: int) -> list[list[Call]]:
    """Return, for each key with a response, the request that got it, shared out among
    the clients.
    """
    first = {
        one.call.key: one.call
        for one in reversed(history.exchanges)
        if one.kind == Kind.OK
    }
    calls = [
        replace(call, client=number % clients, retry=call.retry + 1, draining=True)
        for number, call in enumerate(first.values())
    ]
    return [calls[client::clients] for client in range(clients)]


def _drain(
    calls: Sequence[Call], send: Send, history: History, deadline: float
) -> None:
    """Send the calls, at least once, until each key has a response. If a key has two
    bodies, one of them gets it.
    """
    left: dict[str, list[Call]] = defaultdict(list)
    for call in calls:
        left[call.key].append(call)
    retry = 0
    while left and (retry == 0 or time.monotonic() < deadline):
        for key, bodies in list(left.items()):
            ends = [
                _exchange(replace(call, retry=retry), send, history) for call in bodies
            ]
            if Kind.OK in ends:
                del left[key]
        retry += 1
        if left:
            time.sleep(PAUSE)


def _exchange(call: Call, send: Send, history: History) -> Kind:
    exchange = history.begin(call)
    try:
        response = send(call)
    except Exception as error:  # raised by send(): a request without a response
        return history.end(exchange, None, repr(error))
    return history.end(exchange, response)
