"""Checks of the place of ``IdempotencyMiddleware`` among the other middleware, and of CORS."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.apps import apps
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.utils.module_loading import import_string

from django_idempotency import conf
from django_idempotency.checks.settings import Apps, are_usable
from django_idempotency.http.responses import REPLAYED
from django_idempotency.middleware import IdempotencyMiddleware, is_ours

# Their own documentation puts them last in MIDDLEWARE, and they look at the view only to count.
MEASURING = frozenset({"django_prometheus.middleware.PrometheusAfterMiddleware"})
MIDDLEWARE = f"{IdempotencyMiddleware.__module__}.{IdempotencyMiddleware.__qualname__}"


@register(Tags.compatibility)
def check_cors(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """W053: django-cors-headers keeps keys, or headers of our responses, from scripts of other origins."""
    if not (are_usable() and apps.is_installed("corsheaders")):
        return []
    from corsheaders.conf import conf as cors

    sent = [conf.conf().header, *filter(None, [conf.conf().request_time_header])]
    lacking = {
        "CORS_ALLOW_HEADERS": _lacking(sent, cors.CORS_ALLOW_HEADERS),
        "CORS_EXPOSE_HEADERS": _lacking([REPLAYED, "Retry-After", "X-Should-Retry"], cors.CORS_EXPOSE_HEADERS),
    }
    return [
        Warning(
            f"{setting} lacks {', '.join(headers)}: browsers keep them from scripts of other origins.",
            hint=f"Add {', '.join(map(repr, headers))} to {setting}.",
            id="django_idempotency.W053",
        )
        for setting, headers in lacking.items()
        if headers
    ]


def _lacking(headers: Iterable[str], allowed: Iterable[str]) -> list[str]:
    known = {header.lower() for header in allowed}
    return [header for header in headers if header.lower() not in known]


@register(Tags.compatibility)
def check_middleware(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E004: a middleware that has to run before the view comes after ours. W054: one that measures views does."""
    installed = conf.middleware()
    ours = next((place for place, path in enumerate(installed) if is_ours(path)), len(installed))
    later = [path for path in installed[ours + 1 :] if _looks_at_views(path)]
    return [_measures_views(path) if path in MEASURING else _is_passed_over(path) for path in later]


def _is_passed_over(path: str) -> CheckMessage:
    return Error(
        f"{path} comes after IdempotencyMiddleware, which calls the view itself: it would be skipped.",
        hint="Put IdempotencyMiddleware last in MIDDLEWARE.",
        id="django_idempotency.E004",
    )


def _measures_views(path: str) -> CheckMessage:
    return Warning(
        f"{path} comes after IdempotencyMiddleware, which calls the view itself: it doesn't count those requests by "
        "view.",
        hint="Put IdempotencyMiddleware last in MIDDLEWARE, directly after it.",
        id="django_idempotency.W054",
    )


def _looks_at_views(path: str) -> bool:
    return hasattr(import_string(path), "process_view")
