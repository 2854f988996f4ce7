"""Nobody sees anything of another's operations, and what deferring costs."""

from __future__ import annotations

import re
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.http import JsonResponse

from django_idempotency.contrib.operations import defer
from testproject.imports import run_import
from testproject.models import LedgerEntry
from tests.contrib.operations.worker import run_due
from tests.support.callers import effects, entry_point, is_replay, payment
from tests.support.statements import sent_statements

pytestmark = pytest.mark.usefixtures("transactional_db")
OPERATIONS = 25  # and bob tries four ways


@pytest.fixture
def sent(client):
    """A request of a seeded user."""
    call_command("seed", verbosity=0)

    def send(who, method, path, key=None, body=None):
        headers = {"Authorization": f"Token {who}-token"}
        headers |= {"Idempotency-Key": key} if key else {}
        json = {"content_type": "application/json"}
        return client.generic(method, path, body or b"", headers=headers, **json)

    return send


@pytest.mark.parametrize("done", [False, True], ids=["waiting", "done"])
def test_a_hundred_attempts_to_see_another_s_operations_see_nothing(sent, done):
    def deferred(who, key):
        body = JsonResponse(payment(key)).content
        return sent(who, "POST", "/api/imports/", key, body)

    keys = [f"k-{number}" for number in range(OPERATIONS)]
    hers = {key: deferred("alice", key).json()["id"] for key in keys}
    while done and run_due():
        pass
    secrets = {*hers.values(), *map(str, LedgerEntry.objects.values_list("pk", flat=1))}
    assert len(secrets) == OPERATIONS * (1 + done)

    def shown(path, key=None):
        response = sent("bob", "GET", path, key)
        return response.status_code, response.content, [*response.headers]

    nothing = shown(f"/api/operations/{uuid4()}/")
    for key, id in hers.items():
        assert sent("alice", "GET", f"/api/operations/{id}/").status_code == 200
        tries = (f"/api/operations/{id}/",), ("/api/operations/", key)
        for looked in (*tries, (f"/api/operations/{id}/", key)):
            assert shown(*looked) == nothing
            assert nothing[0] == 404
        his = deferred("bob", key)
        assert (his.status_code, is_replay(his)) == (202, False)
        assert not secrets & {*re.findall(r"[0-9a-f-]{36}", his.content.decode())}


def writes(statements):
    found = [re.sub(r"FOR (NO KEY )?UPDATE", "", each) for each in statements.all]
    return [each for each in found if re.search(r"\b(INSERT|UPDATE|DELETE)\b", each)]


@pytest.mark.postgresql
def test_to_defer_is_one_more_write_and_only_replays_of_a_202_look_for_its_end():
    def deferring(request):
        return defer(request, run_import, user=1, payment=payment("r"))

    def answering(request):
        return JsonResponse({}, status=status)

    def statements_of(view, key):
        with sent_statements() as statements:
            entry_point(view)(key)
        return statements

    status = 202
    statements_of(answering, "first")  # what a process does once
    plain = statements_of(answering, "plain")
    deferred = statements_of(deferring, "deferred")
    assert len(writes(deferred)) - len(writes(plain)) == 1
    assert writes(plain)
    status = 201
    statements_of(answering, "created")
    assert len(statements_of(answering, "created").all) == 1
    replay = statements_of(deferring, "deferred")
    assert (len(replay.all), writes(replay)) == (3, [])
    assert effects() == 0
