"""Encrypting again with the newest key, and the checks that tell when an old one is needed, or a key is none."""

from __future__ import annotations

import base64
import json
import os
import re
from contextlib import closing
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import transaction
from django.http import HttpResponse

from django_idempotency import conf
from django_idempotency.checks.keys import EXAMPLES, check_keys, check_needed_keys, weakness
from django_idempotency.maintenance import reencrypt
from django_idempotency.maintenance.reencryption import reencrypt_in_batches
from django_idempotency.models import IdempotencyRecord
from django_idempotency.policy import Policy
from django_idempotency.stores.codec import key_id
from tests.support.callers import claim, effects, entry_point, is_replay, paying, record, row
from tests.support.threads import OtherThread
from tests.support.views import code

pytestmark = [pytest.mark.usefixtures("payer"), pytest.mark.cryptography]
DOCS = Path(__file__).parents[2] / "docs"


def new_key():
    return base64.b64encode(os.urandom(32)).decode()


def id_of(key):
    return key_id(base64.b64decode(key))


OLD, NEW, DIGEST = new_key(), new_key(), new_key()


@pytest.fixture(autouse=True)
def keys(settings):
    """Have other encryption keys in the settings."""

    def have(*texts, digests=(DIGEST,)):
        settings.IDEMPOTENCY = {"ENCRYPTION_KEYS": list(texts), "DIGEST_KEYS": list(digests)}

    have(OLD)
    return have


def done(*names, encrypt="require"):
    send = entry_point(paying, encrypt=encrypt)
    return {name: send(name).content for name in names}


def keys_in_table():
    return {headers[0][1] for headers in IdempotencyRecord.objects.values_list("response_headers", flat=True)}


# --- Encrypting again ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 100])
def test_the_old_key_is_not_needed_afterwards(batch, keys):
    first = done("a", "b", "c")
    keys(NEW, OLD)
    first |= done("d")
    result = reencrypt(batch=batch, pause=0)
    assert (result.reencrypted, result.complete) == (3, True)
    assert result.keys == {id_of(OLD): 3, id_of(NEW): 1}
    assert keys_in_table() == {id_of(NEW)}
    keys(NEW)
    assert done(*first) == first
    assert effects() == 4


def test_a_second_run_changes_nothing(keys):
    done("k")
    keys(NEW, OLD)
    reencrypt()
    before = row()
    assert (reencrypt().reencrypted, row()) == (0, before)


def test_nothing_but_the_response_is_written(keys):
    done("k")
    before = row()
    keys(NEW, OLD)
    reencrypt()
    assert {name for name, value in row().items() if value != before[name]} == {"response_headers", "response_body"}


def test_an_interrupted_run_is_taken_up_where_it_ended(keys):
    done(*"abcde")
    keys(NEW, OLD)
    first = reencrypt(batch=2, max_seconds=0)
    assert (first.reencrypted, first.finished, first.complete) == (2, False, False)
    rest = reencrypt(batch=2, pause=0, after=first.after)
    assert (rest.reencrypted, rest.complete) == (3, True)


def test_each_batch_is_committed_by_itself(keys):
    done(*"abcd")
    keys(NEW, OLD)
    batches = reencrypt_in_batches(batch=2, pause=0)
    next(batches)
    assert sum(headers[0][1] == id_of(NEW) for headers in all_headers()) == 2
    batches.close()


def all_headers():
    return IdempotencyRecord.objects.values_list("response_headers", flat=True)


@pytest.mark.row_locks
def test_a_locked_record_is_passed_over(keys):
    done("a", "b")
    keys(NEW, OLD)
    with closing(OtherThread()) as other, transaction.atomic():
        IdempotencyRecord.objects.select_for_update().get(key="a")
        result = other(reencrypt)
    assert (result.reencrypted, result.busy, result.complete) == (1, 1, False)
    assert reencrypt().complete


def test_what_can_not_be_read_is_left_as_it_is(keys):
    done("a", "b")
    IdempotencyRecord.objects.filter(key="a").update(response_body=b"x" * 100)
    before = row("a")
    keys(NEW, OLD)
    result = reencrypt()
    assert (result.reencrypted, result.unreadable, result.complete, row("a")) == (1, 1, False, before)


def test_what_is_in_clear_is_encrypted_only_when_told(keys):
    done("k", encrypt=False)
    before = row()
    assert (reencrypt().reencrypted, row()) == (0, before)
    assert reencrypt(unencrypted=True).reencrypted == 1
    again = entry_point(paying, encrypt="require")("k")
    assert (is_replay(again), code(again), effects()) == (True, None, 1)


def test_headers_without_a_body_are_encrypted_too(keys):
    def created(request):
        return HttpResponse("x", status=201, headers={"Location": "/payments/7/"})

    entry_point(created, store_body=False)()
    assert reencrypt(unencrypted=True).reencrypted == 1
    assert "Location" not in str(record().response_headers)
    again = entry_point(created, encrypt="require")()
    assert (again.status_code, again.headers["Location"], is_replay(again)) == (201, "/payments/7/", True)


