"""Export the records of a caller, for example one who asks what is stored about them."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from django_idempotency import signals
from django_idempotency.maintenance import history
from django_idempotency.maintenance.records import HAS_BODY, Records, operation_of, record_of, records
from django_idempotency.maintenance.selection import Selection
from django_idempotency.maintenance.sweep import Pages, sweep
from django_idempotency.models import DatabaseNow
from django_idempotency.reporting.events import send
from django_idempotency.stores import Store
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
    store: Store | None = None,
    by: Any = None,
    note: str = "",
    **selected: Any,
) -> Iterator[dict[str, Any]]:
    """Yield what is stored about the records of ``scope``, or of another ``Selection``, each as a dict for JSON.

    - ``bodies``: include the headers and bodies of responses, decrypted. For each body, ``response_viewed`` is sent,
      and what the user ``by`` did, and the ``note`` on why, is written to the history.
    - ``batch``: records of any scope that are read in one statement; default: 1,000.
    - ``using``: the database's alias. ``store``: a store outside the database, of which all records are read.

    A body in UTF-8 is text in ``response["body"]``; any other body is in base64 in ``response["body_base64"]``. A body
    that is not stored, or can't be decrypted, is ``None``. The fingerprint is left out. Raises ``ValueError`` as
    ``Selection`` does, if ``batch`` is less than 1, and if ``DECISIONS`` requires a note for ``bodies``.
    """
    selection = Selection(scope, **selected)
    if bodies and history.lacks_note(note):
        raise ValueError("DECISIONS requires a note that says why.")
    if store is not None:
        for snapshot in filter(selection.matches, store.records()):
            yield _exported(record_of(snapshot), bodies, by, note)
        return

    def pick(rows: Records) -> list[tuple[UUID, Any]]:
        mine: Any = selection.of(rows)
        if bodies:  # they are read one by one, because they may be large
            return [(id, None) for id in mine.values_list("pk", flat=True)]
        return [(record.pk, record) for record in _whole(mine).defer("response_body", "response_headers")]

    pages = Pages(lambda: selection.near(records(using)), pick)
    for page, _swept in sweep(pages, None, {"batch": batch}, batch=PAGE, pause=0):
        for id, read in page.found:
            if record := read or _whole(records(using)).filter(pk=id).first():
                yield _exported(record, bodies, by, note)


def _whole(rows: Any) -> Any:
    return rows.annotate(has_body=HAS_BODY, now=DatabaseNow())


def _exported(record: Any, bodies: bool, by: Any, note: str) -> dict[str, Any]:
    content = _content(record, by, note) if bodies else {}
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


def _content(record: Any, by: Any, note: str) -> dict[str, Any]:
    response = stored_response(record)
    if response is None:
        return {}
    if record.response_body is not None:
        send(signals.response_viewed, operation_of(record), user=by)
        history.write_entry(record, by, f"{history.VIEWED} {note}".strip())
    headers = [list(header) for header in response.headers]
    if response.body is None:
        return {"headers": headers, "body": None}
    try:
        return {"headers": headers, "body": response.body.decode()}
    except UnicodeDecodeError:
        return {"headers": headers, "body": None, "body_base64": base64.b64encode(response.body).decode()}
