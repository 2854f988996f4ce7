"""What a person on call does in the admin, in a real browser."""

from __future__ import annotations

import contextlib

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from django_idempotency import engine
from django_idempotency.interventions import version
from django_idempotency.keys import record_id
from django_idempotency.models import IdempotencyRecord
from django_idempotency.outcomes import Keep, Operation, StoredResponse
from django_idempotency.policy import Policy
from django_idempotency.stores.database import ahead
from tests.browser import NARROW
from tests.callers import stop_heartbeat
from tests.threads import OtherThread
from tests.waiting import eventually

pytestmark = [pytest.mark.browser, pytest.mark.row_locks]

LIST = "/admin/django_idempotency/idempotencyrecord/"
ATOMIC = Policy()
HOLD = Policy(mode="lease", on_crash="hold")


def operation(key):
    return Operation("user:1", key, bytes(32), "POST", f"/api/{key}/")


def overdue(key, policy=ATOMIC):
    """A claim whose lease has run out."""
    claim = engine.claim(operation(key), policy)
    IdempotencyRecord.objects.filter(pk=claim.id).update(locked_at=ahead(-180), locked_until=ahead(-120))
    return claim


def held(key):
    overdue(key, HOLD)
    engine.claim(operation(key), HOLD)
    assert found(key).held


def found(key):
    return IdempotencyRecord.objects.get(pk=record_id("user:1", key))


@pytest.fixture(autouse=True)
def no_heartbeat():
    """Replays that are not counted yet are forgotten with the test."""
    yield
    stop_heartbeat()


@pytest.fixture
def admin(browser, admin_user):
    browser.sign_in("admin", "password")
    browser.follow("Idempotency records")
    return browser


def keys(admin):
    return [cell.text for cell in admin.all("#result_list .field-key")]


def choose(admin, key, action):
    """Tick a record in the list and run an action on it."""
    for box in admin.all("#result_list tbody tr"):
        if box.find_element(By.CSS_SELECTOR, ".field-key").text == key:
            box.find_element(By.CSS_SELECTOR, "input.action-select").click()
    admin.find(f"select[name=action] option[value={action}]").click()
    admin.click(".actions button[type=submit]")


@pytest.mark.postgresql  # where the page can tell beforehand that the row is locked
def test_a_key_is_released_once_its_holder_is_dead_and_not_before(admin):
    alive, dead = overdue("alive"), overdue("dead")
    engine.claim(operation("young"), ATOMIC)
    holder = OtherThread()
    run = engine.execution(alive, ATOMIC)
    entered = holder(run.__enter__)
    try:
        admin.open(LIST)
        admin.follow("Lease ran out (2)")
        assert sorted(keys(admin)) == ["alive", "dead"]
        choose(admin, "alive", "release_records")
        assert "Not this one: Its row is locked" in admin.text
        assert admin.all("input[type=submit][value=Release]") == []
        admin.follow("No, take me back")
        choose(admin, "dead", "release_records")
        # While the page is open, the other one's number comes into it.
        admin.driver.execute_script(
            "const other = document.querySelector('input[name=record]').cloneNode();"
            "other.value = arguments[0]; document.querySelector('form .idempotency-chosen').append(other)",
            f"{alive.id} {version(found('alive'))}",
        )
        admin.click("input[type=submit][value=Release]")
        assert "Release for retry: done for one record." in admin.text
        assert "nothing was done to user:1 alive. Its row is locked" in admin.text
        assert (found("dead").status, found("alive").status) == ("failed", "processing")
        assert found("dead").token != dead.token
    finally:
        entered.settle(Keep(StoredResponse(201)))
        holder(run.__exit__, None, None, None)
        holder.close()
    assert found("alive").status == "completed"
    admin.follow("Failed, free to retry (1)")
    assert keys(admin) == ["dead"]


def test_a_held_key_is_resolved_and_replays_what_was_typed(admin):
    held("order-1")
    admin.open(LIST)
    admin.follow("Held for a decision (1)")
    admin.follow("order-1")
    assert "held for a decision: its lease ran out while it was running" in admin.text
    admin.click("a[href*='intervene/resolve']")
    admin.find("#id_body").send_keys('{"id": ')
    admin.click("input[type=submit][value=Resolve]")
    assert "This is not JSON" in admin.text
    assert found("order-1").held
    admin.find("#id_body").send_keys("7}")
    admin.find("#id_status").clear()
    admin.find("#id_status").send_keys("201")
    admin.find("#id_note").send_keys("the bank says it was paid")
    admin.click("input[type=submit][value=Resolve]")
    assert "Resolve with an answer: done for one record." in admin.text
    assert "the bank says it was paid by admin" in admin.text
    answer = engine.claim(operation("order-1"), HOLD).response
    assert (answer.status, answer.body) == (201, b'{"id": 7}')


def test_a_key_is_found_and_can_be_copied(admin):
    overdue("order-2")
    admin.find("#searchbar").send_keys('"order-2"')
    admin.click("#changelist-search [type=submit]")
    assert keys(admin) == ["order-2"]
    admin.follow("order-2")
    admin.find(".field-copyable_key button.idempotency-copy").click()
    assert eventually(lambda: admin.all(".field-copyable_key button[data-done]"))


def test_an_action_can_be_done_by_keyboard_alone(admin):
    held("order-3")
    admin.open(f"{LIST}intervene/release/?id={found('order-3').pk}")
    admin.find("#id_note").send_keys("by keyboard", Keys.TAB)
    focused = admin.driver.switch_to.active_element
    assert focused.get_attribute("value") == "Release"
    focused.send_keys(Keys.ENTER)
    assert "done for one record" in admin.find(".messagelist .success").text
    assert not found("order-3").held


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_fits_a_narrow_screen_in_both_themes(admin, scheme):
    held("x" * 255)
    overdue("order-4")
    record = f"{LIST}{found('x' * 255).pk}/change/"
    confirm = f"{LIST}intervene/resolve/?id={found('x' * 255).pk}"
    admin.prefer(scheme)
    admin.resize(NARROW)
    for page in (f"{LIST}?situation=done", record, confirm):
        admin.open(page)
        assert not admin.scrolls_sideways(), page


def test_a_breach_of_the_policy_for_content_does_not_go_unnoticed(browser):
    browser.open("/admin/login/")
    assert browser.complaints() == []
    browser.driver.execute_script("document.body.insertAdjacentHTML('beforeend', '<p style=\"color: red\">red</p>')")
    assert any("Content Security Policy" in complaint for complaint in eventually(browser.complaints))


@pytest.mark.django_db
def test_the_service_gives_out_the_style_of_its_admin_without_a_web_server(client):
    for file in ("admin/css/base.css", "django_idempotency/admin.css"):
        with contextlib.closing(client.get(f"/static/{file}")) as response:
            assert response.status_code == 200
