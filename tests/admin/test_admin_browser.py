"""What an operator on call does in the admin, in a real browser."""

from __future__ import annotations

import contextlib

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from django_idempotency import engine
from django_idempotency.maintenance.decisions import version
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores.database import ahead
from django_idempotency.values.outcomes import Keep, Operation, StoredResponse
from django_idempotency.values.policy import Lease, Policy
from tests.admin.pages import LIST, found
from tests.support.browser import NARROW
from tests.support.happening import happen
from tests.support.threads import OtherThread
from tests.support.waiting import eventually

pytestmark = [pytest.mark.browser, pytest.mark.row_locks]

ATOMIC = Policy()
HOLD = Policy(mode=Lease(on_crash="hold"))


def operation(key):
    return Operation("user:1", key, bytes(32), "POST", f"/api/{key}/")


def overdue(key, policy=ATOMIC):
    """A claim whose lease has run out."""
    claim = engine.claim(operation(key), policy)
    IdempotencyRecord.objects.filter(pk=claim.id).update(
        locked_at=ahead(-180), locked_until=ahead(-180)
    )
    return claim


def on_hold(key):
    overdue(key, HOLD)
    engine.claim(operation(key), HOLD)
    assert found(key).on_hold


@pytest.fixture
def admin(browser, admin_user):
    browser.sign_in("admin", "password")
    browser.follow("Idempotency records")
    return browser


def keys(admin):
    return [cell.text for cell in admin.all("#result_list .field-shown_key")]


def choose(admin, key, action):
    """Tick a record in the list and run an action on it."""
    for box in admin.all("#result_list tbody tr"):
        if box.find_element(By.CSS_SELECTOR, ".field-shown_key").text == key:
            box.find_element(By.CSS_SELECTOR, "input.action-select").click()
    admin.find(f"select[name=action] option[value={action}]").click()
    admin.click(".actions button[type=submit]")


@pytest.mark.postgresql  # where the page can tell beforehand that the row is locked
def test_a_key_is_released_once_its_owner_is_dead_and_not_before(admin):
    alive, dead = overdue("alive"), overdue("dead")
    engine.claim(operation("young"), ATOMIC)
    owner = OtherThread()
    run = owner(engine.execution, alive, ATOMIC)
    entered = owner(run.__enter__)
    try:
        admin.open(LIST)
        admin.follow("Lease ran out")
        assert keys(admin) == ["dead"]
        admin.follow("In flight")
        assert sorted(keys(admin)) == ["alive", "dead", "young"]
        choose(admin, "alive", "allow_retry_records")
        assert "Not this one: Its row is locked" in admin.text
        assert admin.all("input[type=submit][value='Allow retry']") == []
        admin.follow("No, take me back")
        choose(admin, "dead", "allow_retry_records")
        # While the page is open, the other one's number comes into it.
        admin.driver.execute_script(
            "const other ="
            " document.querySelector('input[name=record]').cloneNode();other.value ="
            " arguments[0]; document.querySelector('form"
            " .idempotency-chosen').append(other)",
            f"{alive.id} {version(found('alive'))}",
        )
        admin.click("input[type=submit][value='Allow retry']")
        assert "Allow a retry: done for one record." in admin.text
        assert "nothing was done to user:1 alive. Its row is locked" in admin.text
        assert (found("dead").status, found("alive").status) == ("failed", "processing")
        assert found("dead").token != dead.token
    finally:
        entered.verdict = Keep(StoredResponse(201))
        owner(run.__exit__, None, None, None)
        owner.close()
    assert found("alive").status == "completed"
    admin.follow("Failed, free to retry")
    assert keys(admin) == ["dead"]


def test_an_action_can_be_done_by_keyboard_alone(admin):
    on_hold("order-3")
    admin.open(f"{LIST}intervene/allow_retry/?id={found('order-3').pk}")
    admin.find("#id_note").send_keys("by keyboard", Keys.TAB)
    focused = admin.driver.switch_to.active_element
    assert focused.get_attribute("value") == "Allow retry"
    focused.send_keys(Keys.ENTER)
    assert "done for one record" in admin.find(".messagelist .success").text
    assert not found("order-3").on_hold


@pytest.mark.parametrize("width", [1440, 1024, NARROW[0]])
def test_the_dashboard_fits_the_window(admin, width):
    happen(
        "shop.views.a_name_that_goes_on_and_on.PaymentMethodReplacementViewSet",
        claimed=5,
        replayed=2,
        in_flight=1,
    )
    admin.resize((width, 900))
    admin.open(f"{LIST}dashboard/")
    assert not admin.scrolls_sideways()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_a_narrow_screen_in_both_themes(admin, scheme):
    on_hold("x" * 255)
    overdue("order-4")
    record = f"{LIST}{found('x' * 255).pk}/change/"
    confirm = f"{LIST}intervene/resolve/?id={found('x' * 255).pk}"
    admin.prefer(scheme)
    admin.resize(NARROW)
    for page in (f"{LIST}?situation=done", record, confirm):
        admin.open(page)
        assert not admin.scrolls_sideways(), page


@pytest.mark.parametrize("width", [1280, 1271, 1024, NARROW[0]])
def test_every_column_of_a_list_is_in_the_window(admin, width):
    engine.claim(
        Operation(
            "auth.user:" + 40 * "7", "x" * 255, bytes(32), "POST", "/api/" + 400 * "y"
        ),
        ATOMIC,
    )
    on_hold("z" * 255)
    admin.resize((width, 800))
    for situation in ("live", "on_hold", "done"):
        admin.open(f"{LIST}?situation={situation}")
        assert admin.all("#result_list tbody tr")
        hidden = (
            "const list = document.querySelector('.results'); return list.scrollWidth >"
            " list.clientWidth"
        )
        assert not admin.driver.execute_script(hidden), situation
        assert not admin.scrolls_sideways(), situation
        filters, rows = (
            admin.find(part).rect["y"]
            for part in ("#changelist-filter", "#result_list tbody")
        )
        assert filters < rows, "the filters are not under fifty rows"


def test_a_breach_of_the_policy_for_content_does_not_go_unnoticed(browser):
    browser.open("/admin/login/")
    assert browser.complaints() == []
    browser.driver.execute_script(
        "document.body.insertAdjacentHTML('beforeend', '<p style=\"color:"
        " red\">red</p>')"
    )
    assert any(
        "Content Security Policy" in complaint
        for complaint in eventually(browser.complaints)
    )


@pytest.mark.django_db
def test_the_service_serves_its_static_files(client):
    for file in ("admin/css/base.css", "django_idempotency/admin.css"):
        with contextlib.closing(client.get(f"/static/{file}")) as response:
            assert response.status_code == 200
