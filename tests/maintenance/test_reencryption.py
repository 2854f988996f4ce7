"""Encrypting again with the newest key."""

from __future__ import annotations

import base64

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.http import HttpResponse

from django_idempotency.maintenance import reencrypt
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.codec import key_id
from django_idempotency.values.policy import Body, Policy
from tests.stores.test_digests import new_key
from tests.support.callers import claim, effects, entry_point, is_replay, paying, row
from tests.support.commands import told

pytestmark = [pytest.mark.usefixtures("payer"), pytest.mark.cryptography]


def id_of(key):
    return key_id(base64.b64decode(key))


OLD, NEW, DIGEST = new_key(), new_key(), new_key()


@pytest.fixture(autouse=True)
def keys(settings):
    """Have other encryption keys in the settings."""

    def have(*texts, digests=(DIGEST,)):
        settings.IDEMPOTENCY = {
            "ENCRYPTION_KEYS": list(texts),
            "DIGEST_KEYS": list(digests),
        }

    have(OLD)
    return have


def done(*names, encrypt="require"):
    send = entry_point(paying, body=Body(encrypt=encrypt))
    return {name: send(name).content for name in names}


def keys_in_table():
    return {
        headers[0][1]
        for headers in IdempotencyRecord.objects.values_list(
            "response_headers", flat=True
        )
    }


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_the_old_key_is_not_needed_afterwards(batch, keys):
    first = done("a", "b", "c")
    keys(NEW, OLD)
    first |= done("d")
    result = reencrypt(batch=batch, pause=0)
    assert (result.rows, result.complete) == (3, True)
    assert keys_in_table() == {id_of(NEW)}
    keys(NEW)
    assert done(*first) == first
    assert effects() == 4


def test_only_the_response_is_written_and_only_once(keys):
    done("k")
    before = row()
    keys(NEW, OLD)
    reencrypt()
    once = row()
    assert {name for name, value in once.items() if value != before[name]} == {
        "response_headers",
        "response_body",
    }
    assert (reencrypt().rows, row()) == (0, once)


def test_an_unreadable_response_is_left_as_it_is(keys):
    done("a", "b")
    IdempotencyRecord.objects.filter(key="a").update(response_body=b"x" * 100)
    before = row("a")
    keys(NEW, OLD)
    result = reencrypt()
    assert (result.rows, result.left["unreadable"], result.complete, row("a")) == (
        1,
        1,
        False,
        before,
    )


def test_headers_without_a_body_are_encrypted_again(keys):
    def created(request):
        return HttpResponse("x", status=201, headers={"Location": "/payments/7/"})

    send = entry_point(created, body=Body(store=False, encrypt="require"))
    send()
    keys(NEW, OLD)
    assert reencrypt().rows == 1
    keys(NEW)
    again = send()
    assert (again.status_code, again.headers["Location"], is_replay(again)) == (
        201,
        "/payments/7/",
        True,
    )


def test_live_and_emptied_records_and_those_in_clear_are_not_touched(keys):
    claim(policy=Policy())
    done("done")
    done("clear", encrypt=False)
    IdempotencyRecord.objects.filter(key="done").update(response_body=None)
    keys(NEW, OLD)
    before = list(IdempotencyRecord.objects.order_by("pk").values())
    assert (reencrypt().rows, reencrypt().complete) == (0, True)
    assert list(IdempotencyRecord.objects.order_by("pk").values()) == before


def test_without_a_key_nothing_is_encrypted(keys):
    keys()
    with pytest.raises(ImproperlyConfigured, match="no key in ENCRYPTION_KEYS"):
        reencrypt()
    with pytest.raises(CommandError, match="no key in ENCRYPTION_KEYS"):
        call_command("idempotency_privacy", "reencrypt")


def test_the_command_counts_and_then_encrypts(keys, capsys):
    done("a", "b")
    keys(NEW, OLD)
    call_command("idempotency_privacy", "reencrypt", "--dry-run")
    assert capsys.readouterr().out == "Would be encrypted again: 2; left alone: none.\n"
    assert keys_in_table() == {id_of(OLD)}
    (facts,) = told("idempotency_privacy", "reencrypt")
    assert (facts["done"], facts["complete"]) == ({"reencrypted": 2}, True)
    assert keys_in_table() == {id_of(NEW)}


def test_the_command_fails_while_something_is_left(keys, capsys):
    done("a", "b")
    keys(NEW, OLD)
    with pytest.raises(SystemExit):
        call_command(
            "idempotency_privacy", "reencrypt", "--batch", "1", "--max-seconds", "0"
        )
    assert (
        f"continue with --after {IdempotencyRecord.objects.order_by('pk').first().pk}"
        in capsys.readouterr().out
    )
