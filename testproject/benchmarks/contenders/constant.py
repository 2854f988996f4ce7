"""The floor without a database: the same middleware and view, but the view responds with a constant."""

from __future__ import annotations

from typing import Any

from testproject.benchmarks.contenders import Contender

BODY = b'{"id":1,"object":"effect","key":"constant","amount":4200,"currency":"eur","status":"succeeded"}'


def protect(view: Any) -> Any:
    from django.db import transaction
    from django.http import HttpResponse

    class Constant(view):  # type: ignore[misc]
        def post(self, request: Any) -> HttpResponse:
            return HttpResponse(BODY, status=201, content_type="application/json")

    return transaction.non_atomic_requests(Constant.as_view())


CONTENDER = Contender(title="a constant", protect=protect)
