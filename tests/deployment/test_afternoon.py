"""An afternoon: a new project is protected, described, called over a bad network,
tested twice over, and watched.
"""

from __future__ import annotations

import importlib
import json
from contextlib import contextmanager

import httpx
import pytest

from django_idempotency.contrib.client import Retries
from django_idempotency.contrib.client.httpx import IdempotentTransport
from tests.support.generated import generated_client
from tests.support.pages import FENCE, text
from tests.support.reader import reader_with_postgresql
from tests.support.relay import running_relay
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.curl,
    pytest.mark.openapi_client,
    pytest.mark.psycopg3,
    pytest.mark.postgresql,
    pytest.mark.slow,
]

SETTINGS = """# shop/settings.py, at the end
INSTALLED_APPS += [
    "drf_spectacular",
    "django_idempotency.contrib.dashboard",
    "django_idempotency.contrib.openapi",
]
REST_FRAMEWORK["DEFAULT_SCHEMA_CLASS"] = "drf_spectacular.openapi.AutoSchema"
REST_FRAMEWORK["DEFAULT_PARSER_CLASSES"] = ["rest_framework.parsers.JSONParser"]
REST_FRAMEWORK["TEST_REQUEST_DEFAULT_FORMAT"] = "json"
SPECTACULAR_SETTINGS = {"SCHEMA_PATH_PREFIX": ""}
"""
URLS = """# shop/urls.py, at the end
from django.contrib import admin
urlpatterns += [path("admin/", admin.site.urls)]
"""
SUITE = """# payments/tests.py
import pytest
from django.contrib.auth.models import User
from rest_framework.test import APIClient

@pytest.fixture
def client(db):
    client = APIClient(headers={"Idempotency-Key": '"k"'})
    client.force_authenticate(User.objects.create_user("carol"))
    return client

def test_a_charge_is_made(client):
    assert client.post("/charges/", {"amount": 5}).json()["amount"] == 5
    assert len(client.get("/charges/").json()) == 1

def test_a_charge_has_an_amount(client):
    assert client.post("/charges/", {}).status_code == 400
"""
DESCRIBE = (
    "manage.py spectacular --format openapi-json --validate --fail-on-warn --file"
    " openapi.json"
)
TWICE = (
    "-m pytest payments/tests.py --ds shop.settings -p no:cacheprovider"
    " --idempotency-twice"
)
ALICE = {"Authorization": "Token alice"}
KEY = '"charge-1"'
SIGN_IN = """
from django.contrib.auth.models import User
from django.test import Client
client = Client()
client.force_login(User.objects.create_superuser("admin"))
print(client.session.session_key)
"""
DASHBOARD = (
    "http://127.0.0.1:8000/admin/django_idempotency/idempotencyrecord/dashboard/"
)


def test_an_afternoon(tmp_path, db):
    with reader_with_postgresql(tmp_path) as someone:
        *blocks, start = FENCE.findall(
            text("quickstart_drf.md").partition("\n## Charge once")[0]
        )
        for language, block in blocks:
            {"python": someone.write, "console": someone.type}[language](block)
        for block in (SETTINGS, URLS, SUITE):
            someone.write(block)
        someone.run("manage.py", "migrate")
        someone.type(start[1])
        assert charged_over_a_bad_network(someone) == [{"id": 1, "amount": 500}]
        assert "1 requests were sent twice; 0 differed" in someone.run(*TWICE.split())
        session = someone.run("manage.py", "shell", "-c", SIGN_IN).split()[-1]
        eventually(lambda: "<dd>66.67 %</dd>" in dashboard(someone, session), every=0.5)


def charged_over_a_bad_network(someone):
    """The charges that are there, after a client generated from the project's document
    has lost two responses.
    """
    someone.run(*DESCRIBE.split())
    with client_over_a_bad_network(someone, ALICE) as (package, client):
        charge = importlib.import_module(f"{package}.models").Charge(id=0, amount=500)
        create = importlib.import_module(f"{package}.api.charges.charges_create")
        made = create.sync_detailed(client=client, body=charge, idempotency_key=KEY)
    assert (made.status_code, made.headers["Idempotent-Replayed"]) == (201, "true")
    charges = f"http://127.0.0.1:{someone.port}/charges/"
    return httpx.get(charges, headers=ALICE, trust_env=False, timeout=120).json()


@contextmanager
def client_over_a_bad_network(someone, headers):
    """A client generated from the project's document that loses two responses, and the
    name of its package.
    """
    document = json.loads((someone.directory / "openapi.json").read_text())
    server = f"http://127.0.0.1:{someone.port}"
    with (
        generated_client(document, someone.directory) as package,
        running_relay(server) as relay,
    ):
        relay.plan = ["lose", "cut"]
        transport = IdempotentTransport(
            httpx.HTTPTransport(trust_env=False), Retries(first_wait=0.001)
        )
        with package.Client(
            base_url=relay.url, headers=headers, httpx_args={"transport": transport}
        ) as client:
            yield package.__name__, client
        assert relay.keys == [KEY] * 3


def dashboard(someone, session):
    return someone.curl("-i", DASHBOARD, "-H", f"Cookie: sessionid={session}")
