"""Clients generated from our OpenAPI documents send the key, retry into one effect, and know our problem responses.

``tests/deployment/test_afternoon.py`` shows it of a document of REST framework.
"""

from __future__ import annotations

import importlib
import json
import uuid

import pytest
from django.core.wsgi import get_wsgi_application
from django.urls import path
from ninja import NinjaAPI, Schema, Status

from django_idempotency.decorators import idempotent
from tests.support.callers import all_effects, pay
from tests.support.generated import generated_client

pytestmark = [pytest.mark.openapi_client, pytest.mark.usefixtures("payer", "transactional_db")]


class Payment(Schema):
    amount: int


class Paid(Payment):
    entry: str


def served():
    """The URLs of an operation that is protected, and its OpenAPI document."""
    api = NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None)

    @api.post("/payments/", response={201: Paid}, operation_id="payments_create", tags=["payments"])
    @idempotent(scope="public")
    def create(request, payment: Payment):
        return Status(201, {"amount": payment.amount, "entry": str(pay().pk)})

    return [path("", api.urls)], json.loads(json.dumps(api.get_openapi_schema(path_prefix="")))


@pytest.fixture
def generated(settings, tmp_path):
    """The package that was generated from the document of an API of Django Ninja, which is served."""
    urls, document = served()
    settings.ROOT_URLCONF = tuple(urls)
    with generated_client(document, tmp_path) as package:
        yield package


@pytest.fixture
def send(generated):
    """Sends a payment by the generated client; the first response gets lost."""
    import httpx

    from django_idempotency.contrib.client.httpx import IdempotentTransport
    from django_idempotency.contrib.client.retries import Retries

    class Lossy(httpx.WSGITransport):
        sent = 0

        def handle_request(self, request):
            response = super().handle_request(request)
            self.sent += 1
            if self.sent == 1:
                response.read()
                raise httpx.ReadError("the response is lost")
            return response

    transport = IdempotentTransport(Lossy(get_wsgi_application()), Retries(first_wait=0.001))
    name = generated.__name__
    create = importlib.import_module(f"{name}.api.payments.payments_create")
    payment = importlib.import_module(f"{name}.models").Payment
    client = generated.Client(base_url="http://testserver", httpx_args={"transport": transport})

    def sent(amount):
        return create.sync_detailed(client=client, body=payment(amount=amount), idempotency_key='"k"')

    yield sent
    client.get_httpx_client().close()


def test_a_generated_client_retries_into_one_effect(send):
    first = send(5)
    assert (first.status_code, first.headers["Idempotent-Replayed"], all_effects()) == (201, "true", 1)
    assert first.parsed.amount == 5
    reused = send(6)
    assert (reused.status_code, reused.parsed.code, all_effects()) == (422, "idempotency_key_reused", 1)
