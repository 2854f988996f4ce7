"""Incoming webhooks: a view that handles each event once, by the id that its sender
gave it.
"""

from __future__ import annotations

import base64
import hmac
import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from inspect import Parameter, signature
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt

from django_idempotency.conf import resolve
from django_idempotency.engine import Context
from django_idempotency.http.placement import idempotency_exempt
from django_idempotency.http.transactions import without_atomic_requests
from django_idempotency.messages.consumer import Consumer
from django_idempotency.messages.message import (
    Ack,
    InFlightElsewhere,
    Malformed,
    Message,
    RetryLater,
)
from django_idempotency.values.policy import Policy

Verify = Callable[[HttpRequest], str]
TOLERANCE = 5 * 60  # seconds
POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
ACCEPTED_FOR = 2 * TOLERANCE  # a time may be off in either direction


class NotVerified(Exception):
    """The request was not sent by the sender that it names, or was sent too long
    ago.
    """


def standard_webhook(*secrets: str) -> Verify:
    """Return a ``verify`` for senders that follow the Standard Webhooks specification.

    ``secrets``: ``whsec_…``, more than one while a secret is being replaced. ``verify``
    raises ``NotVerified`` if the signature does not match, or its time is more than
    five minutes off. Raises ``ImproperlyConfigured`` for what is not a secret.
    https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
    """
    keys = [*map(_decoded, _refuse_empty("standard_webhook", secrets))]

    def verify(request: HttpRequest) -> str:
        id, at = _header(request, "webhook-id"), _header(request, "webhook-timestamp")
        words = _header(request, "webhook-signature").split()
        sent = [word.removeprefix(b"v1,") for word in words if word.startswith(b"v1,")]
        content = b".".join([id, at, request.body])
        made = [base64.b64encode(hmac.digest(key, content, "sha256")) for key in keys]
        if not (_is_recent(at) and _has_one_of(made, sent)):
            raise NotVerified
        return id.decode()

    verify.accepts_for = ACCEPTED_FOR  # type: ignore[attr-defined]
    return verify


def stripe_webhook(*secrets: str) -> Verify:
    """Return a ``verify`` for Stripe, whose id is that of the event.

    ``secrets`` and errors: as for ``standard_webhook``; signatures are accepted for the
    same time. https://docs.stripe.com/webhooks#verify-manually
    """
    keys = [it.encode() for it in _refuse_empty("stripe_webhook", secrets)]

    def verify(request: HttpRequest) -> str:
        pairs = [
            pair.strip().partition(b"=")
            for pair in _header(request, "Stripe-Signature").split(b",")
        ]
        at = next((value for name, _, value in pairs if name == b"t"), b"")
        sent = [value for name, _, value in pairs if name == b"v1"]
        content = b".".join([at, request.body])
        if not (_is_recent(at) and _has_one_of(_hexadecimal(keys, content), sent)):
            raise NotVerified
        with suppress(ValueError, TypeError, LookupError):
            if isinstance(id := json.loads(request.body)["id"], str):
                return id
        return ""  # is refused as no usable id

    verify.accepts_for = ACCEPTED_FOR  # type: ignore[attr-defined]
    return verify


def github_webhook(*secrets: str) -> Verify:
    """Return a ``verify`` for GitHub, whose id is ``X-GitHub-Delivery``.

    ``secrets`` and errors: as for ``standard_webhook``. The signature has no time, so
    it never expires, and does not cover the id.
    https://docs.github.com/en/webhooks/using-webhooks/validating-webhook-deliveries
    """
    keys = [it.encode() for it in _refuse_empty("github_webhook", secrets)]

    def verify(request: HttpRequest) -> str:
        sent = _header(request, "X-Hub-Signature-256")
        made = [b"sha256=" + it for it in _hexadecimal(keys, request.body)]
        if not _has_one_of(made, [sent]):
            raise NotVerified
        return _header(request, "X-GitHub-Delivery").decode()

    return verify


def _refuse_empty(verifier: str, secrets: tuple[str, ...]) -> tuple[str, ...]:
    # anybody can sign with an empty one
    if secrets and all(isinstance(it, str) and it.strip() for it in secrets):
        return secrets
    raise ImproperlyConfigured(f"{verifier}() takes secrets, non-empty strings.")


