"""Encrypted at rest: nobody reads an answer without the key, and nobody else's record takes it."""

from __future__ import annotations

import base64
import logging
import os
import sys
from functools import partial

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission
from django.core.exceptions import ImproperlyConfigured
from django.urls import path

from django_idempotency import conf, privacy
from django_idempotency.checks import check_settings
from django_idempotency.encryption import decrypt, encrypt
from django_idempotency.interventions import Done, Refusal, Refused, fail, resolve
from django_idempotency.keys import record_id
from django_idempotency.maintenance import drop_bodies
from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import StoredResponse
from django_idempotency.policy import Policy
from tests.callers import MODES, claim, door, effects, is_replay, paying, record, row, shift
from tests.proxy import Cut
from tests.test_privacy import SECRET, card, everything_stored, without_card
from tests.views import code

pytestmark = pytest.mark.usefixtures("payer")
modes = pytest.mark.parametrize("mode", MODES)


def new_key():
    return base64.urlsafe_b64encode(os.urandom(32)).decode()


OLD, NEW = new_key(), new_key()


@pytest.fixture(autouse=True)
def keys(settings):
    """Have other keys in the settings."""

    def have(*texts):
        settings.IDEMPOTENCY = {"ENCRYPTION_KEYS": list(texts)}

    have(OLD)
    return have


@modes
def test_a_replay_is_to_the_byte_what_the_first_caller_got_and_nothing_of_it_can_be_read_in_the_table(mode):
    def answering(request):
        response = card(request)
        response.set_cookie("session", SECRET)
        return response

    send = door(answering, mode=mode, encrypt=True, store_cookies=True)
    first, second = send(), send()
    assert (second.status_code, second.content, is_replay(second), effects()) == (201, first.content, True, 1)
    assert dict(second.headers) == {**first.headers, "Idempotent-Replayed": "true"}
    assert second.cookies.output() == first.cookies.output()
    table = everything_stored()
    assert SECRET not in table
    assert SECRET.encode().hex() not in table
    assert "X-Card" not in table


def test_without_encryption_it_could(keys):
    door(card)()
    assert SECRET in everything_stored()


@pytest.mark.parametrize(
    "response",
    [
        StoredResponse(200, (), b""),
        StoredResponse(200, (("A", "ü"), ("A", "2")), bytes(range(256))),
        StoredResponse(201, (("A", "b"),), None),
        StoredResponse(204, (("A", "b"),), b""),
    ],
)
def test_what_was_sealed_is_opened_as_it_was(response):
    id = record_id("s", "k")
    sealed = privacy.sealed(response, id, Policy(encrypt=True))
    assert privacy.is_encrypted(sealed)
    assert privacy.opened(sealed, id) == response
    assert sealed.body != privacy.sealed(response, id, Policy(encrypt=True)).body, "never twice the same"


def test_where_there_is_nothing_to_hide_nothing_is_encrypted():
    nothing = StoredResponse(200, (), None)
    assert privacy.sealed(nothing, record_id("s", "k"), Policy(encrypt=True)) == nothing
    plain = StoredResponse(200, (("A", "b"),), b"x")
    assert privacy.sealed(plain, record_id("s", "k"), Policy()) is plain
    assert privacy.opened(plain, record_id("s", "k")) is plain


# --- Keys ------------------------------------------------------------------------------------------------------------


def test_a_new_key_in_front_encrypts_and_the_old_one_still_opens(keys):
    send = door(paying, encrypt=True)
    before = send("before")
    keys(NEW, OLD)
    after = send("after")
    assert [send("before").content, send("after").content] == [before.content, after.content]
    marks = {key: record(key).response_headers[0][1] for key in ("before", "after")}
    assert marks == {
        "before": privacy.key_id(base64.urlsafe_b64decode(OLD)),
        "after": privacy.key_id(base64.urlsafe_b64decode(NEW)),
    }
    keys(NEW)
    assert send("after").content == after.content


def gone(keys):
    keys(NEW)


def not_even_one(keys):
    keys()


def moved(keys):
    """The answer of another record of the same caller."""
    door(card, encrypt=True)("another")
    other = record("another")
    IdempotencyRecord.objects.filter(key="k").update(response_body=other.response_body)


def another_status(keys):
    IdempotencyRecord.objects.filter(key="k").update(response_status=202)


def a_changed_byte(keys):
    body = bytearray(record().response_body)
    body[-20] ^= 1
    IdempotencyRecord.objects.filter(key="k").update(response_body=bytes(body))


def cut_short(keys):
    IdempotencyRecord.objects.filter(key="k").update(response_body=b"short")


@modes
@pytest.mark.parametrize("harm", [gone, not_even_one, moved, another_status, a_changed_byte, cut_short])
def test_what_can_not_be_decrypted_is_not_replayed_and_never_run_again(mode, harm, keys, caplog):
    send = door(card, mode=mode, encrypt=True)
    send()
    harm(keys)
    before = effects()
    caplog.clear()
    again = send()
    assert (again.status_code, code(again), is_replay(again)) == (record().response_status, "response_not_stored", True)
    assert effects() == before
    (said,) = [entry for entry in caplog.records if entry.levelno == logging.ERROR]
    assert f"{record().pk} could not be decrypted" in said.getMessage()
    assert SECRET not in caplog.text


