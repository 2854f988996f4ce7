"""Compute the 32 bytes that say whether a retry is the same request. Pure.

JSON is compared by meaning, forms and multipart by field, and anything else by its bytes. A body is also compared by
its bytes if it can't be parsed as its content type says, or if comparing it would cost much more than parsing it. Every
part is length-prefixed, and the parts of the query are counted, so no two requests have the same encoding.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator
from copy import copy
from functools import reduce
from itertools import chain
from operator import getitem, itemgetter
from typing import Any, AnyStr
from urllib.parse import parse_qsl

from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest
from django.utils.datastructures import MultiValueDict

VERSION = b"1"
MAX_FIELDS = 1000  # Django's default for DATA_UPLOAD_MAX_NUMBER_FIELDS
MAX_DEPTH = (
    100  # levels of nested arrays and objects; far below the limit of Python's stack
)
MAX_FRACTIONS = 1000
VISITS = 1000  # elements that may be looked at one by one, and more in a long body:
PER_VISIT = 6  # bytes; shorter elements are parsed much faster than they are looked at
LONGEST_NAME = 100  # characters of a form's field that may name a nested one
LONG = 10_000  # characters
FEW = MAX_DEPTH

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
    other bodies, and don't lead into arrays, which count whole. In a form, ``card.cvv`` also names ``card[cvv]``. A
    query or a form with more than ``max_fields`` fields is compared by its bytes; ``None`` means no limit. Errors that
    Django raises while it reads the body (too large, malformed multipart) are not caught.
    """
    media_type, selection = request.content_type or "", Selection(only, exclude)
    if media_type == "multipart/form-data":
        parts = _form_parts(_multipart_fields(_posted(request)), selection)
    elif media_type == "application/x-www-form-urlencoded":
        parts = _urlencoded_parts(request.body, max_fields, selection)
    elif media_type == "application/json" or media_type.endswith("+json"):
        parts = _json_parts(request.body, selection)
    else:
        parts = [b"raw", request.body]
    encoded = request.META.get("QUERY_STRING", "").encode("utf-8", "surrogatepass")
    query = _urlencoded_parts(encoded, max_fields, EVERYTHING)
    return digest([*_request_line(request), str(len(query)).encode(), *query, *parts])


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
    return [
        (request.method or "").encode(),
        request.path.encode("utf-8", "surrogatepass"),
    ]


def _json_parts(body: bytes, selection: Selection) -> list[bytes]:
    try:
        return [b"json", canonical_json(body, selection)]
    except ValueError:
        return [b"raw", body]


def _urlencoded_parts(
    encoded: bytes, max_fields: int | None, selection: Selection
) -> list[bytes]:
    text = encoded.decode("utf-8", "surrogateescape")
    try:
        pairs = parse_qsl(
            text,
            keep_blank_values=True,
            errors="surrogateescape",
            max_num_fields=max_fields,
        )
    except ValueError:  # more than max_fields
        return [b"raw", encoded]
    return _form_parts(
        [(name, value.encode("utf-8", "surrogateescape")) for name, value in pairs],
        selection,
    )


def _form_parts(fields: Fields, selection: Selection) -> list[bytes]:
    parts = [b"form"]
    counting = [(name, value) for name, value in fields if selection.has_field(name)]
    for name, value in sorted(
        counting, key=itemgetter(0)
    ):  # the values of one field keep their order
        parts += name.encode("utf-8", "surrogatepass"), value
    return parts


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
            yield from (
                field
                for name, values in posted.lists()
                for value in values
                for field in _fields(name, value)
            )
        else:
            yield from _fields("", posted)


def _fields(name: str, value: Any, depth: int = 0) -> Fields:
    """Yield the fields in ``value``. A parser of REST framework may have made objects of them, with files inside."""
    if isinstance(value, dict | list | tuple) and value and depth < MAX_DEPTH:
        for inner, part in (
            value.items() if isinstance(value, dict) else enumerate(value)
        ):
            yield from _fields(
                f"{name}[{inner}]" if name else str(inner), part, depth + 1
            )
    elif isinstance(value, UploadedFile):
        yield (
            name,
            digest(
                [
                    (value.name or "").encode("utf-8", "surrogatepass"),
                    _file_digest(value),
                ]
            ),
        )
    else:
        yield name, str(value).encode("utf-8", "surrogatepass")


def _file_digest(file: UploadedFile[Any]) -> bytes:
    total = hashlib.sha256()
    for chunk in file.chunks():
        total.update(chunk)
    file.seek(0)
    return total.digest()


# --- Fields ----------------------------------------------------------------------------------------------------------


