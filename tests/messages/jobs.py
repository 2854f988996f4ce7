"""Jobs that tests run in processes of their own."""

from __future__ import annotations

import os
import signal
from typing import Any

from django_idempotency import Lease, once
from tests.support.callers import pay


@once(key="{reference}", retention=3600)
def bill(reference: str) -> dict[str, str]:
    return {"entry": str(pay(reference).pk)}


def dies(*, mode: Any, dies: bool = True) -> Any:
    """Call a function whose process is killed after its effect, or is not."""
    mode = Lease(seconds=600) if mode == "lease" else mode

    @once(key="{reference}", retention=3600, mode=mode, name="dies")
    def die(reference: str) -> str:
        pay(reference)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return "lived"

    return die("r")
