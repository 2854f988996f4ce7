"""A record's page shows what it can tell, and bodies to a few; what a client sent
deceives nobody there.
"""

from __future__ import annotations

import base64
import json
import logging
import re
from datetime import timedelta
from html import unescape

import pytest
from django.contrib.admin.models import LogEntry
from django.core.management import CommandError, call_command
from django.db import DatabaseError
from django.utils import timezone
from django.utils.html import strip_tags

from django_idempotency import signals
from django_idempotency.models import DatabaseNow, IdempotencyRecord
from django_idempotency.reporting.logs import log
from django_idempotency.values.keys import record_id
from django_idempotency.values.outcomes import Fail, Keep, StoredResponse
from django_idempotency.values.policy import Body
from django_idempotency.values.printable import printable, printable_lines
from tests.admin.pages import BODY, LIST, act, allow, ended, found, page
from tests.support.callers import heard
from tests.support.maintained import RecordFactory


def test_a_body_is_shown_only_with_its_own_permission(client, staff, records):
    ended(
        "text",
        Keep(StoredResponse(200, (("Content-Type", "text/html"),), b"<b>secret</b>")),
    )
    without = page(client, "done"), page(client, "text")
    assert "completed, 201" in without[0]
    assert not [
        shown
        for shown in without
        if "secret" in shown or BODY[:4].hex(" ") in shown or "X-Kept" in shown
    ]
    allow(staff, "view_response_idempotencyrecord")
    assert "X-Kept" in page(client, "done")
    assert BODY.hex(" ") in page(client, "done")
    shown = page(client, "text")
    assert "&lt;b&gt;secret&lt;/b&gt;" in shown
    assert "<b>secret" not in shown


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (rb'{"a": "\ud800"}', "application/json"),
        (b"+2AA-", "text/plain; charset=utf-7"),
    ],
)
def test_a_body_with_half_a_character_is_shown(
    client, superuser, db, body, content_type
):
    ended("k", Keep(StoredResponse(200, (("Content-Type", content_type),), body)))
    page(client, "k")


@pytest.mark.cryptography
def test_only_that_permission_shows_a_decrypted_response(client, staff, db, settings):
    settings.IDEMPOTENCY = {"ENCRYPTION_KEYS": [base64.b64encode(b"k" * 32).decode()]}
    ended(
        "k",
        Keep(
            StoredResponse(
                200, (("X-Kept", "secret"), ("Content-Type", "text/plain")), b"hush"
            )
        ),
        body=Body(encrypt=True),
    )
    without = page(client, "k")
    assert not [word for word in ("secret", "hush") if word in without]
    allow(staff, "view_response_idempotencyrecord")
    assert not [word for word in ("secret", "hush") if word not in page(client, "k")]


def test_the_timeline_is_of_one_life_of_the_key(client, superuser, db):
    """The clock of the application may be anywhere: it is the database's that
    counts.
    """
    for note in ("in an earlier life", "in this life"):
        IdempotencyRecord.objects.all().delete()
        ended("on_hold", Fail("crashed", on_hold=True))
        act(client, "allow_retry", "on_hold", note=note)
    shown = page(client, "on_hold")
    assert ("in this life" in shown, "in an earlier life" in shown) == (True, False)
    assert "by staff" in strip_tags(shown)
    history = client.get(
        f"{LIST}{record_id('user:1', 'on_hold')}/history/"
    ).content.decode()
    assert "in this life" in history
    assert "in an earlier life" in history


@pytest.mark.parametrize("hours", [-2, 2])
def test_an_entry_has_the_time_of_the_database(
    client, superuser, records, monkeypatch, hours
):
    skewed = timezone.now() + timedelta(hours=hours)
    monkeypatch.setattr(
        LogEntry._meta.get_field("action_time"), "default", lambda: skewed
    )
    act(client, "allow_retry", "on_hold", note="asked the bank")
    assert "asked the bank" in page(client, "on_hold")
    now = IdempotencyRecord.objects.values_list(DatabaseNow(), flat=True)[0]
    assert now - timedelta(minutes=1) < LogEntry.objects.get().action_time <= now


