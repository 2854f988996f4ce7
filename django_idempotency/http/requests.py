"""Identify the operation that a request asks for: its key, its scope and its
fingerprint.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.utils.translation import gettext_noop

from django_idempotency import engine
from django_idempotency.conf import conf, max_fields
from django_idempotency.engine.digests import keyed
from django_idempotency.http.key_sources import (
    LOOKUP,
    identifier,
    key_of,
    missing,
)
from django_idempotency.reporting.logs import is_due, log
from django_idempotency.values import fingerprints
from django_idempotency.values.exceptions import (
    AnonymousKey,
    MalformedKey,
    RequestIncomplete,
)
from django_idempotency.values.outcomes import (
    EntryPoint,
    Operation,
    StoredRecord,
    dotted_name,
)
from django_idempotency.values.policy import Fingerprint, Policy, is_async
from django_idempotency.values.scopes import (
    CUSTOM,
    BuiltInScope,
    caller_scope,
    with_path,
)

SHORTEST_SECRET = 8  # characters; shorter ones may be part of a scope by chance
# NUL and lone surrogates, which PostgreSQL can't store in text
UNSTORABLE = re.compile(r"[\0\ud800-\udfff]")


class IdempotentRequest(HttpRequest):
    """The type of the request that a view gets, to annotate it with. Requests are not
    instances of it.
    """

    idempotency: engine.Context | engine.Unclaimed


def context_of(request: HttpRequest) -> engine.Context | engine.Unclaimed:
    """Return what ``request`` has as ``idempotency``, and set it if it has none yet."""
    seen: engine.Context | engine.Unclaimed | None
    if (seen := getattr(request, "idempotency", None)) is None:
        request.idempotency = seen = engine.Unclaimed()  # type: ignore[attr-defined]
    return seen


def expect_request(request: object) -> None:
    """Raise ``ImproperlyConfigured`` if ``request`` is something else, because an entry
    point is misplaced.
    """
    if isinstance(request, HttpRequest):
        return
    inside = (
        "below @api_view or on a method of an APIView"
        if hasattr(request, "_request")
        else "on a method"
    )
    raise ImproperlyConfigured(
        f"An entry point got {type(request).__name__} instead of an HttpRequest, as"
        f" happens {inside}. Put @idempotent above @api_view, make IdempotentMixin the"
        ' first base of an APIView, or put @method_decorator(idempotent, name="post")'
        " on another class."
    )


def is_keyed(request: HttpRequest, policy: Policy) -> bool:
    """Whether ``request`` has a key or needs one, and the policy covers its method.

    A callable is not yet asked: any request may have its key.
    """
    if hasattr(request, LOOKUP):
        return True
    header = policy.key.meta_name
    covered = conf().protects and request.method in policy.methods
    return covered and (policy.required or not header or header in request.META)


def identify(
    request: HttpRequest,
    policy: Policy,
    *,
    sender: object,
    entry_point: EntryPoint | None = None,
    caller: HttpRequest | None = None,
) -> Operation | None:
    """Return the operation that a keyed request asks for; ``None`` if its anonymous
    caller's key is ignored.

    ``caller``: the request as the view's framework has authenticated it, for the scope.
    Raises ``MissingKey``, ``MalformedKey``, ``AnonymousKey`` and ``RequestIncomplete``,
    ``ImproperlyConfigured`` for what is not a scope or contains credentials, and
    whatever Django raises for an unreadable body.
    """
    caller = caller or request
    if lookup := getattr(request, LOOKUP, None):
        scope, key, fingerprint = scope_of(caller, policy) or "", lookup.key, b""
    else:
        named = scope_and_key(request, caller, policy, entry_point, warned_of=sender)
        if named is None:
            return None
        scope, key = named
        fingerprint = fingerprint_of(request, caller, policy)
        _refuse_incomplete(request)
    operation = Operation(
        key=key,
        scope=scope,
        fingerprint=fingerprint,
        digest=fingerprint,
        method=request.method or "",
        path=request.path.replace("\0", "\N{SYMBOL FOR NULL}"),
        sender=sender,
        entry_point=entry_point,
        database=engine.routed(policy),
        permits=policy.may_replay and _permits(caller, policy.may_replay),
    )
    return lookup(operation, policy) if lookup else keyed(operation)


def scope_and_key(
    request: HttpRequest,
    caller: HttpRequest,
    policy: Policy,
    entry_point: EntryPoint | None,
    *,
    warned_of: object = None,
) -> tuple[str, str] | None:
    """Return what names the operation of a keyed request; ``None`` if its anonymous
    caller's key is ignored.

    ``warned_of``: the view to name in a warning if its caller has no scope.
    """
    scope = scope_of(caller, policy)
    if scope is None and _ignores_anonymous(policy, entry_point):
        return None
    key = key_of(request, policy, caller)
    if key is None:
        raise missing(policy)
    if scope is None:
        if warned_of:
            _warn_of_missing_scope(warned_of)
        raise AnonymousKey
    return scope, key


def observed_operation(
    request: HttpRequest,
    policy: Policy,
    key: str,
    sender: object,
    entry_point: EntryPoint,
) -> Operation | None:
    """Return the operation of a request that is only watched; ``None`` if it has no
    scope. ``key`` may be empty.
    """
    scope = scope_of(request, policy)
    if scope is None:
        return None
    fingerprint = fingerprint_of(request, request, policy)
    return keyed(
        Operation(
            scope,
            key,
            fingerprint,
            digest=fingerprint,
            sender=sender,
            entry_point=entry_point,
        )
    )


def _warn_of_missing_scope(sender: object) -> None:
    """Log that a caller has no scope, once for each view."""
    view = dotted_name(sender)
    if not is_due(f"scope_missing {view}", every=math.inf):
        return
    log(
        logging.WARNING,
        "scope_missing",
        "a key was refused, because its caller is not a user with a primary key."
        " If such callers are authenticated, for example by an API key, set a scope in"
        " the view's policy: a callable that takes the request and returns the id of"
        " the caller's account.",
        view=sender,
    )


def _ignores_anonymous(policy: Policy, entry_point: EntryPoint | None) -> bool:
    if policy.anonymous is None:
        return entry_point == EntryPoint.MIDDLEWARE
    return policy.anonymous == "ignore"


def scope_of(caller: HttpRequest, policy: Policy) -> str | None:
    """Return whose key a request has by ``policy``; ``None`` if that is unknown."""
    scope = _identity(caller, policy)
    return with_path(scope, caller.path) if scope and policy.scope_path else scope


def _identity(caller: HttpRequest, policy: Policy) -> str | None:
    if callable(policy.scope):
        scope = identifier(policy.scope(caller), policy.scope, "scope")
    else:
        scope = policy.scope or default_scope(caller, policy)
    if not scope:
        return None
    if UNSTORABLE.search(scope):
        raise MalformedKey(
            gettext_noop(
                "The scope %(scope)s of this request contains a character that can't be"
                " stored."
            ),
            scope=ascii(scope),
        )
    if not callable(policy.scope) or isinstance(scope, BuiltInScope):
        return str(scope)
    _refuse_credentials(scope, caller)
    return CUSTOM + scope


def _refuse_credentials(scope: str, caller: HttpRequest) -> None:
    """Raise ``ImproperlyConfigured`` for a scope that contains the request's
    credentials, which would be stored.
    """
    header = caller.META.get("HTTP_AUTHORIZATION", "")
    _scheme, _space, credentials = header.partition(" ")
    if any(
        len(secret) >= SHORTEST_SECRET and secret in scope
        for secret in (header, credentials.strip())
    ):
        raise ImproperlyConfigured(
            "The scope callable returns the credentials of the Authorization header,"
            " and scopes are stored in clear text. Return something that stays the same"
            " when they are renewed, such as the id of the user or the account."
        )


def default_scope(caller: HttpRequest, policy: Policy) -> str | None:
    """Return the scope of a request whose policy sets none, which is that of its
    caller.
    """
    return caller_scope(
        caller, None if callable(policy.using) else engine.alias(policy)
    )


def _permits(caller: HttpRequest, ask: Any) -> Callable[[StoredRecord], object]:
    return partial(async_to_sync(ask) if is_async(ask) else ask, caller)


def fingerprint_of(
    request: HttpRequest,
    caller: HttpRequest,
    policy: Policy,
    *,
    leave_out: Collection[str] = (),
) -> bytes:
    """Return the fingerprint of ``request`` as ``policy`` has it. ``leave_out``: more
    fields that don't count.
    """
    fingerprint = _of_content(request, caller, policy, leave_out)
    if not policy.compared_headers:
        return fingerprint
    values = [
        (name, request.headers.get(name))
        for name in sorted(map(str.lower, policy.compared_headers))
    ]
    parts = [f"{name}{'' if value is None else f'={value}'}" for name, value in values]
    return fingerprints.digest(
        [fingerprint, *(part.encode("utf-8", "surrogatepass") for part in parts)]
    )


def _of_content(
    request: HttpRequest,
    caller: HttpRequest,
    policy: Policy,
    leave_out: Collection[str],
) -> bytes:
    if not isinstance(compared := policy.fingerprint, Fingerprint):
        return fingerprints.of_bytes(request, compared(caller))
    exclude = {*compared.exclude, *leave_out}
    return fingerprints.fingerprint(
        request, only=compared.only, exclude=exclude, max_fields=max_fields()
    )


def _refuse_incomplete(request: HttpRequest) -> None:
    stated = _content_length(request)
    received = (
        len(request._body)
        if hasattr(request, "_body")
        else _read_so_far(request, stated)
    )
    if received < stated:
        raise RequestIncomplete(received, stated)


def _content_length(request: HttpRequest) -> int:
    try:
        return int(request.META.get("CONTENT_LENGTH") or 0)
    except ValueError:  # Django ignores it then, too
        return 0


def _read_so_far(request: HttpRequest, stated: int) -> int:
    """Return how many bytes a form's parser has got from the server; ``stated`` if none
    has read, or none counts.
    """
    position: int = getattr(getattr(request, "_stream", None), "_pos", 0)
    return position or stated
