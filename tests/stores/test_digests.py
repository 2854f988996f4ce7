"""What a dumped row shows of a request: nothing that can be guessed without a digest
key, however keys are rotated.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import os
from contextlib import suppress
from dataclasses import replace

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.test import RequestFactory

from django_idempotency import conf, forms
from django_idempotency.engine import Context, digests
from django_idempotency.engine.claims import Claimant
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values import fingerprints, keys
from django_idempotency.values.outcomes import StoredResponse
from django_idempotency.values.policy import Atomic, Body, Policy
from tests.support.callers import (
    MODES,
    SCOPE,
    Gate,
    claim,
    effects,
    entry_point,
    is_replay,
    operation,
    paying,
    post,
    record,
    shift,
)
from tests.support.checks import found
from tests.support.views import code

pytestmark = pytest.mark.usefixtures("payer")
modes = pytest.mark.parametrize("mode", MODES)


def new_key():
    return base64.b64encode(os.urandom(32)).decode()


def raw(key):
    return base64.b64decode(key)


OLD, NEW, OTHER = new_key(), new_key(), new_key()
OTHER_BODY = b'{"amount": 6}'


@pytest.fixture(autouse=True)
def have(settings):
    """Have other digest keys in the settings."""

    def have(*texts, **others):
        settings.IDEMPOTENCY = {"DIGEST_KEYS": list(texts)} | others

    have(OLD)
    return have


def failing(request):
    raise ZeroDivisionError


def attempt(send, *args):
    with suppress(ZeroDivisionError):
        return send(*args)


def child_key(claimed):
    return Context(claimed, Policy()).child_key("bank")


@modes
def test_a_dumped_fingerprint_can_not_be_guessed(mode):
    entry_point(paying, mode=mode)()
    guessed = fingerprints.fingerprint(post())
    stored = bytes(record().fingerprint)
    assert stored != guessed
    assert guessed not in stored
    assert hashlib.sha256(record().pk.bytes + guessed).digest() not in stored
    assert stored[:4] == conf.digest_key_id(raw(OLD))
    assert raw(OLD)[:4] not in stored
    entry_point(paying, mode=mode)("another")
    assert bytes(record("another").fingerprint)[4:] != stored[4:]


def test_without_any_key_the_digest_itself_is_stored(have):
    have()
    entry_point(paying)()
    assert bytes(record().fingerprint) == fingerprints.fingerprint(post())


def test_encryption_keys_give_digest_keys_where_none_is_stated(have):
    have(ENCRYPTION_KEYS=[OTHER])
    entry_point(paying)()
    (derived,) = conf.conf().digests.values()
    assert bytes(record().fingerprint)[:4] == conf.digest_key_id(derived)
    assert derived != raw(OTHER), "a digest tells nothing of what decrypts"


CHANGES = {
    "a new key in front": ([OLD], [NEW, OLD]),
    "a first key": ([], [NEW]),
    "a key of its own in front of a derived one": (
        [],
        [NEW],
        {"ENCRYPTION_KEYS": [OTHER]},
    ),
}


@modes
@pytest.mark.parametrize("change", CHANGES)
def test_after_a_rotation_retries_match_and_others_do_not(mode, change, have):
    before, after, *others = CHANGES[change]
    have(*before, **dict(*others))
    send = entry_point(paying, mode=mode)
    first = send()
    have(*after, **dict(*others))
    again = send()
    assert (is_replay(again), again.content, effects()) == (True, first.content, 1)
    assert (code(send("k", OTHER_BODY)), effects()) == ("idempotency_key_reused", 1)


def test_a_live_owner_is_found_alive_after_a_rotation_and_without_its_key(have):
    with Gate().running() as answer:
        have(NEW, OLD)
        assert code(entry_point(paying)()) == "idempotency_key_in_use"
        assert code(entry_point(paying)("k", OTHER_BODY)) == "idempotency_key_reused"
        have(NEW)
        assert code(entry_point(paying)()) == "idempotency_key_in_use"
    assert (answer.result().status_code, effects()) == (201, 1)


@modes
def test_a_record_stays_under_its_key_until_it_begins_anew(mode, have):
    attempt(entry_point(failing, mode=mode))
    have(NEW, OLD)
    entry_point(paying, mode=mode)()
    assert bytes(record().fingerprint)[:4] == conf.digest_key_id(raw(OLD))
    shift(expires_at=-1)
    entry_point(paying, mode=mode)()
    assert (bytes(record().fingerprint)[:4], effects()) == (
        conf.digest_key_id(raw(NEW)),
        2,
    )


@modes
def test_without_its_key_a_response_is_not_replayed(mode, have, caplog):
    send = entry_point(paying, mode=mode)
    send()
    have(NEW)
    for body in (b'{"amount": 5}', OTHER_BODY):
        again = send("k", body)
        assert (again.status_code, code(again), effects()) == (
            201,
            "response_not_stored",
            1,
        )
    (said,) = [entry for entry in caplog.records if entry.levelno == logging.ERROR]
    assert conf.digest_key_id(raw(OLD)).hex() in said.getMessage()


@modes
def test_without_its_key_nothing_runs_again(mode, have):
    attempt(entry_point(failing, mode=mode))
    before = bytes(record().fingerprint)
    have(NEW)
    assert (code(entry_point(paying, mode=mode)()), effects()) == (
        "idempotency_key_reused",
        0,
    )
    assert bytes(record().fingerprint) == before
    have(NEW, OLD)
    assert (entry_point(paying, mode=mode)().status_code, effects()) == (201, 1)


def test_a_key_made_of_a_form_does_not_show_its_content(have):
    signed = forms.new_form_key()
    sent = {forms.FIELD: signed, "card": "4242"}
    forms.idempotent_form(paying)(anonymous(sent))
    (key,) = IdempotencyRecord.objects.values_list("key", flat=True)
    plain = fingerprints.fingerprint(anonymous(sent), exclude=forms.NOT_CONTENT)
    assert plain.hex()[:32] not in key
    forms.idempotent_form(paying)(anonymous(sent))
    assert effects() == 1


def anonymous(fields):
    return RequestFactory().post("/", fields)


def test_a_child_key_can_not_be_worked_out_from_scope_and_key(have):
    keyed = child_key(claim(policy=Policy()))
    assert keyed != keys.child_key(keys.record_id(SCOPE, "k"), "bank")
    have(NEW)
    assert child_key(claim("another", policy=Policy())) != keyed


@modes
@pytest.mark.parametrize("change", CHANGES)
def test_child_keys_of_later_attempts_are_the_same_after_a_rotation(mode, change, have):
    before, after, *others = CHANGES[change]
    sent = []

    def calling(request):
        sent.append(request.idempotency.child_key("bank"))
        if len(sent) == 1:
            raise ZeroDivisionError
        return HttpResponse("done")

    have(*before, **dict(*others))
    send = entry_point(calling, mode=mode)
    attempt(send)
    have(*after, **dict(*others))
    assert attempt(send).status_code == 200
    assert sent[0] == sent[1]


def test_a_takeover_whose_response_was_lost_stays_under_its_key(have):
    """The record is this caller's already when it asks again."""
    dead = claim(policy=Policy(mode=Atomic(takeover_grace=0)))
    have(NEW, OLD)
    claimant = Claimant(operation(), Policy(mode=Atomic(takeover_grace=0)))
    taken, found = claimant.ask(), claimant.ask()
    assert (
        (taken.attempt, taken.token)
        == (found.attempt, found.token)
        == (2, claimant.token)
    )
    assert taken.taken_over
    assert found.operation.fingerprint == bytes(record().fingerprint)
    assert child_key(found) == child_key(taken) == child_key(dead)


