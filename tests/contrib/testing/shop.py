"""A small shop whose orders are protected by this package, by something broken, or not
at all.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from pathlib import Path
from typing import Any

from django.core.cache import cache
from django.core.mail import send_mail
from django.db import transaction
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt

from django_idempotency.http.placement import idempotent
from django_idempotency.values.policy import Lease
from testproject.models import LedgerEntry, Receipt
from tests.support.callers import pay

numbers = itertools.count()
journal: Path | None = None  # a file, which no transaction undoes


meeting = threading.Barrier(2)  # of duplicates, between the look and the act


def remembering(view: Any) -> Any:
    """A broken peer: looks for a response, runs the view, stores the response."""

    @functools.wraps(view)
    def remembered(request: Any) -> HttpResponse:
        key = request.headers["Idempotency-Key"]
        stored = cache.get(key)
        if cache.get("measured"):
            meeting.wait(60)
        cache.set("measured", True)
        if stored is None:
            stored = view(request).content
            cache.set(key, stored)
        return HttpResponse(stored, status=201)

    return remembered


def order(request: Any) -> JsonResponse:
    return JsonResponse({"order": str(pay().pk), "number": next(numbers)}, status=201)


def bumping(request: Any) -> HttpResponse:
    """Change rows and make none: the balance goes up."""
    for entry in LedgerEntry.objects.all():
        entry.amount += 5
        entry.save()
    return HttpResponse("bumped")


def mailing(request: Any) -> HttpResponse:
    send_mail("Order", "is taken", "shop@example.com", ["customer@example.com"])
    return HttpResponse("sent")


def journaling(request: Any) -> HttpResponse:
    """Have an effect outside of the database, too."""
    assert journal is not None
    with journal.open("a") as lines:
        lines.write("order\n")
    return order(request)


def refusing(request: Any) -> JsonResponse:
    Receipt.objects.create(event="refused", reference="r")
    return JsonResponse({"number": next(numbers)}, status=422)


def streaming(request: Any) -> StreamingHttpResponse:
    return StreamingHttpResponse([order(request).content])


def renewing(request: Any) -> JsonResponse:
    """Renew the session, as a login does: the caller's old cookie stands for nobody
    from then on.
    """
    seen = by_session(request)
    request.session.flush()
    request.session["seen"] = seen
    return order(request)


def noting_the_end(get_response: Any) -> Any:
    """A middleware that notes which process ended a request, however that came
    about.
    """

    def respond(request: Any) -> Any:
        assert journal is not None
        try:
            return get_response(request)
        finally:
            with journal.open("a") as lines:
                lines.write(f"{os.getpid()}\n")

    return respond


def unique(request: Any) -> JsonResponse:
    """Have the database refuse a second effect."""
    LedgerEntry.objects.filter(pk=pay().pk).update(operation="only")
    return JsonResponse({}, status=201)


async def slow_order(request: Any) -> JsonResponse:
    await Receipt.objects.acreate(event="slow", reference="r")
    return JsonResponse({"number": next(numbers)}, status=201)


def pointing_at_the_first(view: Any) -> Any:
    """A broken peer: does nothing twice, but tells a retry only that it is one."""

    @functools.wraps(view)
    def pointed(request: Any) -> HttpResponse:
        if not cache.add(request.headers["Idempotency-Key"], True):
            return JsonResponse({"duplicate": True})
        return view(request)

    return pointed


def by_session(request: Any) -> str:
    return str(request.session.get("seen", "nobody"))


def telling(request: Any) -> JsonResponse:
    """Tell what headers came, and have an effect."""
    pay()
    return JsonResponse(dict(request.headers))


public = idempotent(scope="public")
lease = idempotent(scope="public", mode=Lease(on_crash="retry"))
hold = idempotent(scope="public", mode=Lease(on_crash="hold"))

urlpatterns = [
    path("orders/", csrf_exempt(public(order))),
    path(
        "orders/<int:number>/",
        csrf_exempt(public(lambda request, number: order(request))),
    ),
    path("lease/", csrf_exempt(lease(transaction.atomic(order)))),
    path("hold/", csrf_exempt(hold(transaction.atomic(order)))),
    path("bumps/", csrf_exempt(public(bumping))),
    path("mails/", csrf_exempt(public(mailing))),
    path("journal/", csrf_exempt(public(journaling))),
    path("refusals/", csrf_exempt(public(refusing))),
    path("streams/", csrf_exempt(public(streaming))),
    path("async/", csrf_exempt(lease(slow_order))),
    path("nobody/", csrf_exempt(idempotent(order))),
    path("renewals/", csrf_exempt(idempotent(scope=by_session)(renewing))),
    path("unprotected/", csrf_exempt(order)),
    path("unprotected/bumps/", csrf_exempt(bumping)),
    path("unprotected/mails/", csrf_exempt(mailing)),
    path("pointed/", csrf_exempt(pointing_at_the_first(order))),
    path("broken/", csrf_exempt(lambda request: HttpResponse(status=1 // 0))),
    path("remembered/", csrf_exempt(remembering(order))),
    path("busy/", csrf_exempt(lambda request: HttpResponse(status=409))),
    path("unique/", csrf_exempt(unique)),
    path("nothing/", csrf_exempt(lambda request: HttpResponse())),
    path("headers/", csrf_exempt(telling)),
]
