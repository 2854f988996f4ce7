"""Commands write English, and English is stored. The admin shows it in the language of its reader."""

from __future__ import annotations

import pytest
from django.core.management import CommandError, call_command
from django.utils import translation

from django_idempotency import signals
from django_idempotency.maintenance import reap
from django_idempotency.maintenance.advice import shown_reason
from django_idempotency.policy import Lease, Policy
from django_idempotency.values.outcomes import Fail
from tests.maintenance.test_key_commands import held, settled
from tests.support.callers import claim, heard, record, shift

pytestmark = pytest.mark.usefixtures("payer")


@pytest.fixture
def german():
    with translation.override("de"):
        yield


def test_commands_write_english_whatever_the_language(german, capsys):
    held()
    call_command("idempotency_keys", "list")
    call_command("idempotency_keys", "show", "held")
    call_command("idempotency_reap")
    call_command("idempotency_stats")
    printed = capsys.readouterr().out
    assert printed.startswith("on hold ")
    assert "safe to do now  Find out" in printed
    assert "Freed: 0, put on hold: 0" in printed
    assert "WHAT HAPPENED" in printed
    assert translation.get_language() == "de"
    with pytest.raises(CommandError, match="Unknown key"):
        call_command("idempotency_keys", "show", "nobody")


def test_a_reason_is_stored_and_announced_in_english_and_shown_in_german(german):
    claim("stuck", policy=Policy(mode=Lease(on_crash="hold")))
    shift("stuck", locked_at=-7200, locked_until=-3600)
    with heard(signals.key_reaped) as reaped:
        reap()
    found = record("stuck")
    assert found.reason == "its lease ran out while it was running" == reaped[0]["reason"]
    assert shown_reason(found) == "die Lease lief während der Ausführung ab"


def test_a_reason_of_the_project_stays_as_it_is(german):
    settled("failed", Fail("ValueError\x1b"))
    assert shown_reason(record("failed")) == r"ValueError\x1b"
