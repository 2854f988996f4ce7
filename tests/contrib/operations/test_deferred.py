"""Operations that a request defers: one effect, the same 202 until it is done, and then
its response.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import timedelta

import pytest
from django.contrib.auth.models import User
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.db import connection
from django.utils.timezone import now
from drf_spectacular.generators import SchemaGenerator
from openapi_schema_validator import OAS30Validator
from rest_framework.authtoken.models import Token

from django_idempotency import Body, Hold, Policy
from django_idempotency.contrib.operations import (
    DeferError,
    operation,
    operation_due,
    run_operation,
    running,
)
from django_idempotency.contrib.operations.models import DeferredOperation
from django_idempotency.contrib.operations.registry import find
from django_idempotency.contrib.operations.running import hint, take
from django_idempotency.contrib.operations.schedule import HINT
from django_idempotency.http.responses import REPLAYED
from django_idempotency.maintenance.decisions import allow_retry, fail
from django_idempotency.maintenance.passes import run_pass
from django_idempotency.maintenance.privacy import erase, reencrypt
from django_idempotency.messages import RejectMessage
from django_idempotency.models import IdempotencyRecord
from django_idempotency.signals import response_replayed
from testproject.models import LedgerEntry
from tests.support.callers import is_replay
from tests.support.databases import environment

pytestmark = pytest.mark.usefixtures("transactional_db")
KEYS = ["eJ2oqS2Q6Xk1m3yQ9vN0n1c4b7a8d5f6g7h8i9j0k1E="]
PAYMENT = {"amount": 5, "currency": "eur", "reference": "r"}


@pytest.fixture
def send(client, alice):
    token = Token.objects.create(user=alice)

    def send(key="k", payment=PAYMENT, **headers):
        return client.post(
            "/api/imports/",
            json.dumps(payment),
            "application/json",
            headers={
                "Authorization": f"Token {token.key}",
                "Idempotency-Key": key,
                **headers,
            },
        )

    send.token = token.key
    return send


@pytest.fixture
def function(monkeypatch):
    """Have the operation call another function."""

    def replace(function, **options):
        known = find("imports.run")
        for name, value in {"function": function, **options}.items():
            monkeypatch.setitem(vars(known), name, value)

    return replace


def run_due():
    return [run_operation(each.pk, using="default") for each in take("default", 10)]


def due_now():
    DeferredOperation.objects.exclude(due_at=None).update(due_at="2020-01-01T00:00Z")


def deferred():
    return DeferredOperation.objects.get()


def own_record():
    return IdempotencyRecord.objects.get(pk=deferred().own_id)


def effects():
    return LedgerEntry.objects.filter(reference="r").count()


def test_a_retry_gets_the_202_until_the_operation_is_done_and_then_its_response(send):
    first = send()
    assert (first.status_code, effects()) == (202, 0)
    assert first["Location"] == f"/api/operations/{deferred().pk}/"
    assert first["Retry-After"] == "5"
    again = send()
    assert (again.status_code, again.content) == (202, first.content)
    run_due()
    done = send()
    assert (done.status_code, effects(), is_replay(done)) == (201, 1, True)
    assert done.json() == {"id": str(LedgerEntry.objects.get().pk), "reference": "r"}
    assert send().content == done.content
    assert (deferred().due_at, deferred().arguments) == (None, None)


def test_a_double_hint_runs_the_operation_once(send):
    send()
    id = deferred().pk
    for _time in range(3):
        run_operation(id, using="default")
    assert effects() == 1


def test_nothing_is_deferred_if_the_view_is_rolled_back(send, monkeypatch):
    from testproject import imports

    def defer(*args, **named):
        imports_defer(*args, **named)
        raise LookupError

    imports_defer = imports.defer
    monkeypatch.setattr(imports, "defer", defer)
    with pytest.raises(LookupError):
        send()
    assert not DeferredOperation.objects.exists()


def test_a_hint_comes_after_the_commit_and_again_with_each_sweep_until_it_is_run(send):
    seen = []

    def hinted(sender, record_id, using, **_named):
        assert not connection.in_atomic_block
        seen.append((sender, record_id, using))

    operation_due.connect(hinted)
    try:
        send()
        assert seen == [("imports.run", deferred().pk, "default")]
        assert (hint("default").hinted, hint("default").hinted) == (1, 0)
        due_now()
        assert hint("default").hinted == 1
        assert len(seen) == 3
        run_operation(deferred().pk, using="default")
        due_now()
        assert hint("default").hinted == 0
    finally:
        operation_due.disconnect(hinted)


def test_all_hints_are_lost_and_the_next_sweep_has_everything_run(send):
    """As when the queue is flushed, twice."""
    queue, keys = [], [f"k-{number}" for number in range(20)]

    def enqueue(record_id, **_named):
        queue.append(record_id)

    operation_due.connect(enqueue)
    try:
        for key in keys:
            assert send(key).status_code == 202
        for _lost in range(2):
            assert len(queue) == len(keys)
            queue.clear()
            due_now()
            run_pass(HINT.name)
    finally:
        operation_due.disconnect(enqueue)
    assert HINT.every == running.AGAIN == 60, "nothing that was sent is sent again"
    for record_id in queue:
        run_operation(record_id, using="default")
    assert effects() == len(keys)
    assert [send(key).status_code for key in keys] == [201] * len(keys)


def test_a_queue_that_is_down_keeps_no_client_from_its_202(send):
    def down(**_named):
        raise ConnectionError

    operation_due.connect(down)
    try:
        assert send().status_code == 202
    finally:
        operation_due.disconnect(down)
    run_due()
    assert effects() == 1


def test_a_failed_attempt_is_undone_and_made_again_and_the_last_puts_it_on_hold(
    send, function
):
    def fails(**_arguments):
        LedgerEntry.objects.create(kind="order", user=user, amount=1, reference="r")
        raise LookupError("no such file")

    function(fails, max_attempts=2)
    send()
    user = User.objects.get(username="alice")
    for attempt in (1, 2):
        due_now()
        run_due()
        assert (effects(), own_record().attempts) == (0, attempt)
    assert own_record().on_hold
    assert own_record().reason == "attempt 2 failed: LookupError: no such file"
    assert deferred().due_at > now() + timedelta(minutes=50), "nobody asks meanwhile"
    due_now()
    run_due()
    assert own_record().attempts == 2
    assert send().status_code == 202
    function(lambda **_arguments: "done")
    assert isinstance(allow_retry(own_record().pk), IdempotencyRecord)
    run_due()
    assert send().json() == "done"


def test_in_lease_mode_a_result_that_json_cant_hold_runs_nothing_again(
    send, function, caplog
):
    """Its effects have happened."""
    runs = []
    function(lambda **_arguments: runs.append(1) or {1}, policy=Policy(mode="lease"))
    send()
    for _worker in range(2):
        due_now()
        run_due()
    assert len(runs) == 1
    assert "a result was not kept" in caplog.text
    assert send().json()["code"] == "response_not_stored"


@pytest.mark.parametrize("encrypt", [True, "require"])
def test_the_result_is_encrypted_as_the_arguments_are(
    send, settings, monkeypatch, encrypt
):
    from testproject import imports

    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "ENCRYPTION_KEYS": KEYS}
    policy = Policy(required=True, body=Body(encrypt=encrypt))
    monkeypatch.setattr(imports.ImportView, "idempotency_policy", policy)
    send()
    run_due()
    assert b"reference" not in bytes(own_record().response_body)
    assert (send().status_code, send().json()["reference"]) == (201, "r")


@pytest.mark.parametrize("mode", ["atomic", "lease"])
def test_the_result_is_beside_the_request_if_other_views_have_another_store(
    send, settings, monkeypatch, function, mode
):
    from testproject import imports

    backend = {"BACKEND": "tests.stores.memory.MemoryStore"}
    mine = {"STORES": {"mine": backend}, "STORE": "mine"}
    settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, **mine}
    policy = Policy(required=True, store="default")
    monkeypatch.setattr(imports.ImportView, "idempotency_policy", policy)
    function(imports.run_import.function, policy=Policy(mode=mode))
    send()
    run_due()
    assert (send().status_code, effects()) == (201, 1)


def test_an_operation_whose_digest_key_is_gone_is_not_lost(send, settings, function):
    """Its arguments were encrypted anew, but its record has an old digest of them."""

    def fails(**_arguments):
        raise LookupError

    def use(*keys):
        settings.IDEMPOTENCY = {**settings.IDEMPOTENCY, "ENCRYPTION_KEYS": [*keys]}

    newest = [KEYS[0].replace("e", "a", 1), *KEYS]
    use(*KEYS)
    function(fails)
    send()
    run_due()
    use(*newest)
    reencrypt()
    use(newest[0])
    due_now()
    run_due()
    assert deferred().due_at is not None
    use(*newest)
    function(lambda **_arguments: "done")
    due_now()
    run_due()
    assert send().json() == "done"


def test_an_operation_that_an_operator_ends_has_ended(send, function):
    def holds(**_arguments):
        raise Hold("the file says maybe")

    function(holds)
    send()
    run_due()
    assert isinstance(fail(own_record().pk), IdempotencyRecord)
    assert len(run_due()) == 1
    assert deferred().due_at is None
    assert (send().status_code, effects()) == (410, 0)


def test_an_operation_that_this_worker_does_not_know_is_put_back(
    send, monkeypatch, caplog
):
    from django_idempotency.contrib.operations import registry

    send()
    with monkeypatch.context() as elsewhere:
        elsewhere.delitem(registry._by_name, "imports.run")
        assert run_due() == [None]
    said = [entry for entry in caplog.records if hasattr(entry, "view")]
    assert [(entry.event, entry.view) for entry in said] == [
        ("operation_put_back", "imports.run")
    ]
    due_now()
    run_due()
    assert effects() == 1


def test_a_key_that_begins_a_new_life_defers_anew(send):
    send()
    run_due()
    IdempotencyRecord.objects.filter(pk=deferred().pk).update(
        expires_at="2020-01-01T00:00Z"
    )
    assert send().status_code == 202
    assert deferred().due_at is not None
    run_due()
    assert effects() == 2


def test_a_key_that_expires_while_its_operation_waits_defers_nothing_more(send):
    send()
    IdempotencyRecord.objects.update(expires_at="2020-01-01T00:00Z")
    assert send().status_code == 202
    assert len(run_due()) == 1
    assert (effects(), send().status_code) == (1, 201)


def test_a_request_defers_one_operation(send):
    send()
    IdempotencyRecord.objects.update(expires_at="2020-01-01T00:00Z")
    with pytest.raises(DeferError, match="is not done"):
        send(payment={**PAYMENT, "amount": 6})


@pytest.mark.parametrize(
    ("prefer", "applied"),
    [
        ("respond-async, wait=10", "respond-async"),
        ("wait=10", None),
        ("handling=lenient, respond-async", "respond-async"),
    ],
)
def test_a_preference_is_said_to_be_applied(send, prefer, applied):
    assert send(Prefer=prefer).headers.get("Preference-Applied") == applied


def test_the_document_describes_what_is_sent(send, status):
    def described(response, path, method):
        documented = document["paths"][path][method]["responses"]
        stated = documented[str(response.status_code)]
        schema = stated["content"]["application/json"]["schema"]
        OAS30Validator(schema).validate(response.json())
        return stated

    document = SchemaGenerator().get_schema(request=None, public=True)
    first = send(Prefer="respond-async")
    stated = described(first, "/api/imports/", "post")
    for name, header in stated["headers"].items():
        assert (name in first.headers) == (name != REPLAYED)
        pattern = {"integer": r"\d+", "string": r"\S+"}[header["schema"]["type"]]
        assert re.fullmatch(pattern, first.headers.get(name, "true"))
    for shown in ("running", "succeeded"):
        seen = status(send, first["Location"])
        schema = described(seen, "/api/operations/{id}/", "get")
        schema = schema["content"]["application/json"]["schema"]
        assert seen.json()["status"] == shown
        assert {*schema["required"]} <= seen.json().keys()
        assert seen.json().keys() <= schema["properties"].keys()
        run_due()
    described(send(), "/api/imports/", "post")


@pytest.mark.row_locks  # SQLite has the test database in memory, for one process
def test_the_command_runs_what_is_due_in_a_process_that_has_served_no_request(send):
    send()
    done = subprocess.run(
        [sys.executable, "-m", "testproject", "idempotency_run", "--once"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "1 operations run" in done.stdout
    assert effects() == 1


def test_erasure_takes_the_result_and_leaves_what_is_still_to_be_run(send):
    send()
    scope = deferred().scope
    erase(scope)
    assert deferred().due_at is not None
    run_due()
    assert effects() == 1
    assert not DeferredOperation.objects.exists()
    erase(scope)
    assert not IdempotencyRecord.objects.exists()


def test_erasure_of_a_key_takes_its_operation_with_it(send):
    send()
    run_due()
    erase(key="k")
    assert not DeferredOperation.objects.exists()
    assert not IdempotencyRecord.objects.exists()


@pytest.fixture
def status(client, alice):
    def ask(send, location):
        return client.get(location, headers={"Authorization": f"Token {send.token}"})

    return ask


def test_the_status_view_tells_how_far_the_operation_is(send, function, status):
    def fails(**_arguments):
        raise LookupError

    function(fails, max_attempts=2)
    location = send()["Location"]
    waiting = status(send, location)
    assert (waiting.status_code, waiting.json()["status"]) == (200, "running")
    assert (waiting.json()["attempt"], waiting.json()["response"]) == (0, None)
    assert waiting.json()["operation"] == "imports.run"
    assert "Retry-After" in waiting
    run_due()
    assert status(send, location).json()["attempt"] == 1
    due_now()
    run_due()
    held = status(send, location)
    assert (held.json()["status"], held.json()["response"]) == ("on_hold", None)
    assert "Retry-After" not in held
    function(lambda **_arguments: {"entry": 7})
    allow_retry(own_record().pk)
    run_due()
    done = status(send, location).json()
    assert (done["status"], done["response"]["status"]) == ("succeeded", 201)
    assert json.loads(done["response"]["body"]) == {"entry": 7}


@pytest.mark.postgresql
def test_the_status_view_names_the_last_step_that_is_done(send, function, status):
    from django_idempotency.contrib import steps

    def pays(**_arguments):
        steps.atomic("reserve:7", lambda: 1)
        seen.append(status(send, location).json())
        steps.atomic("book", lambda: 1)
        return 1

    seen = []
    function(pays, policy=Policy(mode="lease"))
    location = send()["Location"]
    run_due()
    seen.append(status(send, location).json())
    told = [(each["status"], each["attempt"], each["step"]) for each in seen]
    assert told == [("running", 1, "reserve"), ("succeeded", 1, "book")]


def test_the_status_is_not_ahead_of_the_response_if_the_operation_ends_meanwhile(
    send, status
):
    location = send()["Location"]

    def end(**_named):
        run_due()

    response_replayed.connect(end)
    try:
        shown = status(send, location).json()
    finally:
        response_replayed.disconnect(end)
    assert (shown["status"], shown["response"]) == ("running", None)
    assert status(send, location).json()["response"]["status"] == 201


def test_an_operation_that_rejects_its_arguments_has_failed(send, function, status):
    def rejects(**_arguments):
        raise RejectMessage("no such file")

    function(rejects)
    location = send()["Location"]
    run_due()
    refused = send()
    assert (refused.status_code, refused.json()) == (422, "no such file")
    shown = status(send, location).json()
    assert (shown["status"], shown["response"]["status"]) == ("failed", 422)


@pytest.mark.parametrize("name", ["", "a/b", "two words", "x" * 101])
def test_a_name_that_workers_could_not_use_is_refused(name):
    with pytest.raises(ImproperlyConfigured, match="1 to 100 letters"):
        operation(name)(lambda: None)


def test_the_operation_ends_in_its_own_transaction(send, monkeypatch):
    """Else it would run again if no worker looked at it before its result expired."""
    send()
    calls = []

    def crash(rows):
        calls.append(connection.in_atomic_block)
        if not calls[-1]:
            raise KeyboardInterrupt
        end(rows)

    end = running._end
    monkeypatch.setattr(running, "_end", crash)
    with pytest.raises(KeyboardInterrupt):
        run_operation(deferred().pk, using="default")
    assert (calls, effects(), deferred().due_at) == ([True, False], 1, None)


def test_the_command_outlives_the_loss_of_its_connection(send, monkeypatch, capsys):
    send()
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    connection.connection.close()
    call_command("idempotency_run", once=True)
    call_command("idempotency_run", once=True)
    assert effects() == 1


def test_the_admin_lists_what_waits_and_links_to_its_record(send, admin_client):
    send()
    rows = "/admin/django_idempotency_operations/deferredoperation/"
    page = admin_client.get(rows).content.decode()
    assert "imports.run" in page
    link = f"/admin/django_idempotency/idempotencyrecord/{deferred().own_id}/change/"
    assert link in page
    run_due()
    assert admin_client.get(link).status_code == 200
    row = admin_client.get(f"{rows}{deferred().pk}/change/").content.decode()
    assert "arguments" not in row


def test_a_project_that_has_no_url_of_the_status_view_is_warned(settings):
    def found():
        return [each.id for each in run_checks() if "operations" in (each.id or "")]

    assert found() == []
    settings.ROOT_URLCONF = ()
    assert found() == []
    settings.ROOT_URLCONF = "tests.support.admin_urls"
    assert found() == ["django_idempotency_operations.W002"]
