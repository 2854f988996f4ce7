"""docs/agentic_checkout.md: each clause of its tables, against the running test
project.
"""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from django.http import HttpResponse
from django.test.client import BOUNDARY, MULTIPART_CONTENT, encode_multipart

from django_idempotency import Policy, idempotent
from django_idempotency.conf import resolve
from django_idempotency.contrib.profiles import acp, stripe, ucp
from django_idempotency.http import run
from django_idempotency.values.exceptions import StoreUnavailable
from tests.support.pages import code, rows, section
from tests.support.views import Runs
from tests.support.waiting import eventually

PAGE = "agentic_checkout.md"
PATHS = {"acp": "/acp/checkout_sessions", "ucp": "/ucp/checkout-sessions"}


class Shop:
    """The checkout of the running test project, and what an agent sends it first."""

    def __init__(self, server, protocol):
        self.server, self.path = server, PATHS[protocol]
        self.key, self.reference = str(uuid.uuid4()), str(uuid.uuid4())
        self.items = [{"id": "a", "quantity": 1}, {"id": "b", "quantity": 2}]
        self.body = {"reference": self.reference, "items": self.items}

    def send(self, body=None, *, path="", token="alice-token", **options):
        """``body``: an object, or the bytes of one. ``key=None`` sends no key."""
        content = body if isinstance(body, str) else json.dumps(body or self.body)
        key = options.pop("key", self.key)
        headers = {
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            **({"Idempotency-Key": key} if key else {}),
            **options.pop("headers", {}),
        }
        return self.server.request(
            "POST",
            self.path + path,
            token=None,
            headers=headers,
            content=content,
            **options,
        )

    def again(self, *args, **options):
        assert self.send().status_code == 201
        return self.send(*args, **options)

    @property
    def effects(self):
        return self.server.ledger(self.reference)

    def complete(self):
        session = self.send().json()["id"]
        return self.send(path=f"/{session}/complete")

    def after_failing(self):
        assert self.send(simulate={"status": 500}).status_code == 500
        return self.send()

    def after_a_kill(self):
        with pytest.raises(httpx.TransportError):
            self.send(simulate={"kill": "after"})
        return eventually(lambda: unless_busy(self.send()))

    def together(self):
        def both():
            self.key = str(uuid.uuid4())
            with ThreadPoolExecutor(2) as agents:
                send = lambda _: self.send(simulate={"delay_ms": 500})  # noqa: E731
                responses = list(agents.map(send, range(2)))
            return next((it for it in responses if it.status_code == 409), None)

        return eventually(both)

    def invalid(self):
        self.body = {"items": []}
        assert self.send().status_code == 400
        return self.send()


def unless_busy(response):
    return None if response.status_code == 409 else response


def spaced(body):
    text = json.dumps(dict(reversed(body.items())), indent=2)
    return text.replace('"quantity": 1', '"quantity": 1.0')


ACP = {
    "6.1 Key required": lambda shop: shop.send(key=None),
    "6.1 Scope: identity": lambda shop: shop.again(token="bob-token"),
    "6.1 Scope: path": Shop.complete,
    "6.2 Equality": lambda shop: shop.again(spaced(shop.body)),
    "6.2 Null": lambda shop: shop.again(shop.body | {"buyer": None}),
    "6.2 Arrays": lambda shop: shop.again(shop.body | {"items": shop.items[::-1]}),
    "6.2 Body only": lambda shop: shop.again(path="?a=1", headers={"X-Other": "1"}),
    "6.3 Replay": Shop.again,
    "6.3 Replay of an error": Shop.invalid,
    "6.4 Mismatch": lambda shop: shop.again({"items": shop.items}),
    "6.4 In flight": Shop.together,
    "6.5 Server errors": Shop.after_failing,
    "6.8 One transaction": Shop.after_a_kill,
    "3.1 Echo": lambda shop: shop.send(),
}
UCP = {
    "Key required": lambda shop: shop.send(key=None),
    "Entropy": lambda shop: shop.send(key="k" * 21),
    "Uniqueness": Shop.complete,
    "Duplicate": Shop.again,
    "Payload: raw bytes": lambda shop: shop.again(json.dumps(shop.body, indent=2)),
    "Mismatch": lambda shop: shop.again({"items": shop.items}),
}


def mismatch_in_authentication(call, monkeypatch):
    view = idempotent(policy=acp(mismatch=409))(Runs().view)
    call(view, {"a": 1})
    return call(view, {"a": 2})


def without_a_store(call, monkeypatch):
    def away(*args):
        raise StoreUnavailable

    monkeypatch.setattr(run.engine, "begin", away)
    return call(idempotent(policy=ucp())(Runs().view), key="k" * 22)