def _decoded(secret: str) -> bytes:
    with suppress(ValueError):
        encoded = secret.removeprefix("whsec_")
        if key := base64.b64decode(encoded, validate=True):
            return key
    raise ImproperlyConfigured(
        "standard_webhook() takes secrets of the form whsec_ and base64; one has"
        " another form."
    )


def _header(request: HttpRequest, name: str) -> bytes:
    return request.headers.get(name, "").encode("utf-8", "replace")


def _hexadecimal(keys: list[bytes], content: bytes) -> list[bytes]:
    return [hmac.digest(key, content, "sha256").hex().encode() for key in keys]


def _is_recent(at: bytes) -> bool:
    try:
        return abs(time.time() - int(at)) <= TOLERANCE
    except (ValueError, OverflowError):
        return False


def _has_one_of(made: list[bytes], sent: list[bytes]) -> bool:
    return any(hmac.compare_digest(one, other) for one in made for other in sent)


@method_decorator(csrf_exempt, name="dispatch")
class WebhookView(View):
    """Handles each event once.

    ``source``: the sender, which is part of the key. ``handle(message, context)``: the
    method that does the work. An exception rolls back, and the sender tries again.
    ``RejectMessage`` is final. ``verify``: called with the request before anything is
    claimed. Returns the event's id, or raises ``NotVerified``.

    The response to an event that was handled, and to its duplicates, is 200. It is 401
    if the event is not verified, 400 if it has no usable id or a different body than
    before, and 422 if it can never be handled. It is 409 while the event is handled
    elsewhere, and 503 if handling failed, the event is on hold or the store is
    unavailable; both have a ``Retry-After``. Only the body is compared, no headers.
    """

    source: ClassVar[str]
    verify: ClassVar[Verify]
    handle: Callable[[Message, Context], Any]
    policy: ClassVar[Policy | None] = None
    max_attempts: ClassVar[int] = 1_000_000  # the sender knows when to give up

    @classmethod
    def as_view(cls, **initkwargs: Any) -> Callable[..., HttpResponseBase]:
        if missing := [
            name for name in ("source", "verify", "handle") if not hasattr(cls, name)
        ]:
            raise ImproperlyConfigured(
                f"{cls.__qualname__} has no {' and no '.join(missing)}: set it on the"
                " class."
            )
        retention = resolve(initkwargs.get("policy", cls.policy) or Policy()).retention
        accepts_for = getattr(initkwargs.get("verify", cls.verify), "accepts_for", 0)
        if retention < accepts_for:
            raise ImproperlyConfigured(
                f"{cls.__qualname__}: its retention of {retention:g} s is shorter than"
                f" the {accepts_for} s for which a signature is accepted, so an event"
                " could be sent and handled again. Lengthen retention in its policy."
            )
        return without_atomic_requests(
            idempotency_exempt(super().as_view(**initkwargs))
        )

    def _verifier(self) -> Verify:
        """Return the class's ``verify``, a function of the request or a method."""
        verify: Any = type(self).verify
        needed = [
            parameter
            for parameter in signature(verify).parameters.values()
            if parameter.kind in POSITIONAL and parameter.default is Parameter.empty
        ]
        return partial(verify, self) if len(needed) > 1 else verify

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            # as_view() may have been given another
            verify: Verify = vars(self).get("verify") or self._verifier()
            id = verify(request)
        except NotVerified:
            return JsonResponse({"detail": "The signature does not match."}, status=401)
        headers = {name.lower(): value for name, value in request.headers.items()}
        options: Any = {
            "policy": self.policy,
            "max_attempts": self.max_attempts,
            "sender": type(self),
        }
        consumer = Consumer("webhooks", self.handle, **options)
        match delivery := consumer.consume(
            Message(self.source, id, request.body, headers)
        ):
            case Ack():
                return HttpResponse(status=200)
            case RetryLater(delay=delay):
                status = 409 if isinstance(delivery, InFlightElsewhere) else 503
                return JsonResponse(
                    {},
                    status=status,
                    headers={"Retry-After": str(max(1, math.ceil(delay)))},
                )
        status = 400 if isinstance(delivery, Malformed) else 422
        return JsonResponse({"detail": delivery.reason}, status=status)
