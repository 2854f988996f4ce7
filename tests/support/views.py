"""What the views of the tests do, and a way to call a view through Django as a client
does.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from asgiref.sync import async_to_sync
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient
from django.urls import path
from django.views import View

from testproject.models import LedgerEntry


def book(request: Any, reference: str = "r") -> LedgerEntry:
    """An effect in the database."""
    return LedgerEntry.objects.create(
        kind=LedgerEntry.Kind.ORDER,
        user=request.user,
        amount=1,
        currency="EUR",
        reference=reference,
    )


class Runs:
    """Plain views, sync and async, that have an effect and count how often they ran."""

    def __init__(
        self, answer: Callable[[HttpRequest], HttpResponse] | None = None
    ) -> None:
        self.contexts: list[Any] = []
        self.answer = answer or (lambda request: HttpResponse(f"run {self.count}"))

    @property
    def count(self) -> int:
        return len(self.contexts)

    def view(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        self.contexts.append(getattr(request, "idempotency", None) or None)
        return self.answer(request)

    async def aview(
        self, request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        return self.view(request)


class Order(View):
    """Has no ``runs``: a test makes a class of its own that has."""

    runs: Runs

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return self.runs.view(request)


class AsyncOrder(View):
    runs: Runs

    async def post(
        self, request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponse:
        return await self.runs.aview(request)


def class_with(base: Any, runs: Runs) -> Any:
    return type(base.__name__, (base,), {"runs": runs})


def api_class(respond: Callable[[Any], Any], *bases: type, **attributes: Any) -> Any:
    """A view of REST framework that responds to a POST by ``respond(request)``, and
    lets everybody in.
    """
    from rest_framework.views import APIView

    open_to_all = {"authentication_classes": (), "permission_classes": ()}
    handler = {"post": lambda _view, request, *_args, **_kwargs: respond(request)}
    return type("Posted", (*bases, APIView), open_to_all | handler | attributes)


class Caller:
    """A signed-in client: ``call(view, {"amount": 1}, key="k")`` serves the view and
    sends it a request.
    """

    PATH = "/view/"

    def __init__(self, client: Any, settings: Any) -> None:
        self.client = client
        self.settings = settings

    def __call__(self, view: Any, *args: Any, **options: Any) -> Any:
        """``key=None`` sends no key; the options are those of the client's
        ``generic``.
        """
        self._serve(view)
        return self.client.generic(**self.request(*args, **options))

    def asgi(self, view: Any, *args: Any, **options: Any) -> Any:
        """The same request by way of ASGI."""
        self._serve(view)
        client = AsyncClient(
            raise_request_exception=self.client.raise_request_exception
        )
        client.cookies = self.client.cookies

        async def send() -> Any:
            return await client.generic(**self.request(*args, **options))

        return async_to_sync(send)()

    def _serve(self, view: Any) -> None:
        self.settings.ROOT_URLCONF = (path("view/", view), path("view/<int:pk>/", view))

    def request(
        self,
        payload: Any = None,
        *,
        key: str | None = "k",
        method: str = "POST",
        path: str = PATH,
        **options: Any,
    ) -> dict[str, Any]:
        headers = {} if key is None else {"Idempotency-Key": key}
        if payload is not None and "data" not in options:
            options |= {"data": json.dumps(payload), "content_type": "application/json"}
        return {
            "method": method,
            "path": path,
            "headers": headers | options.pop("headers", {}),
            **options,
        }


def code(response: Any) -> str | None:
    """The code of one of our own answers."""
    if not response.headers.get("Content-Type", "").startswith(
        "application/problem+json"
    ):
        return None
    code: str = json.loads(response.content)["code"]
    return code


def own_dispatch(cls: Any) -> Any:
    """A ``dispatch`` for a view of REST framework, to be marked: a mark on the
    inherited one would be on every view.
    """

    def dispatch(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        return super(cls, self).dispatch(request, *args, **kwargs)

    return dispatch
