"""A process that has a lease and forks. Its child has another lease. Both write what
they do in lines.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from django_idempotency.values.policy import Lease
from tests.support.waiting import eventually

LEASE = 2
LONGEST = 300  # seconds that either process lasts, even one that hangs
# Called through PyDLL, which keeps the GIL: a fork without it may leave the child a GIL
# that nothing gives back.
FORKS = {"os.fork": os.fork, "without Python's hooks": ctypes.PyDLL(None).fork}


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def hold(key: str, entered: threading.Event) -> None:
    from django.http import HttpResponse

    from tests.support.callers import entry_point

    def view(_request: Any) -> HttpResponse:
        say(f"{key} {os.getpid()}")
        entered.set()
        threading.Event().wait(120)
        return HttpResponse()

    entry_point(view, mode=Lease(seconds=LEASE))(key)


def asleep() -> bool:
    """Whether the thread that renews the parent's lease has nothing to do for now."""
    from django_idempotency.engine import leases

    (keeper,) = leases._keepers.values()
    return keeper._sleeps_until > time.monotonic() + LEASE / 5


def switches() -> list[str]:
    """What Linux tells of each other thread: its state, and how often it has stopped
    running.
    """
    return [
        line
        for task in sorted(Path("/proc/self/task").glob("[0-9]*"))
        if task.name != str(threading.get_native_id())
        for line in (task / "status").read_text().splitlines()
        if line.startswith(("State", "voluntary", "nonvoluntary"))
    ]


def undisturbed() -> bool:
    """Whether all other threads sleep, and have done so since before this one slept.

    A thread that waits for the GIL sleeps too, but gets it while this one sleeps. If it
    waits at the fork, the child inherits a lock of the C library that this thread will
    never leave, and hangs.
    """
    try:
        before = switches()
        time.sleep(0.02)
        return before == switches() and "R (running)" not in " ".join(before)
    except OSError:  # a thread has ended meanwhile
        return False


def main(how: str) -> None:
    import django

    django.setup()
    entered = threading.Event()
    threading.Thread(target=hold, args=("parent", entered), daemon=True).start()
    assert entered.wait(120)
    # what another thread was doing at the fork stays half done in the child
    eventually(lambda: undisturbed() and asleep())
    child = FORKS[how]() == 0
    signal.alarm(LONGEST)
    if child:
        hold("child", threading.Event())
    else:
        threading.Event().wait(120)


if __name__ == "__main__":
    main(sys.argv[1])