def test_viewing_a_body_leaves_an_entry_and_sends_a_signal(client, staff, records):
    allow(staff, "view_response_idempotencyrecord")
    with heard(signals.response_viewed) as sent:
        assert BODY.hex(" ") in page(client, "done")
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id) == (staff, str(record_id("user:1", "done")))
    assert entry.get_change_message() == "Response body viewed."
    assert [(told["user"], told["operation"].key) for told in sent] == [(staff, "done")]
    assert "Response body viewed." in page(client, "done")


def test_viewing_a_record_without_its_body_is_not_an_entry(client, staff, records):
    with heard(signals.response_viewed) as sent:
        page(client, "done")  # without the permission
        allow(staff, "view_response_idempotencyrecord")
        page(client, "on_hold")
        client.get(f"{LIST}{record_id('user:1', 'done')}/history/")
        client.get(f"{LIST}?situation=done")
        IdempotencyRecord.objects.filter(key="done").update(response_body=None)
        page(client, "done")
    assert (LogEntry.objects.count(), sent) == (0, [])


def test_a_body_is_shown_only_after_its_entry_is_written(
    client, superuser, records, monkeypatch
):
    def fail(*args, **named):
        raise DatabaseError

    monkeypatch.setattr(LogEntry, "save", fail)
    with heard(signals.response_viewed) as sent, pytest.raises(DatabaseError):
        client.get(f"{LIST}{record_id('user:1', 'done')}/change/")
    assert sent == []


def test_a_page_has_a_fingerprint_and_a_token_with_the_bodys_permission(
    client, staff, records
):
    every, token = (
        ("running", "stuck", "done", "failed", "on_hold"),
        str(found("running").token),
    )
    assert not [key for key in every if (b"f" * 32).hex() in page(client, key)]
    assert token not in page(client, "running")
    allow(staff, "view_response_idempotencyrecord")
    assert token in page(client, "running")
    assert [key for key in every if (b"f" * 32).hex() in page(client, key)] == [*every]
    assert "its lease ran out" in page(client, "on_hold")
    IdempotencyRecord.objects.update(fingerprint=b"")
    assert "ingerprint" not in page(client, "done")


@pytest.mark.parametrize(
    ("key", "what", "by_itself", "safe"),
    [
        (
            "running",
            "its lease ends in",
            "The owner renews the lease",
            "extend the lease",
        ),
        (
            "stuck",
            "Stuck: in flight for 3 h 7 min",
            "The next request with the key runs again",
            "find out whether",
        ),
        (
            "done",
            "It got its response, 201",
            "Every retry gets this response",
            "nothing can be",
        ),
        (
            "failed",
            "the last run failed",
            "The next request with the key runs again",
            "Nothing has to be done",
        ),
        (
            "on_hold",
            "it is not known whether the operation took place",
            "Nothing. It never runs",
            "Find out whether",
        ),
    ],
)
def test_a_page_says_what_it_is_and_what_is_safe(
    client, staff, records, key, what, by_itself, safe
):
    shown = unescape(page(client, key))
    assert not [text for text in (what, by_itself, safe) if text not in shown]


def test_texts_of_clients_are_set_apart_from_the_others(client, superuser, records):
    scope = "\u05d0\u05d1"  # a text of the other direction
    ended("done", Keep(StoredResponse(201)), scope=scope)
    id = record_id(scope, "done")
    for url in (
        f"{LIST}?situation=done",
        f"{LIST}{id}/change/",
        f"{LIST}intervene/allow_retry/?id={id}",
    ):
        html = client.get(url).content.decode()
        body = html.partition('<div id="content"')[2]
        assert re.findall(rf"<bdi[^>]*>{scope}", body), url
        unmarked = re.sub(r"<bdi[^>]*>[^<]*</bdi>|<[^>]*>", "", body)
        assert scope not in unmarked, url


def test_without_the_permission_there_is_nothing_to_see(client, staff, records):
    staff.user_permissions.clear()
    assert client.get(LIST).status_code == 403


