"""A process where one caller waits, so that no other may, and that forks. It writes how its child was answered."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from tests.support.forking import LEASE, hold, say
from tests.support.waiting import eventually

WAIT = 1.0


def wait(seconds: float) -> Any:
    """The status of the answer."""
    from django_idempotency.policy import Lease
    from tests.support.callers import entry_point, paying

    return entry_point(paying, mode=Lease(seconds=LEASE), wait=seconds)("parent").status_code


def main() -> None:
    import django
    from django.conf import settings
    from django.test import override_settings

    django.setup()
    override_settings(IDEMPOTENCY={**settings.IDEMPOTENCY, "MAX_WAITERS": 1}).enable()
    from django_idempotency.engine.waiting import waiters

    entered = threading.Event()
    threading.Thread(target=hold, args=("parent", entered), daemon=True).start()
    assert entered.wait(30)
    threading.Thread(target=wait, args=(60,), daemon=True).start()
    eventually(lambda: len(waiters) == 1)
    if os.fork() == 0:
        begun = time.monotonic()
        status = wait(WAIT)
        say(f"{status} {time.monotonic() - begun}")
        os._exit(0)
    threading.Event().wait(120)


if __name__ == "__main__":
    main()
