"""Clients generated from our OpenAPI documents send the key, retry into one effect, and
know our problem responses.

``tests/deployment/test_afternoon.py`` shows it of a document of REST framework.
"""

from __future__ import annotations

import importlib
import json
import uuid

import httpx
import pytest
from django.core.wsgi import get_wsgi_application
from django.urls import path
from ninja import NinjaAPI, Schema, Status

from django_idempotency.contrib.client import Retries
from django_idempotency.contrib.client.httpx import IdempotentTransport
from django_idempotency.http.placement import idempotent
from tests.support.callers import all_effects, pay
from tests.support.generated import generated_client

pytestmark = [
    pytest.mark.openapi_client,
    pytest.mark.usefixtures("payer", "transactional_db"),
]


class Payment(Schema):
    amount: int


class Paid(Payment):
    entry: str


@pytest.fixture
def send(settings, tmp_path):
    """Sends a payment by a client that was generated from an API of Django Ninja; the
    first response gets lost.
    """
    api = NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None)

    @api.post(
        "/payments/",
        response={201: Paid},
        operation_id="payments_create",
        tags=["payments"],
    )
    @idempotent(scope="public")
    def create_payment(request, payment: Payment):
        return Status(201, {"amount": payment.amount, "entry": str(pay().pk)})

    settings.ROOT_URLCONF = (path("", api.urls),)

    class Lossy(httpx.WSGITransport):
        sent = 0

        def handle_request(self, request):
            response = super().handle_request(request)
            self.sent += 1
            if self.sent == 1:
                response.read()
                raise httpx.ReadError("the response is lost")
            return response

    transport = IdempotentTransport(
        Lossy(get_wsgi_application()), Retries(first_wait=0.001)
    )
    document = json.loads(json.dumps(api.get_openapi_schema(path_prefix="")))
    with (
        generated_client(document, tmp_path) as package,
        package.Client(
            base_url="http://testserver", httpx_args={"transport": transport}
        ) as client,
    ):
        create = importlib.import_module(
            f"{package.__name__}.api.payments.payments_create"
        )
        of_payments = importlib.import_module(f"{package.__name__}.models").Payment
        yield lambda amount: create.sync_detailed(
            client=client, body=of_payments(amount=amount), idempotency_key='"k"'
        )


def test_a_generated_client_retries_into_one_effect(send):
    first = send(5)
    assert (first.status_code, first.headers["Idempotent-Replayed"], all_effects()) == (
        201,
        "true",
        1,
    )
    assert first.parsed.amount == 5
    reused = send(6)
    assert (reused.status_code, reused.parsed.code, all_effects()) == (
        422,
        "idempotency_key_reused",
        1,
    )
