"""``crash_after_effect``: a real process that dies by SIGKILL, and views that don't
survive it.
"""

from __future__ import annotations

import os

import pytest
from django.db import transaction

from django_idempotency.contrib.testing import crash_after_effect, duplicates_at_once
from django_idempotency.models import IdempotencyRecord
from testproject.models import Receipt
from tests.contrib.testing import shop
from tests.support.callers import effects

pytestmark = [pytest.mark.usefixtures("payer"), pytest.mark.row_locks]


def test_effects_that_die_with_the_transaction_are_there_once(client):
    response = crash_after_effect(client, "POST", "/orders/", {"item": "book"})
    assert (response.status_code, effects()) == (201, 1)
    assert IdempotencyRecord.objects.get().attempts == 2, "the first one died"


@pytest.mark.parametrize(
    ("url", "options", "fault"),
    [
        (
            "/lease/",
            {"patience": 60},
            r"effects {'testproject.LedgerEntry': 1}. After the retry .*: 2}",
        ),
        (
            "/async/",
            {"patience": 60},
            r"effects {'testproject.Receipt': 1}. After the retry .*: 2}",
        ),
        ("/unprotected/", {}, "no view was run under the key: it got 201"),
        ("/broken/", {}, "ZeroDivisionError"),
        ("/orders/", {"effects": Receipt.objects.all()}, "no visible effect"),
    ],
    ids=[
        "a lease without a child key",
        "an async view",
        "no protection",
        "an exception of the child",
        "no effect",
    ],
)
def test_a_view_that_does_not_survive_a_crash_fails(client, url, options, fault):
    with pytest.raises(AssertionError, match=fault):
        crash_after_effect(client, "POST", url, **options)
    Receipt.objects.all().delete()


def test_a_lease_on_hold_is_not_run_again(client):
    response = crash_after_effect(client, "POST", "/hold/", patience=60)
    assert (response.status_code, response.json()["code"]) == (
        409,
        "idempotency_key_on_hold",
    )
    assert effects() == 1


def test_an_effect_outside_of_the_transaction_fails(client, monkeypatch, tmp_path):
    monkeypatch.setattr(shop, "journal", tmp_path / "journal")

    def lines():
        return shop.journal.read_text().splitlines() if shop.journal.exists() else []

    with pytest.raises(
        AssertionError,
        match=r"effects {'effects': 1}. After the retry there are {'effects': 2}",
    ):
        crash_after_effect(client, "POST", "/journal/", effects=lines)
    assert (len(lines()), effects()) == (2, 1)


def test_effects_without_a_size_are_refused(client):
    with pytest.raises(TypeError, match="number or a collection"):
        crash_after_effect(client, "POST", "/orders/", effects=object)


def test_a_dying_process_does_not_run_finally_blocks_of_a_request(
    client, settings, monkeypatch, tmp_path
):
    settings.MIDDLEWARE = ["tests.contrib.testing.shop.noting_the_end"]
    monkeypatch.setattr(shop, "journal", tmp_path / "journal")
    crash_after_effect(client, "POST", "/orders/")
    assert set(shop.journal.read_text().split()) == {str(os.getpid())}, (
        "only retries were ended"
    )


@pytest.mark.parametrize("assertion", [crash_after_effect, duplicates_at_once])
def test_helpers_that_need_commits_are_refused_in_a_transaction(client, assertion):
    with transaction.atomic(), pytest.raises(RuntimeError, match="real commits"):
        assertion(client, "POST", "/orders/")
