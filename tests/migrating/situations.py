"""What a client can meet, sent to a view with the old package, with ours, and with both
during the switch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from uuid import uuid4

from django.contrib.auth.models import User
from django.db import connections
from django.test import Client, override_settings
from django.urls import path

from tests.migrating.payments import during, effects, runs
from tests.migrating.peers import Peer, View, ours

PATH = "/payments/"


@dataclass(frozen=True)
class Stage:
    """One step of a switch: the view and the middleware that a process has then."""

    view: View
    middleware: tuple[str, ...] = ()

    @contextmanager
    def entered(self) -> Iterator[Client]:
        urls = ModuleType("urls")
        urls.urlpatterns = [path(PATH[1:], self.view)]  # type: ignore[attr-defined]
        with override_settings(ROOT_URLCONF=urls, MIDDLEWARE=list(self.middleware)):
            yield Client(raise_request_exception=False)

    def send(self, body: Any, key: str | None, token: str | None = "alice") -> Any:
        headers = ({"Idempotency-Key": key} if key else {}) | (
            {"Authorization": f"Token {token}"} if token else {}
        )
        text = body if isinstance(body, str) else json.dumps(body)
        with self.entered() as client:
            return client.post(
                PATH, text, content_type="application/json", headers=headers
            )


def old(peer: Peer) -> Stage:
    return Stage(peer.alone(), peer.middleware)


def both(peer: Peer) -> Stage:
    return Stage(peer.around(), peer.middleware)


def new(peer: Peer) -> Stage:
    return Stage(ours())


def payment(status: int = 201) -> dict[str, Any]:
    return {"reference": f"r-{uuid4()}", "status": status}


def in_words(first: Any, second: Any, ran_again: bool) -> str:
    if ran_again:
        word = "runs again"
    elif first is not None and second.content == first.content:
        word = "replayed"
    else:
        word = "refused"
    return f"`{second.status_code}`, {word}"


def sent_twice(
    stage: Stage,
    status: int = 201,
    *,
    again: dict[str, Any] | None = None,
    token: str | None = "alice",
) -> str:
    body, key = payment(status), str(uuid4())
    second_body = body if again is None else body | again
    first = stage.send(body, key)
    before = runs.total()
    second = stage.send(second_body, key, token)
    return in_words(first, second, runs.total() > before)


def after_401(stage: Stage) -> str:
    body, key = payment(), str(uuid4())
    first, second = stage.send(body, key, None), stage.send(body, key)
    assert first.status_code == 401
    return (
        f"`{second.status_code}`, {'runs' if runs[body['reference']] else 'replayed'}"
    )


def in_flight(stage: Stage) -> str:
    body, first, second, _key = sent_during(stage, stage)
    return in_words(first, second, runs[body["reference"]] > 1)


def sent_during(stage: Stage, other: Stage) -> tuple[dict[str, Any], Any, Any, str]:
    """A payment, its response, that of its duplicate at ``other`` while the first is
    running, and their key.
    """
    body, key = payment(), str(uuid4())
    seconds: list[Any] = []

    def duplicate() -> None:
        with ThreadPoolExecutor(1) as thread:
            seconds.append(thread.submit(sent_in_thread, other, body, key).result(60))

    during[body["reference"]] = duplicate
    first = stage.send(body, key)
    assert first.status_code == 201, first.content
    return body, first, seconds[0], key


def sent_in_thread(stage: Stage, body: Any, key: str) -> Any:
    try:
        return stage.send(body, key)
    finally:
        connections.close_all()


def sent_once(stage: Stage, key: str | None) -> str:
    body = payment()
    response = stage.send(body, key)
    return (
        f"`{response.status_code}`, {'runs' if runs[body['reference']] else 'refused'}"
    )


def reordered(stage: Stage) -> str:
    body, key = payment(), str(uuid4())
    first = stage.send(body, key)
    before = runs.total()
    second = stage.send(json.dumps(dict(reversed(body.items()))), key)
    return in_words(first, second, runs.total() > before)


# By the first cell of the tables in docs/comparison.md.
SITUATIONS: dict[str, Callable[[Stage], str]] = {
    "retry after `201`": lambda stage: sent_twice(stage),
    "duplicate while the first runs": in_flight,
    "same key, another body": lambda stage: sent_twice(
        stage, again={"note": "changed"}
    ),
    "same key, JSON in another order": reordered,
    "same key, another user": lambda stage: sent_twice(stage, token="bob"),
    "retry with a new token of the same user": lambda stage: sent_twice(
        stage, token="alice/2"
    ),
    "retry without credentials": lambda stage: sent_twice(stage, token=None),
    "retry after `400`": lambda stage: sent_twice(stage, 400),
    "retry after `402`": lambda stage: sent_twice(stage, 402),
    "retry after an exception": lambda stage: sent_twice(stage, 500),
    "same request with credentials, after `401`": after_401,
    "no key": lambda stage: sent_once(stage, None),
    "a key that is no UUID": lambda stage: sent_once(stage, f"order-{uuid4()}x"),
}


def kept(peer: Peer) -> dict[str, bool]:
    """What of a request can be found in what the package has stored."""
    body, key = payment(), str(uuid4())
    before = set(peer.records())
    assert old(peer).send(body, key).status_code == 201
    (record,) = set(peer.records()) - before
    owner = User.objects.get(username="alice")
    return {
        "key": key in record,
        "caller": f"'user_id': {owner.pk}" in record,
        "body": body["reference"] in record,
        "response": "payment" in record,
    }


# --- The switch -----------------------------------------------------------------------


def outcome(before: Stage, after: Stage) -> tuple[int, bool, int]:
    """The status of a retry at another stage, whether it is the first response, and how
    many effects there are.
    """
    body, key = payment(), str(uuid4())
    first = before.send(body, key)
    second = after.send(body, key)
    return (
        second.status_code,
        second.content == first.content,
        effects(body["reference"]),
    )


def while_running(first: Stage, other: Stage) -> tuple[int, int, int]:
    """The status of a duplicate at another stage, that of a retry there, and how many
    effects there are.
    """
    body, _first, duplicate, key = sent_during(first, other)
    return (
        duplicate.status_code,
        other.send(body, key).status_code,
        effects(body["reference"]),
    )


def switch(peer: Peer) -> dict[str, Any]:
    alone, around, ours_alone = old(peer), both(peer), new(peer)
    return {
        "old, then both": outcome(alone, around),
        "both, then old": outcome(around, alone),
        "both, then ours": outcome(around, ours_alone),
        "ours, then both": outcome(ours_alone, around),
        "old, then ours": outcome(alone, ours_alone),
        "both at once": while_running(around, around),
        "both, and ours meanwhile": while_running(around, ours_alone),
        "ours, and both meanwhile": while_running(ours_alone, around),
    }
