"""Webhooks that come in: each event once, and no id for strangers."""

from __future__ import annotations

import base64
import hmac
import json
import time
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.test import Client, RequestFactory
from django.urls import path
from standardwebhooks import Webhook

from django_idempotency.messages import RejectMessage
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.policy import Lease, Policy
from django_idempotency.webhooks import (
    NotVerified,
    WebhookView,
    github_webhook,
    standard_webhook,
    stripe_webhook,
)
from tests.messages.handlers import pay
from tests.support.callers import all_effects as effects

pytestmark = [pytest.mark.webhooks, pytest.mark.usefixtures("transactional_db")]

OLD, NEW, ANOTHER = (
    "whsec_" + base64.b64encode(word * 8).decode()
    for word in (b"old ", b"new ", b"own ")
)
BODY = b'{"type": "paid", "data": {"amount": 5}}'


class Hook(WebhookView):
    source = "gateway"
    verify = standard_webhook(NEW, OLD)
    handle = staticmethod(pay)


class Failing(Hook):
    def handle(self, message, context):
        pay(message, context)
        raise LookupError("not yet")


class Refusing(Hook):
    def handle(self, message, context):
        raise RejectMessage("unknown type")


urlpatterns = [
    path(f"{view.__name__}/", view.as_view()) for view in (Hook, Failing, Refusing)
]


@pytest.fixture(autouse=True)
def urls(settings):
    settings.ROOT_URLCONF = __name__


def signed(id="evt-1", body=BODY, *, secret=NEW, at=None):
    at = at or datetime.now(UTC)
    signature = Webhook(secret).sign(id, at, body.decode())
    return {
        "webhook-id": id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": signature,
    }


def post(headers, body=BODY, view=Hook):
    return Client().post(
        f"/{view.__name__}/", body, content_type="application/json", headers=headers
    )


def test_a_view_that_does_not_say_whose_events_it_verifies_is_refused():
    with pytest.raises(ImproperlyConfigured, match="Hook has no source and no verify"):
        type("Hook", (WebhookView,), {}).as_view()
    with pytest.raises(ImproperlyConfigured, match="Hook has no verify"):
        type("Hook", (WebhookView,), {"source": "gateway"}).as_view()


@pytest.mark.parametrize("by", ["policy", "setting"])
def test_a_retention_shorter_than_signatures_are_accepted_is_refused(settings, by):
    short = type(
        "Short",
        (Hook,),
        {"policy": Policy(retention=599)} if by == "policy" else {"policy": None},
    )
    settings.IDEMPOTENCY = (
        {} if by == "policy" else {"RETENTION": 599, "LEASE": Lease(seconds=10)}
    )
    with pytest.raises(
        ImproperlyConfigured,
        match="Short: its retention of 599 s is shorter than the 600 s",
    ):
        short.as_view()
    settings.IDEMPOTENCY = {}
    type("Long", (Hook,), {"policy": Policy(retention=600)}).as_view()


def test_another_timestamp_and_signature_are_the_same_event():
    earlier = datetime.now(UTC) - timedelta(seconds=60)
    assert (post(signed()).status_code, post(signed(at=earlier)).status_code) == (
        200,
        200,
    )
    assert (effects(), IdempotencyRecord.objects.get().key) == (1, "evt-1")


def test_verify_may_be_a_method():
    class ByMethod(Hook):
        trusted = "e-1"

        def verify(self, request):
            if request.headers["X-Event"] != self.trusted:
                raise NotVerified
            return self.trusted

    post = RequestFactory().post
    sent = {"data": BODY, "content_type": "application/json"}
    view = ByMethod.as_view()
    responses = [
        view(post("/", **sent, headers={"X-Event": id})).status_code
        for id in ("e-1", "e-1", "e-2")
    ]
    assert (responses, effects()) == ([200, 200, 401], 1)


def by_header(request, name="X-Event", *more, **options):
    return request.headers[name]


@pytest.mark.parametrize(
    "verify",
    [by_header, partial(by_header, name="X-Event"), partial(by_header, at=1)],
    ids=["defaults", "partial", "more options"],
)
def test_a_function_that_verifies_may_have_options(verify):
    view = type("ByFunction", (Hook,), {"verify": verify}).as_view()
    post = RequestFactory().post
    sent = {"data": BODY, "content_type": "application/json"}
    assert view(post("/", **sent, headers={"X-Event": "e-1"})).status_code == 200
    assert IdempotencyRecord.objects.get().key == "e-1"


def test_a_path_can_have_a_secret_of_its_own():
    view = Hook.as_view(source="another", verify=standard_webhook(ANOTHER))
    for secret, status in ((ANOTHER, 200), (NEW, 401)):
        request = RequestFactory().post(
            "/", BODY, content_type="application/json", headers=signed(secret=secret)
        )
        assert view(request).status_code == status
    assert IdempotencyRecord.objects.get().scope == "consumer:webhooks:another"


def test_each_of_several_secrets_will_do():
    assert post(signed("evt-1", secret=NEW)).status_code == 200
    assert post(signed("evt-2", secret=OLD)).status_code == 200
    assert effects() == 2


