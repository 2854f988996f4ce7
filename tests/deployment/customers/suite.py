"""Their tests: Django's own test cases, two databases."""

from __future__ import annotations

import pytest
from django.core import checks
from django.http import HttpResponse
from django.test import SimpleTestCase, TestCase, TransactionTestCase, override_settings
from django.urls import path
from django.views import View

from django_idempotency.decorators import idempotent
from django_idempotency.models import IdempotencyRecord
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


class Promises:
    databases = {"default", "ledger"}

    def setUp(self):
        self.carol = Customer.objects.create(name="carol")
        Customer.objects.create(name="dave")

    def post(self, path="/book/", *, customer="carol", key="k", **data):
        data = {"reference": "r"} | data
        return self.client.post(path, data, headers={"X-Customer": customer, "Idempotency-Key": key})

    def test_a_retry_gets_the_first_response(self):
        first, second = self.post(), self.post()
        assert (first.content, second.content) == (b"1", b"1")
        assert second.headers["Idempotent-Replayed"] == "true"
        assert Booking.objects.count() == 1

    def test_a_key_belongs_to_its_user(self):
        self.post()
        assert self.post(customer="dave").content == b"2"
        scope = f"{self.carol._meta.label_lower}:{self.carol.pk}"
        assert IdempotencyRecord.objects.using("ledger").filter(scope=scope).exists()

    def test_records_are_kept_where_the_effects_are(self):
        self.post()
        self.post("/name/", name="caroline")
        paths = {
            using: list(IdempotencyRecord.objects.using(using).values_list("path", flat=True))
            for using in self.databases
        }
        assert paths == {"ledger": ["/book/"], "default": ["/name/"]}

    def test_a_failed_run_is_rolled_back_and_a_retry_runs(self):
        with pytest.raises(LookupError):
            self.post(fail="yes")
        assert Booking.objects.count() == 0
        with pytest.raises(LookupError):
            self.post(fail="yes")
        assert IdempotencyRecord.objects.using("ledger").get().attempts == 2

    def test_another_request_under_the_key_is_refused(self):
        self.post()
        assert self.post(reference="other").status_code == 422


class InOneTransaction(Promises, TestCase):
    pass


class WithRealTransactions(Promises, TransactionTestCase):
    pass


@idempotent
class Astray(View):
    model = Booking


@idempotent(using="ledger")
class AtHome(View):
    model = Booking


@override_settings(ROOT_URLCONF=(path("astray/", Astray.as_view()), path("at-home/", AtHome.as_view())))
class Checks(SimpleTestCase):
    def test_effects_in_another_database_than_the_record_are_an_error(self):
        (error,) = [message for message in checks.run_checks() if message.id == "django_idempotency.E019"]
        assert "Astray" in error.msg


urlpatterns = [
    path("book/", known(idempotent(using="ledger")(book))),
    path("name/", known(idempotent(name))),
]
