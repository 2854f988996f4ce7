"""A process of its own that does one operation in three steps, and pauses where the
test says.

Its provider is a file: a line for each call, which says the key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from tests.support.pausing_process import PausingProcess, pause, pausing

# In the order in which a run comes by them. Memo and COMMIT are one message: halfway is
# between them, where that is not so.
POINTS = (
    *("before atomic", "in atomic", "after the effect", "halfway", "after atomic"),
    *("in call", "after the call", "after call"),
    *("in once", "after the fax", "after once"),
)


class Provider:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def asked(self, what: str, key: str = "") -> str:
        with self.path.open("a") as log:
            log.write(f"{what} {key}\n")
        return f"{what} done"

    def keys(self, what: str) -> list[str]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [line.partition(" ")[2] for line in lines if line.startswith(f"{what} ")]


def work(provider: Provider, at: Callable[[str], object] = lambda point: None) -> Any:
    """Three steps, of every kind; ``at`` is called with each point."""
    from django_idempotency.contrib import steps
    from tests.support.callers import pay

    def reserve() -> str:
        at("in atomic")
        paid = pay("reserved").id.hex
        at("after the effect")
        return paid

    def bank(key: str) -> str:
        at("in call")
        done = provider.asked("bank", key)
        at("after the call")
        return done

    def fax() -> str:
        at("in once")
        done = provider.asked("fax")
        at("after the fax")
        return done

    at("before atomic")
    results = [steps.atomic("reserve", reserve)]
    at("after atomic")
    results.append(steps.call("bank", bank))
    at("after call")
    results.append(steps.call("fax", fax, at_most_once=True))
    at("after once")
    return results


@contextmanager
def working(point: str, path: Path, lease: int = 30) -> Iterator[PausingProcess]:
    """A worker that stands at ``point``. It says what came of its request at the
    end.
    """
    with pausing(_operate, point, path, lease) as worker:
        assert worker.says() == point
        yield worker


def _operate(point: str, path: Path, lease: int) -> Any:
    from django.db import connection

    from django_idempotency import Lease
    from tests.contrib.steps.conftest import run
    from tests.support.threads import just_after

    connection.ensure_connection()

    def at(reached: str) -> None:
        if reached == point:
            pause(point)

    # a statement that is watched goes without its COMMIT
    halfway = just_after(r"\s*WITH own", lambda: pause(point))
    with halfway if point == "halfway" else nullcontext():
        try:
            return run(lambda: work(Provider(path), at), mode=Lease(seconds=lease))
        except Exception as error:
            return type(error).__name__