@pytest.mark.parametrize(
    "headers",
    [
        {},
        signed() | {"webhook-signature": "v1,AAAA"},
        signed(secret="whsec_" + base64.b64encode(b"another secret").decode()),
        signed(at=datetime.now(UTC) - timedelta(days=1)),
        signed(at=datetime.now(UTC) + timedelta(days=1)),
        signed() | {"webhook-id": "evt-2"},
        signed() | {"webhook-timestamp": "soon"},
        signed() | {"webhook-timestamp": "9" * 400},
        *(
            signed() | {"webhook-signature": text}
            for text in ("x", "v1", "v1,a,b", "v1,abc", "v1,\xe9", "v1,AAAA x")
        ),
    ],
)
def test_a_request_that_is_not_verified_does_not_use_up_the_id(headers):
    assert post(headers).status_code == post(headers, b"\xff\xfe").status_code == 401
    assert (effects(), IdempotencyRecord.objects.count()) == (0, 0)
    assert post(signed()).status_code == 200
    assert effects() == 1


@pytest.mark.parametrize("make", [standard_webhook, stripe_webhook, github_webhook])
@pytest.mark.parametrize("secrets", [(), ("",), (" ",), (NEW, ""), (None,), (b"k",)])
def test_a_verifier_refuses_unusable_secrets(make, secrets):
    with pytest.raises(ImproperlyConfigured, match=rf"^{make.__name__}\(\) takes"):
        make(*secrets)


@pytest.mark.parametrize("secret", ["whsec_", "whsec_é", "whsec_a", "whsec_ab!="])
def test_a_secret_that_is_not_base64_is_refused_and_never_shown(secret):
    with pytest.raises(ImproperlyConfigured, match="whsec_ and base64") as refused:
        standard_webhook(NEW, secret)
    assert repr(secret) not in str(refused.value)


def by_stripe(body, *secrets, off=0, **more):
    at = int(time.time()) + off
    content = f"{at}.".encode() + body
    signs = [hmac.new(it.encode(), content, "sha256").hexdigest() for it in secrets]
    parts = {"t": at, **more}
    named = [f"{name}={value}" for name, value in parts.items()]
    return ",".join([*named, *(f"v1={sign}" for sign in signs)])


PAID = b'{"id": "evt_1", "type": "paid"}'


@pytest.mark.parametrize(
    ("sign", "is_genuine"),
    [
        (lambda: by_stripe(PAID, "new"), True),
        (lambda: by_stripe(PAID, "old"), True),
        (lambda: by_stripe(PAID, "other", "old", v0="x"), True),
        (lambda: by_stripe(PAID, "new", off=-200), True),
        (lambda: by_stripe(PAID, "new", off=-301), False),
        (lambda: by_stripe(PAID, "new", off=400), False),
        (lambda: by_stripe(PAID, "other"), False),
        (lambda: by_stripe(b"{}", "new"), False),
        (lambda: by_stripe(PAID, "new").replace("v1=", "v0="), False),
        (lambda: by_stripe(PAID, "new").replace("t=1", "t=2"), False),
        (lambda: by_stripe(PAID), False),
        *((it.format, False) for it in ("", "t", "t=,v1=", "t=soon,v1=\xe9", "v1,t")),
        (lambda: f"t={'9' * 400},v1=a", False),
    ],
)
def test_a_signature_of_stripe_is_accepted_only_if_it_is_genuine(sign, is_genuine):
    request = RequestFactory().post(
        "/", PAID, "application/json", headers={"Stripe-Signature": sign()}
    )
    verify = stripe_webhook("new", "old")
    if is_genuine:
        assert verify(request) == "evt_1"
    else:
        with pytest.raises(NotVerified):
            verify(request)


@pytest.mark.parametrize("body", [b"{}", b"[]", b'{"id": 5}', b'{"id": null}', b"\xff"])
def test_a_signed_event_of_stripe_without_an_id_is_a_bad_request(body):
    view = Hook.as_view(verify=stripe_webhook("new"))
    headers = {"Stripe-Signature": by_stripe(body, "new")}
    request = RequestFactory().post("/", body, "application/json", headers=headers)
    assert view(request).status_code == 400
    assert (effects(), IdempotencyRecord.objects.count()) == (0, 0)


def test_an_event_whose_handler_fails_is_asked_for_again():
    assert post(signed(), view=Failing).status_code == 503
    assert (effects(), IdempotencyRecord.objects.get().status) == (0, "failed")
    assert post(signed()).status_code == 200
    assert effects() == 1


def test_an_event_that_is_refused_is_refused_for_good():
    answers = [post(signed(), view=Refusing) for _delivery in range(2)]
    assert [
        (answer.status_code, json.loads(answer.content)["detail"]) for answer in answers
    ] == [(422, "unknown type")] * 2


def test_an_id_with_another_body_is_refused():
    other = b'{"type": "paid", "data": {"amount": 6}}'
    assert post(signed()).status_code == 200
    assert post(signed(body=other), other).status_code == 400
    assert effects() == 1


def test_an_event_in_flight_is_to_come_again(other_thread):
    request = {"headers": signed(), "content_type": "application/json"}
    meanwhile = []

    def look(message, context):
        meanwhile.append(other_thread(post, signed()))
        return pay(message, context)

    class Looking(Hook):
        handle = staticmethod(look)

    assert (
        Looking.as_view()(RequestFactory().post("/", BODY, **request)).status_code
        == 200
    )
    assert (
        meanwhile[0].status_code,
        meanwhile[0].headers["Retry-After"] in ("1", "2"),
    ) == (409, True)
    assert effects() == 1


def test_a_key_works_under_atomic_requests(settings, monkeypatch):
    monkeypatch.setitem(connection.settings_dict, "ATOMIC_REQUESTS", True)
    assert post(signed() | {"Idempotency-Key": "k"}).status_code == 200
    assert (effects(), IdempotencyRecord.objects.count()) == (1, 1)


def test_a_signed_body_that_is_not_json_is_handled():
    assert post(signed(body=b"paid"), b"paid").status_code == 200
    assert effects() == 1
