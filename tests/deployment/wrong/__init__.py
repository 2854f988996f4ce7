"""Projects with something wrong, for the test of each check, and the same projects put
right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections
from django.http import HttpResponse
from django.urls import include, path
from django.views import View

from tests.support.sql import run_sql

WRONG: list[Any] = []


def wrong(id: str, sentence: str, *marks: pytest.MarkDecorator) -> Callable[..., Any]:
    """Register a generator: it makes the check ``id`` fire with ``sentence``, yields,
    and makes it silent.
    """

    def register(
        steps: Callable[[Project], Iterator[None]],
    ) -> Callable[[Project], Iterator[None]]:
        WRONG.append(
            pytest.param(id, sentence, steps, marks=marks, id=f"{id}-{steps.__name__}")
        )
        return steps

    return register


class Given:
    """A project with these views. ``options``: ``IDEMPOTENCY``."""

    def __init__(self, *views: Any, **options: Any) -> None:
        self.views = views
        self.options = options


def table(*rows: tuple[str, Given, Given, str]) -> None:
    """Register rows of a check, a project in which it fires, one in which it is silent,
    and what its message says.
    """
    for id, wrong_project, right_project, sentence in rows:

        def steps(
            project: Project, wrong: Given = wrong_project, right: Given = right_project
        ) -> Iterator[None]:
            project.given(wrong)
            yield
            project.given(right)

        wrong(id, sentence)(steps)


class Project:
    """What a case changes: ``project(LEASE=5)`` sets ``IDEMPOTENCY``, ``views()`` the
    URLconf, and so on.
    """

    def __init__(self, settings: Any, patch: pytest.MonkeyPatch):
        self.settings, self.patch = settings, patch

    def __call__(self, **options: Any) -> None:
        self.settings.IDEMPOTENCY = options

    def given(self, given: Given) -> None:
        self(**given.options)
        self.views(*given.views)

    def views(self, *views: Any) -> None:
        routes = [path(f"{number}/", view) for number, view in enumerate(views)]
        self.settings.ROOT_URLCONF = (path("sub/", include(routes)),)

    def second_database(self) -> str:
        """Another alias, on SQLite."""
        databases = connections.settings | {
            "lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
        }
        self.patch.setitem(
            connections.settings,
            "lite",
            connections.configure_settings(databases)["lite"],
        )
        return "lite"

    def execute(self, *statements: str) -> None:
        for statement in statements:
            run_sql(statement)


def view(request):
    return HttpResponse()


async def aview(request):
    return HttpResponse()


class Page(View):
    def post(self, request):
        return HttpResponse()
