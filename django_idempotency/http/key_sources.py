"""Where the key of a request is: in a header, in a field of its body, or where a
project's callable finds it.
"""

from __future__ import annotations

import json
from copy import copy
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured, SuspiciousOperation
from django.http import HttpRequest, RawPostDataException
from django.http.multipartparser import MultiPartParserError
from django.utils.datastructures import MultiValueDict
from django.utils.translation import gettext_noop

from django_idempotency.conf import max_body_in_memory
from django_idempotency.values.exceptions import MalformedKey, MissingKey
from django_idempotency.values.fingerprints import fields_at, is_json, posted
from django_idempotency.values.keys import parse_key, usable
from django_idempotency.values.outcomes import dotted_name
from django_idempotency.values.policy import Key, Policy

# An attribute of requests: what is called instead of claiming its ``key``. It returns
# what the caller gets, and the handler is not run.
LOOKUP = "_idempotency_lookup"
FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


def key_of(request: HttpRequest, policy: Policy, caller: Any = None) -> str | None:
    """Return the key of ``request``; ``None`` without one.

    ``caller``: the request as the view's framework has authenticated it, for a
    callable. Raises ``MalformedKey`` for what is not a key of this policy, and
    ``ImproperlyConfigured`` for what a callable may not return.
    """
    key = policy.key
    if callable(source := key.source):
        returned = identifier(source(caller or request), source, "key")
        found = None if returned is None else usable(returned)
    else:
        header = request.META.get(key.meta_name)
        found = None if header is None else parse_key(header, source, key.strict)
    if found is not None:
        _refuse_unfit(found, key)
    return found


def identifier(value: object, function: object, what: str) -> str | None:
    """Return the scope or key that a project's ``function`` has returned, as text.

    Raises ``ImproperlyConfigured`` if it can't be one.
    """
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int | UUID) and not isinstance(value, bool):
        return str(value)
    raise ImproperlyConfigured(
        f"The {what} callable {dotted_name(function)} returned"
        f" {type(value).__qualname__}. Return a string, an int or a UUID, the same for"
        f" every retry, or None if there is no {what}."
    )


def has_key(request: HttpRequest, policy: Policy) -> bool:
    """Whether ``request`` has a key, usable or not. A body that was read counts as
    having one.
    """
    try:
        return hasattr(request, LOOKUP) or key_of(request, policy) is not None
    except (MalformedKey, RawPostDataException):
        return True


def missing(policy: Policy) -> MissingKey:
    """Return the error that says where this policy expects a key."""
    if isinstance(source := policy.key.source, str):
        where = gettext_noop(
            "Generate a key for the operation, send it in the header %(name)s, and"
            " send the same key with every retry."
        )
        return MissingKey(where, name=source)
    if not isinstance(source, BodyField):
        return MissingKey()
    where = gettext_noop(
        "The key is the field %(name)s of the body. Send it, and send the same key"
        " with every retry."
    )
    return MissingKey(where, name=source.name)


def _refuse_unfit(key: str, rules: Key) -> None:
    if len(key) < rules.min_length:
        raise MalformedKey(
            gettext_noop(
                "The idempotency key has %(length)d characters; this operation requires"
                " at least %(least)d."
            ),
            length=len(key),
            least=rules.min_length,
        )
    if rules.pattern is not None and not rules.pattern.fullmatch(key):
        raise MalformedKey(
            gettext_noop(
                "The idempotency key %(key)s does not match %(pattern)s, which this"
                " operation requires."
            ),
            key=ascii(key),
            pattern=rules.pattern.pattern,
        )


def has_moderate_body(request: HttpRequest) -> bool:
    """Whether the body has a known size that Django keeps in memory."""
    length, most = request.META.get("CONTENT_LENGTH") or "0", max_body_in_memory()
    if "HTTP_TRANSFER_ENCODING" in request.META:
        return False
    return length.isdecimal() and (most is None or int(length) <= most)


# --- Fields of the body ---------------------------------------------------------------


@dataclass(frozen=True)
class BodyField:
    """Finds the key in one field of a JSON object or a form. See ``body_field``."""

    name: str

    def __call__(self, caller: Any) -> str | int | None:
        # REST framework's request has Django's inside
        request = getattr(caller, "_request", caller)
        try:
            found = [value for value in self._values(request) if value is not None]
        except (SuspiciousOperation, MultiPartParserError) as error:
            raise MalformedKey(
                gettext_noop(
                    "The body is too large or malformed, so the idempotency key in its"
                    " field %(name)s can't be read."
                ),
                name=self.name,
            ) from error
        if not found:
            return None
        value, *others = found
        if others or type(value) not in (str, int) or value == "":
            raise MalformedKey(
                gettext_noop(
                    "The field %(name)s of the body is the idempotency key: send it"
                    " once, as a non-empty string or a whole number."
                ),
                name=self.name,
            )
        return value  # type: ignore[no-any-return]

    def _values(self, request: HttpRequest) -> list[Any]:
        """Return what stands in the field. Other bodies than JSON and forms are not
        read.
        """
        if request.content_type in FORMS:
            return self._in_form(request)
        if not is_json(request.content_type or ""):
            return []
        try:
            return fields_at(json.loads(request.body), self.name)
        except (ValueError, RecursionError):  # the view says what is wrong with it
            return []

    def _in_form(self, request: HttpRequest) -> list[Any]:
        parsed = request
        if not hasattr(request, "_post") and has_moderate_body(request):
            # from memory and by a copy: a view may read the stream of a request
            # without a key, or have upload handlers of its own
            _ = request.body
            parsed = copy(request)
            parsed.method = "POST"
        form: Any = posted(parsed).POST
        if not isinstance(form, MultiValueDict):  # by a parser of REST framework
            return fields_at(form, self.name)
        first, *inner = self.name.split(".")
        names = {self.name, first + "".join(f"[{name}]" for name in inner)}
        found = [value for name in names for value in form.getlist(name)]
        if found:  # parsed once
            vars(request).update(_post=form, _files=parsed.FILES)
        return found


def body_field(name: str) -> BodyField:
    """Return a ``key`` for ``Policy`` that is one field of the body, a JSON object or a
    form.

    ``name``: the field; a nested one as ``order.reference``, which in a form is also
    ``order[reference]``. Its value is a string or a whole number. Without the field,
    with ``null`` in it, and in a body of another type, there is no key. The body is
    parsed once, after the view's authentication in REST framework and in Django Ninja.

    Raises ``ValueError`` if the name is empty.
    """
    if not name or not isinstance(name, str):
        raise ValueError(f"body_field takes the name of a field, not {name!r}.")
    return BodyField(name)
