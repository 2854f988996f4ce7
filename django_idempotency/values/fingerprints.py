"""Compute the 32 bytes that say whether a retry is the same request. Pure.

JSON is compared by meaning, forms and multipart by field, and anything else by its
bytes. A body is also compared by its bytes if it can't be parsed as its content type
says, or if comparing it would cost much more than parsing it. Every part is
length-prefixed, and the parts of the query are counted, so no two requests have the
same encoding.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable
from copy import copy
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import Any, AnyStr
from urllib.parse import parse_qsl

from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest
from django.utils.datastructures import MultiValueDict

VERSION = b"1"
MAX_FIELDS = 1000  # Django's default for DATA_UPLOAD_MAX_NUMBER_FIELDS
# levels of nested arrays and objects; far below the limit of Python's stack
MAX_DEPTH = 100
MAX_FRACTIONS = 1000
MAX_DIGITS = 250  # of a number before its fraction: converting it is quadratic
VISITS = 1000  # elements that may be looked at one by one, and more in a long body:
PER_VISIT = 6  # bytes; shorter elements are parsed much faster than they are looked at
LONGEST_NAME = 100  # characters of a form's field that may name a nested one
LONG = 10_000  # characters
FEW = MAX_DEPTH

Fields = Iterable[tuple[str, bytes]]
NO_FIELDS = [b"form"]


def fingerprint(
    request: HttpRequest,
    *,
    only: Collection[str] | None = None,
    exclude: Collection[str] = frozenset(),
    max_fields: int | None = MAX_FIELDS,
) -> bytes:
    """Return the fingerprint of ``request``'s method, path, query and body.

    ``only`` and ``exclude`` name fields of a JSON object or a form, nested ones as
    ``card.cvv``, in each object of an array too; they don't affect other bodies. In a
    form, ``card.cvv`` also names ``card[cvv]`` and ``card[0][cvv]``. A query or a form
    with more than ``max_fields`` fields is compared by its bytes; ``None`` means no
    limit. Errors that Django raises while it reads the body (too large, malformed
    multipart) are not caught.
    """
    media_type = request.content_type or ""
    is_partial = only is not None or exclude
    selection = Selection(only, exclude) if is_partial else EVERYTHING
    if media_type == "multipart/form-data":
        parts = _form_parts(_multipart_fields(posted(request)), selection)
    elif media_type == "application/x-www-form-urlencoded":
        parts = _urlencoded_parts(request.body, max_fields, selection)
    elif is_json(media_type):
        parts = _json_parts(request.body, selection)
    else:
        parts = [b"raw", request.body]
    encoded = request.META.get("QUERY_STRING", "").encode("utf-8", "surrogatepass")
    query = NO_FIELDS
    if encoded:
        query = _urlencoded_parts(encoded, max_fields, EVERYTHING)
    return digest([*_request_line(request), str(len(query)).encode(), *query, *parts])


def is_json(media_type: str) -> bool:
    return media_type == "application/json" or media_type.endswith("+json")


def of_bytes(request: HttpRequest, identity: bytes) -> bytes:
    """Return the fingerprint of a request by the ``identity`` that the view itself has
    computed, not by its body.
    """
    return digest([*_request_line(request), b"view", identity])


def digest(parts: Iterable[bytes]) -> bytes:
    """Return the SHA-256 digest of the length-prefixed ``parts`` and the version of
    this scheme.
    """
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
    parts = [*NO_FIELDS]
    counting = [(name, value) for name, value in fields if selection.has_field(name)]
    # the values of one field keep their order
    for name, value in sorted(counting, key=itemgetter(0)):
        parts += name.encode("utf-8", "surrogatepass"), value
    return parts


def posted(request: HttpRequest) -> HttpRequest:
    """Return ``request`` itself or a copy that is a POST, because Django parses forms
    only for that method.
    """
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
    """Yield the fields in ``value``. A parser of REST framework may have made objects
    of them, with files inside.
    """
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


# --- Fields ---------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _leading_to(paths: frozenset[str]) -> re.Pattern[str]:
    """Return an expression for what ``paths`` name in a form, and for what is below. It
    need not name the places of an array.
    """
    ways = (
        r"(?:\.\d+)*+\.".join(map(re.escape, re.split(r"\.(?!\d)", path)))
        for path in paths
    )
    return re.compile(rf"(?:{'|'.join(ways)})(?:\.|\Z)" if paths else "(?!)")


class Selection:
    """Which fields count: those that ``only`` names, with everything in them, except
    those that ``exclude`` names.
    """

    def __init__(
        self, only: Collection[str] | None = None, exclude: Collection[str] = ()
    ) -> None:
        self.only = None if only is None else frozenset(only)
        self.exclude = frozenset(exclude)
        self.is_partial = only is not None or bool(exclude)
        self._leads_to_only = _leading_to(self.only or frozenset()).match
        self._leads_to_excluded = _leading_to(self.exclude).match

    def has_field(self, name: str) -> bool:
        """Return whether the field ``name`` of a form counts. Takes linear time: a
        client chooses the length.
        """
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

        if self.only is not None and not (
            name in self.only or self._leads_to_only(path)
        ):
            return False
        return not (name in self.exclude or self._leads_to_excluded(path))

    def of_json(self, value: Any) -> Any:
        """Return what counts of a JSON value. Removes the rest of an object from it."""
        if self.only is not None:
            value = _kept(value, _tree(self.only))
        _remove([value], _tree(self.exclude))
        return value


EVERYTHING = Selection()
Tree = dict[str, Any]  # of names, each with the tree inside it; an empty one for all


def _tree(paths: Iterable[str]) -> Tree:
    """Return the names to which ``paths`` lead. A name may have a dot itself, so a path
    is divided at each of its dots.
    """
    inside: dict[str, set[str]] = {}
    for path in paths:
        dots = [place for place, letter in enumerate(path) if letter == "."]
        for end in (*dots, len(path)):
            inside.setdefault(path[:end], set()).add(path[end + 1 :])
    return {name: {} if "" in left else _tree(left) for name, left in inside.items()}


def _remove(values: list[Any], tree: Tree) -> None:
    """Remove what ``tree`` names from the objects in ``values``, and in arrays."""
    objects: list[dict[str, Any]] = []
    while tree and values:
        objects += [value for value in values if type(value) is dict]
        values = [*chain.from_iterable(v for v in values if type(v) is list)]
    for name, inside in tree.items():
        found = [each for each in objects if name in each]
        if inside:
            _remove([each[name] for each in found], inside)
        else:
            for each in found:
                del each[name]


def _kept(value: Any, tree: Tree) -> Any:
    """Return what ``tree`` names of an object, or of each object in an array. Any other
    value is kept, and so is an array's length.
    """
    if type(value) is list:
        return [_kept(each, tree) for each in value]
    if type(value) is not dict:
        return value
    kept = {}
    for name, inside in tree.items():
        if name in value:
            found = _kept(value[name], inside) if inside else value[name]
            if found != {} or not inside:
                kept[name] = found
    return kept


def fields_at(value: Any, path: str) -> list[Any]:
    """Return what stands at ``path`` in a JSON value, at most once for each reading of
    its dots. It does not lead into arrays.
    """
    if not isinstance(value, dict):
        return []
    here = [value[path]] if path in value else []
    return here + [
        found
        for place, letter in enumerate(path)
        if letter == "." and path[:place] in value
        for found in fields_at(value[path[:place]], path[place + 1 :])
    ]


# --- JSON -----------------------------------------------------------------------------

# json's parser and encoder, which are written in C, do nearly all of the work. Only
# numbers with a fraction or an exponent are handled one by one in Python, at most
# MAX_FRACTIONS of them.
_encode = json.JSONEncoder(
    ensure_ascii=False, check_circular=False, sort_keys=True, separators=(",", ":")
).encode


def canonical_json(body: bytes, selection: Selection = EVERYTHING) -> bytes:
    """Return the same bytes for JSON texts with the same meaning, in time linear in
    their length.

    Numbers are the same without the zeros at the end of a fraction. An exponent counts
    as it is written.

    ``selection``: which fields count; all by default.

    Raises ``ValueError`` if the text is not JSON, if it has no agreed meaning (``NaN``,
    or a name that is repeated in one object, RFC 8259 section 4), or if it would cost
    too much: more than ``MAX_DEPTH`` levels of nested arrays and objects, more than
    ``MAX_FRACTIONS`` numbers with a fraction or an exponent, one of more than
    ``MAX_DIGITS`` and a zero as fraction, or many short elements that would have to be
    walked through.
    """
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    fractions = _Fractions()
    try:
        decoder = json.JSONDecoder(
            parse_float=fractions.read, parse_constant=_refuse_constant
        )
        value = decoder.decode(text)
        _refuse_depth(body, value)
        canonical = _encode(value)
        if "{" in text:
            # The parser drops a name that is repeated in an object, so its quotation
            # marks are missing.
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
    if len(text) < LONG:
        return text.count('"')
    found = _count_few(text, '"')
    return found if found <= FEW else text.count('"')


def _count_few(text: AnyStr, character: AnyStr) -> int:
    """Count to one more than ``FEW`` at most: in a long text, finding a few is far
    faster than counting.
    """
    found, place = 0, text.find(character)
    while place >= 0 and found <= FEW:
        found, place = found + 1, text.find(character, place + 1)
    return found


def _refuse_depth(body: bytes, value: Any) -> None:
    """Enforce a fixed limit: how much of the stack is left differs between a request
    and its retry.
    """
    if len(body) < LONG:
        opened = body.count(b"[") + body.count(b"{")
    else:
        opened = _count_few(body, b"[") + _count_few(body, b"{")
    if opened <= MAX_DEPTH:
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
    """Reads the numbers that have a fraction or an exponent, and counts them and the
    quotation marks it adds.
    """

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
                if len(text) > MAX_DIGITS:
                    raise ValueError(f"a number of {len(text)} digits")
                return int(text)
        self.quotes += 2
        # a client can't send ``Infinity``, so this is no array of its own
        return [math.inf, text]
