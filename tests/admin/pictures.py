"""Pictures of the admin's pages, for the documentation: ``python -m tests.admin.pictures DIRECTORY``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from django_idempotency.policy import Lease

LIST = "/admin/django_idempotency/idempotencyrecord/"
# Those in docs/img that this makes: page, width, height if not all of it, scheme. Without the admin's list of models.
OF_DOCS: dict[str, tuple[str, int, int | None, str]] = {
    "dashboard-light": ("dashboard", 1440, None, "light"),
    "admin-list": ("list", 1440, None, "light"),
    "admin-narrow": ("list", 390, 1000, "light"),
    "admin-record": ("record", 1440, None, "light"),
    "admin-confirm-dark": ("confirm", 1440, None, "dark"),
}
SIDEBAR = "'django.admin.navSidebarIsOpen'"
PAID = b'{"id": "9f1c", "amount": 4200, "currency": "EUR", "status": "paid", "lines": [{"sku": "book", "quantity": 2}]}'


def fill() -> dict[str, Any]:
    """Some records of every kind; the ids of those with a page of their own."""
    from django_idempotency import engine
    from django_idempotency.models import IdempotencyRecord
    from django_idempotency.policy import Policy
    from django_idempotency.stores.database import ahead
    from django_idempotency.values.outcomes import Fail, Keep, Operation, StoredResponse
    from tests.support.happening import a_week

    lease, hold = Policy(mode=Lease(seconds=60)), Policy(mode=Lease(on_crash="hold"))

    def claim(key: str, path: str, policy: Policy, scope: str = "user:7") -> Any:
        return engine.claim(Operation(scope, key, bytes(range(32)), "POST", path), policy)

    def end(key: str, path: str, verdict: Any, policy: Policy = lease, scope: str = "user:7") -> Any:
        claimed = claim(key, path, policy, scope)
        with engine.execution(claimed, policy) as run:
            run.verdict = verdict
        return claimed.id

    def age(key: str, **seconds: float) -> None:
        IdempotencyRecord.objects.filter(key=key).update(**{name: ahead(-value) for name, value in seconds.items()})

    for number, (since, ran_out) in enumerate([(12_040, 11_980), (431, 371), (95, 35), (31, -29), (4, -56)]):
        claim(f"8e03978e-40d5-43dd-bc93-6894a57f932{number}", "/api/payouts/", lease, f"user:{40 + number}")
        age(f"8e03978e-40d5-43dd-bc93-6894a57f932{number}", created_at=since, locked_at=since, locked_until=ran_out)
    claim("order-2026-11-0042", "/api/charges/", Policy(), "user:12")
    age("order-2026-11-0042", created_at=200, locked_at=200, locked_until=140)
    on_hold = []
    for number in (1, 2):
        key = f"payout-2026-11-000{number}"
        on_hold.append(end(key, "/api/payouts/", Fail("its lease ran out while it was running", on_hold=True), hold))
        age(key, created_at=4000 * number, updated_at=3600 * number)
    end("import-77", "/api/imports/", Fail("OperationalError"))
    for number in range(12):
        answer = StoredResponse(201, (("Content-Type", "application/json"), ("Location", f"/orders/{number}/")), PAID)
        done = end(f"order-{number}", "/api/charges/", Keep(answer), scope=f"user:{number % 3}")
        IdempotencyRecord.objects.filter(pk=done).update(
            created_at=ahead(-60 * number - 7), updated_at=ahead(-60 * number - 5), replays=number % 5
        )
    IdempotencyRecord.objects.filter(pk=done).update(replays=2, last_replayed_at=ahead(-120), attempts=2)
    a_week()
    return {"on_hold": on_hold[0], "other": on_hold[1], "done": done}


def take(browser: Any, directory: Path, ids: dict[str, Any]) -> None:
    pages = {
        "list": LIST,
        "dashboard": f"{LIST}dashboard/",
        "record": f"{LIST}{ids['done']}/change/",
        "confirm": f"{LIST}intervene/resolve/?id={ids['on_hold']}",
    }
    browser.driver.execute_script(f"localStorage.setItem({SIDEBAR}, 'false')")
    for picture, (page, width, height, scheme) in OF_DOCS.items():
        browser.prefer(scheme)
        browser.resize((width, 640))
        browser.open(pages[page])
        browser.resize((width, height or _height(browser)))
        browser.picture(directory / f"{picture}.png")
    browser.driver.execute_script(f"localStorage.removeItem({SIDEBAR})")


def _height(browser: Any) -> int:
    return int(
        browser.driver.execute_script("return document.getElementById('content').getBoundingClientRect().bottom")
    )


def main(directory: Path) -> None:
    import django
    from django.conf import settings
    from django.test.utils import override_settings

    django.setup()
    from django.contrib.auth import get_user_model
    from django.db import connection
    from pytest_django.live_server_helper import LiveServer

    from tests.support.browser import Browser, running_chromium

    directory.mkdir(parents=True, exist_ok=True)
    name = connection.settings_dict["NAME"]
    connection.creation.create_test_db(verbosity=0, autoclobber=True)
    try:
        get_user_model().objects.create_superuser("anna", "", "password")
        ids = fill()
        with override_settings(MIDDLEWARE=["tests.support.browser.strict_csp", *settings.MIDDLEWARE]):
            server = LiveServer("localhost")
        with tempfile.TemporaryDirectory() as profile, running_chromium(Path(profile)) as chromium:
            browser = Browser(chromium, server.url)
            browser.forget()
            browser.sign_in("anna", "password")
            take(browser, directory, ids)
            print(*browser.complaints(), sep="\n")
        server.stop()
    finally:
        connection.creation.destroy_test_db(name, verbosity=0)


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "testproject.settings")
    main(Path(sys.argv[1]))
