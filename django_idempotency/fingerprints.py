"""Compute the 32 bytes that say whether a retry is the same request. Pure.

JSON is compared by meaning, forms and multipart by field, and anything else by its bytes. A body is also compared by
its bytes if it can't be parsed as its content type says, or if comparing it would cost much more than parsing it. Every
part is length-prefixed, so no two requests have the same encoding.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterable
from copy import copy
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, DecimalException, Inexact, InvalidOperation, Overflow
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl

from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest
from django.utils.datastructures import MultiValueDict

VERSION = b"1"
CHUNK = 64 * 1024
MAX_FIELDS = 1000  # Django's default for DATA_UPLOAD_MAX_NUMBER_FIELDS
MAX_DEPTH = 100  # levels of nested arrays and objects; far below the limit of Python's stack
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
    other bodies. For an array they name the fields of its objects. In a form, ``card.cvv`` also names ``card[cvv]``. A
    query or a form with more than ``max_fields`` fields is compared by its bytes; ``None`` means no limit. Errors that
    Django raises while it reads the body (too large, malformed multipart) are not caught.
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
    """Return the fingerprint of a request by the ``identity`` that the view itself has computed, not by its body."""
    return digest([*_request_line(request), b"view", identity])


def digest(parts: Iterable[bytes]) -> bytes:
    """Return the SHA-256 digest of the length-prefixed ``parts`` and the version of this scheme."""
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
    if not encoded:
        return [b"form"]
    try:
        return _form_parts(_urlencoded_fields(encoded, max_fields), only, exclude)
    except ValueError:  # more than max_fields
        return [b"raw", encoded]


def _form_parts(fields: Fields, only: Collection[str] | None, exclude: Collection[str]) -> list[bytes]:
    selection = Selection(only, exclude)
    return [b"form", *_flat(_by_name((name, value) for name, value in fields if selection.has_field(name)))]


def _by_name(fields: Fields) -> Fields:
    """Return the fields sorted by name; the values of one field keep their order."""
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
    """Return ``request`` itself or a copy that is a POST, because Django parses forms only for that method."""
    if request.method == "POST" or hasattr(request, "_post"):
        return request
    _ = request.body  # kept in memory, for the copy and for the view
    posted = copy(request)
    posted.method = "POST"
    return posted


def _multipart_fields(request: HttpRequest) -> Fields:
    parsed: tuple[Any, Any] = request.POST, request.FILES
    for posted in parsed:
        if isinstance(posted, MultiValueDict):
            yield from (field for name, values in posted.lists() for value in values for field in _fields(name, value))
        else:
            yield from _fields("", posted)


def _fields(name: str, value: Any, depth: int = 0) -> Fields:
    """Yield the fields in ``value``. A parser of REST framework may have made objects of them, with files inside."""
    if isinstance(value, dict | list | tuple) and value and depth < MAX_DEPTH:
        for inner, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _fields(f"{name}[{inner}]" if name else str(inner), part, depth + 1)
    elif isinstance(value, UploadedFile):
        yield name, digest([(value.name or "").encode("utf-8", "surrogatepass"), _file_digest(value)])
    else:
        yield name, str(value).encode("utf-8", "surrogatepass")


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
    """Which fields count: those that ``only`` names, with everything in them, except those that ``exclude`` names."""

    def __init__(self, only: Collection[str] | None, exclude: Collection[str]) -> None:
        self.only = only
        self.exclude = exclude

    @cached_property
    def above(self) -> set[str]:
        """The paths of the objects that contain fields chosen by name."""
        return _above(self.exclude) | _above(self.only or ())

    def has_field(self, name: str) -> bool:
        """Return whether the field ``name`` of a form counts."""
        path = _BRACKETS.sub(lambda match: f".{match[1]}" if match[1] else "", name)
        chosen = self.only is None or name in self.only or _is_below(path, self.only)
        return chosen and name not in self.exclude and not _is_below(path, self.exclude)

    def of_json(self, value: Any) -> Any:
        """Return the part of a JSON value that counts; the value itself if all of it does."""
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
    """Whether ``path`` is one of ``paths`` or inside one. Takes linear time, because a client chooses its length."""
    return any(path == above or path.startswith(f"{above}.") for above in paths)


def _above(paths: Iterable[str]) -> set[str]:
    """Return the paths of the objects that contain the fields of ``paths``."""
    return {path[:place] for path in paths for place, letter in enumerate(path) if letter == "."}


# --- JSON ------------------------------------------------------------------------------------------------------------

# json's parser and encoder, which are written in C, do nearly all of the work. Only numbers with a fraction or an
# exponent are handled one by one in Python, and at most MAX_FRACTIONS of them.
_encode = json.JSONEncoder(ensure_ascii=False, check_circular=False, sort_keys=True, separators=(",", ":")).encode
_EXACT = Context(prec=LONGEST_FRACTION, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[InvalidOperation, Overflow, Inexact])


def canonical_json(body: bytes, select: Callable[[Any], Any] = lambda value: value) -> bytes:
    """Return the same bytes for all JSON texts with the same meaning, in time linear in their length.

    ``select``: a callable that returns the part of the value that counts.

    Raises ``ValueError`` if the text is not JSON, if it has no agreed meaning (``NaN``, or a name that is repeated in
    one object, RFC 8259 section 4), or if it would cost too much: more than ``MAX_DEPTH`` levels of nested arrays and
    objects, or more than ``MAX_FRACTIONS`` numbers with a fraction or an exponent.
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


# The parts of valid JSON without fractions that can be written in several ways: objects, escapes, white space, zero.
_VARYING = ("{", "\\", " ", "\n", "\t", "\r", "-0")


def _is_canonical(text: str) -> bool:
    """Whether the encoder would reproduce ``text``, valid JSON without fractions. Much faster than encoding it."""
    return not any(part in text for part in _VARYING)


def _count_quotes(text: str) -> int:
    """Count the quotation marks around the strings of a JSON text, without the escaped ones inside.

    The parser drops a name that is repeated in an object, so the encoded value lacks its quotation marks.
    """
    if "\\" not in text:
        return text.count('"')
    text = text.replace("\\\\", "")
    return text.count('"') - text.count('\\"')


_AS_ARRAYS = bytes.maketrans(b"{}", b"[]")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}"'))


def _is_shallow(body: bytes) -> bool:
    """Whether brackets are nested no deeper than ``MAX_DEPTH``. Much faster than walking through the value.

    Remove the strings, then repeatedly the innermost pairs. That doesn't work for a string with a bracket or
    an escaped quotation mark, or for encodings such as UTF-16. Only the walk can tell then.
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
    """Enforce a fixed limit: how much of the stack is left differs between a request and its retry."""
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
    raise ValueError(f"more than {MAX_DEPTH} levels of arrays and objects")


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
    """Return the number as an integer or a double if that is exact, else its digits and exponent.

    A double distinguishes numbers of up to 15 digits and is written with its shortest digits. If these digits don't
    equal the number, the double is another number.
    """
    if len(text) > LONGEST_FRACTION:
        raise ValueError("a number is too long")
    try:
        number = _EXACT.normalize(_EXACT.create_decimal(text))
    except DecimalException as error:
        raise ValueError("an exponent is too large") from error
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int)
    if exponent >= 0 and len(digits) + exponent <= LONGEST_INTEGER:
        return int(number)
    double = float(text)
    if math.isfinite(double) and Decimal(repr(double)) == number:
        return double
    # A client can't send ``Infinity``, so it marks the numbers that are neither an integer nor a double.
    significand = int("".join(map(str, digits)))
    return [math.inf, -significand if sign else significand, exponent]