@pytest.mark.parametrize("superuser", [False, True])
def test_nothing_can_be_added_changed_or_deleted(client, staff, records, superuser):
    staff.is_superuser = superuser
    staff.save()
    before = list(IdempotencyRecord.objects.order_by("pk").values())
    record = f"{LIST}{record_id('user:1', 'stuck')}/"
    for url in (f"{LIST}add/", f"{record}change/", f"{record}delete/"):
        assert (
            client.post(
                url, {"key": "x", "status": "completed", "post": "yes"}
            ).status_code
            == 403
        )
    chosen = {
        "action": "delete_selected",
        "_selected_action": [str(record_id("user:1", "stuck"))],
        "post": "yes",
    }
    client.post(LIST, chosen)
    assert list(IdempotencyRecord.objects.order_by("pk").values()) == before


ESCAPE, C1 = "\x1b]0;pwned\x07", "\x9b2J"
# override, isolate, zero width, line separator, byte order mark
INVISIBLE = "\u202e\u2066\u200b\u2028\ufeff"
HOSTILE = f"{ESCAPE}{INVISIBLE}{C1}\r"


def is_harmless(text):
    return not {
        character
        for character in text
        if character in set(HOSTILE) and not character.isprintable()
    }


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 漢 😀 <b>", "plain é 漢 😀 <b>"),
        ("\x1b[31m", "\\x1b[31m"),
        ("\x9b2J", "\\x9b2J"),
        ("a\u202eb\u2066", "a\\u202eb\\u2066"),
        ("\r\n\t\0", "\\r\\n\\t\\x00"),
        ("\ud800\U000e0001", "\\ud800\\U000e0001"),
        ("", ""),
    ],
)
def test_invisible_characters_are_written_as_escapes(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_lines_and_tabs_can_be_kept():
    assert printable_lines("a\tb\n\x1bc\r") == "a\tb\n\\x1bc\\r"


@pytest.fixture
def hostile(db):
    """A record on hold, of a scope, a key, a path and a response that could deceive."""
    texts = {name: f"{name} {HOSTILE}" for name in ("scope", "key", "reason")}
    return RecordFactory.create(held=True, path=f"/pay/{HOSTILE}", **texts)


def completed(record):
    body = json.dumps({"text": INVISIBLE}, ensure_ascii=False).encode()
    headers = [["Content-Type", "application/json"], ["X-Echo", HOSTILE]]
    answered = {
        "response_status": 201,
        "response_headers": headers,
        "response_body": body,
    }
    IdempotencyRecord.objects.filter(pk=record.pk).update(
        status="completed", on_hold=False, reason="", **answered
    )


def test_the_pages_of_the_admin_show_hostile_text_as_escapes(
    superuser, client, hostile
):
    change = f"{LIST}{hostile.pk}/change/"
    confirm = f"{LIST}intervene/allow_retry/?id={hostile.pk}"
    pages = [
        client.get(url) for url in (LIST, f"{LIST}?situation=on_hold", change, confirm)
    ]
    completed(hostile)
    pages += [client.get(url) for url in (f"{LIST}?situation=done", change)]
    assert [page.status_code for page in pages] == [200] * 6
    contents = [page.content.decode() for page in pages]
    assert all(map(is_harmless, contents))
    assert sum("\\x1b]0;pwned\\x07\\u202e" in content for content in contents) >= 4, (
        "it is shown, though"
    )
    assert is_harmless(str(hostile))


def test_commands_print_hostile_text_as_escapes(hostile, admin_user):
    other = IdempotencyRecord.objects.get(pk=hostile.pk)
    other.scope = f"other {HOSTILE}"
    other.id = record_id(other.scope, other.key)
    other.save(force_insert=True)
    with pytest.raises(CommandError, match="several scopes") as refused:
        call_command("idempotency_keys", "allow-retry", hostile.key, by="admin")
    assert is_harmless(str(refused.value))


def test_log_records_hold_hostile_text_as_escapes(caplog):
    log(
        logging.ERROR,
        "an_event",
        "for %s, %s times",
        f"scope {HOSTILE}",
        3,
        reason=HOSTILE,
    )
    (record,) = caplog.records
    assert is_harmless(record.getMessage())
    assert is_harmless(record.reason)
    assert record.getMessage().endswith("3 times")
