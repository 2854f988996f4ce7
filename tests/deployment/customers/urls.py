from __future__ import annotations

from django.http import HttpResponse
from django.urls import path

from django_idempotency.decorators import idempotent
from tests.deployment.customers.models import Booking, Customer


def known(view):
    """Authentication: the customer's name in a header."""

    def authenticated(request, *args, **kwargs):
        request.user = Customer.objects.get(name=request.headers["X-Customer"])
        return view(request, *args, **kwargs)

    return authenticated


def book(request):
    Booking.objects.create(reference=request.POST["reference"])
    if "fail" in request.POST:
        raise LookupError
    return HttpResponse(f"{Booking.objects.count()}")


def name(request):
    Customer.objects.filter(pk=request.user.pk).update(name=request.POST["name"])
    return HttpResponse(f"attempt {request.idempotency.attempt}")


urlpatterns = [
    path("book/", known(idempotent(using="ledger")(book))),
    path("name/", known(idempotent(name))),
]
