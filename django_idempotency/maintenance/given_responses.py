"""The responses that operators give by hand: what they may be, and what makes them harmless."""

from __future__ import annotations

from dataclasses import replace

from django_idempotency.conf import conf
from django_idempotency.http.responses import WITHOUT_BODY, may_be_stored
from django_idempotency.values.outcomes import StoredResponse, is_storable

# The body was typed by an operator, so a browser must not run anything in it.
HARMLESS = (("Content-Security-Policy", "sandbox"), ("X-Content-Type-Options", "nosniff"))


def harmless(response: StoredResponse) -> StoredResponse:
    return replace(response, headers=(*response.headers, *HARMLESS))


def check_given(response: StoredResponse) -> None:
    """Raise ``ValueError`` if an operator can't give this response."""
    if not 200 <= response.status <= 599:
        raise ValueError(f"status is {response.status}; it must be from 200 to 599.")
    if not is_storable(response):
        raise ValueError("The response has a header that can't be sent, or a body that is not bytes.")
    if response.body and response.status in WITHOUT_BODY:
        raise ValueError(f"A response with status {response.status} has no body.")
    if unstored := [name for name, _value in response.headers if not may_be_stored(name)]:
        raise ValueError(f"The response has the header {unstored[0]}, which is never stored.")
    kinds = [value for name, value in response.headers if name.lower() == "content-type"]
    if response.body and not (kinds and all(map(may_be_given, kinds))):
        raise ValueError(
            f"The response is {' and '.join(kinds) or 'of no type'}, which RESOLVE_CONTENT_TYPES does not allow."
        )


def may_be_given(content_type: str) -> bool:
    """Whether ``RESOLVE_CONTENT_TYPES`` allows this content type for an operator's own response."""
    kind = content_type.partition(";")[0].strip().lower()
    return ("application/json" if kind.endswith("+json") else kind) in conf().resolve_content_types
