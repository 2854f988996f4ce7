"""After an erasure nothing of a caller is left in the database but what the page on privacy says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.db import connection, transaction
from django.urls import path

from django_idempotency.contrib.outbox.publishing import publish
from django_idempotency.maintenance import erase
from django_idempotency.values.outcomes import Fail
from tests.admin.pages import LIST, ended, found

DOCS = Path(__file__).parents[2] / "docs"
SCOPE = "marked-scope"
GIVEN = {"body": '{"card": "marked-response"}', "note": "marked-note"}
REASON = "marked-reason"


@pytest.fixture
def marks(client, django_user_model, settings, transactional_db):
    """What is in the database of a record that was on hold, was resolved and looked at, and has published an event."""
    settings.ROOT_URLCONF = (path("admin/", admin.site.urls),)
    client.force_login(django_user_model.objects.create_superuser("operator"))
    ended("marked-key", Fail(REASON, on_hold=True), scope=SCOPE)
    record = found("marked-key", SCOPE)
    chosen = {"record": [f"{record.pk} {record.status} 1 1 {record.updated_at.isoformat()}"]}
    resolved = {"status": 201, "content_type": "application/vnd.marked-type+json", **GIVEN}
    assert client.post(f"{LIST}intervene/resolve/", chosen | resolved).status_code == 302
    assert "marked-response" in client.get(f"{LIST}{record.pk}/change/").content.decode()
    with transaction.atomic():
        publish("topic", {"event": "marked-event"})
    (digest,) = re.findall(r"Digest (\S+)\.", " ".join(LogEntry.objects.values_list("change_message", flat=True)))
    return {
        **{"scope": SCOPE, "key": "marked-key", "path": record.path, "record id": str(record.pk)},
        **{"fingerprint": "f" * 32, "reason": REASON, "note": "marked-note", "digest of the response": digest},
        **{"response body": "marked-response", "response headers": "marked-type", "event": "marked-event"},
    }


def shown(value):
    text = bytes(value).decode("latin-1") if isinstance(value, bytes | memoryview) else str(value)
    return text.replace("-", "")  # a UUID may be written without


def where(marks):
    """The marks that are in each table of the database."""
    found = {}
    with connection.cursor() as cursor:
        for table in connection.introspection.table_names(cursor):
            cursor.execute(f"SELECT * FROM {connection.ops.quote_name(table)}")
            text = "\n".join(shown(value) for row in cursor.fetchall() for value in row)
            found[table] = {name for name, mark in marks.items() if mark.replace("-", "") in text}
    return {table: names for table, names in found.items() if names}


def documented(column):
    """By table, what the page says is left."""
    text = (DOCS / "privacy.md").read_text().partition("### What stays")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| `")]
    listed = {cells[0].strip(" `"): cells[column].strip() for cells in lines}
    return {table: set(what.split(", ")) for table, what in listed.items() if what != "nothing"}


@pytest.mark.parametrize(("bodies", "column"), [(False, 1), (True, 2)], ids=["erased", "bodies"])
def test_an_erasure_leaves_what_the_page_on_privacy_lists(marks, bodies, column):
    before = where(marks)
    assert set().union(*before.values()) == set(marks) - {"reason"}, "or it would not be looked for"
    assert erase(SCOPE, bodies=bodies).complete
    assert where(marks) == documented(column)


def test_the_reason_of_a_hold_is_erased_with_the_bodies(db):
    ended("marked-key", Fail(REASON, on_hold=True), scope=SCOPE)
    assert "reason" in where({"reason": REASON})["django_idempotency_record"]
    assert erase(SCOPE, bodies=True, on_hold=True).complete
    assert where({"reason": REASON}) == {}
