"""Incoming webhooks: a view that handles each event once, by the id that its sender gave it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from standardwebhooks import Webhook, WebhookVerificationError

from django_idempotency.conf import resolve
from django_idempotency.engine import Context
from django_idempotency.http.placement import idempotency_exempt
from django_idempotency.http.transactions import take_over_atomic_requests
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
ACCEPTED_FOR = 10 * 60  # seconds: a time may be five minutes off, in either direction


class NotVerified(Exception):
    """The request was not sent by the sender that it names, or was sent too long ago."""


def standard_webhook(*secrets: str) -> Verify:
    """Return a ``verify`` for senders that follow the Standard Webhooks specification.

    ``secrets``: ``whsec_…``, more than one while a secret is being replaced. ``verify`` raises ``NotVerified`` if the
    signature does not match, or its time is more than five minutes off.
    https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
    """
    webhooks = [Webhook(secret) for secret in secrets]

    def verify(request: HttpRequest) -> str:
        for webhook in webhooks:
            try:
                webhook.verify(request.body, dict(request.headers), json_parse=False)
            except (
                WebhookVerificationError,
                ValueError,
            ):  # ValueError: malformed signatures and bodies
                continue
            return request.headers["webhook-id"]
        raise NotVerified

    verify.accepts_for = ACCEPTED_FOR  # type: ignore[attr-defined]
    return verify


@method_decorator(csrf_exempt, name="dispatch")
class WebhookView(View):
    """Handles each event once.

    ``source``: the sender, which is part of the key.
    ``handle(message, context)``: the method that does the work. An exception rolls back, and the sender tries again.
        ``RejectMessage`` is final.
    ``verify``: called with the request before anything is claimed. Returns the event's id, or raises ``NotVerified``.

    The response to an event that was handled, and to its duplicates, is 200. It is 401 if the event is not verified,
    400 if it has no usable id or another body than before, and 422 if it can never be handled. It is 409 while the
    event is handled elsewhere, and 503 if handling failed, the event is on hold or the store is unavailable; both
    have a ``Retry-After``. Only the body is compared, no headers.
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
                f"{cls.__qualname__} has no {' and no '.join(missing)}: set it on the class."
            )
        retention = resolve(initkwargs.get("policy", cls.policy) or Policy()).retention
        accepts_for = getattr(initkwargs.get("verify", cls.verify), "accepts_for", 0)
        if retention < accepts_for:
            raise ImproperlyConfigured(
                f"{cls.__qualname__}: its retention of {retention:g} s is shorter than the {accepts_for} s for which a "
                "signature is accepted, so an event could be sent and handled again. Lengthen retention in its policy."
            )
        return take_over_atomic_requests(
            idempotency_exempt(super().as_view(**initkwargs))
        )

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            verify: Verify = vars(self).get(
                "verify", type(self).verify
            )  # as_view() may have been given another
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
