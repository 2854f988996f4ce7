"""What goes wrong in published packages of this kind, entry by entry: that it does not go wrong here."""

from __future__ import annotations

import ast
from functools import cache
from inspect import getdoc
from pathlib import Path

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.http import HttpResponse, StreamingHttpResponse
from django.test import override_settings
from rest_framework.authtoken.models import Token

import django_idempotency
from django_idempotency import conf
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.policy import NAMES, Policy
from django_idempotency.stores import store_for
from tests.support.callers import (
    MODES,
    Gate,
    claim,
    effects,
    entry_point,
    is_replay,
    pay,
    paying,
    payment,
    record,
    row,
    shift,
)
from tests.support.threads import in_threads

pytestmark = pytest.mark.usefixtures("payer")
in_both_modes = pytest.mark.parametrize("mode", MODES)
over_http = pytest.mark.server
row_locks = pytest.mark.row_locks
postgresql = pytest.mark.postgresql

PACKAGE = Path(django_idempotency.__file__).parent
PATHS = ("/api/charges/", "/api/payouts/", "/orders/", "/async/orders/", "/legacy/refunds/", "/legacy/api/refunds/")


# --- 1: the lock ends before the view begins; one lock for all -------------------------------------------------------


@over_http
@row_locks
@pytest.mark.parametrize("serving", ["server", "lease_server"])
def test_1_duplicates_that_come_while_the_view_runs_do_not_run(request, serving, reference):
    server = request.getfixturevalue(serving)
    slow = {"delay_ms": 300}
    answers = in_threads(3, lambda _: server.post("/orders/", payment(reference), key=reference, simulate=slow))
    executed = [answer for answer in answers if answer.status_code == 201 and not is_replay(answer)]
    assert len(executed) == 1
    assert server.ledger(reference) == 1


@over_http
@row_locks
@pytest.mark.parametrize("serving", ["server", "lease_server"])
def test_1_different_keys_are_not_in_each_others_way(request, serving, reference):
    server = request.getfixturevalue(serving)
    slow = {"delay_ms": 100}
    answers = in_threads(
        16, lambda index: server.post("/orders/", payment(reference), key=f"{reference}-{index}", simulate=slow)
    )
    assert {answer.status_code for answer in answers} == {201}
    assert server.ledger(reference) == 16


# --- 2: replay before authentication; a scope that changes with the token ---------------------------------------------


@pytest.fixture
def user():
    return get_user_model().objects.create_user("carol")


def send(client, path, user_token, key="k"):
    return client.post(
        path,
        payment("carol's"),
        content_type="application/json",
        headers={"Authorization": f"Token {user_token}", "Idempotency-Key": f'"{key}"'},
    )


@pytest.mark.parametrize("path", [path for path in PATHS if path != "/api/payouts/"])
def test_2_whoever_may_not_come_in_now_gets_no_stored_response(client, user, path):
    token = Token.objects.create(user=user)
    assert send(client, path, token.key).status_code == 201
    user.is_active = False
    user.save()
    refused = send(client, path, token.key)
    assert (refused.status_code, is_replay(refused)) == (401, False)


@pytest.mark.parametrize("path", [path for path in PATHS if path != "/api/payouts/"])
def test_2_a_new_token_is_the_same_user(client, user, path):
    first = send(client, path, Token.objects.create(user=user).key)
    user.auth_token.delete()
    second = send(client, path, Token.objects.create(user=user, key="fresh").key)
    assert is_replay(second)
    assert second.content == first.content
    assert effects("carol's") == 1


# --- 3: a refusal kept and replayed to who is entitled ---------------------------------------------------------------


@in_both_modes
@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 406, 415, 422, 429])
def test_3_a_refusal_is_not_kept(mode, status):
    refused = entry_point(lambda request: HttpResponse(status=status), mode=mode)()
    assert refused.status_code == status
    assert record() is None
    assert entry_point(paying, mode=mode)().status_code == 201


@pytest.mark.parametrize("status", [400, 401, 429])
def test_3_what_was_done_before_a_refusal_stays_as_without_a_key(status):
    def view(request):
        pay()
        return HttpResponse(status=status)

    entry_point(view)()
    assert (effects(), record()) == (1, None)


# --- 4: success recorded before COMMIT -------------------------------------------------------------------------------


@over_http
@postgresql
def test_4_what_failed_at_commit_is_not_replayed_as_a_success(server, reference):
    failed = server.post("/orders/", payment(reference), key=reference, simulate={"fail_commit": True})
    assert (failed.status_code, server.ledger(reference)) == (500, 0)
    retried = server.post("/orders/", payment(reference), key=reference)
    assert (retried.status_code, "Idempotent-Replayed" in retried.headers) == (201, False)
    assert server.ledger(reference) == 1


# --- 5: no fencing, or a fence that comes round again ----------------------------------------------------------------


@in_both_modes
def test_5_the_failure_of_a_zombie_does_not_end_the_new_owners_claim(mode):
    policy = Policy(mode=mode, takeover_grace=0)
    zombie = claim(policy=policy)
    shift(locked_until=-1)
    owner = claim(policy=policy)
    store = store_for(policy)
    assert not store.fail(zombie, "late")
    assert not store.release(zombie)
    assert (record().status, record().token) == (Status.PROCESSING, owner.token)