class Selection:
    """Which fields count: those that ``only`` names, with everything in them, except those that ``exclude`` names."""

    def __init__(
        self, only: Collection[str] | None = None, exclude: Collection[str] = ()
    ) -> None:
        self.only = only
        self.exclude = exclude
        self._above_only = tuple(f"{path}." for path in only or ())
        self._above_excluded = tuple(f"{path}." for path in exclude)

    @property
    def is_partial(self) -> bool:
        return self.only is not None or bool(self.exclude)

    def has_field(self, name: str) -> bool:
        """Return whether the field ``name`` of a form counts. Takes linear time: a client chooses the length."""
        if not self.is_partial:
            return True
        path = name
        if name.endswith("]") and len(name) <= LONGEST_NAME:
            path = (
                name.replace("[]", "")
                .replace("][", ".")
                .replace("[", ".")
                .removesuffix("]")
            )
        names = {name, path}
        if (
            self.only is not None
            and names.isdisjoint(self.only)
            and not path.startswith(self._above_only)
        ):
            return False
        return names.isdisjoint(self.exclude) and not path.startswith(
            self._above_excluded
        )

    def of_json(self, value: Any) -> Any:
        """Return what counts of a JSON value. Removes the rest of an object from it."""
        if not isinstance(value, dict):
            return value
        if self.only is not None:
            value = _kept(value, self.only)
        for path in self.exclude:
            for way, left in [*_ways(value, path)]:
                if not left:
                    _at(value, way[:-1]).pop(way[-1])
        return value


EVERYTHING = Selection()


def _ways(value: Any, path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the names on each way that ``path`` leads in objects, and what is left of it where there is another value.

    A name may have a dot itself, so the path is divided at each of its dots.
    """
    if not isinstance(value, dict):
        yield (), path
        return
    if path in value:
        yield (path,), ""
    for place, letter in enumerate(path):
        if letter == "." and path[:place] in value:
            name = path[:place]
            yield from (
                ((name, *way), left)
                for way, left in _ways(value[name], path[place + 1 :])
            )


def _kept(value: dict[str, Any], paths: Collection[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for path in paths:
        for way, _left in _ways(value, path):
            inside = kept
            for name in way[:-1]:
                inside = inside.setdefault(name, {})
            inside[way[-1]] = _at(value, way)
    return kept


def _at(value: Any, way: tuple[str, ...]) -> Any:
    return reduce(getitem, way, value)


# --- JSON ------------------------------------------------------------------------------------------------------------

# json's parser and encoder, which are written in C, do nearly all of the work. Only numbers with a fraction or an
# exponent are handled one by one in Python, at most MAX_FRACTIONS of them.
_encode = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, sort_keys=True, separators=(",", ":")
).encode


def canonical_json(body: bytes, selection: Selection = EVERYTHING) -> bytes:
    """Return the same bytes for JSON texts with the same meaning, in time linear in their length.

    Numbers are the same without the zeros at the end of a fraction. An exponent counts as it is written.

    ``selection``: which fields count; all by default.

    Raises ``ValueError`` if the text is not JSON, if it has no agreed meaning (``NaN``, or a name that is repeated in
    one object, RFC 8259 section 4), or if it would cost too much: more than ``MAX_DEPTH`` levels of nested arrays and
    objects, more than ``MAX_FRACTIONS`` numbers with a fraction or an exponent, or many short elements that would have
    to be walked through.
    """
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    fractions = _Fractions()
    try:
        value = json.loads(
            text, parse_float=fractions.read, parse_constant=_refuse_constant
        )
        _refuse_depth(body, value)
        canonical = _encode(value)
        if "{" in text:
            # The parser drops a name that is repeated in an object, so its quotation marks are missing.
            expected = (
                _count_quotes(text)
                + ("\\" in text and text.count("\\u0022"))
                + fractions.quotes
            )
            if _count_quotes(canonical) != expected:
                raise ValueError("a name occurs twice in one object")
        if selection.is_partial:
            canonical = _encode(selection.of_json(value))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return canonical.encode("utf-8", "surrogatepass")


def _count_quotes(text: str) -> int:
    found = _count_few(text, '"')
    return found if found <= FEW else text.count('"')


def _count_few(text: AnyStr, character: AnyStr) -> int:
    """Count, in a long text to one more than ``FEW`` at most: finding a few is far faster than counting."""
    if len(text) < LONG:
        return text.count(character)
    found, place = 0, text.find(character)
    while place >= 0 and found <= FEW:
        found, place = found + 1, text.find(character, place + 1)
    return found


def _refuse_depth(body: bytes, value: Any) -> None:
    """Enforce a fixed limit: how much of the stack is left differs between a request and its retry."""
    if _count_few(body, b"[") + _count_few(body, b"{") <= MAX_DEPTH:
        return
    visits, level = VISITS + len(body) // PER_VISIT, [value]
    for _depth in range(MAX_DEPTH + 1):
        objects = [each for each in level if type(each) is dict]
        arrays = [each for each in level if type(each) is list]
        if not objects and not arrays:
            return
        level = [
            *chain.from_iterable(map(dict.values, objects)),
            *chain.from_iterable(arrays),
        ]
        visits -= len(level)
        if visits < 0:
            raise ValueError("too many elements to look at")
    raise ValueError(f"more than {MAX_DEPTH} levels of arrays and objects")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class _Fractions:
    """Reads the numbers that have a fraction or an exponent, and counts them and the quotation marks it adds."""

    def __init__(self) -> None:
        self.count = self.quotes = 0

    def read(self, text: str) -> int | list[Any]:
        self.count += 1
        if self.count > MAX_FRACTIONS:
            raise ValueError(
                f"more than {MAX_FRACTIONS} numbers with a fraction or an exponent"
            )
        if "e" not in text and "E" not in text:
            text = text.rstrip("0").removesuffix(".")
            if "." not in text:
                return int(text)
        self.quotes += 2
        return [
            math.inf,
            text,
        ]  # a client can't send ``Infinity``, so this is no array of its own
