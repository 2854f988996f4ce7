"""Identify the operation that a request asks for: its key, its scope and its fingerprint."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import Any
from uuid import UUID

from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.utils.translation import gettext_noop

from django_idempotency import engine
from django_idempotency.conf import conf, max_body_in_memory, max_fields
from django_idempotency.engine.digests import keyed
from django_idempotency.reporting.logs import is_due, log
from django_idempotency.values import fingerprints
from django_idempotency.values.exceptions import (
    AnonymousKey,
    MalformedKey,
    MissingKey,
    RequestIncomplete,
)
from django_idempotency.values.keys import parse_key
from django_idempotency.values.outcomes import (
    EntryPoint,
    Operation,
    StoredRecord,
    dotted_name,
)
from django_idempotency.values.policy import Fingerprint, Policy, is_async
from django_idempotency.values.scopes import CUSTOM, BuiltInScope, caller_scope

SHORTEST_SECRET = 8  # characters; shorter ones may be part of a scope by chance
UNSTORABLE = re.compile(
    r"[\0\ud800-\udfff]"
)  # NUL and lone surrogates, which PostgreSQL can't store in text


def expect_request(request: object) -> None:
    """Raise ``ImproperlyConfigured`` if ``request`` is something else, because an entry point is misplaced."""
    if isinstance(request, HttpRequest):
        return
    inside = (
        "below @api_view or on a method of an APIView"
        if hasattr(request, "_request")
        else "on a method"
    )
    raise ImproperlyConfigured(
        f"An entry point got {type(request).__name__} instead of an HttpRequest, as happens {inside}. Put @idempotent "
        "above @api_view, make IdempotentMixin the first base of an APIView, or put @method_decorator(idempotent, "
        'name="post") on another class.'
    )


def is_keyed(request: HttpRequest, policy: Policy) -> bool:
    """Whether ``request`` has a key or needs one, and the policy covers its method."""
    covered = conf().protects and request.method in policy.methods
    return covered and (policy.required or conf().meta_name in request.META)


def has_moderate_body(request: HttpRequest) -> bool:
    """Whether the body has a known size that Django keeps in memory."""
    length, most = request.META.get("CONTENT_LENGTH") or "0", max_body_in_memory()
    if "HTTP_TRANSFER_ENCODING" in request.META:
        return False
    return length.isdecimal() and (most is None or int(length) <= most)


def identify(
    request: HttpRequest,
    policy: Policy,
    *,
    sender: object,
    entry_point: EntryPoint | None = None,
    caller: HttpRequest | None = None,
) -> Operation | None:
    """Return the operation that a keyed request asks for; ``None`` if its anonymous caller's key is ignored.

    ``caller``: the request as the view's framework has authenticated it, for the scope.
    Raises ``MissingKey``, ``MalformedKey``, ``AnonymousKey`` and ``RequestIncomplete``, ``ImproperlyConfigured`` for
    what is not a scope or contains credentials, and whatever Django raises for an unreadable body.
    """
    caller = caller or request
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
        permits=_permits(caller, policy),
    )
    return keyed(operation)


def scope_and_key(
    request: HttpRequest,
    caller: HttpRequest,
    policy: Policy,
    entry_point: EntryPoint | None,
    *,
    warned_of: object = None,
) -> tuple[str, str] | None:
    """Return what names the operation of a keyed request; ``None`` if its anonymous caller's key is ignored.

    ``warned_of``: the view to name in a warning if its caller has no scope.
    """
    scope = _scope(caller, policy)
    if scope is None and _ignores_anonymous(policy, entry_point):
        if warned_of and getattr(caller, "auth", None):  # the caller is not anonymous
            _warn_of_missing_scope(
                "was ignored, and the request runs unprotected", warned_of
            )
        return None
    header = request.META.get(conf().meta_name)
    if header is None:
        raise MissingKey
    key = parse_key(header, strict=policy.keys.strict)
    _refuse_unfit(key, policy)
    if scope is None:
        if warned_of:
            _warn_of_missing_scope("was refused", warned_of)
        raise AnonymousKey
    return scope, key


def observed_operation(
    request: HttpRequest,
    policy: Policy,
    key: str,
    sender: object,
    entry_point: EntryPoint,
) -> Operation | None:
    """Return the operation of a request that is only watched; ``None`` if it has no scope. ``key`` may be empty."""
    scope = _scope(request, policy)
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


def _refuse_unfit(key: str, policy: Policy) -> None:
    if len(key) < policy.keys.min_length:
        raise MalformedKey(
            gettext_noop(
                "The idempotency key has %(length)d characters; this operation requires at least %(least)d."
            ),
            length=len(key),
            least=policy.keys.min_length,
        )
    if policy.keys.pattern is not None and not policy.keys.pattern.fullmatch(key):
        raise MalformedKey(
            gettext_noop(
                "The idempotency key %(key)s does not match %(pattern)s, which this operation requires."
            ),
            key=ascii(key),
            pattern=policy.keys.pattern.pattern,
        )


def _warn_of_missing_scope(effect: str, sender: object) -> None:
    """Log that a caller has no scope, once for each view."""
    view = dotted_name(sender)
    if not is_due(f"scope_missing {view}", every=math.inf):
        return
    log(
        logging.WARNING,
        "scope_missing",
        "%s: a key %s, because its caller is not a user with a primary key. If such callers are authenticated, for "
        "example by an API key, set a scope in the view's policy: a callable that takes the request and returns the id "
        "of the caller's account.",
        view,
        effect,
    )


def _ignores_anonymous(policy: Policy, entry_point: EntryPoint | None) -> bool:
    if policy.anonymous is None:
        return entry_point == EntryPoint.MIDDLEWARE
    return policy.anonymous == "ignore"


def _scope(caller: HttpRequest, policy: Policy) -> str | None:
    if callable(policy.scope):
        scope = _returned(policy.scope(caller), policy.scope)
    else:
        scope = policy.scope or default_scope(caller, policy)
    if not scope:
        return None
    if UNSTORABLE.search(scope):
        raise MalformedKey(
            gettext_noop(
                "The scope %(scope)s of this request contains a character that can't be stored."
            ),
            scope=ascii(scope),
        )
    if not callable(policy.scope) or isinstance(scope, BuiltInScope):
        return str(scope)
    _refuse_credentials(scope, caller)
    return CUSTOM + scope


def _returned(scope: object, function: Callable[..., object]) -> str | None:
    if scope is None or isinstance(scope, str):
        return scope
    if isinstance(scope, int | UUID) and not isinstance(scope, bool):
        return str(scope)
    raise ImproperlyConfigured(
        f"The scope callable {dotted_name(function)} returned {type(scope).__qualname__}. Return a string, an int or a "
        "UUID that stays the same for a caller, or None for a caller who may not use keys."
    )


def _refuse_credentials(scope: str, caller: HttpRequest) -> None:
    """Raise ``ImproperlyConfigured`` for a scope that contains the request's credentials, which would be stored."""
    header = caller.META.get("HTTP_AUTHORIZATION", "")
    _scheme, _space, credentials = header.partition(" ")
    if any(
        len(secret) >= SHORTEST_SECRET and secret in scope
        for secret in (header, credentials.strip())
    ):
        raise ImproperlyConfigured(
            "The scope callable returns the credentials of the Authorization header, and scopes are stored in clear "
            "text. Return something that stays the same when they are renewed, such as the id of the user or the "
            "account."
        )


def default_scope(caller: HttpRequest, policy: Policy) -> str | None:
    """Return the scope of a request whose policy sets none, which is that of its caller."""
    return caller_scope(
        caller, None if callable(policy.using) else engine.alias(policy)
    )


def _permits(
    caller: HttpRequest, policy: Policy
) -> Callable[[StoredRecord], object] | None:
    if policy.may_replay is None:
        return None
    ask: Any = policy.may_replay
    return partial(async_to_sync(ask) if is_async(ask) else ask, caller)


def fingerprint_of(
    request: HttpRequest,
    caller: HttpRequest,
    policy: Policy,
    *,
    leave_out: Collection[str] = (),
) -> bytes:
    """Return the fingerprint of ``request`` as ``policy`` has it. ``leave_out``: more fields that don't count."""
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
        len(request.body)
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
    """Return how many bytes a form's parser has got from the server; ``stated`` if none has read, or none counts."""
    position: int = getattr(getattr(request, "_stream", None), "_pos", 0)
    return position or stated
