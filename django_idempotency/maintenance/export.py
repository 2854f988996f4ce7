"""Export the records of a caller, for example one who asks what is stored about them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from django_idempotency import signals
from django_idempotency.maintenance.batches import LONGEST
from django_idempotency.maintenance.records import HAS_BODY, operation_of, pages
from django_idempotency.maintenance.selection import Selection
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stats.queries import at_most
from django_idempotency.stores.codec import stored_response

PAGE = 1_000
TIMES = ("created_at", "updated_at", "locked_at", "locked_until", "expires_at", "purge_at", "last_replayed_at")
COLUMNS = ("scope", "key", "method", "path", "mode", "status", "on_hold", "reason", "attempts", "replays", *TIMES)


def export(
    scope: str | None = None,
    *,
    bodies: bool = False,
    batch: int | None = None,
    using: str | None = None,
    **selected: Any,
) -> Iterator[dict[str, Any]]:
    """Yield what is stored about the records of ``scope``, or of another ``Selection``, each as a dict for JSON.

    - ``bodies``: include the headers and bodies of responses, decrypted. ``response_viewed`` is sent for each body.
    - ``batch``: records of any scope that are looked at in one statement; default: 1,000.
    - ``using``: the database's alias.

    A body in UTF-8 is text in ``response["body"]``; any other body is in base64 in ``response["body_base64"]``. A body
    that is not stored, or can't be decrypted, is ``None``. The fingerprint is left out. Raises ``ValueError`` as
    ``Selection`` does, and if ``batch`` is less than 1.
    """
    selection = Selection(scope, **selected)
    walk = pages(
        using, batch=PAGE if batch is None else batch, pause=0, max_seconds=None, after=None, near=selection.near
    )
    for page in walk:
        mine: Any = selection.of(page.rows).annotate(has_body=HAS_BODY)
        if not bodies:
            with at_most(LONGEST, mine.db):
                found = list(mine.defer("response_body", "response_headers"))
            yield from (_exported(record, {}) for record in found)
            continue
        with at_most(LONGEST, mine.db):
            ids = list(mine.values_list("pk", flat=True))
        for id in ids:  # one by one: bodies may be large
            if (record := mine.filter(pk=id).first()) is not None:
                yield _exported(record, _content(record))


def _exported(record: Any, content: dict[str, Any]) -> dict[str, Any]:
    columns = {name: getattr(record, name) for name in COLUMNS}
    times = {name: columns[name] and columns[name].isoformat() for name in TIMES}
    response = {"status": record.response_status, "has_body": record.has_body, **content}
    trace = bytes(record.trace).hex() if record.trace else None
    return {
        "id": str(record.pk),
        **columns,
        **times,
        "trace": trace,
        "response": response if record.response_status else None,
    }


def _content(record: IdempotencyRecord) -> dict[str, Any]:
    response = stored_response(record)
    if response is None:
        return {}
    if record.response_body is not None:
        signals.send(signals.response_viewed, operation_of(record), user=None)
    headers = [list(header) for header in response.headers]
    if response.body is None:
        return {"headers": headers, "body": None}
    try:
        return {"headers": headers, "body": response.body.decode()}
    except UnicodeDecodeError:
        return {"headers": headers, "body": None, "body_base64": base64.b64encode(response.body).decode()}
