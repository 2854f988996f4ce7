"""Encrypted at rest: without the key no response is read, no other record takes it, and
where it is required, nothing runs.
"""

from __future__ import annotations

import base64
import logging
import os
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial

import pytest
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured

from django_idempotency import conf
from django_idempotency.contrib import cached
from django_idempotency.maintenance.cleaner import drop_bodies
from django_idempotency.maintenance.decisions import Refusal, fail, resolve
from django_idempotency.messages import Consumer, Message
from django_idempotency.messages.message import AwaitsStore
from django_idempotency.models import IdempotencyRecord
from django_idempotency.reporting import logs
from django_idempotency.stores.codec import (
    Binding,
    decoded,
    encrypted,
    is_encrypted,
    key_id,
)
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import StoredResponse, dotted_name
from django_idempotency.values.policy import Body, Policy
from tests.stores.test_privacy import SECRET, card, everything_stored, without_card
from tests.support.callers import (
    MODES,
    OF_A_REPLAY,
    claim,
    effects,
    entry_point,
    is_replay,
    mode_of,
    pay,
    paying,
    record,
    row,
    shift,
)
from tests.support.checks import found
from tests.support.proxy import Cut
from tests.support.views import code

pytestmark = pytest.mark.usefixtures("payer")
modes = pytest.mark.parametrize("mode", MODES)


def errors(caplog):
    return [entry for entry in caplog.records if entry.levelno == logging.ERROR]


def new_key():
    return base64.urlsafe_b64encode(os.urandom(32)).decode()


OLD, NEW, DIGEST = new_key(), new_key(), new_key()
BINDING = Binding(
    record_id("s", "k"), "s", "k", b"f" * 32, datetime(2026, 1, 1, tzinfo=UTC)
)


@pytest.fixture(autouse=True)
def keys(settings):
    """Have other keys in the settings."""

    def have(*texts):
        settings.IDEMPOTENCY = {"ENCRYPTION_KEYS": list(texts), "DIGEST_KEYS": [DIGEST]}

    have(OLD)
    return have


@modes
def test_a_replay_is_exact_and_the_table_shows_nothing_of_it(mode):
    def answering(request):
        response = card(request)
        response.set_cookie("session", SECRET)
        return response

    send = entry_point(
        answering, mode=mode, body=Body(encrypt=True), store_cookies=True
    )
    first, second = send(), send()
    assert (second.status_code, second.content, is_replay(second), effects()) == (
        201,
        first.content,
        True,
        1,
    )
    assert dict(second.headers) == {**first.headers, **OF_A_REPLAY}
    assert second.cookies.output() == first.cookies.output()
    table = everything_stored()
    assert SECRET not in table
    assert SECRET.encode().hex() not in table
    assert "X-Card" not in table
    entry_point(card)("clear")
    assert SECRET in everything_stored(), "or this test would see nothing"


@pytest.mark.parametrize(
    "response",
    [
        StoredResponse(200, (), b""),
        StoredResponse(200, (("A", "ü"), ("A", "2")), bytes(range(256))),
        StoredResponse(201, (("A", "b"),), None),
        StoredResponse(204, (("A", "b"),), b""),
        StoredResponse(200, (), b"\0" * 100),
    ],
)
def test_an_encrypted_response_is_decrypted_unchanged(response):
    stored = encrypted(response, BINDING)
    assert is_encrypted(stored)
    assert decoded(stored, BINDING) == response
    assert stored.body != encrypted(response, BINDING).body, "never twice the same"


def test_a_new_key_in_front_encrypts_and_the_old_one_still_opens(keys):
    send = entry_point(paying, body=Body(encrypt=True))
    before = send("before")
    keys(NEW, OLD)
    after = send("after")
    assert [send("before").content, send("after").content] == [
        before.content,
        after.content,
    ]
    marks = {key: record(key).response_headers[0][1] for key in ("before", "after")}
    assert marks == {
        "before": key_id(base64.urlsafe_b64decode(OLD)),
        "after": key_id(base64.urlsafe_b64decode(NEW)),
    }
    keys(NEW)
    assert send("after").content == after.content


