"""Watch requests without refusing or replaying any, and count in ``stats`` what would have been prevented.

Nothing here changes what a view gets or returns, and no error in it reaches a request. A body is read before the view
only if its size is known and moderate. A multipart body is examined afterwards, if the view has parsed it.
"""

from __future__ import annotations

import logging
import re
from io import RawIOBase
from typing import Any

from django.http import HttpRequest, UnreadablePostError
from django.http.response import HttpResponseBase

from django_idempotency import signals
from django_idempotency.conf import conf
from django_idempotency.exceptions import IdempotencyError
from django_idempotency.http.requests import has_moderate_body, observed_operation
from django_idempotency.keys import parse_key
from django_idempotency.logs import cause, is_due, log
from django_idempotency.outcomes import EntryPoint, Operation
from django_idempotency.policy import Policy

UNNAMED = "unnamed"
PRODUCT = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,40}(/[!#$%&'*+.^_`|~0-9A-Za-z-]{1,20})?")  # RFC 9110, 10.1.5
SEEN = "_idempotency_observed"


def is_observed(request: HttpRequest, policy: Policy) -> bool:
    """Whether to watch ``request``. Only the outermost entry point does so."""
    return conf().observes and request.method in policy.methods and not hasattr(request, SEEN)


def keep_body(request: HttpRequest, policy: Policy) -> bool:
    """Begin to watch a request before its view runs. Keep its body if that has a known, moderate size and is no upload.

    Return whether the request is watched; if so, call ``observe`` afterwards.
    """
    if not is_observed(request, policy):
        return False
    setattr(request, SEEN, True)
    try:
        if request.content_type != "multipart/form-data" and has_moderate_body(request):
            _ = request.body
    except UnreadablePostError as error:  # the view has to get it, too: Django would show it an empty form
        vars(request).update(_stream=_Unreadable(error), _read_started=False)
    except Exception as error:
        _told(error)
    return True


class _Unreadable(RawIOBase):
    """The body of a caller who has hung up."""

    def __init__(self, error: OSError) -> None:
        self.error = error

    def readinto(self, _buffer: Any) -> int:
        raise OSError(*self.error.args)


def observe(
    request: HttpRequest,
    policy: Policy,
    response: HttpResponseBase,
    *,
    sender: object,
    entry_point: EntryPoint,
    caller: HttpRequest | None = None,
) -> None:
    """Report a watched request once its view has responded. ``caller``: as for ``identify``."""
    try:
        key, comparable = _key(request, policy), response.status_code < 400 and _can_be_read(request)
        operation = comparable and observed_operation(request, caller or request, policy, key, sender, entry_point)
        signals.send(
            signals.request_observed,
            operation or Operation("", "", b"", sender=sender, entry_point=entry_point),
            keyed=bool(key),
            client=_client(request),
            comparable=bool(operation),
        )
    except Exception as error:  # from a scope, a fingerprint or a router; the request already has its response
        _told(error)


def _key(request: HttpRequest, policy: Policy) -> str:
    """Return the key; empty if there is no usable one."""
    header = request.META.get(conf().meta_name)
    try:
        return "" if header is None else parse_key(header, strict=policy.strict_header)
    except IdempotencyError:
        return ""


def _can_be_read(request: HttpRequest) -> bool:
    """Whether the body was kept, or is a form without files: a view may have moved those."""
    return hasattr(request, "_body") or (hasattr(request, "_files") and not request._files)


def _client(request: HttpRequest) -> str:
    """The program that sent the request, as it names itself, without the comments that may name a person."""
    product = PRODUCT.match(request.META.get("HTTP_USER_AGENT", ""))
    return product[0] if product else UNNAMED


def _told(error: Exception) -> None:
    if is_due("observing"):
        log(logging.ERROR, "observing", "a request could not be observed: %s", cause(error))
