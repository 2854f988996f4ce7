"""Call another view than the URLconf's, and ask a request's middleware about exceptions
before Django does.

Django asks middleware about an exception after the view has ended, when a transaction
has been rolled back. Entry points have to know before. This is the only module that
relies on the request handler, whose methods Django does not document.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

from asgiref.sync import async_to_sync, iscoroutinefunction
from django.core.handlers.base import BaseHandler
from django.db import connections
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from django_idempotency.http.key_sources import LOOKUP
from django_idempotency.http.requests import context_of

View = Callable[..., Any]
HANDLER = "_idempotency_handler"
COVER = "_idempotency_cover"
ASKED = "_idempotency_asked"

_resolve_request = BaseHandler.resolve_request
_process_exception = BaseHandler.process_exception_by_middleware


def install() -> None:
    """Make requests know their handler, which calls covered views and asks no
    middleware twice about an exception, and have ``request.idempotency``.
    """
    handler: Any = BaseHandler
    handler.resolve_request = _resolving
    handler.process_exception_by_middleware = _processing


@wraps(_resolve_request)
def _resolving(handler: BaseHandler, request: Any) -> Any:
    setattr(request, HANDLER, handler)
    context_of(request)
    view, args, kwargs = _resolve_request(handler, request)
    cover = vars(request).get(COVER)
    return (view if cover is None else cover(request, view), args, kwargs)


def cover_view(
    request: HttpRequest, cover: Callable[[HttpRequest, View], View]
) -> None:
    """Make Django call ``cover(request, view)`` instead of the view that ``request`` is
    for.
    """
    setattr(request, COVER, cover)


@wraps(_process_exception)
def _processing(handler: BaseHandler, exception: Exception, request: Any) -> Any:
    if vars(request).pop(ASKED, None) is exception:
        return None
    return _process_exception(handler, exception, request)


def respond(
    request: HttpRequest, lookup: Callable[..., Any], permitted: Callable[[View], bool]
) -> HttpResponseBase | None:
    """Respond to a copy of a request as Django does inside its middleware, with what
    ``lookup`` returns instead of claiming its ``key``; ``None`` if the view is not
    permitted.
    """
    setattr(request, LOOKUP, lookup)
    handler: Any = getattr(request, HANDLER)
    if not permitted(handler.resolve_request(request)[0]):
        return None
    is_asgi = iscoroutinefunction(handler._middleware_chain)
    respond: Any = (
        async_to_sync(handler._get_response_async) if is_asgi else handler._get_response
    )
    return respond(request)  # type: ignore[no-any-return]


def by_middleware(
    request: HttpRequest, error: Exception, using: str | None = None
) -> HttpResponseBase | None:
    """Return the response of the first middleware whose ``process_exception`` has one;
    ``None`` if none has.

    ``using``: the database whose open transaction is rolled back if there is no
    response. Django then asks again if a middleware has executed a statement there,
    because that is undone.
    """
    handler: Any = getattr(request, HANDLER, None)
    if handler is None or getattr(request, ASKED, None) is error:
        return None
    statements: list[object] = []

    def noting(execute: Any, *args: Any) -> Any:
        statements.append(args[0])
        return execute(*args)

    with nullcontext() if using is None else connections[using].execute_wrapper(noting):
        response: HttpResponseBase | None = _process_exception(handler, error, request)
    if response is None and not statements:
        setattr(request, ASKED, error)
    return response
