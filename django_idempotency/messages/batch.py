"""Handling several messages together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress

from django_idempotency import engine, signals
from django_idempotency.messages.attempt import STORE_DELAY, Attempt
from django_idempotency.messages.message import Delivery, Reject, RetryLater, StoreAway
from django_idempotency.reporting.events import send
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.outcomes import Claimed, Verdict

Attempts = Mapping[int, Attempt]  # by their numbers among the messages


def consume_together(
    attempts: Sequence[Attempt | Reject], *, in_order: bool
) -> list[Delivery]:
    """Handle the attempts of one consumer together if possible, and the others one by one, in their order.

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
        claims |= _claim(group, deliveries)
        _run_together(group, claims, deliveries, in_order=in_order)
    _run_one_by_one(valid, claims, deliveries, in_order=in_order)
    return [deliveries[number] for number in range(len(attempts))]


def _groups(attempts: Attempts, *, in_order: bool) -> list[dict[int, Attempt]]:
    """Group attempts whose records are in one database, for one transaction. A group has at least two."""
    groups: dict[str, dict[int, Attempt]] = defaultdict(dict)
    met = set()
    for number, attempt in attempts.items():
        if (
            attempt.policy.is_atomic and attempt.operation.id not in met
        ):  # duplicates are handled later
            met.add(attempt.operation.id)
            if (
                where := engine.batched_in(attempt.operation, attempt.policy)
            ) is not None:
                groups[where][number] = attempt
    several = in_order and len(groups) > 1
    return [] if several else [group for group in groups.values() if len(group) > 1]


def _claim(group: Attempts, deliveries: dict[int, Delivery]) -> dict[int, Claimed]:
    """Claim the messages that were never tried, in one statement, and find those that are done."""
    first = next(iter(group.values()))
    try:
        outcomes = engine.claim_many(
            [attempt.operation for attempt in group.values()], first.policy
        )
    except StoreUnavailable as error:
        send(signals.store_failed, first.operation, error=error)
        deliveries |= dict.fromkeys(group, StoreAway(STORE_DELAY, str(error)))
        return {}
    by_number = dict(zip(group, outcomes, strict=True))
    deliveries |= {
        number: group[number].delivery(outcome)
        for number, outcome in by_number.items()
        if outcome is not None and not isinstance(outcome, Claimed)
    }
    return {
        number: outcome
        for number, outcome in by_number.items()
        if isinstance(outcome, Claimed)
    }


def _run_together(
    group: Attempts,
    claims: Mapping[int, Claimed],
    deliveries: dict[int, Delivery],
    *,
    in_order: bool,
) -> None:
    """Add the outcomes of messages whose effects are committed. The others leave nothing behind but their claims."""
    done: dict[int, Delivery] = {}
    wanted = [
        number
        for number in group
        if number not in deliveries and (in_order or number in claims)
    ]
    if not any(number in claims for number in wanted):
        return
    batch = engine.Batch(
        [claims[number] for number in wanted if number in claims],
        group[wanted[0]].policy,
    )
    try:
        batch.begin()
        for number in wanted:
            tried = number in claims and _try_in(
                batch, done, number, group[number], claims[number]
            )
            if in_order and not tried:
                break
        batch.end()
    except Exception as error:  # whatever it was, each message runs alone next, and meets it again if it persists
        batch.abort(error)
    except BaseException as error:
        batch.abort(error)
        raise
    else:
        deliveries |= done


def _try_in(
    batch: engine.Batch,
    done: dict[int, Delivery],
    number: int,
    attempt: Attempt,
    claim: Claimed,
) -> bool:
    def work(run: engine.Run) -> Verdict | None:
        verdict, delivery = attempt.handle(run)
        if isinstance(delivery, Exception):
            raise delivery
        done[number] = delivery
        return verdict

    with suppress(
        Exception
    ):  # from the handler: the message runs alone next, and its error is reported then
        if batch.run(claim, work):
            return True
    done.pop(number, None)
    return False


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
