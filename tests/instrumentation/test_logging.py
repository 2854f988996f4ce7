"""Log records with fields, and the setting INSTRUMENTATION."""

from __future__ import annotations

import logging
import sys

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import DataError, OperationalError, connection

from django_idempotency import instrumentation, signals
from django_idempotency.instrumentation import prometheus
from django_idempotency.reporting.logs import cause
from tests.instrumentation.metered import KEY, SECRET, SECRET_SCOPE, everything, scraped
from tests.support.callers import entry_point, heard, operation, paying

pytestmark = pytest.mark.usefixtures("payer")


def test_log_records_have_fields_and_no_secret(caplog, registry):
    caplog.set_level(logging.DEBUG, "django_idempotency")
    everything()
    records = [record for record in caplog.records if record.name == "django_idempotency"]
    assert [(record.event, record.levelname) for record in records] == [
        ("request_rejected", "WARNING"),
        ("key_taken_over", "WARNING"),
    ]
    assert {(record.entry_point, record.view) for record in records} == {("decorator", "tests.support.callers.paying")}
    assert records[-1].attempt == 2
    assert records[-1].record_id == str(operation("reaped").id)
    told = " ".join(str(record.__dict__) for record in records) + scraped(registry)
    assert [secret for secret in (KEY, SECRET_SCOPE, SECRET) if secret in told] == []


def test_a_refusal_that_a_caller_repeats_is_logged_once_a_minute(caplog):
    send = entry_point(paying)
    send("first"), send("second")
    with caplog.at_level(logging.WARNING, "django_idempotency"), heard(signals.request_rejected) as rejected:
        statuses = {send(key, body=b"{}").status_code for key in ("first", "second") for _time in range(3)}
    assert (statuses, len(rejected)) == ({422}, 6)
    assert [record.reason for record in caplog.records] == ["key_reused"] * 2


@pytest.mark.postgresql
def test_an_error_of_the_database_is_logged_without_what_it_quotes():
    with pytest.raises(DataError) as raised, connection.cursor() as cursor:
        cursor.execute("SELECT %s::integer", [SECRET])
    assert SECRET in str(raised.value)
    assert cause(raised.value) == "DataError 22P02"


def test_an_error_on_the_way_to_the_database_is_logged_as_it_is(other_thread, monkeypatch):
    def fail():
        with pytest.raises(OperationalError) as raised:
            connection.ensure_connection()
        return cause(raised.value)

    with monkeypatch.context() as patch:
        patch.setitem(connection.settings_dict, "NAME", "/nowhere/at/all")
        assert other_thread(fail).startswith("OperationalError")


@pytest.mark.parametrize("wrong", ["prometheus", ["prometeus"], [1]])
def test_an_unknown_instrumentation_is_left_to_the_checks(wrong, settings):
    settings.IDEMPOTENCY = {"INSTRUMENTATION": wrong}
    instrumentation.install()


def test_a_library_that_is_missing_is_named(settings, monkeypatch):
    settings.IDEMPOTENCY = {"INSTRUMENTATION": ["prometheus"]}
    name = prometheus.__name__
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "prometheus_client", None)
        with pytest.raises(ImproperlyConfigured, match=r"django-idempotency\[prometheus\]"):
            instrumentation.install()
