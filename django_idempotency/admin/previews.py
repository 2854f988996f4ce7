"""The bytes of a response, in a form that an operator can read. Pure."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from email.message import Message

from django_idempotency.values.printable import printable_lines

SHOWN = 10_000  # characters
SHOWN_BYTES = 256
LINE = 16
_JSON = re.compile(r"application/(?:[\w.+-]+\+)?json", re.IGNORECASE)
_UNSHOWABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Readable:
    """``kind`` is ``json`` (indented), ``text`` as it is, or ``binary`` (the first bytes). ``cut``: there is more."""

    kind: str
    text: str
    size: int
    cut: bool


def readable(body: bytes, content_type: str) -> Readable:
    """Return the body as what its content type says it is, as far as that is true."""
    header = Message()
    header["Content-Type"] = content_type or "application/octet-stream"
    text = _decoded(body, header.get_content_charset("utf-8"))
    if text is None:
        return Readable("binary", _dump(body[:SHOWN_BYTES]), len(body), len(body) > SHOWN_BYTES)
    kind = "text"
    if _JSON.fullmatch(header.get_content_type()) and (indented := _indented(text)) is not None:
        kind, text = "json", indented
    return Readable(kind, printable_lines(text[:SHOWN]), len(body), len(text) > SHOWN)


def _decoded(body: bytes, charset: str) -> str | None:
    try:
        text = body.decode(charset)
    except (LookupError, ValueError):
        return None
    return None if _UNSHOWABLE.search(text) else text


def _indented(text: str) -> str | None:
    try:
        indented = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return None if _UNSHOWABLE.search(indented) else indented


def _dump(body: bytes) -> str:
    lines = (body[start : start + LINE] for start in range(0, len(body), LINE))
    return "\n".join(f"{number * LINE:04x}  {line.hex(' ')}" for number, line in enumerate(lines))