HERE = {
    "Delegated authentication, 7": mismatch_in_authentication,
    "Storage failure": without_a_store,
}
KEPT = {"6.6 Retention": acp, "Storage": ucp}


def table(heading):
    return {
        clause: responds for clause, _sends, responds in rows(section(PAGE, heading))
    }


TABLES = {
    "acp": (ACP, table("Agentic Commerce Protocol")),
    "ucp": (UCP, table("Universal Commerce Protocol")),
}


def assert_stated(response, responds):
    """Each word of code in the table is in the response."""
    status, *words = code(responds)
    said = {str(it).lower() for it in json.loads(response.content).values()}
    said |= {name.lower() for name in response.headers}
    said |= {f"{name}: {value}".lower() for name, value in response.headers.items()}
    assert str(response.status_code) == status
    assert {word.lower() for word in words} <= said
    assert ("Idempotent-Replayed" in response.headers) == ("Replayed" in responds)


@pytest.mark.parametrize(
    ("protocol", "clause"),
    [(name, clause) for name, (sent, _table) in TABLES.items() for clause in sent],
)
@pytest.mark.server
@pytest.mark.drf
def test_the_test_project_responds_as_the_page_says(server, protocol, clause):
    scenarios, responds = TABLES[protocol]
    shop = Shop(server, protocol)
    response = scenarios[clause](shop)
    if clause == "3.1 Echo":
        assert response.headers["Idempotency-Key"] == shop.key
    else:
        assert_stated(response, responds[clause])
    if "one effect" in responds[clause]:
        assert shop.effects == 1


@pytest.mark.parametrize("clause", HERE)
def test_a_clause_that_the_test_project_cannot_show_is_kept(call, monkeypatch, clause):
    responds = TABLES["acp"][1] | TABLES["ucp"][1]
    assert_stated(HERE[clause](call, monkeypatch), responds[clause])


def test_every_clause_of_the_page_is_tested(settings):
    settings.IDEMPOTENCY = {"RETENTION": 60, "KEY": "X-Own", "SCOPE": "public"}
    clauses = {clause for _sent, responds in TABLES.values() for clause in responds}
    assert clauses == {*ACP, *UCP, *HERE, *KEPT}
    for clause, profile in KEPT.items():
        (responds,) = (each[clause] for _, each in TABLES.values() if clause in each)
        assert f"{resolve(profile()).retention:,} seconds" in responds


@pytest.mark.parametrize("profile", [acp, ucp, stripe])
def test_a_profile_may_be_derived(profile):
    derived = profile().derive(mode="lease", retention=9)
    assert isinstance(derived, Policy)
    assert (derived.is_atomic, derived.retention) == (False, 9)
    assert derived.problems == profile().problems or derived.problems.func


@pytest.mark.parametrize("profile", [acp, ucp])
def test_an_update_by_put_is_run_once_and_needs_a_key(call, profile):
    runs = Runs()
    view = idempotent(policy=profile())(runs.view)
    first, again = (call(view, method="PUT", key="k" * 22) for _time in range(2))
    assert (again.content, runs.count) == (first.content, 1)
    assert call(view, method="PUT", key=None).status_code == 400


def test_the_settings_do_not_change_what_stripe_does(settings):
    settings.IDEMPOTENCY = {
        "REQUIRED": True,
        "SCOPE_PATH": True,
        "RELEASE_STATUSES": (),
    }
    policy = resolve(stripe())
    assert not policy.required
    assert not policy.scope_path
    assert policy.release_statuses == Policy().release_statuses


def test_a_form_that_was_parsed_is_a_bad_request_under_a_profile_for_json(call):
    protected = idempotent(policy=acp())(Runs().view)

    def view(request):
        assert request.POST["a"] == "1"
        return protected(request)

    body = encode_multipart(BOUNDARY, {"a": "1"})
    refused = call(view, data=body, content_type=MULTIPART_CONTENT)
    assert refused.status_code == 400


def test_a_policy_like_stripes_keeps_returned_errors_and_has_its_envelope(call):
    failing = Runs(lambda request: HttpResponse(status=500))
    view = idempotent(policy=stripe())(failing.view)
    assert [call(view, {"a": 1}).status_code for _time in range(2)] == [500, 500]
    assert failing.count == 1
    refused = call(view, {"a": 2})
    assert refused.status_code == 400
    assert refused.headers["Stripe-Should-Retry"] == "false"
    assert refused.json()["error"]["type"] == "idempotency_error"
    assert call(view, {"a": 1}).headers["Idempotent-Replayed"] == "true"
