"""What is kept of an answer is what the policy says; failing at that costs the copy,
never the answer.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
from django.contrib.auth import get_user_model
from django.http import HttpResponse, JsonResponse, StreamingHttpResponse

from django_idempotency import engine, signals
from django_idempotency.http.responses import stored
from django_idempotency.messages import Message, Refused, RejectMessage, consume
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.outcomes import (
    Keep,
    Replay,
    StoredResponse,
    dotted_name,
)
from django_idempotency.values.policy import Body, Policy
from django_idempotency.values.response_headers import SENSITIVE_HEADERS
from tests.support.callers import (
    MODES,
    claim,
    effects,
    entry_point,
    heard,
    is_replay,
    pay,
    record,
)
from tests.support.sql import run_sql
from tests.support.views import code

pytestmark = pytest.mark.usefixtures("payer")
modes = pytest.mark.parametrize("mode", MODES)

SECRET = "4111-1111"


def card(request):
    return JsonResponse(
        {"id": pay().pk.hex, "card": SECRET},
        status=201,
        headers={"X-Card": SECRET, "X-Kept": "1"},
    )


def without_card(response):
    kept = {
        name: value
        for name, value in json.loads(response.body).items()
        if name != "card"
    }
    headers = tuple(header for header in response.headers if header[0] != "X-Card")
    return replace(response, headers=headers, body=json.dumps(kept).encode())


def everything_stored():
    rows = run_sql(f"SELECT * FROM {IdempotencyRecord._meta.db_table}")
    return repr(
        [[bytes(v) if isinstance(v, memoryview) else v for v in row] for row in rows]
    )


@modes
def test_only_replays_are_redacted(mode):
    send = entry_point(card, mode=mode, body=Body(redact=without_card))
    first, second = send(), send()
    assert json.loads(first.content)["card"] == SECRET
    assert (second.status_code, is_replay(second), effects()) == (201, True, 1)
    assert json.loads(second.content) == {"id": json.loads(first.content)["id"]}
    assert (second.headers["X-Kept"], "X-Card" in second.headers) == ("1", False)
    assert SECRET not in everything_stored()


@modes
def test_receivers_hear_of_what_is_kept(mode):
    send = entry_point(card, mode=mode, body=Body(redact=without_card))
    with (
        heard(signals.key_completed) as completed,
        heard(signals.response_replayed) as replayed,
    ):
        send()
        send()
    assert [
        SECRET.encode() in named["response"].body for named in (*completed, *replayed)
    ] == [False, False]


def raising(response):
    raise ValueError(f"can't redact {response.body!r} {response.headers}")


def querying(response):
    get_user_model().objects.count()
    return response


def failing_query(response):
    run_sql("SELECT no_such_column")
    return response


WRONG = {
    "raises": raising,
    "queries": querying,
    "fails in a query": failing_query,
    "returns bytes": lambda response: response.body,
    "returns nothing": lambda response: None,
    "text for a body": lambda response: replace(response, body=response.body.decode()),
    "a header of two lines": lambda response: replace(
        response, headers=(("X-A", "1\r\nX-B: 2"),)
    ),
    "a header that is no pair": lambda response: replace(response, headers=(("X-A",),)),
    "a header beyond Latin-1": lambda response: replace(
        response, headers=(("X-A", "\ud800"),)
    ),
    "a header that is none": lambda response: replace(
        response, headers=((":encrypted", "x"),)
    ),
}


@modes
@pytest.mark.parametrize("redact", WRONG.values(), ids=WRONG)
def test_a_redaction_that_fails_costs_the_copy_and_never_the_response(
    mode, redact, caplog
):
    send = entry_point(card, mode=mode, body=Body(redact=redact))
    first, second = send(), send()
    assert (first.status_code, json.loads(first.content)["card"], effects()) == (
        201,
        SECRET,
        1,
    )
    assert (second.status_code, code(second), is_replay(second)) == (
        201,
        "response_not_stored",
        True,
    )
    assert record().status == "completed"
    assert SECRET not in everything_stored()
    (said,) = [entry for entry in caplog.records if entry.levelno == logging.ERROR]
    assert (
        f"{record().pk} could not be redacted, and is not stored" in said.getMessage()
    )
    assert (said.event, said.record_id) == ("response_lost", str(record().pk))
    assert said.view == dotted_name(card)
    assert said.getMessage().endswith(f" [{said.view}]")
    assert SECRET not in caplog.text


def test_a_redaction_can_not_change_the_status():
    send = entry_point(
        card, body=Body(redact=lambda response: replace(response, status=500))
    )
    assert [send().status_code for _ in range(2)] == [201, 201]


def test_the_headers_of_a_streamed_response_are_redacted():
    def streaming(request):
        return StreamingHttpResponse(iter([pay().pk.bytes]), headers={"X-Card": SECRET})

    send = entry_point(
        streaming, body=Body(redact=lambda response: replace(response, headers=()))
    )
    send().getvalue()
    assert (code(send()), effects()) == ("response_not_stored", 1)
    assert SECRET not in everything_stored()


@modes
def test_a_replay_says_that_the_body_was_not_stored(mode):
    send = entry_point(card, mode=mode, body=Body(store=False, redact=without_card))
    assert json.loads(send().content)["card"] == SECRET
    second = send()
    assert (second.status_code, code(second), is_replay(second)) == (
        201,
        "response_not_stored",
        True,
    )
    assert (second.headers["X-Kept"], record().response_body, effects()) == (
        "1",
        None,
        1,
    )


def test_a_rejected_message_stays_so_without_its_reason():
    def reject(message, context):
        raise RejectMessage(SECRET)

    policy = Policy(body=Body(store=False))
    assert consume(Message("queue", "1"), reject, policy=policy) == Refused(SECRET)
    assert consume(Message("queue", "1"), reject, policy=policy) == Refused(
        "it failed before, with status 422"
    )


@pytest.mark.parametrize(
    "name",
    sorted({*SENSITIVE_HEADERS, "proxy-authenticate", "proxy-anything", "set-cookie"}),
)
@pytest.mark.parametrize("spelt", [str.lower, str.upper, str.title])
def test_a_sensitive_header_is_never_stored(name, spelt):
    response = HttpResponse("x", headers={spelt(name): SECRET, "X-Kept": "1"})
    assert dict(stored(response, Policy(store_cookies=True)).headers).keys() == {
        "Content-Type",
        "X-Kept",
    }


def test_a_views_header_can_not_pass_for_the_mark_of_encryption():
    response = HttpResponse("x")
    response.headers._store[":encrypted"] = (":encrypted", "00000000")
    assert dict(stored(response, Policy()).headers).keys() == {"Content-Type"}


def test_objects_that_may_be_logged_show_neither_headers_nor_body():
    answer = StoredResponse(201, (("X-Card", SECRET),), SECRET.encode())
    policy = Policy(scope="public")
    claimed = claim(policy=policy)
    with engine.execution(claimed, policy) as run:
        run.verdict = Keep(answer)
    replay = engine.claim(claimed.operation, policy)
    assert replay == Replay(answer)
    seen = run.store.read(claimed.id)
    assert seen.response_body == SECRET.encode()
    for shown in (answer, replay, Keep(answer), seen, run.verdict):
        assert SECRET not in repr(shown)


@pytest.mark.postgresql
def test_a_row_that_the_database_refuses_is_not_quoted_in_the_log(caplog):
    """PostgreSQL's error quotes the beginning of each column."""
    run_sql(
        "ALTER TABLE django_idempotency_record ADD CONSTRAINT empty CHECK"
        " (response_body IS NULL)"
    )
    try:
        send = entry_point(card, mode="lease")
        assert SECRET in send().content.decode()
    finally:
        run_sql("ALTER TABLE django_idempotency_record DROP CONSTRAINT empty")
    assert code(send()) == "response_not_stored"
    assert "IntegrityError 23514" in caplog.text
    assert SECRET not in caplog.text
    assert SECRET.encode().hex() not in caplog.text