@in_both_modes
def test_5_no_fence_is_ever_used_twice(mode):
    policy = Policy(mode=mode)
    store = store_for(policy)
    tokens = set()
    for _round in range(5):  # released, so that any counter in the row would begin anew
        claimed = claim(policy=policy)
        assert claimed.attempt == 1
        tokens.add(claimed.token)
        store.release(claimed)
    assert len(tokens) == 5


# --- 6: a result that was not saved, taken for a handler that failed -------------------------------------------------


@postgresql
def test_6_an_unsaved_result_does_not_run_the_handler_again(proxy):
    runs = []

    def view(request):
        runs.append(request)
        proxy.go_away()
        return HttpResponse(b"paid by a gateway", status=201)

    policy = {"mode": "lease", "lease": 1, "on_conflict": "wait"}
    first = entry_point(view, **policy)()
    connection.close()
    proxy.come_back()
    second = entry_point(view, **policy)()
    assert (first.status_code, second.content, len(runs)) == (201, first.content, 1)


# --- 7: a waiter that gives up and takes the claim with it -----------------------------------------------------------


@row_locks
@in_both_modes
def test_7_a_waiter_that_gives_up_leaves_the_claim_as_it_is(mode):
    with Gate().running(mode=mode) as first:
        before = row()
        assert entry_point(paying, mode=mode, on_conflict="wait", wait_timeout=0.1)().status_code == 409
        assert row() == before
    assert first.result().status_code == 201
    assert effects() == 1


# --- 8: an exception that leaves the key in progress -----------------------------------------------------------------


@in_both_modes
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt, SystemExit])
def test_8_after_an_exception_a_retry_runs_at_once(mode, error):
    def view(request):
        raise error

    with pytest.raises(error):
        entry_point(view, mode=mode)()
    assert record().status == Status.FAILED
    assert entry_point(paying, mode=mode)().status_code == 201
    assert effects() == 1


# --- 9: a takeover that does not look at the fingerprint -------------------------------------------------------------


@in_both_modes
def test_9_who_comes_with_another_request_takes_nothing_over(mode):
    claim(policy=Policy(mode=mode))
    shift(locked_at=-60, locked_until=-60)
    before = row()
    assert entry_point(paying, mode=mode)(body=b"{}").status_code == 422
    assert row() == before
    assert entry_point(paying, mode=mode)().status_code == 201


# --- 10: a 500 after the effect --------------------------------------------------------------------------------------

RESPONSES = {
    "streaming": lambda: StreamingHttpResponse([b"a"], status=201),
    "binary": lambda: HttpResponse(bytes(range(256)), status=201),
    "no content": lambda: HttpResponse(status=204),
    "NUL": lambda: HttpResponse(b"\0", headers={"X-Note": "a\0b"}, status=201),
    "no type": lambda: HttpResponse(b"a", content_type="", status=201),
}
REQUESTS = {
    "path": {"path": "/" + "p" * 5000},
    "path with NUL": {"path": "/a%00b"},
    "query": {"path": "/?" + "&".join(f"q{index}={index}" for index in range(5000))},
    "body with NUL": {"body": b'{"a": "\\u0000", "b": "\0"}'},
    "body of no encoding": {"body": b'{"a": "\xff\xfe"}'},
    "body that is no JSON": {"body": b"{"},
    "form that breaks off": {"body": b"--x\r\nContent-Disp", "content_type": "multipart/form-data; boundary=x"},
    "key that is no UUID": {"key": "order#17!"},
    "longest key": {"key": "k" * 255},
}


@in_both_modes
@pytest.mark.parametrize("answer", RESPONSES.values(), ids=RESPONSES)
def test_10_no_response_is_too_odd_to_be_replayed(mode, answer):
    def view(request):
        pay()
        return answer()

    send = entry_point(view, mode=mode)
    first, second = send(), send()
    assert first.getvalue() == answer().getvalue()
    assert second.status_code == first.status_code
    assert is_replay(second)
    assert effects() == 1


@in_both_modes
@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
def test_10_no_request_is_too_odd_to_be_run_once(mode, request_):
    send = entry_point(paying, mode=mode)
    first, second = send(**request_), send(**request_)
    assert (first.status_code, second.content, effects()) == (201, first.content, 1)


# --- 11, as far as there is something to go wrong already ------------------------------------------------------------


def test_11_nothing_is_pickled():
    imported = {name for path in PACKAGE.rglob("*.py") for name in imports(path)}
    assert "json" in imported
    assert not imported & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


@postgresql
def test_11_the_table_is_logged():
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT relpersistence FROM pg_class WHERE oid = %s::regclass", [IdempotencyRecord._meta.db_table]
        )
        assert cursor.fetchone() == ("p",)


# --- 14: settings that are frozen, documented and not read, or described as something else ----------------------------


def test_14_settings_are_read_live():
    send = entry_point(lambda request: HttpResponse(b"12345", status=201))
    with override_settings(IDEMPOTENCY={"MAX_BODY_SIZE": 4}):
        send()
    assert b"response_not_stored" in send().content
    assert send(key="other").content == send(key="other").content == b"12345"


@pytest.mark.parametrize("name", sorted(NAMES | conf.GLOBAL_NAMES))
def test_14_every_setting_is_read_and_documented(name):
    owner = Policy if name in NAMES else conf.Conf
    assert f"``{name}``" in getdoc(owner)
    readers = [path for path in PACKAGE.rglob("*.py") if path.name != "policy.py" and name in reads(path)]
    assert readers or (name in {"audit_retention"} and name in reads(PACKAGE / "policy.py"))


@cache
def reads(path):
    """The names of the attributes that the module reads."""
    return {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
