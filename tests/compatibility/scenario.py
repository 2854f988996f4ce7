"""The common scenario, by one project's settings: ``python -m
tests.compatibility.scenario silk.settings`` prints JSON.

Needs the project's packages and ``DATABASE_URL``: a PostgreSQL server on which to make
a database ``test_…``.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from threading import Event
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import django

if TYPE_CHECKING:
    from tests.compatibility.project import Project

DUPLICATES = 4
SECONDS = 60


def is_replay(answer: Any) -> bool:
    return answer.headers.get("Idempotent-Replayed") == "true"


def fresh() -> str:
    return f"r-{uuid4()}"


def a_retry_is_replayed(project: Project) -> None:
    reference, key = fresh(), fresh()
    first, again = (project.send(reference, key) for _ in range(2))
    assert (first.status_code, is_replay(first)) == (project.paid, False), (
        first.status_code,
        first.content[:500],
    )
    assert (again.status_code, again.content, is_replay(again)) == (
        project.paid,
        first.content,
        True,
    )
    assert project.effects(reference) == 1


def another_body_is_refused(project: Project) -> None:
    reference, other, key = fresh(), fresh(), fresh()
    assert project.send(reference, key).status_code == project.paid
    refused = project.send(other, key)
    assert (refused.status_code, project.code(refused)) == (
        422,
        "idempotency_key_reused",
    )
    assert (project.effects(reference), project.effects(other)) == (1, 0)


def a_released_key_keeps_the_bookkeeping(project: Project) -> None:
    reference, key = fresh(), fresh()
    project.take_bookings()
    plain = project.send(reference, refuse=True)
    kept = project.take_bookings()
    keyed = project.send(reference, key, refuse=True)
    assert 400 <= plain.status_code == keyed.status_code < 500, (
        plain.status_code,
        plain.content[:500],
    )
    assert "Idempotent-Replayed" not in keyed.headers
    assert project.take_bookings() == kept
    assert (kept > 0) == project.books
    after = project.send(reference, key)
    assert (after.status_code, is_replay(after)) == (
        project.paid,
        False,
    ), "the key is free"


def of_concurrent_duplicates_one_runs(project: Project) -> None:
    """The first is held where its effect was written, so the others do arrive while it
    runs.
    """
    from django.db import connections
    from django.db.models.signals import post_save

    reference, key = fresh(), fresh()
    inside, go_on = Event(), Event()

    def hold(**_named: Any) -> None:
        inside.set()
        assert go_on.wait(SECONDS)

    def send(_index: int) -> Any:
        try:
            return project.send(reference, key)
        finally:
            connections.close_all()

    post_save.connect(hold, sender=project.effect)
    try:
        with ThreadPoolExecutor(DUPLICATES + 1) as threads:
            first = threads.submit(send, 0)
            try:
                assert inside.wait(SECONDS) or first.result()
                duplicates = list(threads.map(send, range(DUPLICATES), timeout=SECONDS))
            finally:
                go_on.set()
            assert [each.status_code for each in duplicates] == [409] * DUPLICATES
            assert first.result().status_code == project.paid
    finally:
        post_save.disconnect(hold, sender=project.effect)
    assert is_replay(project.send(reference, key))
    assert project.effects(reference) == 1


def the_package_works(project: Project) -> None:
    project.check()


STEPS: dict[str, Callable[[Project], None]] = {
    "replay": a_retry_is_replayed,
    "other body": another_body_is_refused,
    "released": a_released_key_keeps_the_bookkeeping,
    "concurrent": of_concurrent_duplicates_one_runs,
    "package": the_package_works,
}


def failure(step: Callable[[Project], None], project: Project) -> str | None:
    try:
        step(project)
    except Exception:
        return traceback.format_exc()
    return None


def run(settings: str) -> dict[str, dict[str, str | None]]:
    """The failures by title and step, ``None`` where there is none."""
    os.environ["DJANGO_SETTINGS_MODULE"] = f"tests.compatibility.{settings}"
    django.setup()

    from django.core.management import call_command
    from django.test.runner import DiscoverRunner
    from django.test.utils import setup_test_environment

    debug = django.conf.settings.DEBUG
    setup_test_environment(debug=debug)
    runner = DiscoverRunner(verbosity=0, interactive=False, debug_mode=debug)
    databases = runner.setup_databases()
    try:
        call_command("check", "--fail-level", "ERROR", "--database", "default")
        projects = import_module(django.conf.settings.ROOT_URLCONF).PROJECTS
        found = {}
        for title, project in projects.items():
            project.begin()
            found[title] = {
                label: failure(step, project) for label, step in STEPS.items()
            }
            found[title] |= (
                {} if project.books else {"released": found[title]["released"] or "-"}
            )
        return found
    finally:
        django.db.connections.close_all()
        runner.teardown_databases(databases)


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
