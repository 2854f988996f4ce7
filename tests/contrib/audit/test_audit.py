"""A history that outlives the accounts of operators, and that nothing but an erasure
changes.
"""

from __future__ import annotations

import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.core.management import call_command
from django.db import DatabaseError
from django.test import modify_settings

from django_idempotency.contrib.audit.admin import EntryAdmin
from django_idempotency.contrib.audit.models import Entry
from django_idempotency.maintenance import allow_retry, erase, export
from django_idempotency.maintenance.advice import timeline
from django_idempotency.maintenance.decisions import Refusal, fail
from django_idempotency.maintenance.history import entries_of_life, write_entry
from django_idempotency.management.commands.idempotency_keys import read
from django_idempotency.models import IdempotencyRecord
from tests.maintenance.test_key_commands import held
from tests.support.callers import SCOPE, entry_point, paying, record

pytestmark = pytest.mark.usefixtures("payer")


@pytest.fixture
def anna(django_user_model):
    return django_user_model.objects.create_superuser("anna")


def history():
    """What ``show`` and the admin say that operators did, and who they were."""
    (found,) = read(IdempotencyRecord.objects.filter(key="held"))
    return [(event.what, event.by) for event in timeline(found) if event.by]


def test_the_history_outlives_the_account_of_the_operator(anna):
    held()
    call_command(
        "idempotency_keys", "allow-retry", "held", "--by=anna", "--note=asked the bank"
    )
    told = [("Retry allowed. asked the bank", "anna")]
    assert history() == told
    id = str(anna.pk)
    anna.delete()
    assert not LogEntry.objects.exists()
    assert history() == told
    assert Entry.objects.get().user_id == id


@modify_settings(INSTALLED_APPS={"remove": ["django.contrib.admin"]})
def test_decisions_of_users_and_names_are_kept_without_the_admin(anna):
    held()
    fail(record("held").pk, by="a script", note="cancelled")
    (entry,) = Entry.objects.all()
    assert (entry.user, entry.user_id, entry.object_id) == (
        "a script",
        "",
        str(record("held").pk),
    )
    assert entry.change_message.endswith(" cancelled")
    assert not LogEntry.objects.exists()


def test_two_operators_decide_without_the_admin_and_a_deleted_one_does_not_count(
    anna, django_user_model, settings
):
    settings.IDEMPOTENCY = {"DECISIONS": ["second_operator"]}
    bob, carol = (
        django_user_model.objects.create_superuser(name) for name in ("bob", "carol")
    )
    held()
    with modify_settings(INSTALLED_APPS={"remove": ["django.contrib.admin"]}):
        assert allow_retry(record("held").pk, by=anna) == Refusal.PROPOSED
        anna.delete()
        assert allow_retry(record("held").pk, by=bob) == Refusal.PROPOSED
        allow_retry(record("held").pk, by=carol)
    assert not record("held").on_hold


def test_a_viewed_body_is_kept_with_its_viewer_and_note(anna):
    entry_point(paying)("k")
    assert len(list(export(SCOPE, bodies=True, by=anna, note="asked for it"))) == 1
    anna.delete()
    assert [(entry.user, entry.change_message) for entry in Entry.objects.all()] == [
        ("anna", "Response body viewed. asked for it")
    ]


def test_an_entry_about_another_model_is_kept_apart(anna, django_user_model):
    held()
    customer = django_user_model.objects.create(username="customer")
    customer.now, customer.created_at = (
        record("held").created_at,
        record("held").created_at,
    )
    write_entry(customer, anna, "Requeued.")
    assert Entry.objects.get().model == "auth.User"
    assert [entry.user for entry in entries_of_life(customer)] == ["anna"]
    assert history() == []


def test_an_entry_is_added_and_never_changed(anna):
    held()
    allow_retry(record("held").pk, by=anna, note="asked the bank")
    entry = Entry.objects.get()
    entry.change_message = "nothing"
    with pytest.raises(DatabaseError):
        entry.save()
    page = EntryAdmin(Entry, admin.site)
    assert not any(
        may(None)
        for may in (
            page.has_add_permission,
            page.has_change_permission,
            page.has_delete_permission,
        )
    )


def test_an_erasure_replaces_texts_and_leaves_who_did_something_and_when(anna):
    held()
    allow_retry(record("held").pk, by=anna, note="asked the bank")
    before = Entry.objects.get()
    assert erase(SCOPE).complete
    after = Entry.objects.get()
    assert after.change_message == "(erased)"
    assert (after.user, after.action_time, after.object_id) == (
        before.user,
        before.action_time,
        before.object_id,
    )
