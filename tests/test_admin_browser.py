"""The admin in a real browser."""

from __future__ import annotations

import pytest

from tests.waiting import eventually

pytestmark = pytest.mark.browser


@pytest.fixture
def admin(browser, admin_user):
    browser.sign_in("admin", "password")
    return browser


def test_somebody_signs_in_and_finds_the_records(admin):
    assert admin.path == "/admin/"
    admin.follow("Idempotency records")
    assert "0 idempotency records" in admin.text


def test_a_breach_of_the_policy_for_content_does_not_go_unnoticed(browser):
    browser.open("/admin/login/")
    assert browser.complaints() == []
    browser.driver.execute_script("document.body.insertAdjacentHTML('beforeend', '<p style=\"color: red\">red</p>')")
    assert any("Content Security Policy" in complaint for complaint in eventually(browser.complaints))
