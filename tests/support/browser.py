"""Headless Chromium, driven by its own driver: what an operator sees and clicks, with
everything inline blocked.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

PROGRAMS = ("chromium", "chromedriver")
POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; frame-ancestors 'none';"
    " form-action 'self'"
)
QUIET = (
    "--headless=new",
    "--no-sandbox",  # there is no sandbox for root
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE, NARROW = (1280, 900), (390, 844)
PATIENCE = 60  # seconds


def strict_csp(get_response: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A middleware: nothing inline, nothing from elsewhere. What breaks it is in
    ``Browser.complaints``.
    """

    def middleware(request: Any) -> Any:
        response = get_response(request)
        response.headers["Content-Security-Policy"] = POLICY
        return response

    return middleware


class Browser:
    """One window. ``origin``: what paths are relative to."""

    def __init__(self, driver: Chrome, origin: str) -> None:
        self.driver = driver
        self.origin = origin

    def open(self, path: str) -> None:
        self.driver.get(self.origin + path)

    def sign_in(self, name: str, password: str) -> None:
        """By the admin's own form."""
        self.open("/admin/login/")
        self.find("#id_username").send_keys(name)
        self.find("#id_password").send_keys(password)
        self.click("input[type=submit]")

    @property
    def path(self) -> str:
        return self.driver.current_url.removeprefix(self.origin)

    @property
    def text(self) -> str:
        """What the page says to the eye."""
        return self.find("body").text

    def find(self, selector: str) -> WebElement:
        """The element, as soon as it is there."""
        return WebDriverWait(self.driver, PATIENCE).until(
            lambda driver: driver.find_element(By.CSS_SELECTOR, selector)
        )

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        """And wait for the page that a link or a button of a form leads to."""
        self.leave_by(self.find(selector))

    def follow(self, text: str) -> None:
        """Click the link that says ``text``."""
        self.leave_by(
            WebDriverWait(self.driver, PATIENCE).until(
                lambda driver: driver.find_element(By.LINK_TEXT, text)
            )
        )

    def leave_by(self, element: WebElement) -> None:
        """Click what leads to another page, and wait until it is there."""
        self.driver.execute_script("document.documentElement.dataset.left = 'yes'")
        element.click()
        arrived = (
            "return document.readyState === 'complete' &&"
            " !document.documentElement.dataset.left"
        )
        WebDriverWait(self.driver, PATIENCE).until(
            lambda driver: driver.execute_script(arrived)
        )

    def resize(self, size: tuple[int, int]) -> None:
        """To ``WIDE`` or ``NARROW``, however narrow a window may otherwise be."""
        width, height = size
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": False,
        }
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """The ``light`` or the ``dark`` color scheme."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": features}
        )

    def scrolls_sideways(self) -> bool:
        """Whether the page is wider than the window."""
        overflow = (
            "return document.documentElement.scrollWidth >"
            " document.documentElement.clientWidth"
        )
        return bool(self.driver.execute_script(overflow))

    def complaints(self) -> list[str]:
        """What the browser's console has had to say since it was last asked: errors,
        breaches of the policy.
        """
        said = [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] == "SEVERE"
        ]
        # the browser asks for that by itself
        return [message for message in said if "/favicon.ico" not in message]

    def forget(self) -> None:
        """Who was signed in, and what was complained of."""
        self.driver.get("about:blank")
        self.driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        self.resize(WIDE)
        self.complaints()


@contextmanager
def running_chromium(directory: Path) -> Iterator[Chrome]:
    """Chromium with an empty profile in ``directory``. Both programs are the machine's
    own; none is downloaded.
    """
    chromium, chromedriver = (shutil.which(program) for program in PROGRAMS)
    options = ChromeOptions()
    options.binary_location = str(chromium)
    for argument in (*QUIET, f"--user-data-dir={directory}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(str(chromedriver)))
    try:
        yield driver
    finally:
        driver.quit()