def written(**columns):
    IdempotencyRecord.objects.filter(key="k").update(**columns)


def moved(_keys):
    """The answer of another record of the same caller."""
    entry_point(card, body=Body(encrypt=True))("another")
    written(response_body=record("another").response_body)


def a_changed_byte(_keys):
    body = bytearray(record().response_body)
    body[-20] ^= 1
    written(response_body=bytes(body))


HARM = {
    "its key is gone": lambda keys: keys(NEW),
    "every key is gone": lambda keys: keys(),
    "moved": moved,
    "another status": lambda _keys: written(response_status=202),
    "a changed byte": a_changed_byte,
    "cut short": lambda _keys: written(response_body=b"short"),
}


@modes
@pytest.mark.parametrize("harm", HARM.values(), ids=HARM)
def test_an_undecryptable_response_is_never_replayed_or_rerun(mode, harm, keys, caplog):
    send = entry_point(card, mode=mode, body=Body(encrypt=True))
    send()
    harm(keys)
    before = effects()
    caplog.clear()
    again = send()
    assert (again.status_code, code(again), is_replay(again)) == (
        record().response_status,
        "response_not_stored",
        True,
    )
    assert effects() == before
    (said,) = errors(caplog)
    assert f"{record().pk} could not be decrypted" in said.getMessage()
    assert said.view == dotted_name(card)
    assert SECRET not in caplog.text


OTHER_LIVES = [
    replace(BINDING, scope="t"),
    replace(BINDING, key="l"),
    replace(BINDING, scope="sk", key=""),
    replace(BINDING, fingerprint=b"g" * 32),
    replace(BINDING, fingerprint=b""),
    replace(BINDING, created_at=BINDING.created_at + timedelta(microseconds=1)),
]


@pytest.mark.parametrize("other", OTHER_LIVES)
def test_another_life_of_a_record_does_not_open_a_response(other):
    stored = encrypted(StoredResponse(201, (("A", "b"),), b"x"), BINDING)
    assert decoded(stored, other) == StoredResponse(201, (), None)


@modes
def test_a_response_of_an_earlier_life_is_not_replayed(mode):
    send = entry_point(card, mode=mode, body=Body(encrypt=True))
    first = send()
    columns = ("response_status", "response_headers", "response_body")
    earlier = {name: value for name, value in row().items() if name in columns}
    shift(expires_at=-1)
    second = send()
    assert (second.content != first.content, is_replay(second), effects()) == (
        True,
        False,
        2,
    )
    assert send().content == second.content
    written(**earlier)
    assert (code(send()), effects()) == ("response_not_stored", 2)


@modes
def test_a_successors_encrypted_response_is_replayed(mode):
    claim(policy=Policy(mode=mode_of(mode, takeover_grace=0)))
    shift(locked_until=-1)
    send = entry_point(
        card, mode=mode_of(mode, takeover_grace=0), body=Body(encrypt="require")
    )
    first, second = send(), send()
    assert (is_replay(first), is_replay(second), second.content) == (
        False,
        True,
        first.content,
    )


FORGED = {
    "clear columns": {
        "response_headers": [["Content-Type", "text/plain"]],
        "response_body": b"forged",
    },
    "without headers": {"response_headers": [], "response_body": b"forged"},
    "without a body": {"response_headers": [["X-Forged", "1"]], "response_body": None},
}


@modes
@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_where_it_is_required_what_is_in_clear_is_not_replayed(mode, forged, caplog):
    send = entry_point(card, mode=mode, body=Body(encrypt="require"))
    send()
    written(**forged)
    again = send()
    assert (again.status_code, code(again), effects()) == (
        201,
        "response_not_stored",
        1,
    )
    assert b"forged" not in again.content
    assert "X-Forged" not in again
    (said,) = errors(caplog)
    assert f"{record().pk} is not encrypted, and is not replayed" in said.getMessage()
    assert is_replay(entry_point(card, mode=mode, body=Body(encrypt=True))()), (
        "where it is not required, it is"
    )


