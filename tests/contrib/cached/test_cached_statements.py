"""What replays from the cache send to the database: nothing in the request, and a fixed
number in the background.
"""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.contrib.auth import get_user_model
from django.core.cache import caches
from django.http import HttpResponse
from django.urls import path

from django_idempotency.contrib.dashboard.counters import Counters
from django_idempotency.engine.background import PATIENCE, Background, Worker
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.own_connections import own_connection
from tests.contrib.cached.test_cached import use
from tests.support.statements import sent_statements
from tests.support.threads import in_threads

pytestmark = [
    pytest.mark.postgresql,
    pytest.mark.psycopg3,
    pytest.mark.usefixtures("transactional_db"),
]
OURS, SESSION, USER = "django_idempotency_", "django_session", "auth_user"
MANY = 50


@pytest.fixture(autouse=True)
def cached_store(settings, tmp_path):
    location = {
        "BACKEND": "django.core.cache.backends.filebased.FileBasedCache",
        "LOCATION": str(tmp_path),
    }
    settings.CACHES = {"default": location}
    use(settings, max_age=3600)


def pay(request):
    if not request.user.is_authenticated:
        return HttpResponse(status=401)
    request.session.get("basket")
    return HttpResponse("paid", status=201)


urlpatterns = [path("pay/", pay)]


@pytest.fixture
def order(client, settings):
    """Pay under a key, as a caller who is logged in by a session; the middleware covers
    the view.
    """
    settings.ROOT_URLCONF = __name__
    settings.MIDDLEWARE = [
        "django.contrib.sessions.middleware.SessionMiddleware",
        "django.contrib.auth.middleware.AuthenticationMiddleware",
        "django_idempotency.middleware.IdempotencyMiddleware",
    ]
    client.force_login(get_user_model().objects.create_user("dora"))

    def post(key):
        response = client.post("/pay/", {"amount": 5}, headers={"Idempotency-Key": key})
        assert response.status_code == 201
        return response

    return post


def test_replays_send_only_what_the_login_needs(order):
    """However many there are; and one that the cache does not hold sends one statement
    more, and only once.
    """
    order("k")
    with sent_statements() as sent:
        assert all(order("k")["Idempotent-Replayed"] == "true" for _ in range(MANY))
    assert (len(sent.on(SESSION)), len(sent.on(USER))) == (MANY, MANY)
    assert len(sent.all) == 2 * MANY

    caches["default"].clear()  # as after max_age
    with sent_statements() as sent:
        for _ in range(MANY):
            order("k")
    assert len(sent.on(OURS)) == len(sent.all) - 2 * MANY == 1


def everybody(operation):
    return True


def test_replays_send_nothing_more_where_new_keys_are_asked_for(order, settings):
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "ADMIT": f"{__name__}.everybody"}
    order("k")
    with sent_statements() as sent:
        assert order("k")["Idempotent-Replayed"] == "true"
    assert sent.on(OURS) == []


def test_the_background_sends_one_statement_for_all_replays(order, monkeypatch):
    """What a benchmark that counts all of a server's statements sees: none of any one
    request.
    """
    background = Background("background")
    monkeypatch.setattr(Worker, "wake", lambda self: None)  # it works when it is told
    monkeypatch.setattr(
        "django_idempotency.engine.background.in_test_run", lambda: False
    )
    monkeypatch.setattr("django_idempotency.engine.claims.background", background)
    monkeypatch.setattr(
        "django_idempotency.contrib.dashboard.counters.background", background
    )
    monkeypatch.setattr(
        "django_idempotency.contrib.dashboard.counters.counters", Counters()
    )
    monkeypatch.setattr("django_idempotency.contrib.dashboard.counters.FLUSH_EVERY", 0)
    keys = [str(uuid4()) for _ in range(3)]
    for key in keys:
        order(key)
    _sent_by(background)
    for key in keys * 20:
        order(key)
    sent = _sent_by(background)
    counter, replays = (
        sent.on("INSERT INTO django_idempotency_counter"),
        sent.on("SET replays = replays + "),
    )
    assert (len(counter), len(replays)) == (1, 1)
    # the limits of each transaction; one reads the age of the oldest pending key
    assert len(sent.on("set_config")) == 3
    assert (len(sent.transaction), len(sent.all)) == (6, 12)
    assert list(IdempotencyRecord.objects.values_list("replays", flat=True)) == [20] * 3


def _sent_by(background):
    """In a thread with a connection of its own, which is what it has."""
    found = []

    def work(_number):
        with own_connection("default", seconds=PATIENCE):
            pass  # connected, and left to this thread
        with sent_statements() as sent:
            background.work()
        found.append(sent)

    in_threads(1, work)
    return found[0]
