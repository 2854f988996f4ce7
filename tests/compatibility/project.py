"""What the scenario has to know of a project: of a plain view behind the middleware,
unless the project says more.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any
from uuid import uuid4

from django.contrib.auth.models import Group
from django.core.wsgi import get_wsgi_application
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import ResponseHeaders
from django.test import RequestFactory

REFUSED = "refused"


def pay(request: HttpRequest) -> HttpResponse:
    """Write a row, also for what is refused in the end, as a package's bookkeeping
    does.
    """
    reference, refuse = json.loads(request.body).values()
    write(REFUSED if refuse else reference)
    return JsonResponse({"paid": str(uuid4())}, status=422 if refuse else 201)


def write(reference: str) -> None:
    Group.objects.create(name=f"{reference} {uuid4()}")


def paid(reference: str) -> str:
    write(reference)
    return str(uuid4())


@dataclass(frozen=True)
class Answer:
    status_code: int
    headers: ResponseHeaders
    content: bytes

    def json(self) -> Any:
        return json.loads(self.content)


@cache
def application() -> Any:
    return get_wsgi_application()


def ask(method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """Send a request to the WSGI application, as a server does: a form if ``body`` is
    text, else JSON.
    """
    kind = (
        "application/x-www-form-urlencoded"
        if isinstance(body, str)
        else "application/json"
    )
    data = body if isinstance(body, str) else "" if body is None else json.dumps(body)
    request = RequestFactory().generic(method, path, data, kind, headers=headers)
    started: list[Any] = []
    chunks = application()(request.environ, lambda *start: started.extend(start))
    content = b"".join(chunks)
    chunks.close()
    status, sent = started[:2]
    return Answer(int(status.partition(" ")[0]), ResponseHeaders(sent), content)


class Project:
    path = "/pay/"
    paid = 201  # the status of what took effect
    effect: type[Model] = Group
    books = True  # whether there is a row or the like of a request that was refused

    def begin(self) -> None:
        """Make what the project needs in its empty database."""

    def headers(self) -> dict[str, str]:
        """Those of a caller who is let in."""
        return {}

    def body(self, reference: str, *, refuse: bool) -> Any:
        return {"reference": reference, "refuse": refuse}

    def send(
        self,
        reference: str,
        key: str | None = None,
        *,
        refuse: bool = False,
        **headers: str,
    ) -> Answer:
        """POST a payment to the view; ``refuse``: one that it answers by a status that
        releases the key.
        """
        sent = self.headers() | ({"Idempotency-Key": key} if key else {}) | headers
        return ask("POST", self.path, self.body(reference, refuse=refuse), **sent)

    def effects(self, reference: str) -> int:
        return Group.objects.filter(name__startswith=reference).count()

    def take_bookings(self) -> int:
        """How much the package or the view has kept of refused requests, which is
        forgotten then.
        """
        return Group.objects.filter(name__startswith=REFUSED).delete()[0]

    def code(self, refused: Answer) -> Any:
        """Return the code of a problem."""
        return refused.json()["code"]

    def check(self) -> None:
        """Assert what else the package promises."""


class GraphQL(Project):
    paid = 200
    books = False  # what is refused has no query

    def __init__(self, path: str, fields: str = "") -> None:
        self.path, self.fields = path, fields

    def body(self, reference: str, *, refuse: bool) -> Any:
        return (
            {}
            if refuse
            else {
                "query": f'mutation {{ pay(reference: "{reference}") {self.fields} }}'
            }
        )
