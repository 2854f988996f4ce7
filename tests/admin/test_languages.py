"""The admin in German: no text of the package is left in English, and times say of
which zone they are.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from html import unescape

import pytest
from django.utils import translation

from django_idempotency.contrib.outbox.models import OutboxEvent, Status
from django_idempotency.engine.decisions import LEASE_LAPSED
from django_idempotency.maintenance.formatting import amount, duration, share
from django_idempotency.models import IdempotencyRecord
from django_idempotency.values.printable import in_zone, shown
from tests.admin.pages import LIST, act, found
from tests.unit.test_catalogues import PLACEHOLDER, messages

SITUATIONS = ("live", "stuck", "on_hold", "retryable", "done")
NOVEMBER = datetime(2026, 11, 23, 14, 37, 5, tzinfo=UTC)


@pytest.fixture
def german(superuser, settings, records):
    settings.LANGUAGE_CODE, settings.TIME_ZONE = "de", "UTC"
    IdempotencyRecord.objects.filter(key="on_hold").update(reason=LEASE_LAPSED)


def words(response):
    """What a reader sees and hears of a page, without the texts of scripts and the
    values of attributes.
    """
    assert response.status_code == 200
    page = re.sub(r"(?s)<(script|style).*?</\1>", "", response.content.decode())
    heard = re.findall(r'(?:aria-label|placeholder|data-copy)="([^"]*)"', page)
    return " ".join(unescape(" ".join([re.sub("<[^>]*>", "\n", page), *heard])).split())


def left_in_english(page):
    """The texts of the catalogue that the page has in English, without those that are
    German words, too.
    """
    texts = (
        (message.fields["msgid"], message.translations[0]) for message in messages("de")
    )
    known = [
        (" ".join(english.split()), german)
        for english, german in texts
        if not PLACEHOLDER.search(english)
    ]
    return [
        english
        for english, german in known
        if " " in english and english != german and english in page
    ]


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_list_is_in_german(client, german, situation):
    page = words(client.get(LIST, {"situation": situation}))
    assert left_in_english(page) == []
    assert "1 festhängend, am längsten seit 3 h 7 min · 1 zurückgehalten" in page


@pytest.mark.parametrize("key", ["running", "stuck", "done", "failed", "on_hold"])
def test_a_record_is_in_german(client, german, key):
    page = words(client.get(f"{LIST}{found(key).pk}/change/"))
    assert left_in_english(page) == []
    assert "Was jetzt gefahrlos ist" in page
    assert ("die Lease lief während der Ausführung ab" in page) is (key == "on_hold")


@pytest.mark.parametrize("action", ["allow_retry", "fail", "resolve", "extend"])
def test_a_confirmation_and_its_messages_are_in_german(client, german, action):
    key = "running" if action == "extend" else "on_hold"
    assert (
        left_in_english(
            words(client.get(f"{LIST}intervene/{action}/", {"id": found(key).pk}))
        )
        == []
    )
    page = words(act(client, action, key, note="wegen der Bank"))
    assert "für einen Datensatz erledigt." in page
    assert left_in_english(page) == []


def test_the_dashboard_is_in_german(client, german, settings):
    settings.IDEMPOTENCY = {"DASHBOARD": {"STATS_RETENTION": None}}
    page = words(client.get(f"{LIST}dashboard/"))
    assert left_in_english(page) == []
    assert "Es wird nichts gezählt: Die Einstellung STATS_RETENTION ist None." in page


def test_the_outbox_is_in_german(client, german):
    outbox = "/admin/django_idempotency_outbox/"
    for topic in ("paid", "sent"):
        OutboxEvent.objects.create(
            event_id=f"{'0' * 28}{topic.encode().hex()[:4]}",
            **{
                "publisher": "shop",
                "lane": 0,
                "topic": topic,
                "payload": b"{}",
                "content_type": "text/plain",
            },
            **{
                "status": Status.DEAD,
                "attempts": 1,
                "given_up_at": NOVEMBER,
                "created_at": NOVEMBER,
            },
        )
    events = list(OutboxEvent.objects.all())
    pages = [
        words(client.get(f"{outbox}outboxevent/")),
        words(client.get(f"{outbox}outboxevent/{events[0].pk}/change/")),
    ]
    assert list(map(left_in_english, pages)) == [[], []]
    assert all("23. November 2026 14:37 UTC" in page for page in pages)
    chosen = {"action": "requeue", "_selected_action": [event.pk for event in events]}
    asked = client.post(f"{outbox}outboxevent/", chosen)
    assert left_in_english(words(asked)) == []
    chosen |= {
        "confirmed": "1",
        "record": [f"{row[0].pk} {row[1]}" for row in asked.context["rows"]],
    }
    assert "für 2 Ereignisse erledigt." in words(
        client.post(f"{outbox}outboxevent/", chosen, follow=True)
    )


def test_times_have_the_zone_in_force(client, german, settings):
    settings.TIME_ZONE = "Europe/Berlin"
    IdempotencyRecord.objects.filter(key="done").update(created_at=NOVEMBER)
    assert "23. November 2026 15:37 CET" in words(
        client.get(LIST, {"situation": "done"})
    )
    page = words(client.get(f"{LIST}{found('done').pk}/change/"))
    assert "23. November 2026 15:37:05 CET" in page


def test_times_in_the_repeated_hour_of_autumn_show_their_zone(settings):
    settings.TIME_ZONE = "Europe/Berlin"
    twice = [datetime(2026, 10, 25, hour, 30, tzinfo=UTC) for hour in (0, 1)]
    with translation.override("en"):
        assert [shown(moment) for moment in twice] == [
            "Oct. 25, 2026, 2:30 a.m. CEST",
            "Oct. 25, 2026, 2:30 a.m. CET",
        ]


def test_a_time_without_a_zone_is_of_the_default_one(settings):
    settings.TIME_ZONE, settings.USE_TZ = "Asia/Kathmandu", False
    assert (
        in_zone(datetime(2026, 11, 23, 14, 37)).isoformat()  # noqa: DTZ001
        == "2026-11-23T14:37:00+05:45"
    )


def test_numbers_are_written_as_the_language_writes_them():
    with translation.override("de"):
        assert [
            amount(1_234_567),
            amount(10_000, 10_000),
            share(0.0042),
            duration(0.254),
        ] == [*("1.234.567", "10.000 oder mehr", "0,42 %", "0,25 s")]
