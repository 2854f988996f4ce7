"""Calls of functions: by which key each is known, and what of it is compared. Pure."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime
from decimal import Context, Decimal
from string import Formatter
from typing import Any
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder

from django_idempotency.values.outcomes import dotted_name
from django_idempotency.values.policy import Policy
from django_idempotency.values.rules import nearest

KeyBy = str | Callable[..., Any]

_WITH_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PARTS = "text, integers, UUIDs, dates and saved objects"


class Keying:
    """How calls of ``function`` get their keys.

    ``key``: a template over the arguments, such as ``"invoice-{invoice_id}"``, or a
    callable that takes the function's arguments. The parts of a key are text, integers,
    UUIDs, dates, or saved objects, whose primary key is taken. ``also``: further names
    that a template may use. Raises ``ImproperlyConfigured`` for a wrong template, and
    if ``policy`` states no ``retention``: a key of data that is forgotten after a day
    would run again.
    """

    def __init__(
        self,
        key: KeyBy,
        function: Callable[..., Any],
        policy: Policy,
        *,
        also: Iterable[str] = (),
    ) -> None:
        self.key, self.function = key, function
        self.what = f"The key of {dotted_name(function)}"
        if "retention" not in policy.stated:
            raise ImproperlyConfigured(
                f"{self.what} needs a retention: set retention to seconds, to a"
                " timedelta, or to None, to remember keys for good."
            )
        if isinstance(key, str):
            self._check_template(key, {*inspect.signature(function).parameters, *also})
        elif not callable(key):
            raise ImproperlyConfigured(
                f"{self.what} is {key!r}; it must be a template, such as"
                ' "invoice-{invoice_id}", or a callable.'
            )

    def of(self, args: Iterable[Any], kwargs: Mapping[str, Any], **also: object) -> str:
        """Return the key of a call. Raises ``ValueError`` if a part of it is wrong, and
        ``TypeError`` for arguments that the function does not take.
        """
        if not isinstance(self.key, str):
            return self._part("it", self.key(*args, **kwargs))
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        bound.apply_defaults()
        known = {**also, **bound.arguments}
        return "".join(
            text + ("" if name is None else self._part(name, known[name]))
            for text, name, _format, _conversion in Formatter().parse(self.key)
        )

    def _check_template(self, key: str, known: set[str]) -> None:
        try:
            fields = [
                (name, format_spec or conversion)
                for _text, name, format_spec, conversion in Formatter().parse(key)
                if name is not None
            ]
        except ValueError as error:
            raise ImproperlyConfigured(f"{self.what}, {key!r}: {error}.") from None
        for name, more in fields:
            if more or not name.isidentifier():
                raise ImproperlyConfigured(
                    f"{self.what}, {key!r}: {{{name}}} must be the plain name of an"
                    " argument, such as {invoice_id}. For more, pass a callable."
                )
            if name not in known:
                raise ImproperlyConfigured(
                    f"{self.what}, {key!r}: there is no argument {name!r};"
                    f" {nearest(name, known)}"
                )
        if not fields:
            raise ImproperlyConfigured(
                f"{self.what}, {key!r}, names no argument: all calls would share one"
                ' key. Write {…} around a name, such as "invoice-{invoice_id}", or pass'
                " a callable."
            )

    def _part(self, name: str, value: Any) -> str:
        part = value
        if _is_saved(value):
            part = value.pk
        if isinstance(part, datetime):
            part = _in_utc(part)
        if isinstance(part, str) and part:
            return str.__str__(part)
        if isinstance(part, int) and not isinstance(part, bool):
            return str(int(part))
        if isinstance(part, UUID):
            return str(part)
        if isinstance(part, date):
            return part.isoformat()
        raise ValueError(
            f"{self.what}: {name} is {value!r:.100}; a key is made of {_PARTS}."
        )


def arguments_of(
    function: Callable[..., Any],
    args: Iterable[Any],
    kwargs: Mapping[str, Any],
    *,
    but: int = 0,
) -> bytes:
    """Return the arguments of a call for comparison, by name, whichever way they were
    passed. ``but``: how many of the first to leave out.

    Raises ``ValueError`` for one that no other process could recognise.
    """
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
        named = list(bound.arguments.items())[but:]
    except (TypeError, ValueError):  # a decorator may pass others on
        named = [("args", [*args][but:]), ("kwargs", kwargs)]
    return json.dumps(
        {name: _comparable(name, value, function) for name, value in named}
    ).encode()


def _comparable(name: str, value: Any, function: Callable[..., Any]) -> Any:
    try:
        try:
            return json.loads(json.dumps(value, cls=_Encoder))
        except (TypeError, ValueError):
            # a dictionary's keys, or a value that contains itself
            return _stable(repr(value))
    except _Unstable as error:
        raise ValueError(
            f"{dotted_name(function)}: the argument {name} contains {error}, which"
            " can't be compared with that of another call. Pass plain values or saved"
            " objects."
        ) from None


def _is_saved(value: Any) -> bool:
    """Whether ``value`` is an object that is in the database. A model's class and its
    forms are none.
    """
    return not getattr(getattr(value, "_state", None), "adding", True)


def _in_utc(moment: datetime) -> datetime:
    return moment if moment.tzinfo is None else moment.astimezone(UTC)


class _Unstable(Exception):
    """The representation of an object is another one in each process."""


def _stable(text: str) -> str:
    if _WITH_ADDRESS.search(text):
        raise _Unstable(f"{text:.100}")
    return text


class _Encoder(DjangoJSONEncoder):
    def default(self, value: Any) -> Any:
        if _is_saved(value):
            return [value._meta.label, str(value.pk)]
        if isinstance(value, set | frozenset):
            return sorted(_stable(repr(each)) for each in value)
        if isinstance(value, datetime):
            value = _in_utc(value)
        if isinstance(value, Decimal) and value.is_finite():
            # the same with and without the zeros at its end, which a database adds
            digits = len(value.as_tuple().digits)
            value = value.normalize(Context(prec=digits))
        try:
            return super().default(value)
        except TypeError:
            return value.hex() if isinstance(value, bytes) else _stable(repr(value))
