"""What happened over time is drawn from the counters: by the hour, and by five minutes
within one.
"""

from __future__ import annotations

import re

import pytest
from django.core.management import call_command

from django_idempotency.contrib.dashboard.activity import history
from django_idempotency.contrib.dashboard.counters import OLDEST, counters
from django_idempotency.contrib.dashboard.formatting import Line, drawn
from django_idempotency.contrib.dashboard.models import IdempotencyCounter
from django_idempotency.maintenance.stats import DAY, HOUR, WEEK
from django_idempotency.models import in_utc
from django_idempotency.values.policy import Lease, Policy
from tests.admin.pages import LIST
from tests.support.callers import claim, shift
from tests.support.commands import told
from tests.support.happening import happen

pytestmark = pytest.mark.usefixtures("payer")


@pytest.mark.parametrize(
    ("seconds", "ago", "slots"),
    [(HOUR, 0.5, 13), (6 * HOUR, 4.5, 7), (DAY, 20, 25), (WEEK, 100, 169)],
)
def test_each_count_is_in_its_slot_and_the_slots_add_up(seconds, ago, slots):
    happen("pay", hours=ago, claimed=7, replayed=2, in_flight=3)
    happened_at = IdempotencyCounter.objects.get(event="response_replayed").since
    for event, count in (("key_failed", 4), ("request_unprotected.no_scope", 5)):
        IdempotencyCounter.objects.create(
            since=happened_at, view="pay", event=event, count=count
        )
    happen("pay", claimed=1)
    happen("pay", hours=seconds / HOUR + 1, claimed=100)
    times, past = history(seconds)
    assert len(times) == slots
    assert sum(past["requests"]) == 13
    # the last one, or the one before it that has just ended
    assert sorted(past["requests"][-2:]) == [0, 1]
    slot = past["requests"].index(12)
    names = ("replays", "conflicts", "failed", "unprotected")
    assert [past[name][slot] for name in names] == [2, 3, 4, 5]
    begins, length = times[slot], times[1] - times[0]
    assert begins <= in_utc(happened_at, "default") < begins + length


def test_the_oldest_pending_key_is_noted_with_the_counts_and_is_old_since_its_claim():
    claim("k", policy=Policy(mode=Lease(seconds=9000)))
    shift("k", locked_at=-2 * HOUR - 600)
    for _twice in range(2):
        counters.count("key_claimed", "pay")
        counters.flush("default")
    # two rows, if five minutes have ended between them
    rows = IdempotencyCounter.objects.filter(event=OLDEST)
    noted = max(rows.values_list("count", flat=True))
    assert 2 * HOUR + 600 <= noted < 2 * HOUR + 1200  # not the sum of both
    ages = history(DAY)[1][OLDEST]
    assert ages[-1] >= noted
    assert ages[-5] == 0
    assert ages == sorted(ages)


def test_a_line_is_drawn_only_from_counts():
    assert drawn(history(DAY)[1]) == []


def test_a_line_is_drawn_from_nothing_to_the_most():
    line = Line("x", [0, 1, 50, 100], [], "100")
    assert line.blocks == "▁▂▅█"
    assert line.points == "0.0,19.0 33.3,18.8 66.7,10.0 100.0,1.0"
    assert Line("x", [0, 0], [], "0").blocks == "▁▁"
    assert Line("x", [76.03949554237994], [], "76").blocks == "█"


def test_the_dashboard_draws_the_lines_with_a_table_behind_them(admin_client):
    happen("pay", hours=3, claimed=5, replayed=1)
    html = admin_client.get(f"{LIST}dashboard/").content.decode()
    section = html[html.index('id="lines"') :]
    section = section[: section.index("</table>")]
    assert len(re.findall(r'<polyline points="[\d., ]+"', section)) == 6
    assert section.count('<th scope="col">') == 7
    assert section.count('<th scope="row">') == 25
    assert "<td>6</td><td>1</td>" in section
    assert not re.search("<script|style=", section)


def test_the_command_draws_the_same_and_has_it_as_facts(capsys):
    happen("pay", claimed=5)
    call_command("idempotency_stats")
    printed = capsys.readouterr().out
    # in the last hour, or in the one before it that has just ended
    assert re.search(r"requests with a key +▁{23}(▁█|█▁)  at most 5\n", printed)
    (facts,) = told("idempotency_stats")
    assert sorted(facts["by_hour"]["requests"][-2:]) == [0, 5]
