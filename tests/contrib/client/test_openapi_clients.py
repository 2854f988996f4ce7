"""Clients generated from our OpenAPI documents send the key, retry into one effect, and know our problem responses."""

from __future__ import annotations

import importlib
import json
import uuid

import pytest
from django.core.wsgi import get_wsgi_application
from django.urls import path
from ninja import NinjaAPI, Schema, Status

from django_idempotency.decorators import idempotent
from django_idempotency.policy import Policy
from tests.support.callers import all_effects, pay
from tests.support.generated import generated_client

pytestmark = [pytest.mark.openapi_client, pytest.mark.usefixtures("payer", "transactional_db")]


class Payment(Schema):
    amount: int


class Paid(Payment):
    entry: str


def by_rest_framework():
    """The URLs of a view that is protected, and its OpenAPI document."""
    from drf_spectacular.generators import SchemaGenerator
    from rest_framework import parsers, response, routers, serializers, viewsets

    from django_idempotency.rest_framework import IdempotentMixin

    class PaymentSerializer(serializers.Serializer):
        amount = serializers.IntegerField()
        entry = serializers.CharField(read_only=True)

    class Payments(IdempotentMixin, viewsets.GenericViewSet):
        authentication_classes = permission_classes = ()
        parser_classes = (parsers.JSONParser,)
        serializer_class = PaymentSerializer
        idempotency_policy = Policy(scope="public")

        def create(self, request):
            return response.Response({"amount": request.data["amount"], "entry": str(pay().pk)}, status=201)

    router = routers.SimpleRouter()
    router.register("payments", Payments, basename="payment")
    return router.urls, SchemaGenerator(patterns=router.urls).get_schema(request=None, public=True)


def by_ninja():
    """The same, of Django Ninja."""
    api = NinjaAPI(urls_namespace=uuid.uuid4().hex, docs_url=None)

    @api.post("/payments/", response={201: Paid}, operation_id="payments_create", tags=["payments"])
    @idempotent(scope="public")
    def create(request, payment: Payment):
        return Status(201, {"amount": payment.amount, "entry": str(pay().pk)})

    return [path("", api.urls)], json.loads(json.dumps(api.get_openapi_schema(path_prefix="")))


@pytest.fixture(params=[by_rest_framework, by_ninja], ids=["drf", "ninja"])
def generated(request, settings, tmp_path):
    """The package that was generated from the document of an API, which is served."""
    urls, document = request.param()
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

    def sent(amount, **named):
        return create.sync_detailed(client=client, body=payment(amount=amount, **named), idempotency_key='"k"')

    yield sent
    client.get_httpx_client().close()


def test_a_generated_client_retries_into_one_effect(send, generated):
    entry = {"entry": ""} if "entry" in generated.models.Payment.__annotations__ else {}  # of REST framework, read-only
    first = send(5, **entry)
    assert (first.status_code, first.headers["Idempotent-Replayed"], all_effects()) == (201, "true", 1)
    assert first.parsed.amount == 5
    reused = send(6, **entry)
    assert (reused.status_code, reused.parsed.code, all_effects()) == (422, "idempotency_key_reused", 1)
