"""HTML forms: a form is submitted once, despite a double click, a reload or the back
button.

The form has a signed key, which is new for each rendering: ``{% idempotency_key %}``.
Decorate its view with ``@idempotent_form``.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial, wraps
from typing import Any, NoReturn

from django.contrib import messages
from django.contrib.messages.storage.cookie import MessageDecoder, MessageEncoder
from django.core.exceptions import ImproperlyConfigured, SuspiciousOperation
from django.core.signing import BadSignature, Signer
from django.http import HttpRequest
from django.http.response import HttpResponseBase
from django.utils.cache import patch_cache_control

from django_idempotency.conf import conf, resolve
from django_idempotency.http import ninja
from django_idempotency.http.key_sources import has_key
from django_idempotency.http.placement import idempotent
from django_idempotency.http.requests import default_scope, fingerprint_of
from django_idempotency.http.responses import REPLAYED
from django_idempotency.values.outcomes import StoredResponse, dotted_name
from django_idempotency.values.policy import (
    Decorator,
    Key,
    Policy,
    Redact,
    Using,
    is_async,
)
from django_idempotency.values.scopes import BuiltInScope

FIELD = "idempotency_key"
NOT_CONTENT = (FIELD, "csrfmiddlewaretoken")
# Carries the messages of the first submission to its replays. It is never sent to a
# client.
MESSAGES = "X-Idempotency-Messages"

FORM_DEFAULTS = Policy(wait=10, store_cookies=True)

_signer = Signer(salt="django_idempotency.forms")
_submitted: ContextVar[HttpRequest] = ContextVar("_submitted")


def new_form_key() -> str:
    """Return a new key for one rendering of a form, signed so that it can't be
    forged.
    """
    return _signer.sign(secrets.token_urlsafe(16))


def _submitted_once(
    view: Callable[..., HttpResponseBase], policy: Policy
) -> Callable[..., HttpResponseBase]:
    if is_async(view):
        raise ImproperlyConfigured(
            f"{dotted_name(view)} is async, and @idempotent_form works only on sync"
            " views."
        )
    stated, policy = policy, policy.over(FORM_DEFAULTS)
    by_header = idempotent(policy=_OfForm(**policy.stated))(view)
    in_scope = policy.over(Policy(scope=partial(_scope, using=stated.using)))
    # this module makes the keys
    own = in_scope.derive(
        key=ANY_KEY, echo_key=False, fingerprint=partial(_content, stated)
    )
    by_field = idempotent(policy=_OfForm(**own.stated))(view)

    @wraps(by_field)
    def submit(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        protected = by_field if _take_key(request, stated) else by_header
        _have_messages_be_text(request)
        before = _submitted.set(request)
        try:
            response = protected(request, *args, **kwargs)
        finally:
            _submitted.reset(before)
        _restore_messages(request, response)
        patch_cache_control(response, private=True)  # a page of the form has a key
        return response

    setattr(submit, ninja.CONTRIBUTIONS, [partial(_refuse_operation, view)])
    return submit


idempotent_form = Decorator(Policy, _submitted_once, "idempotent_form")
"""Run the view of a form once for each rendering of the form and each content, and
replay its response.

Write ``@idempotent_form``, or ``@idempotent_form(…)`` with any options of ``Policy``. A
second submission waits for the first, up to ``wait`` seconds, 10 by default, and gets
the same redirect with the same messages and cookies. The same key with other content,
for example after the back button, is a new submission. A form without the field is
handled as if there were no decorator. A key in the header has the scope of ``Policy``,
so anonymous callers can't send one. Put the decorator below decorators that
authenticate and above ``@transaction.atomic``.

Raises ``SuspiciousOperation``, for which Django returns 400, if this project has not
signed the key, and ``ImproperlyConfigured`` for an async view and for an operation of
Django Ninja.
"""


FORM_KEY = "_idempotency_form_key"


def _form_key(request: Any) -> str | None:
    return getattr(request, FORM_KEY, None)


ANY_KEY = Key(source=_form_key, pattern=None, min_length=1, strict=False)


class _OfForm(Policy):
    """A policy that stores the form's messages too, and redacts all of it as the policy
    in force says.
    """

    def over(self, defaults: Any) -> Any:
        policy = super().over(defaults)
        return policy.derive(
            body=policy.body.derive(redact=partial(_with_messages, policy.body.redact))
        )


def _refuse_operation(view: Any, *_operation: Any) -> NoReturn:
    raise ImproperlyConfigured(
        f"@idempotent_form is on {dotted_name(view)}, an operation of Django Ninja,"
        " which does not read the form's key. Use @idempotent."
    )


def _scope(request: HttpRequest, using: str | Using | None) -> BuiltInScope:
    """Return the user's scope, or that of an anonymous visitor's CSRF cookie: a cache
    may show a key to several.
    """
    cookie = request.META.get("CSRF_COOKIE")
    visitor = (
        f"form:{hashlib.sha256(cookie.encode()).hexdigest()[:32]}" if cookie else "form"
    )
    return BuiltInScope(default_scope(request, resolve(Policy(using=using))) or visitor)


def _content(stated: Policy, caller: HttpRequest) -> bytes:
    """Digest what was submitted, without the fields that are new in each rendering."""
    # REST framework's request has Django's inside
    request = getattr(caller, "_request", caller)
    return fingerprint_of(request, caller, resolve(stated), leave_out=NOT_CONTENT)


def _take_key(request: HttpRequest, stated: Policy) -> bool:
    """Note the form's key; return whether there is one.

    The key of the policy is not signed, so it must not get the scope of an anonymous
    visitor.
    """
    if (
        request.method != "POST"
        or has_key(request, resolve(stated))
        or not (signed := request.POST.get(FIELD))
    ):
        return False
    try:
        token = _signer.unsign(signed)
    except BadSignature as error:
        if not conf().protects:  # nothing is refused
            return False
        raise SuspiciousOperation(
            "The form's idempotency key is not signed by this project."
        ) from error
    # Keyed with the signature, which no record contains, so that the content can't be
    # guessed from the key.
    digest = hmac.digest(signed.encode(), _content(stated, request), "sha256")
    setattr(request, FORM_KEY, f"{token}-{digest.hex()[:32]}")
    return True


def _with_messages(redact: Redact | None, response: StoredResponse) -> StoredResponse:
    storage: Any = getattr(_submitted.get(None), "_messages", None)
    if added := getattr(storage, "_queued_messages", None):
        storage._prepare_messages(added)  # as before they are stored
        encoded = base64.b64encode(
            json.dumps(added, cls=MessageEncoder).encode()
        ).decode()
        response = replace(response, headers=(*response.headers, (MESSAGES, encoded)))
    return response if redact is None else redact(response)


def _have_messages_be_text(request: HttpRequest) -> None:
    """Make each message text when it is added: an object's text may need a query, which
    redaction must not make.
    """
    storage: Any = getattr(request, "_messages", None)
    if storage is not None:
        add = storage.add
        storage.add = lambda level, message, extra_tags="": add(
            level, str(message), extra_tags
        )


def _restore_messages(request: HttpRequest, response: HttpResponseBase) -> None:
    encoded = response.headers.get(MESSAGES)
    response.headers.pop(MESSAGES, None)
    if encoded and REPLAYED in response.headers and hasattr(request, "_messages"):
        for message in json.loads(base64.b64decode(encoded), cls=MessageDecoder):
            messages.add_message(
                request,
                message.level,
                message.message,
                extra_tags=message.extra_tags or "",
            )
