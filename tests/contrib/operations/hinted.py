"""The payments service with a queue of hints, a list in Redis; and those who work for
the campaign.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from functools import wraps

import redis
from django.apps import AppConfig

from testproject.settings import *  # noqa: F403
from tests.contrib.operations.campaign import HINTS

INSTALLED_APPS = [*INSTALLED_APPS, f"{__name__}.HintsConfig"]  # noqa: F405
HINTS_URL = os.environ["HINTS_URL"]
AGAIN = 10.0  # seconds, in the place of a minute
LONGEST = 1.0  # seconds that an operation takes once its effect is written
SWEPT = 5.0  # seconds between two sweeps


class HintsConfig(AppConfig):
    name = "tests.contrib.operations"
    label = "hints"

    def ready(self):
        from django_idempotency.contrib.operations import operation_due

        operation_due.connect(send)


def send(record_id, **_named):
    with redis.Redis.from_url(HINTS_URL) as queue:
        queue.lpush(HINTS, str(record_id))


def poll():
    """``idempotency_run``."""
    from django.core.management import call_command

    call_command("idempotency_run")


def read():
    """Run what hints name; one is lost if the database is away."""
    from django_idempotency.contrib.operations import run_operation

    with redis.Redis.from_url(HINTS_URL) as queue:
        while True:
            try:
                _name, record_id = queue.brpop(HINTS, timeout=0)
            except redis.RedisError:  # it was killed
                threading.Event().wait(1)
                continue
            outliving(lambda id=record_id: run_operation(id.decode(), using="default"))


def sweep():
    from django_idempotency.contrib.operations.schedule import HINT
    from django_idempotency.maintenance.passes import run_pass

    while True:
        outliving(lambda: run_pass(HINT.name))
        threading.Event().wait(SWEPT)


def outliving(work):
    from django.db import Error, connection

    try:
        work()
    except Error as error:
        print(error, file=sys.stderr, flush=True)
        connection.close()


def slowed(function):
    @wraps(function)
    def slow(**arguments):
        result = function(**arguments)
        threading.Event().wait(random.uniform(0, LONGEST))
        return result

    return slow


def main(what):
    import django

    django.setup()
    from django_idempotency.contrib.operations import running
    from django_idempotency.contrib.operations.registry import find

    running.AGAIN = AGAIN
    known = find("imports.run")
    vars(known)["function"] = slowed(known.function)
    {"poll": poll, "read": read, "sweep": sweep}[what]()


if __name__ == "__main__":
    # settings have the module's own name
    from tests.contrib.operations import hinted

    hinted.main(*sys.argv[1:])
