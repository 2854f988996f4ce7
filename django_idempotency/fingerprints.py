"""From a request to the 32 bytes that say whether a retry is the same request. Pure.

JSON counts by meaning, forms and multipart by field, anything else by its bytes. A body that can't be parsed as what it
is declared to be is still only bytes. Every part is length-prefixed, so no two requests share an encoding.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable
from copy import copy
from decimal import Decimal, InvalidOperation
from typing import Any
from urllib.parse import parse_qsl

from django.core.files.uploadedfile import UploadedFile
from django.http import HttpRequest

VERSION = b"1"
LONGEST_INTEGER = 1000
CHUNK = 64 * 1024

Fields = Iterable[tuple[str, bytes]]


def fingerprint(
    request: HttpRequest, *, only: Collection[str] | None = None, exclude: Collection[str] = frozenset()
) -> bytes:
    """The fingerprint of ``request``'s method, path, query and body.

    ``only`` and ``exclude`` name top-level fields of a JSON object or a form; they don't affect other bodies. Errors
    that Django raises while it reads the body (too large, malformed multipart) pass through.
    """
    media_type = request.content_type or ""
    if media_type == "multipart/form-data":
        parts = _form_parts(_multipart_fields(_posted(request)), only, exclude)
    elif media_type == "application/x-www-form-urlencoded":
        parts = _form_parts(_query_fields(request.body.decode("utf-8", "surrogateescape")), only, exclude)
    elif media_type == "application/json" or media_type.endswith("+json"):
        parts = _json_parts(request.body, only, exclude)
    else:
        parts = [b"raw", request.body]
    query = sorted(_query_fields(request.META.get("QUERY_STRING", "")))
    return digest([*_request_line(request), *_flat(query), b"", *parts])


def of_bytes(request: HttpRequest, identity: bytes) -> bytes:
    """The fingerprint of a request whose identity the view itself has worked out."""
    return digest([*_request_line(request), b"view", identity])


def digest(parts: Iterable[bytes]) -> bytes:
    """SHA-256 over length-prefixed parts and the version of this scheme."""
    total = hashlib.sha256(VERSION)
    for part in parts:
        total.update(len(part).to_bytes(8, "big"))
        total.update(part)
    return total.digest()


def canonical_json(body: bytes) -> Any:
    """The value of a JSON text, such that equal meanings compare and encode equal.

    Raises ``ValueError`` for what is not JSON, or has no agreed meaning (a name twice in one object, RFC 8259
    section 4; ``NaN``), or is too deep or too long a number to handle.
    """
    try:
        return json.loads(
            body, object_pairs_hook=_object, parse_float=_number, parse_int=_integer, parse_constant=_constant
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def encode_json(value: Any) -> bytes:
    # ``Infinity`` can't come from a client, so it marks the numbers that JSON's own integers can't express.
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_encode_decimal).encode("ascii")


def _request_line(request: HttpRequest) -> list[bytes]:
    return [(request.method or "").encode(), request.path.encode("utf-8", "surrogatepass")]


def _json_parts(body: bytes, only: Collection[str] | None, exclude: Collection[str]) -> list[bytes]:
    try:
        value = canonical_json(body)
    except ValueError:
        return [b"raw", body]
    if isinstance(value, dict):
        value = {name: field for name, field in value.items() if _counts(name, only, exclude)}
    return [b"json", encode_json(value)]


def _form_parts(fields: Fields, only: Collection[str] | None, exclude: Collection[str]) -> list[bytes]:
    # Fields in whatever order, but the values of one field in theirs.
    counted = [(name, value) for name, value in fields if _counts(name, only, exclude)]
    return [b"form", *_flat(sorted(counted, key=lambda field: field[0]))]


def _counts(name: str, only: Collection[str] | None, exclude: Collection[str]) -> bool:
    return (only is None or name in only) and name not in exclude


def _flat(fields: Fields) -> Iterable[bytes]:
    for name, value in fields:
        yield name.encode("utf-8", "surrogatepass")
        yield value


def _query_fields(query: str) -> list[tuple[str, bytes]]:
    pairs = parse_qsl(query, keep_blank_values=True, errors="surrogateescape")
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


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return value


def _integer(text: str) -> int:
    if len(text) > LONGEST_INTEGER:
        raise ValueError("too long a number")
    return int(text)


def _number(text: str) -> int | Decimal:
    """An integer wherever the number is one, as 1.0 and 1E2 are; else the exact decimal without trailing zeros."""
    try:
        sign, digits, exponent = Decimal(text).as_tuple()
    except InvalidOperation as error:
        raise ValueError("too large an exponent") from error
    assert isinstance(exponent, int)
    written = "".join(map(str, digits)).lstrip("0")
    significant = written.rstrip("0")
    exponent += len(written) - len(significant)
    if not significant:
        return 0
    if exponent >= 0 and len(significant) + exponent <= LONGEST_INTEGER:
        whole: int = int(significant) * 10**exponent
        return -whole if sign else whole
    return Decimal((sign, tuple(map(int, significant)), exponent))


def _constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _encode_decimal(number: Decimal) -> list[Any]:
    sign, digits, exponent = number.as_tuple()
    return [math.inf, sign, "".join(map(str, digits)), exponent]
