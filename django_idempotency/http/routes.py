"""The paths of the URLconf, with their views."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.urls import URLPattern, URLResolver, get_resolver

from django_idempotency.conf import has_urls


def routes() -> Iterator[tuple[str, Any]]:
    """Yield every path of the URLconf, with its view; none in a project that only consumes messages."""
    return _routes(get_resolver().url_patterns if has_urls() else [])


def _routes(patterns: Iterable[URLPattern | URLResolver], prefix: str = "/") -> Iterator[tuple[str, Any]]:
    for pattern in patterns:
        route = prefix + str(pattern.pattern).removeprefix("^")
        if isinstance(pattern, URLResolver):
            yield from _routes(pattern.url_patterns, route)
        else:
            yield route, pattern.callback