def test_live_and_emptied_records_are_not_touched(keys):
    claim(policy=Policy())
    done("done")
    IdempotencyRecord.objects.filter(key="done").update(response_body=None)
    keys(NEW, OLD)
    before = list(IdempotencyRecord.objects.order_by("pk").values())
    assert (reencrypt(unencrypted=True).complete, effects()) == (True, 1)
    assert list(IdempotencyRecord.objects.order_by("pk").values()) == before


def test_without_a_key_nothing_is_encrypted(keys):
    keys()
    with pytest.raises(ImproperlyConfigured, match="no key in ENCRYPTION_KEYS"):
        reencrypt()
    with pytest.raises(CommandError, match="no key in ENCRYPTION_KEYS"):
        call_command("idempotency_reencrypt")


def test_the_command_counts_by_key_and_then_encrypts(keys, capsys):
    done("a", "b")
    keys(NEW, OLD)
    call_command("idempotency_reencrypt", "--dry-run")
    digest = conf.digest_key_id(base64.b64decode(DIGEST)).hex()
    assert capsys.readouterr().out == (
        f"0 responses encrypted again; left: none; keys before: {id_of(OLD)} (2); digest keys: {digest} (2).\n"
    )
    assert keys_in_table() == {id_of(OLD)}
    call_command("idempotency_reencrypt", "--json")
    told = json.loads(capsys.readouterr().out)
    assert (told["reencrypted"], told["complete"], told["keys"]) == (2, True, {id_of(OLD): 2})
    assert keys_in_table() == {id_of(NEW)}


def test_the_command_fails_while_something_is_left(keys, capsys):
    done("a", "b")
    keys(NEW, OLD)
    with pytest.raises(SystemExit):
        call_command("idempotency_reencrypt", "--batch", "1", "--max-seconds", "0")
    assert f"continue with --after {IdempotencyRecord.objects.order_by('pk').first().pk}" in capsys.readouterr().out


# --- E090 ------------------------------------------------------------------------------------------------------------

WEAK = {
    "a letter": ("is text", b"k" * 32),
    "a sentence": ("is text", b"correct horse battery staple 123"),
    "hexadecimal": ("is text", os.urandom(16).hex().encode()),
    "zeros": ("is not random", bytes(32)),
    "counted": ("is not random", bytes(range(32))),
    "counted by threes": ("is not random", bytes(range(0, 96, 3))),
    "two bytes": ("is not random", b"\xff\x00" * 16),
    "repeated": ("is not random", os.urandom(8) * 4),
}


@pytest.mark.parametrize(("why", "key"), WEAK.values(), ids=WEAK)
@pytest.mark.parametrize("name", ["ENCRYPTION_KEYS", "DIGEST_KEYS"])
def test_e090_refuses_a_weak_key(why, key, name, settings):
    weak = base64.b64encode(key).decode()
    settings.IDEMPOTENCY = {name: [new_key(), weak]}
    (found,) = check_keys(None)
    assert (found.id, found.msg) == ("django_idempotency.E090", f"{name}: the key at index 1 {why}.")
    assert weak not in found.msg


def test_e090_refuses_every_key_that_the_documentation_shows():
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    shown = {base64.b64decode(key) for key in re.findall(r'"([A-Za-z0-9+/_-]{43}=)"', pages)}
    assert shown == EXAMPLES
    assert all(map(weakness, shown))


def test_e090_refuses_a_key_that_is_stated_twice(keys):
    keys(OLD, digests=[OLD])
    assert [found.msg for found in check_keys(None)] == [
        "ENCRYPTION_KEYS: the key at index 0 is listed twice.",
        "DIGEST_KEYS: the key at index 0 is listed twice.",
    ]


def test_random_keys_are_not_refused(keys):
    assert not [key for key in (os.urandom(32) for _ in range(10_000)) if weakness(key)]
    keys(OLD, NEW)
    assert check_keys(None) == []


# --- E091 ------------------------------------------------------------------------------------------------------------


def missing():
    found = check_needed_keys(None, databases=["default"])
    assert {message.id for message in found} <= {"django_idempotency.E091"}
    return [re.search(r"the key (\w+), which is (?:not|neither) in (\w+)", message.msg).groups() for message in found]


def test_e091_tells_of_keys_that_records_need(keys):
    done("a")
    assert missing() == []
    keys(NEW, OLD, digests=[])
    assert missing() == [(conf.digest_key_id(base64.b64decode(DIGEST)).hex(), "DIGEST_KEYS")]
    keys(NEW)
    assert missing() == [(id_of(OLD), "ENCRYPTION_KEYS")]
    keys(NEW, OLD)
    reencrypt()
    keys(NEW)
    assert missing() == []


def test_a_response_that_was_dropped_needs_no_key(keys):
    done("a")
    IdempotencyRecord.objects.update(response_body=None, fingerprint=b"")
    keys(NEW)
    assert missing() == []


def test_e091_asks_only_the_databases_it_may(keys, django_assert_num_queries):
    done("a")
    keys()
    with django_assert_num_queries(0):
        assert check_needed_keys(None) == []


def test_records_without_keys_need_none(keys):
    keys(digests=[])
    done("a", encrypt=False)
    claim("live", policy=Policy())
    assert missing() == []
    assert record("a").response_headers
