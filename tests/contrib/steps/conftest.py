"""Operations of several steps, run behind an entry point in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.http import JsonResponse

from django_idempotency import Lease
from tests.admin.conftest import staff, superuser  # noqa: F401
from tests.support.callers import entry_point

LEASE = Lease(seconds=30)


def _read(response: Any) -> Any:
    body = json.loads(response.content)
    return body["result"] if response.status_code == 200 else body


def run(work: Callable[[], Any], key: str = "k", **policy: Any) -> Any:
    """One request: the result of ``work``, or the problem document."""
    view = entry_point(
        lambda request: JsonResponse({"result": work()}), **{"mode": LEASE} | policy
    )
    return _read(view(key))


def arun(work: Callable[[], Any], key: str = "k", **policy: Any) -> Any:
    """The same with an async view, which awaits ``work``."""

    async def view(request: Any) -> JsonResponse:
        return JsonResponse({"result": await work()})

    async def respond() -> Any:
        return await entry_point(view, **{"mode": LEASE} | policy)(key)

    return _read(async_to_sync(respond)())


@pytest.fixture(autouse=True)
def _paying(payer: None) -> None:
    pass
