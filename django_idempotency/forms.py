"""Plain HTML forms: a double click, a reload or the back button submits a form once.

The form carries a signed key, made anew whenever it is rendered: ``{% idempotency_key %}``. Its view takes
``@idempotent_form``.
"""

from __future__ import annotations

import base64
import hmac
import json
import secrets
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

from django.contrib import messages
from django.core.exceptions import SuspiciousOperation
from django.core.signing import BadSignature, Signer
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from django_idempotency import fingerprints
from django_idempotency.conf import conf, max_fields, resolve
from django_idempotency.decorators import idempotent
from django_idempotency.http.requests import default_scope
from django_idempotency.http.responses import REPLAYED
from django_idempotency.policy import OnConflict, Policy
from django_idempotency.scopes import BuiltInScope

V = TypeVar("V", bound=Callable[..., HttpResponseBase])

FIELD = "idempotency_key"
NOT_CONTENT = (FIELD, "csrfmiddlewaretoken")
# Messages of the first submission, for its replays; never sent to a client.
MESSAGES = "X-Idempotency-Messages"

_signer = Signer(salt="django_idempotency.forms")


def new_form_key() -> str:
    """Return a new key for one rendering of a form, signed so that it can't be forged."""
    return _signer.sign(secrets.token_urlsafe(16))


def idempotent_form(view: V | None = None, /, **options: Any) -> Any:
    """Run the view of a form once for each rendering of the form and each content, and replay its response.

    ``options`` are those of ``Policy``. A second submission waits for the first, up to ``wait_timeout`` seconds, and
    gets the same redirect with the same messages and cookies. Other content under the same key, as after the back
    button, is another submission. A form without the field runs as if there were no decorator. A key in the header has
    the scope of ``Policy``, so anonymous callers can't send one. Stands below decorators that authenticate and above
    ``@transaction.atomic``.

    Raises ``SuspiciousOperation``, for which Django returns 400, for a key that this project has not signed.
    """
    if view is None:
        return partial(idempotent_form, **options)
    policy: dict[str, Any] = {"on_conflict": OnConflict.WAIT, "store_cookies": True, **options}
    keeping = _keeping_messages(view)
    by_header = idempotent(**policy)(keeping)
    own_keys = {"key_pattern": None, "min_key_length": 1}  # which this module makes
    of_field = {"scope": partial(_scope, using=options.get("using")), **policy, **own_keys}
    by_field = idempotent(**of_field)(keeping)

    @wraps(by_field)
    def submit(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        protected = by_field if _take_key(request) else by_header
        response = protected(request, *args, **kwargs)
        _restore_messages(request, response)
        return response

    return submit


def _scope(request: HttpRequest, using: str | None) -> BuiltInScope:
    """The user's scope, or one for all anonymous callers, whose signed keys are known only to the page's reader."""
    return BuiltInScope(default_scope(request, resolve(Policy(using=using))) or "form")


def _take_key(request: HttpRequest) -> bool:
    """Whether the form has a key. A key in a header is not signed, so it gets no scope that callers share."""
    header = conf().meta_name
    if request.method != "POST" or header in request.META or not (signed := request.POST.get(FIELD)):
        return False
    try:
        token = _signer.unsign(signed)
    except BadSignature as error:
        if not conf().protects:  # nothing is refused
            return False
        raise SuspiciousOperation("The form's idempotency key is not signed by this project.") from error
    content = fingerprints.fingerprint(request, exclude=NOT_CONTENT, max_fields=max_fields())
    # Under the signature, which no record has: the content can't be guessed from the key.
    digest = hmac.digest(signed.encode(), content, "sha256")
    request.META[header] = f'"{token}-{digest.hex()[:32]}"'
    return True


def _keeping_messages(view: V) -> Callable[..., HttpResponseBase]:
    @wraps(view)
    def run(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        response = view(request, *args, **kwargs)
        if added := getattr(getattr(request, "_messages", None), "_queued_messages", None):
            told = [(message.level, str(message.message), message.extra_tags) for message in added]
            response.headers[MESSAGES] = base64.b64encode(json.dumps(told).encode()).decode()
        return response

    return run


def _restore_messages(request: HttpRequest, response: HttpResponseBase) -> None:
    told = response.headers.get(MESSAGES)
    response.headers.pop(MESSAGES, None)
    if told and REPLAYED in response.headers and hasattr(request, "_messages"):
        for level, message, tags in json.loads(base64.b64decode(told)):
            messages.add_message(request, level, message, extra_tags=tags or "")
