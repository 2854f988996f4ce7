"""A task that django-ox runs, and a program that enqueues it or says what came of it.

``python -m tests.messages.ox_tasks enqueue DIRECTORY``, or ``report``, as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import django

TIMES = 3


def main(action: str, directory: str = "") -> None:
    if action == "enqueue":
        for _time in range(TIMES):
            charge.enqueue(directory)
        return
    from django_ox.models import OxTask

    from testproject.models import LedgerEntry

    tasks = [(task.status, task.return_value) for task in OxTask.objects.all()]
    print(json.dumps([LedgerEntry.objects.count(), tasks]))


django.setup()

from django.contrib.auth import get_user_model  # noqa: E402
from django.tasks import task  # noqa: E402

from django_idempotency.messages.django_tasks import idempotent_task  # noqa: E402
from testproject.models import LedgerEntry  # noqa: E402
from tests.support.waiting import eventually  # noqa: E402


@task(takes_context=True)
@idempotent_task(key="{directory}", retention=None)
def charge(context: Any, directory: str) -> str:
    user, _created = get_user_model().objects.get_or_create(username="carol")
    entry = LedgerEntry.objects.create(user=user, amount=5, reference="r")
    (Path(directory) / "entered").touch()
    eventually((Path(directory) / "open").exists, within=120)
    return str(entry.pk)


if __name__ == "__main__":
    from tests.messages import ox_tasks

    ox_tasks.main(*sys.argv[1:])