# --- Keys from a callable -------------------------------------------------------------

calls = []


def from_a_service():
    calls.append(1)
    return [raw(NEW), OLD]


@pytest.mark.parametrize("provider", [from_a_service, f"{__name__}.from_a_service"])
@pytest.mark.parametrize("name", ["DIGEST_KEYS", "ENCRYPTION_KEYS"])
def test_keys_come_from_a_callable_that_is_called_once(provider, name, settings):
    calls.clear()
    settings.IDEMPOTENCY = {name: provider}
    send = entry_point(paying, body=Body(encrypt=name == "ENCRYPTION_KEYS"))
    send("a")
    send("b")
    assert (len(calls), len(conf.conf().digests), is_replay(send("a"))) == (1, 2, True)
    if name == "ENCRYPTION_KEYS":
        assert conf.conf().encryption == (raw(NEW), raw(OLD))


def out_of_reach():
    raise OSError("secret: " + OLD)


PROVIDERS = {
    "failed: OSError": out_of_reach,
    "failed: TypeError": lambda: None,
    "returned no key": lambda: [],
    "returned a key that is not 32 bytes": lambda: [b"short"],
}


@pytest.mark.parametrize("error", PROVIDERS)
@pytest.mark.parametrize("name", ["DIGEST_KEYS", "ENCRYPTION_KEYS"])
def test_without_the_keys_of_a_callable_nothing_runs(name, error, settings):
    settings.IDEMPOTENCY = {name: PROVIDERS[error]}
    (message,) = found(databases=())
    assert (message.id, message.msg) == (
        "django_idempotency.E001",
        f"The callable in {name} {error}.",
    )
    with pytest.raises(ImproperlyConfigured, match=error):
        entry_point(paying)()
    assert effects() == 0


RESPONSE = StoredResponse(201, (("Content-Type", "application/json"),), b'{"id": 7}')


def test_a_digest_tells_responses_apart():
    bodies, statuses = [replace(RESPONSE, body=b"{}")], [replace(RESPONSE, status=200)]
    others = [
        *bodies,
        *statuses,
        replace(RESPONSE, headers=()),
        replace(RESPONSE, body=None),
    ]
    assert (
        len({digests.response_digest(response) for response in [RESPONSE, *others]})
        == 5
    )


def test_a_digest_of_a_response_is_keyed(settings):
    settings.IDEMPOTENCY = {}
    plain = digests.response_digest(RESPONSE)
    settings.IDEMPOTENCY = {"DIGEST_KEYS": [OLD]}
    keyed = digests.response_digest(RESPONSE)
    assert (plain.partition(":")[0], keyed.partition(":")[0]) == (
        "sha256",
        "hmac-sha256",
    )
