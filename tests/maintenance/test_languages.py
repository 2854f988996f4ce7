"""Commands in the language of the project. What programs read, and what is stored, is in English."""

from __future__ import annotations

import io
import re
from contextlib import suppress

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command, get_commands, load_command_class
from django.utils import translation

from django_idempotency import signals
from django_idempotency.maintenance import reap
from django_idempotency.maintenance.reasons import told_reason
from django_idempotency.outcomes import Fail
from django_idempotency.policy import Policy
from tests.maintenance.test_key_commands import held, settled
from tests.support.callers import claim, entry_point, heard, paying, record, shift

pytestmark = pytest.mark.usefixtures("payer")

LOCAL = "django_idempotency.outbox.publishers.local.LocalPublisher"
OURS = sorted(name for name, app in get_commands().items() if str(app).startswith("django_idempotency"))


@pytest.fixture
def german():
    with translation.override("de"):
        yield


def printed(*arguments):
    output = io.StringIO()
    call_command(*arguments, stdout=output)
    return output.getvalue()


def due(*keys):
    for key in keys:
        entry_point(paying)(key)
        shift(key, expires_at=-3600, purge_at=-3600)


@pytest.mark.parametrize(
    ("keys", "told"), [("a", "1 Datensatz in "), ("ab", "2 Datensätze in "), ("", "0 Datensätze in ")]
)
def test_one_is_told_from_several(german, keys, told):
    due(*keys)
    assert printed("idempotency_cleanup").startswith(told)


def test_what_an_operator_reads(german, settings):
    held()
    assert (
        printed("idempotency_reap")
        == "0 frei zur Wiederholung, 0 zurückgehalten, 0 konnten nicht geschrieben werden.\n"
    )
    assert printed("idempotency_list").startswith("zurückgehalten ")
    assert "was jetzt gefahrlos ist  Finden Sie heraus" in printed("idempotency_show", "held")
    assert "OK: festhängend seit 0 s" in printed("idempotency_stats", "--check")
    settings.IDEMPOTENCY = {"OUTBOX": {"PUBLISHERS": {"shop": {"BACKEND": LOCAL}}}}
    assert printed("idempotency_outbox", "status").startswith("shop: 0 ausstehend; 0 scheiternd")
    with pytest.raises(CommandError, match="Unbekannter Schlüssel"):
        call_command("idempotency_show", "nobody")


def test_the_columns_of_the_statistics_stay_apart(german):
    lines = printed("idempotency_stats").splitlines()
    words = [line.split() for line in lines if line.startswith("  ")]
    assert ["zurückgehalten", "0"] in [[line[-2], line[-1]] for line in words if len(line) > 1]
    assert all(len(line) > 1 for line in words)


@pytest.mark.parametrize("name", OURS)
def test_the_help_is_in_german_and_can_be_printed(german, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10000")  # no line is broken
    command = load_command_class(get_commands()[name], name)
    told = " ".join(command.create_parser("manage.py", name).format_help().split())
    assert translation.gettext(str(command.about)) in told
    with translation.override("en"):
        assert str(command.about) not in told


@pytest.mark.parametrize(
    "arguments",
    [
        ("idempotency_list",),
        ("idempotency_show", "held"),
        ("idempotency_stats", "--check"),
        ("idempotency_cleanup", "--dry-run"),
        ("idempotency_show", "nobody"),
    ],
)
def test_json_is_the_same_in_every_language(arguments):
    held()
    shift("held", updated_at=-7200)
    told = []
    for language in ("en", "de"):
        output = io.StringIO()
        with translation.override(language):
            with suppress(CommandError, SystemExit):
                call_command(*arguments, "--json", stdout=output)
            assert translation.get_language() == language
        told.append(re.sub(r"[\d.]+", "0", output.getvalue()))  # time goes by
    assert told[0] == told[1] != ""


def test_what_is_decided_is_stored_in_english(german):
    held()
    get_user_model().objects.create_superuser("anna")
    call_command("idempotency_allow_retry", "held", "--by=anna", "--note=bei der Bank gefragt")
    assert LogEntry.objects.get().change_message == "Retry allowed. bei der Bank gefragt"


def test_a_reason_is_stored_and_announced_in_english_and_shown_in_german(german):
    claim("stuck", policy=Policy(mode="lease", on_crash="hold"))
    shift("stuck", locked_at=-7200, locked_until=-3600)
    with heard(signals.key_reaped) as reaped:
        reap()
    found = record("stuck")
    assert found.reason == "its lease ran out while it was running" == reaped[0]["reason"]
    assert told_reason(found) == "die Lease lief während der Ausführung ab"


def test_a_reason_of_the_project_stays_as_it_is(german):
    settled("failed", Fail("ValueError\x1b"))
    assert told_reason(record("failed")) == r"ValueError\x1b"