@pytest.fixture
def behind_a_cache(settings, monkeypatch):
    """One that is used, however slow it is, or was in an earlier test."""
    monkeypatch.setattr(cached, "PATIENCE", 60)
    cached._guards.clear()
    settings.IDEMPOTENCY |= {
        "STORES": {
            "default": {"BACKEND": "django_idempotency.contrib.cached.CachedStore"}
        }
    }
    settings.CACHES = {
        "default": {
            "BACKEND": "django.core.cache.backends.locmem.LocMemCache",
            "LOCATION": new_key(),
        }
    }


@pytest.mark.usefixtures("behind_a_cache")
def test_where_it_is_required_a_cache_replays_nothing_in_clear():
    entry_point(card)("clear")
    assert (
        code(entry_point(card, body=Body(encrypt="require"))("clear"))
        == "response_not_stored"
    )


@pytest.mark.parametrize(
    "first_in", [True, False], ids=["written at COMMIT", "read since"]
)
@pytest.mark.usefixtures("behind_a_cache")
def test_an_encrypted_response_is_replayed_from_a_cache(
    first_in, django_assert_num_queries
):
    send = entry_point(card, body=Body(encrypt="require"))
    first = send()
    if not first_in:
        caches["default"].clear()
    send()
    with django_assert_num_queries(0):
        again = send()
    assert (again.content, is_replay(again)) == (first.content, True)


def test_an_error_is_logged_once_a_minute_for_each_key(keys, caplog, monkeypatch):
    send = entry_point(card, body=Body(encrypt=True))
    send("a")
    send("b")
    keys(NEW, OLD)
    send("c")
    keys()
    for key in "abca":
        assert code(send(key)) == "response_not_stored"
    assert len(errors(caplog)) == 2
    now = time.monotonic()
    monkeypatch.setattr(logs.time, "monotonic", lambda: now + 61)
    assert code(send("b")) == "response_not_stored"
    assert len(errors(caplog)) == 3


def test_a_record_kept_for_audit_loses_its_response(keys, caplog):
    send = entry_point(card, body=Body(encrypt=True))
    send()
    shift(expires_at=-1, purge_at=7200)
    assert drop_bodies().rows == 1
    shift(expires_at=3600)
    assert (code(send()), effects()) == ("response_not_stored", 1)
    assert not errors(caplog), "nothing is wrong"


@modes
def test_without_a_key_the_response_is_given_and_not_stored(mode, keys, caplog):
    keys()
    send = entry_point(card, mode=mode, body=Body(encrypt=True))
    assert (SECRET in send().content.decode(), effects()) == (True, 1)
    assert (code(send()), effects(), record().status) == (
        "response_not_stored",
        1,
        "completed",
    )
    assert SECRET not in everything_stored()
    assert "could not be encrypted, and is not stored: IndexError" in caplog.text
    assert {entry.view for entry in errors(caplog)} == {dotted_name(card)}


NOT_KEYS = ["short", "é" * 44, base64.b64encode(b"x" * 31).decode(), b"x" * 44, 7, None]
REFUSALS = [*([OLD, wrong] for wrong in NOT_KEYS), OLD]


@pytest.mark.parametrize("name", ["ENCRYPTION_KEYS", "DIGEST_KEYS"])
@pytest.mark.parametrize("keys", REFUSALS, ids=range(len(REFUSALS)))
def test_invalid_keys_are_an_error_that_does_not_show_them(name, keys, settings):
    settings.IDEMPOTENCY = {name: keys}
    with pytest.raises(ImproperlyConfigured) as refused:
        conf.conf()
    wanted = "it must be a list of strings, each 32 bytes in base64, or a callable."
    assert str(refused.value) == f'IDEMPOTENCY["{name}"]: {wanted}'


def test_an_encryption_key_is_the_same_in_either_alphabet_of_base64(keys):
    raw = b"\xfb\xff" * 16
    keys(base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode())
    assert conf.conf().encryption == (raw, raw)


