"""An operator works through a list: after a decision the next record is offered, and links stay in the list."""

from __future__ import annotations

import re
from html import unescape
from types import SimpleNamespace

import pytest
from django.db import DatabaseError

from django_idempotency.admin import filters as lists
from django_idempotency.values.outcomes import Fail
from tests.admin.pages import LIST, act, ended, found

ON_HOLD = {"situation": "on_hold"}


@pytest.fixture
def another_on_hold(records):
    ended("other", Fail("its lease ran out", on_hold=True))


def offered(response):
    """Where the offer leads."""
    return re.findall(r'Next in this list: <a href="([^"]+)"><bdi>', unescape(response.content.decode()))


@pytest.mark.parametrize("filters", ["", "situation=on_hold", "situation=on_hold&method=POST"])
def test_the_next_record_of_the_list_is_offered(client, superuser, another_on_hold, filters):
    (url,) = offered(act(client, "allow_retry", "on_hold", single="1", filters=filters))
    assert url.startswith(f"{LIST}{found('other').pk}/change/?_changelist_filters=")
    shown = client.get(url)
    assert shown.status_code == 200
    confirm = re.findall(r'href="([^"]*intervene/allow_retry/[^"]+)"', unescape(shown.content.decode()))
    assert all("situation" in link for link in confirm)


def test_a_record_that_was_refused_is_followed_by_the_next(client, superuser, another_on_hold):
    (url,) = offered(act(client, "allow_retry", "on_hold", seen="old", single="1", filters="situation=on_hold"))
    assert str(found("other").pk) in url


@pytest.mark.parametrize(
    "given",
    [
        {"single": "1", "filters": "situation=on_hold&path=/nothing/"},
        {"single": "1", "filters": "situation=on_hold&unheard_of=1"},
        {"filters": "situation=on_hold"},
    ],
    ids=["none_left", "no_such_filter", "from_the_list"],
)
def test_nothing_is_offered_where_nothing_follows(client, superuser, another_on_hold, given):
    response = act(client, "allow_retry", "on_hold", **given)
    assert offered(response) == []
    assert not found("on_hold").on_hold


def test_a_list_that_is_not_in_time_undoes_no_decision(client, superuser, another_on_hold, monkeypatch):
    def late(*_args):
        raise DatabaseError

    monkeypatch.setattr(lists, "queries", SimpleNamespace(at_most=late))
    response = act(client, "allow_retry", "on_hold", single="1", filters="situation=on_hold", follow=False)
    assert response.status_code == 302
    assert not found("on_hold").on_hold


def links(client, query):
    html = client.get(LIST, query).content.decode()
    return {
        strip(text): unescape(url) for url, text in re.findall(r'<a href="([^"]*)"[^>]*>(.*?)</a>', html, re.DOTALL)
    }


def strip(html):
    return " ".join(re.sub(r"<[^>]+>|&#10006;", "", html).split())


def test_clearing_the_filters_stays_in_the_list(client, staff, another_on_hold):
    cleared = links(client, {**ON_HOLD, "method": "PUT", "path": "/nothing/"})["Clear all filters"]
    assert cleared == "?situation=on_hold"
    assert len(client.get(LIST + cleared).context["cl"].result_list) == 2
    assert "Clear all filters" not in links(client, ON_HOLD)


def test_leaving_a_search_leads_back_to_the_list(client, staff, another_on_hold):
    found_links = links(client, {**ON_HOLD, "q": "other", "path": "/pay/"})
    assert "Show all" not in found_links
    assert sorted(found_links["Leave the search"].lstrip("?").split("&")) == ["path=%2Fpay%2F", "situation=on_hold"]
