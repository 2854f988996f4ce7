"""Messages that are handled together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from django_idempotency import engine, signals
from django_idempotency.consumers.messages import Delivery, Reject, StoreAway
from django_idempotency.consumers.tracing import message_span
from django_idempotency.exceptions import StoreUnavailable
from django_idempotency.outcomes import Claimed
from django_idempotency.policy import Mode

if TYPE_CHECKING:
    from django_idempotency.consumers.base import Attempt

STORE_DELAY = 1


def consume_together(attempts: Sequence[Attempt | Reject]) -> list[Delivery]:
    """Handle the attempts of one consumer: together those that can be, one by one the others, in their order."""
    deliveries: dict[int, Delivery] = {}
    firsts: dict[object, tuple[int, Attempt]] = {}
    for place, attempt in enumerate(attempts):
        if isinstance(attempt, Reject):
            deliveries[place] = attempt
        elif attempt.policy.mode == Mode.ATOMIC:
            firsts.setdefault(attempt.operation.id, (place, attempt))  # the same id once more is a duplicate, later
    for placed in _by_place(firsts.values()):
        if len(placed) > 1:
            deliveries |= _first_deliveries(placed)
    return [
        deliveries[place] if place in deliveries else _alone(attempt)  # type: ignore[arg-type]
        for place, attempt in enumerate(attempts)
    ]


def _by_place(firsts: Collection[tuple[int, Attempt]]) -> Collection[list[tuple[int, Attempt]]]:
    """Attempts whose records are in one database, for one transaction."""
    groups: dict[str, list[tuple[int, Attempt]]] = defaultdict(list)
    for place, attempt in firsts:
        groups[engine.place(attempt.operation, attempt.policy)].append((place, attempt))
    return groups.values()


def _alone(attempt: Attempt) -> Delivery:
    begun = attempt.begin()
    return attempt.run(begun) if isinstance(begun, Claimed) else begun


def _first_deliveries(placed: list[tuple[int, Attempt]]) -> dict[int, Delivery]:
    attempts = [attempt for _place, attempt in placed]
    policy = attempts[0].policy
    try:
        outcomes = engine.claim_many([attempt.operation for attempt in attempts], policy)
    except StoreUnavailable as error:
        signals.send(signals.store_failed, attempts[0].operation, error=error)
        return {place: StoreAway(STORE_DELAY, str(error)) for place, _attempt in placed}
    claims = {p: (a, outcome) for (p, a), outcome in zip(placed, outcomes, strict=True) if isinstance(outcome, Claimed)}
    together = _run_together(claims) if claims else {}
    deliveries: dict[int, Delivery] = {}
    for (place, attempt), outcome in zip(placed, outcomes, strict=True):
        if not isinstance(outcome, Claimed):
            deliveries[place] = attempt.delivery(outcome)
        else:
            deliveries[place] = together.get(place) or attempt.run(outcome)
    return deliveries


def _run_together(claims: dict[int, tuple[Attempt, Claimed]]) -> dict[int, Delivery]:
    """What came of those whose effects are committed; of the others nothing is left but their claims."""
    done: dict[int, Delivery] = {}
    policy = next(iter(claims.values()))[0].policy
    batch = engine.Batch([claim for _attempt, claim in claims.values()], policy)
    try:
        with batch.running():
            for place, (attempt, claim) in claims.items():
                _try_in(batch, done, place, attempt, claim)
    except Exception:  # whatever it was, each message runs alone next, and meets it there if it persists
        return {}
    return done


def _try_in(batch: engine.Batch, done: dict[int, Delivery], place: int, attempt: Attempt, claim: Claimed) -> None:
    def work(execution: engine.Execution) -> None:
        with message_span(attempt.message):
            done[place] = attempt.handle(execution)
        if isinstance(done[place], Reject):
            raise NotTogether

    try:
        if claim.attempt > 1 or not batch.run(claim, work):
            done.pop(place, None)
    except Exception:  # of the handler: the message runs alone next, where its error is reported
        done.pop(place, None)


class NotTogether(Exception):
    """A verdict that a batch can't write."""
