"""From a request to the 32 bytes that say whether a retry is the same request. Pure.

JSON counts by meaning, forms and multipart by field, anything else by its bytes. A body that can't be parsed as what it
is declared to be is still only bytes, and so is one that would cost much more to compare than to parse. Every part is
length-prefixed, so no two requests share an encoding.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable
from copy import copy
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, DecimalException, Inexact, InvalidOperation, Overflow
from typing import Any
from urllib.parse import parse_qsl

from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest

VERSION = b"1"
CHUNK = 64 * 1024
MAX_FIELDS = 1000  # Django's default of DATA_UPLOAD_MAX_NUMBER_FIELDS
MAX_DEPTH = 100  # arrays and objects inside one another; far below what Python's stack has room for
MAX_FRACTIONS = 1000
LONGEST_FRACTION = 1000  # characters
LONGEST_INTEGER = 30  # digits that a number written with a fraction or an exponent may have as an integer

Fields = Iterable[tuple[str, bytes]]


def fingerprint(
    request: HttpRequest,
    *,
    only: Collection[str] | None = None,
    exclude: Collection[str] = frozenset(),
    max_fields: int | None = MAX_FIELDS,
) -> bytes:
    """Return the fingerprint of ``request``'s method, path, query and body.

    ``only`` and ``exclude`` name fields of a JSON object or a form, nested ones as ``card.cvv``; they don't affect
    other bodies. In an array they name the fields of its objects; ``card[cvv]`` in a form is ``card.cvv`` too. A query
    or a form of more than ``max_fields`` fields counts by its bytes; ``None`` is no limit. Errors that Django raises
    while it reads the body (too large, malformed multipart) pass through.
    """
    media_type = request.content_type or ""
    if media_type == "multipart/form-data":
        parts = _form_parts(_multipart_fields(_posted(request)), only, exclude)
    elif media_type == "application/x-www-form-urlencoded":
        parts = _urlencoded_parts(request.body, max_fields, only, exclude)
    elif media_type == "application/json" or media_type.endswith("+json"):
        parts = _json_parts(request.body, only, exclude)
    else:
        parts = [b"raw", request.body]
    query = request.META.get("QUERY_STRING", "").encode("utf-8", "surrogatepass")
    return digest([*_request_line(request), *_urlencoded_parts(query, max_fields, None, ()), b"", *parts])


def of_bytes(request: HttpRequest, identity: bytes) -> bytes:
    """Return the fingerprint of a request whose identity the view itself has worked out."""
    return digest([*_request_line(request), b"view", identity])


def digest(parts: Iterable[bytes]) -> bytes:
    """Return SHA-256 over length-prefixed parts and the version of this scheme."""
    total = hashlib.sha256(VERSION)
    for part in parts:
        total.update(len(part).to_bytes(8, "big"))
        total.update(part)
    return total.digest()


def _request_line(request: HttpRequest) -> list[bytes]:
    return [(request.method or "").encode(), request.path.encode("utf-8", "surrogatepass")]


def _json_parts(body: bytes, only: Collection[str] | None, exclude: Collection[str]) -> list[bytes]:
    try:
        return [b"json", canonical_json(body, Selection(only, exclude).of_json)]
    except ValueError:
        return [b"raw", body]


def _urlencoded_parts(
    encoded: bytes, max_fields: int | None, only: Collection[str] | None, exclude: Collection[str]
) -> list[bytes]:
    try:
        return _form_parts(_urlencoded_fields(encoded, max_fields), only, exclude)
    except ValueError:  # more than max_fields
        return [b"raw", encoded]


def _form_parts(fields: Fields, only: Collection[str] | None, exclude: Collection[str]) -> list[bytes]:
    selection = Selection(only, exclude)
    return [b"form", *_flat(_by_name((name, value) for name, value in fields if selection.has_field(name)))]


def _by_name(fields: Fields) -> Fields:
    """Fields in whatever order, but the values of one field in theirs."""
    return sorted(fields, key=lambda field: field[0])


def _flat(fields: Fields) -> Iterable[bytes]:
    for name, value in fields:
        yield name.encode("utf-8", "surrogatepass")
        yield value


def _urlencoded_fields(encoded: bytes, max_fields: int | None) -> list[tuple[str, bytes]]:
    text = encoded.decode("utf-8", "surrogateescape")
    pairs = parse_qsl(text, keep_blank_values=True, errors="surrogateescape", max_num_fields=max_fields)
    return [(name, value.encode("utf-8", "surrogateescape")) for name, value in pairs]


def _posted(request: HttpRequest) -> HttpRequest:
    """``request`` itself, or as if it were a POST: Django parses the forms of no other method."""
    if request.method == "POST" or hasattr(request, "_post"):
        return request
    _ = request.body  # kept in memory, for the copy and for the view
    posted = copy(request)
    posted.method = "POST"
    return posted


def _multipart_fields(request: HttpRequest) -> Fields:
    for name, values in request.POST.lists():
        yield from ((name, str(value).encode("utf-8", "surrogatepass")) for value in values)
    for name, files in request.FILES.lists():
        for file in files:
            yield name, digest([(file.name or "").encode("utf-8", "surrogatepass"), _file_digest(file)])


def _file_digest(file: UploadedFile[Any]) -> bytes:
    total = hashlib.sha256()
    file.seek(0)
    while chunk := file.read(CHUNK):
        total.update(chunk)
    file.seek(0)
    return total.digest()


# --- Fields ----------------------------------------------------------------------------------------------------------

_BRACKETS = re.compile(r"\[([^\[\]]*)\]")


class Selection:
    """Which fields count: those that ``only`` names, with all that is in them, less those that ``exclude`` names."""

    def __init__(self, only: Collection[str] | None, exclude: Collection[str]) -> None:
        self.only = only
        self.exclude = exclude
        self.above = _above(exclude) | _above(only or ())

    def has_field(self, name: str) -> bool:
        """Return whether the field ``name`` of a form counts."""
        path = _BRACKETS.sub(lambda match: f".{match[1]}" if match[1] else "", name)
        chosen = self.only is None or name in self.only or _is_below(path, self.only)
        return chosen and name not in self.exclude and not _is_below(path, self.exclude)

    def of_json(self, value: Any) -> Any:
        """Return what counts of a JSON value: the value itself, if that is all of it."""
        if isinstance(value, dict) and (self.only is not None or self.exclude):
            kept = self._of_object(value, "", self.only is None)
            return value if kept == value else kept
        return value

    def _of_object(self, value: dict[str, Any], above: str, whole: bool) -> dict[str, Any]:
        kept = {}
        for name, inner in value.items():
            path = above + name
            if path in self.exclude:
                continue
            all_of_it = whole or (self.only is not None and path in self.only)
            if path in self.above and isinstance(inner, dict | list):
                kept[name] = self._inside(inner, path, all_of_it)
            elif all_of_it:
                kept[name] = inner
        return kept

    def _inside(self, value: Any, path: str, whole: bool) -> Any:
        if isinstance(value, list):
            return [self._inside(item, path, whole) for item in value]
        return self._of_object(value, f"{path}.", whole) if isinstance(value, dict) else value


def _is_below(path: str, paths: Iterable[str]) -> bool:
    """Whether ``path`` is one of ``paths``, or inside one. In time linear in its length, which a client chooses."""
    return any(path == above or path.startswith(f"{above}.") for above in paths)


def _above(paths: Iterable[str]) -> set[str]:
    """The paths of what contains the fields of ``paths``."""
    return {path[:place] for path in paths for place, letter in enumerate(path) if letter == "."}


# --- JSON ------------------------------------------------------------------------------------------------------------

# Nearly all of the work is done by json's parser and encoder, which are written in C. What is done here for one value
# after the other is bounded: numbers with a fraction or an exponent, at most MAX_FRACTIONS of them.
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, sort_keys=True, separators=(",", ":")).encode
_EXACT = Context(prec=LONGEST_FRACTION, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[InvalidOperation, Overflow, Inexact])


def canonical_json(body: bytes, select: Callable[[Any], Any] = lambda value: value) -> bytes:
    """Return the same bytes for all JSON texts of the same meaning, in time linear in their length.

    ``select``: returns what counts of the value.
    Raises ``ValueError`` for what is not JSON, for what has no agreed meaning (``NaN``; a name twice in one object,
    RFC 8259 section 4), and for what would cost too much: more than ``MAX_DEPTH`` arrays and objects inside one
    another, or more than ``MAX_FRACTIONS`` numbers with a fraction or an exponent.
    """
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    fractions = _Fractions()
    try:
        value = json.loads(text, parse_float=fractions.read, parse_constant=_refuse_constant)
        if not _is_shallow(body):
            _refuse_depth(value)
        if not fractions.count and _is_canonical(text):
            return text.encode("utf-8", "surrogatepass")
        canonical = _encode(value)
        selected = select(value)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if "{" in text and _count_quotes(canonical) != _count_quotes(text):
        raise ValueError("a name occurs twice in one object")
    if selected is not value:
        canonical = _encode(selected)
    return canonical.encode("utf-8", "surrogatepass")


# What valid JSON without fractions can be written with in more than one way: objects, escapes, white space, zero.
_VARYING = ("{", "\\", " ", "\n", "\t", "\r", "-0")


def _is_canonical(text: str) -> bool:
    """Whether the encoder would write valid JSON without fractions as it stands, which is seen much sooner."""
    return not any(part in text for part in _VARYING)


def _count_quotes(text: str) -> int:
    """Count the quotation marks around the strings of a JSON text, not the escaped ones inside.

    The parser drops a name that is repeated in an object, so its quotation marks are missing from what is encoded.
    """
    if "\\" not in text:
        return text.count('"')
    text = text.replace("\\\\", "")
    return text.count('"') - text.count('\\"')


_AS_ARRAYS = bytes.maketrans(b"{}", b"[]")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))


def _is_shallow(body: bytes) -> bool:
    """Whether no more than ``MAX_DEPTH`` pairs of brackets are inside one another; seen much sooner than by a walk.

    Strings are taken away first, then with each turn the innermost pairs. A string with a bracket, an escaped quotation
    mark or an encoding of more bytes stops that, and then only the walk can tell.
    """
    if b'\\"' in body or b"\0" in body:
        return False
    brackets = body.translate(_AS_ARRAYS, _NOT_STRUCTURE).replace(b'""', b"")
    for _depth in range(MAX_DEPTH):
        if not brackets:
            return True
        brackets = brackets.replace(b"[]", b"")
    return not brackets


def _refuse_depth(value: Any) -> None:
    """Refuse by a limit of our own: how much of the stack is left differs between a request and its retry."""
    level = [value]
    for _depth in range(MAX_DEPTH):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if type(outer) is dict else outer)
            if type(inner) is dict or type(inner) is list
        ]
        if not level:
            return
    raise ValueError(f"more than {MAX_DEPTH} arrays and objects inside one another")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class _Fractions:
    """Reads the numbers that have a fraction or an exponent, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def read(self, text: str) -> Any:
        self.count += 1
        if self.count > MAX_FRACTIONS:
            raise ValueError(f"more than {MAX_FRACTIONS} numbers with a fraction or an exponent")
        return _fraction(text)


def _fraction(text: str) -> int | float | list[Any]:
    """An integer or a double where that is exactly the number, else its digits and exponent.

    A double tells up to 15 digits apart, and is written by its shortest digits: they are the number, or it is another.
    """
    if len(text) > LONGEST_FRACTION:
        raise ValueError("too long a number")
    try:
        number = _EXACT.normalize(_EXACT.create_decimal(text))
    except DecimalException as error:
        raise ValueError("too large an exponent") from error
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    if exponent >= 0 and len(digits) + exponent <= LONGEST_INTEGER:
        return int(number)
    double = float(text)
    if math.isfinite(double) and Decimal(repr(double)) == number:
        return double
    # ``Infinity`` can't come from a client, so it marks the numbers that are neither.
    significand = int("".join(map(str, digits)))
    return [math.inf, -significand if sign else significand, exponent]
