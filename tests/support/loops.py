"""Run coroutines to their end, and close the database connections of their threads."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections


def run(main: Callable[[], Awaitable[Any]]) -> Any:
    """Run ``main`` in a loop of its own."""

    async def closing() -> Any:
        try:
            return await main()
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(closing())


def waiting_for_an_owner(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """An event that is set once a caller waits for the owner of its key."""
    waits, sleep = asyncio.Event(), asyncio.sleep

    async def wait(seconds: float) -> None:
        waits.set()
        await sleep(seconds)

    # only there: the test itself sleeps, too
    patched = SimpleNamespace(**vars(asyncio) | {"sleep": wait})
    monkeypatch.setattr("django_idempotency.engine.beginning.asyncio", patched)
    return waits
