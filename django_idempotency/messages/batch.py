"""Handling several messages together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

from django_idempotency import engine, signals
from django_idempotency.messages.attempt import STORE_DELAY, Attempt
from django_idempotency.messages.message import (
    AwaitsStore,
    Delivery,
    Reject,
    RetryLater,
)
from django_idempotency.reporting.events import send
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.outcomes import Claimed, Verdict

Attempts = Mapping[int, Attempt]  # by their numbers among the messages


def consume_together(
    attempts: Sequence[Attempt | Reject], *, in_order: bool
) -> list[Delivery]:
    """Handle the attempts of one consumer together if possible, and the others one by
    one, in their order.

    ``in_order``: handle no message behind one that must be redelivered.
    """
    deliveries: dict[int, Delivery] = {
        n: attempt for n, attempt in enumerate(attempts) if isinstance(attempt, Reject)
    }
    valid = {
        n: attempt
        for n, attempt in enumerate(attempts)
        if not isinstance(attempt, Reject)
    }
    claims: dict[int, Claimed] = {}
    for group in _groups(valid, in_order=in_order):
        claimed, known = _claim(group)
        claims |= claimed
        deliveries |= known
        untried = {n: group[n] for n in group if n not in known}
        deliveries |= _run_in_one_transaction(untried, claimed, in_order=in_order)
    _run_one_by_one(valid, claims, deliveries, in_order=in_order)
    return [deliveries[number] for number in range(len(attempts))]


def _groups(attempts: Attempts, *, in_order: bool) -> list[dict[int, Attempt]]:
    """Group attempts whose records are in one database, for one transaction. A group
    has at least two.
    """
    groups: dict[str, dict[int, Attempt]] = defaultdict(dict)
    met = set()
    for number, attempt in attempts.items():
        # duplicates are handled later
        if attempt.policy.is_atomic and attempt.operation.id not in met:
            met.add(attempt.operation.id)
            if (
                where := engine.batched_in(attempt.operation, attempt.policy)
            ) is not None:
                groups[where][number] = attempt
    several = in_order and len(groups) > 1
    return [] if several else [group for group in groups.values() if len(group) > 1]


def _claim(group: Attempts) -> tuple[dict[int, Claimed], dict[int, Delivery]]:
    """Claim the messages that were never tried, in one statement. Return their claims,
    and the outcomes of those that are done.
    """
    first = next(iter(group.values()))
    try:
        outcomes = engine.claim_many(
            [attempt.operation for attempt in group.values()], first.policy
        )
    except StoreUnavailable as error:
        send(signals.store_failed, first.operation, error=error)
        return {}, dict.fromkeys(group, AwaitsStore(STORE_DELAY, str(error)))
    claims: dict[int, Claimed] = {}
    deliveries: dict[int, Delivery] = {}
    for number, outcome in zip(group, outcomes, strict=True):
        if isinstance(outcome, Claimed):
            claims[number] = outcome
        elif outcome is not None:
            deliveries[number] = group[number].delivery(outcome)
    return claims, deliveries


def _run_in_one_transaction(
    group: Attempts, claims: Mapping[int, Claimed], *, in_order: bool
) -> dict[int, Delivery]:
    """Return the outcomes of messages whose effects are committed. The others leave
    nothing behind but their claims.
    """
    wanted = [number for number in group if in_order or number in claims]
    claimed = [claims[number] for number in wanted if number in claims]
    if not claimed:
        return {}
    done: dict[int, Delivery] = {}
    batch = engine.Batch(claimed, group[wanted[0]].policy)
    try:
        batch.begin()
        for number in wanted:
            delivery = None
            if number in claims:
                delivery = _try_in(batch, group[number], claims[number])
            if delivery is not None:
                done[number] = delivery
            elif in_order:
                break
        batch.commit()
    except Exception as error:
        # whatever it was, each message runs alone next, and meets it again if it
        # persists
        batch.abort(error)
        return {}
    except BaseException as error:
        batch.abort(error)
        raise
    return done


def _try_in(batch: engine.Batch, attempt: Attempt, claim: Claimed) -> Delivery | None:
    """Return the outcome of a message; ``None`` if it has to run alone."""
    handled: list[Delivery] = []

    def work(run: engine.Run) -> Verdict | None:
        verdict, delivery = attempt.handle(run)
        if isinstance(delivery, Exception):
            raise delivery
        handled.append(delivery)
        return verdict

    # from the handler: the message runs alone next, and its error is reported then
    with suppress(Exception):
        if batch.run(claim, work):
            return handled[0]
    return None


def _run_one_by_one(
    attempts: Attempts,
    claims: Mapping[int, Claimed],
    deliveries: dict[int, Delivery],
    *,
    in_order: bool,
) -> None:
    """Handle the messages that have no outcome yet."""
    first: RetryLater | None = None
    for number, attempt in attempts.items():
        if number not in deliveries:
            begun = claims.get(number)
            deliveries[number] = (
                attempt.consume(begun) if first is None else attempt.leave(begun, first)
            )
        delivery = deliveries[number]
        if in_order and first is None and isinstance(delivery, RetryLater):
            first = delivery
