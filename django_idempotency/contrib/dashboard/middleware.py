"""Watch requests without refusing or replaying any, and count what would have been
prevented.

Nothing here changes what a view gets or returns, and no error in it reaches a request.
A body is read before the view only if its size is known and moderate. A multipart body
is read afterwards, unless the view has read it in its own way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from io import RawIOBase
from typing import Any

from asgiref.sync import iscoroutinefunction as is_async
from asgiref.sync import markcoroutinefunction, sync_to_async
from django.http import HttpRequest, RawPostDataException, UnreadablePostError
from django.http.response import HttpResponseBase

from django_idempotency import IdempotencyError, Policy
from django_idempotency.contrib.dashboard.conf import observes
from django_idempotency.contrib.dashboard.observations import (
    REFUSED,
    UNPROTECTED,
    observations,
)
from django_idempotency.extending import cause, is_due, log, resolve
from django_idempotency.extending.requests import (
    entry_point_policy,
    handler_of,
    has_key,
    has_moderate_body,
    key_of,
    observed_operation,
    policy_by_path,
    scope_and_key,
)
from django_idempotency.extending.stores import EntryPoint

WATCHED = "_idempotency_watched"
View = Callable[..., Any]


class ObservingMiddleware:
    """Watches the requests that entry points would protect, while ``OBSERVE`` is set.

    It knows every entry point, ``IdempotencyMiddleware`` among them if that is
    installed too. Put it behind the middleware that authenticates.
    """

    sync_capable = True
    async_capable = True

    def __init__(self, get_response: Callable[[HttpRequest], Any]) -> None:
        self.get_response = get_response
        if is_async(get_response):
            markcoroutinefunction(self)

    def __call__(self, request: HttpRequest) -> Any:
        if is_async(self.get_response):
            return self._acall(request)
        response = self.get_response(request)
        _report(request, response)
        return response

    async def _acall(self, request: HttpRequest) -> HttpResponseBase:
        response: HttpResponseBase = await self.get_response(request)
        if hasattr(request, WATCHED):
            await sync_to_async(_report)(request, response)
        return response

    def process_view(
        self, request: HttpRequest, view: View, args: Any, kwargs: Any
    ) -> None:
        """Note the view, and keep the body if that has a known, moderate size and is no
        upload.
        """
        policy = (
            policy_by_path(view, request.method or "", request.path)
            if observes()
            else None
        )
        if policy is None or request.method not in resolve(policy).methods:
            return
        setattr(request, WATCHED, (view, resolve(policy)))
        try:
            if request.content_type != "multipart/form-data" and has_moderate_body(
                request
            ):
                _ = request.body
        except (
            UnreadablePostError
        ) as error:  # the view has to get it, too: Django would show it an empty form
            vars(request).update(_stream=_Unreadable(error), _read_started=False)
        except Exception as error:
            _report_failure(error, view)


class _Unreadable(RawIOBase):
    """The body of a caller who has hung up."""

    def __init__(self, error: OSError) -> None:
        self.error = error

    def readinto(self, _buffer: Any) -> int:
        raise OSError(*self.error.args)


def _report(request: HttpRequest, response: HttpResponseBase) -> None:
    if (watched := vars(request).pop(WATCHED, None)) is None:
        return
    view, policy = watched
    try:
        own = entry_point_policy(view, request.method)
        entry_point = EntryPoint.MIDDLEWARE if own is None else EntryPoint.DECORATOR
        sender = handler_of(view, request.method)
        key, operation = _key(request, policy), None
        if response.status_code < 400 and _can_be_read(request):
            operation = observed_operation(request, policy, key, sender, entry_point)
        observations.receive(
            sender, operation, keyed=bool(key), fate=_fate(request, policy, entry_point)
        )
    except Exception as error:
        # from a scope, a fingerprint or a router; the request already has its response
        _report_failure(error, view)


def _fate(request: HttpRequest, policy: Policy, entry_point: EntryPoint) -> str | None:
    """Return the event that the request would be refused, or would run unprotected
    despite its key, if it would.
    """
    if not (policy.required or has_key(request, policy)):
        return None
    try:
        return (
            UNPROTECTED
            if scope_and_key(request, request, policy, entry_point) is None
            else None
        )
    except IdempotencyError:
        return REFUSED


def _key(request: HttpRequest, policy: Policy) -> str:
    try:
        return key_of(request, policy) or ""
    except (IdempotencyError, RawPostDataException):
        return ""


def _can_be_read(request: HttpRequest) -> bool:
    """Whether the body was kept, was not read, or is a form without files: a view may
    have moved those.
    """
    if hasattr(request, "_body"):
        return True
    if hasattr(request, "_files"):
        return not request._files
    return has_moderate_body(request) and not getattr(request, "_read_started", True)


def _report_failure(error: Exception, view: View) -> None:
    if is_due("observing"):
        log(
            logging.ERROR,
            "observing",
            "a request could not be observed: %s",
            cause(error),
            view=view,
        )
