"""What a step returns, as JSON, and what can be wrong with a step."""

from __future__ import annotations

import json
from inspect import isawaitable, iscoroutine
from typing import Any

from django_idempotency import IdempotencyError

MOST = 2**20  # bytes
LONGEST_NAME = 100
# Reasons of holds, stored with names of steps in them, and so in English.
UNKNOWN = (
    "The step {name} was interrupted, and may run at most once: find out whether it was"
    " done."
)
ENDED = (
    "The transaction of the step {name} was committed or rolled back behind Django's"
    " back: find out whether its effects are there."
)
UNREADABLE = "The result of the step {name} was erased, or can't be decrypted."
DRIFT = (
    "The code has changed: the step {name} has not run yet, but these have, and were"
    " not asked for: {others}."
)

KINDS = {
    "code_changed": DRIFT,
    "outcome_unknown": UNKNOWN,
    "transaction_ended": ENDED,
    "result_unreadable": UNREADABLE,
}


def held_by(reason: str) -> tuple[str, str]:
    """Return the kind of a hold, and the name of the step that it is by; two empty
    texts if it is by none.
    """
    for kind, text in KINDS.items():
        before, _name, behind = text.partition("{name}")
        name, found, _more = reason.removeprefix(before).partition(
            behind.partition("{")[0]
        )
        if reason.startswith(before) and found:
            return kind, name
    return "", ""


class StepError(IdempotencyError):
    """A step can't be run as it is written. The message says what to change."""


def check_name(name: str) -> None:
    if not (0 < len(name) <= LONGEST_NAME and name.isprintable()):
        raise StepError(
            f"The name {name!r} needs 1 to {LONGEST_NAME} printable characters."
        )


def dumped(name: str, result: Any) -> bytes:
    """Return the result of a step as JSON. Raises ``StepError`` if that can't hold
    it.
    """
    if isawaitable(result):
        if iscoroutine(result):
            result.close()
        raise StepError(
            f"The step {name!r} returned a coroutine: call steps.acall() in async code,"
            " and give steps.aatomic() a sync function."
        )
    try:
        text = json.dumps(result, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise StepError(
            f"The result of the step {name!r} can't be kept as JSON: {error}. Return"
            " only what JSON can hold, such as ids and strings."
        ) from error
    if len(text) > MOST:
        raise StepError(
            f"The result of the step {name!r} has {len(text)} bytes, but at most"
            f" {MOST} are kept. Return less, such as an id."
        )
    return text


def declared(name: str) -> str:
    """Return the part of a step's name before a colon, which code declares: ``line``
    for ``line:7``.
    """
    return name.partition(":")[0]
