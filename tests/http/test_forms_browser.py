"""What people do with a form that is submitted once, in a real browser: click twice, go
back, reload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from django.core.signals import request_started

from testproject.models import LedgerEntry
from tests.support.browser import Browser
from tests.support.waiting import eventually

pytestmark = [pytest.mark.browser, pytest.mark.row_locks]

PAGE = "/orders/new/"
BUTTON = "button[type=submit]"
# Chromium makes one submission of two clicks at once; each click after that ends the
# submission before it.
CLICK_UNTIL_IT_LEAVES = """
const click = (wait) => { arguments[0].click(); setTimeout(click, wait, 2 * wait); };
click(100);
"""


@pytest.fixture
def form(browser: Browser, django_user_model) -> Browser:
    """The window with the form filled in, for somebody who is signed in."""
    django_user_model.objects.create_superuser("anna", password="secret")
    browser.sign_in("anna", "secret")
    browser.open(PAGE)
    fill(browser)
    return browser


def fill(browser: Browser) -> None:
    browser.find("#id_reference").send_keys("pen")
    browser.find("#id_amount").send_keys("5")


@pytest.fixture
def submissions() -> Iterator[Callable[[], int]]:
    """How many times the form has arrived."""
    arrived: list[str] = []

    def note(environ, **_named) -> None:
        if environ["REQUEST_METHOD"] == "POST" and environ["PATH_INFO"] == PAGE:
            arrived.append(environ["PATH_INFO"])

    request_started.connect(note)
    yield lambda: len(arrived)
    request_started.disconnect(note)


@pytest.fixture
def slow_view(monkeypatch, submissions) -> None:
    """The view takes until the form has arrived twice."""
    write = type(LedgerEntry.objects).record

    def record(self, **payment):
        eventually(lambda: submissions() > 1)
        return write(self, **payment)

    monkeypatch.setattr(type(LedgerEntry.objects), "record", record)


@pytest.mark.usefixtures("slow_view")
@pytest.mark.parametrize("protected", [True, False])
def test_clicks_under_a_slow_view_order_once(form, submissions, protected):
    if not protected:
        form.driver.execute_script(
            "document.querySelector('[name=idempotency_key]').remove()"
        )
    form.driver.execute_script(CLICK_UNTIL_IT_LEAVES, form.find(BUTTON))
    assert form.find(".message").text == "Ordered pen."
    orders = (lambda: 1) if protected else submissions
    eventually(lambda: LedgerEntry.objects.count() == orders())
    assert submissions() > 1


def test_going_back_and_ordering_again_orders_once(form, submissions):
    form.open(f"{PAGE}?from=menu")
    fill(form)
    form.driver.execute_script("document.forms[0].action = arguments[0]", PAGE)
    form.click(BUTTON)
    form.driver.back()
    form.click(BUTTON)
    assert form.find(".message").text == "Ordered pen."
    assert (submissions(), LedgerEntry.objects.count()) == (2, 1)
