"""What a client sent reaches no terminal, no log and no page of the admin in a form that could deceive."""

from __future__ import annotations

import json
import logging

import pytest
from django.core.management import CommandError, call_command

from django_idempotency.models import IdempotencyRecord
from django_idempotency.reporting.logs import log
from django_idempotency.values.keys import record_id
from django_idempotency.values.printable import printable, printable_lines
from tests.admin.pages import LIST
from tests.support.factories import RecordFactory

ESCAPE, C1 = "\x1b]0;pwned\x07", "\x9b2J"
INVISIBLE = "\u202e\u2066\u200b\u2028\ufeff"  # override, isolate, zero width, line separator, byte order mark
HOSTILE = f"{ESCAPE}{INVISIBLE}{C1}\r"


def is_harmless(text):
    return not {character for character in text if character in set(HOSTILE) and not character.isprintable()}


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
    answered = {"response_status": 201, "response_headers": headers, "response_body": body}
    IdempotencyRecord.objects.filter(pk=record.pk).update(status="completed", on_hold=False, reason="", **answered)


def test_the_pages_of_the_admin_show_hostile_text_as_escapes(superuser, client, hostile):
    change = f"{LIST}{hostile.pk}/change/"
    confirm = f"{LIST}intervene/allow_retry/?id={hostile.pk}"
    pages = [client.get(url) for url in (LIST, f"{LIST}?situation=on_hold", change, confirm)]
    completed(hostile)
    pages += [client.get(url) for url in (f"{LIST}?situation=done", change)]
    assert [page.status_code for page in pages] == [200] * 6
    contents = [page.content.decode() for page in pages]
    assert all(map(is_harmless, contents))
    assert sum("\\x1b]0;pwned\\x07\\u202e" in content for content in contents) >= 4, "it is shown, though"


def test_the_name_of_a_hostile_record_is_printable(hostile):
    assert is_harmless(str(hostile))


def test_commands_print_hostile_text_as_escapes(hostile):
    other = IdempotencyRecord.objects.get(pk=hostile.pk)
    other.scope = f"other {HOSTILE}"
    other.id = record_id(other.scope, other.key)
    other.save(force_insert=True)
    with pytest.raises(CommandError, match="several scopes") as refused:
        call_command("idempotency_keys", "allow-retry", hostile.key)
    assert is_harmless(str(refused.value))


def test_log_records_hold_hostile_text_as_escapes(caplog):
    log(logging.ERROR, "an_event", "for %s, %s times", f"scope {HOSTILE}", 3, reason=HOSTILE)
    (record,) = caplog.records
    assert is_harmless(record.getMessage())
    assert is_harmless(record.reason)
    assert record.getMessage().endswith("3 times")