def test_once_its_body_is_dropped_for_audit_the_record_stays_without_an_answer(keys, caplog):
    send = door(card, encrypt=True)
    send()
    shift(expires_at=-1, purge_at=7200)
    assert drop_bodies().rows == 1
    shift(expires_at=3600)
    assert (code(send()), effects()) == ("response_not_stored", 1)
    assert not [entry for entry in caplog.records if entry.levelno == logging.ERROR], "nothing is wrong"


@modes
def test_without_a_key_the_answer_is_given_and_not_stored(mode, keys, caplog):
    keys()
    send = door(card, mode=mode, encrypt=True)
    assert (SECRET in send().content.decode(), effects()) == (True, 1)
    assert (code(send()), effects(), record().status) == ("response_not_stored", 1, "completed")
    assert SECRET not in everything_stored()
    assert "could not be encrypted, and is not stored: IndexError" in caplog.text


@pytest.mark.parametrize("wrong", ["short", "é" * 44, base64.b64encode(os.urandom(31)).decode(), b"x" * 44, 7, None])
def test_a_key_that_is_none_is_an_error_that_does_not_tell_it(keys, wrong):
    keys(OLD, wrong)
    with pytest.raises(ImproperlyConfigured) as refused:
        conf.conf()
    assert str(refused.value) == "ENCRYPTION_KEYS[1] must be 32 bytes in base64."


def test_a_string_is_not_a_list_of_keys(settings):
    settings.IDEMPOTENCY = {"ENCRYPTION_KEYS": OLD}
    with pytest.raises(ImproperlyConfigured, match=r"^ENCRYPTION_KEYS must be a list of strings\.$"):
        conf.conf()


def test_both_alphabets_of_base64_are_the_same_key(keys):
    raw = b"\xfb\xff" * 16
    keys(base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode())
    assert conf.conf().encryption == (raw, raw)


def test_the_settings_do_not_show_the_keys():
    assert OLD not in repr(conf.conf())


def test_each_message_has_its_own_key_and_is_bound_to_what_it_was_sealed_with():
    key = os.urandom(32)
    sealed = [encrypt(b"same", key, b"id") for _ in range(2)]
    assert sealed[0] != sealed[1]
    assert decrypt(sealed[0], key, b"id") == b"same"
    for wrong in ((key, b"other"), (os.urandom(32), b"id")):
        with pytest.raises(Exception, match=r"^$") as refused:
            decrypt(sealed[0], *wrong)
        assert type(refused.value).__name__ == "InvalidTag"


# --- A person's answer ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", [fail, partial(resolve, response=StoredResponse(201, (), SECRET.encode()))])
def test_an_answer_that_a_person_gives_is_refused_if_it_can_not_be_encrypted(act, monkeypatch, caplog):
    claim(policy=Policy(mode="lease"))
    shift(locked_until=-1)
    before = row()
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "django_idempotency.encryption", None)
        assert act(record().pk) == Refused(Refusal.NOT_ENCRYPTED)
    assert row() == before
    (said,) = [entry for entry in caplog.records if entry.levelno == logging.ERROR]
    assert "could not be encrypted" in said.getMessage()
    assert isinstance(act(record().pk), Done)
    assert SECRET not in everything_stored()


# --- COMMIT ----------------------------------------------------------------------------------------------------------


@pytest.mark.postgresql
def test_when_the_answer_to_commit_is_lost_an_encrypted_answer_is_known_for_our_own(proxy):
    """Though it is never encrypted in the same way twice."""
    send = door(commits_next(proxy), encrypt=True, redact=without_card)
    first = send()
    assert (first.status_code, is_replay(first), SECRET in first.content.decode()) == (201, False, True)
    assert (effects(), proxy.cuts) == (1, 1)
    second = send()
    assert (second.status_code, is_replay(second), code(second), effects()) == (201, True, None, 1)


def commits_next(proxy):
    def view(request):
        response = card(request)
        proxy.cut = Cut.AFTER_COMMIT
        return response

    return view


def test_the_system_check_is_content_with_a_key_and_the_package(settings):
    settings.IDEMPOTENCY |= {"ENCRYPT": True}
    assert check_settings(None) == []


# --- Looking at it ---------------------------------------------------------------------------------------------------


def test_a_record_gives_its_answer_decrypted(keys):
    send = door(card, encrypt=True)
    first = send()
    assert (record().answer.body, dict(record().answer.headers)["X-Card"]) == (first.content, SECRET)
    keys(NEW)
    assert record().answer == StoredResponse(201, (), None)


@pytest.mark.parametrize("permitted", [True, False])
def test_the_admin_shows_a_body_decrypted_to_those_who_may_see_it(client, django_user_model, settings, permitted):
    settings.ROOT_URLCONF = (path("admin/", admin.site.urls),)
    door(card, encrypt=True)()
    staff = django_user_model.objects.create_user("staff", is_staff=True)
    wanted = ["view_idempotencyrecord", *["view_response_body"] * permitted]
    staff.user_permissions.set(Permission.objects.filter(codename__in=wanted))
    client.force_login(staff)
    page = client.get(f"/admin/django_idempotency/idempotencyrecord/{record().pk}/change/")
    assert page.status_code == 200
    assert (SECRET in page.content.decode()) == permitted
