"""Pages that wings add to the admin, and what their own have in common with those of the records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.utils.functional import Promise


@dataclass(frozen=True, slots=True)
class Page:
    """A page below the list of records. ``view`` gets the ``ModelAdmin`` and the request, and checks permissions.

    ``name``: that of its URL in the namespace ``admin``. ``title``: of the link above the list; empty for no link.
    """

    route: str
    view: Callable[[Any, HttpRequest], HttpResponse]
    name: str
    title: str | Promise = ""


class ReadOnly:
    """A ``ModelAdmin`` with this base adds, changes and deletes nothing by a form."""

    def _never(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    has_add_permission = has_change_permission = has_delete_permission = _never


_pages: dict[str, Page] = {}


def register(page: Page) -> None:
    """Add ``page``. Call this before the project's URLs are loaded, in the ``ready()`` of an app."""
    _pages[page.name] = page


def registered() -> list[Page]:
    return list(_pages.values())


def links() -> list[tuple[str, str | Promise]]:
    """Return the name of the URL and the title of each page that has a link."""
    return [(f"admin:{page.name}", page.title) for page in _pages.values() if page.title]