def test_the_settings_do_not_show_the_keys():
    assert OLD not in repr(conf.conf())
    assert DIGEST not in repr(conf.conf())


TEXT = (("Content-Type", "text/plain"),)


@pytest.mark.parametrize(
    "act", [fail, partial(resolve, response=StoredResponse(201, TEXT, SECRET.encode()))]
)
def test_an_operators_response_must_be_encrypted(act, monkeypatch, caplog):
    claim(policy=Policy(mode="lease"))
    shift(locked_until=-1)
    before = row()
    with monkeypatch.context() as without:
        without.setitem(
            sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None
        )
        assert act(record().pk) == Refusal.NOT_ENCRYPTED
    assert row() == before
    (said,) = errors(caplog)
    assert "could not be encrypted" in said.getMessage()
    assert not isinstance(act(record().pk), Refusal)
    assert SECRET not in everything_stored()


@pytest.mark.postgresql
def test_an_encrypted_response_is_recognized_after_a_lost_commit(proxy):
    """Though it is never encrypted in the same way twice."""
    send = entry_point(
        commits_next(proxy), body=Body(encrypt=True, redact=without_card)
    )
    first = send()
    assert (first.status_code, is_replay(first), SECRET in first.content.decode()) == (
        201,
        False,
        True,
    )
    assert (effects(), proxy.cuts) == (1, 1)
    second = send()
    assert (second.status_code, is_replay(second), code(second), effects()) == (
        201,
        True,
        None,
        1,
    )


def commits_next(proxy):
    def view(request):
        response = card(request)
        proxy.cut = Cut.AFTER_COMMIT
        return response

    return view


WITH_KEY = {"ENCRYPTION_KEYS": [base64.b64encode(os.urandom(32)).decode()]}
ONLY_DIGESTS = {"DIGEST_KEYS": WITH_KEY["ENCRYPTION_KEYS"]}


@pytest.mark.cryptography
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("lost", "package", "reason"),
    [
        ({}, True, "there is no encryption key"),
        (ONLY_DIGESTS, True, "there is no encryption key"),
        (WITH_KEY, False, "cryptography is not"),
    ],
    ids=["no key", "digest key only", "no package"],
)
def test_a_request_that_can_not_be_encrypted_is_refused_until_it_can(
    mode, lost, package, reason, settings, monkeypatch, caplog
):
    # nor does it run unprotected: a wrong configuration is not an outage
    send = entry_point(card, mode=mode, body=Body(encrypt="require"), fail_open=True)
    with monkeypatch.context() as without:
        settings.IDEMPOTENCY = lost | {"BODY": Body(encrypt="require")}
        if not package:
            without.setitem(sys.modules, "cryptography", None)
        refused = send()
        (message,) = found("E003")
    assert (refused.status_code, code(refused)) == (
        503,
        "idempotency_store_unavailable",
    )
    assert (effects(), IdempotencyRecord.objects.count()) == (0, 0)
    assert reason in caplog.text
    assert reason in message.msg
    settings.IDEMPOTENCY = WITH_KEY
    first, second = send(), send()
    assert (first.status_code, is_replay(first), is_replay(second), effects()) == (
        201,
        False,
        True,
        1,
    )


@pytest.mark.cryptography
@pytest.mark.parametrize("together", [False, True], ids=["one by one", "batch"])
def test_messages_that_can_not_be_encrypted_stay_with_the_broker(together, settings):
    settings.IDEMPOTENCY = {}
    consumer = Consumer(
        "receipts", lambda *_given: pay(), policy=Policy(body=Body(encrypt="require"))
    )
    messages = [
        Message(source="receipts", id=id, body=b"4111 1111 1111 1111")
        for id in ("a", "b")
    ]
    deliveries = (
        consumer.consume_many(messages)
        if together
        else [*map(consumer.consume, messages)]
    )
    assert [type(delivery) for delivery in deliveries] == [AwaitsStore] * 2
    assert (effects(), IdempotencyRecord.objects.count()) == (0, 0)
