"""What differs between two responses, of whichever client, and between what there is
before and after a request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from django.apps import apps
from django.core import mail
from django.db import connections, router
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model, QuerySet
from django.urls import Resolver404, get_resolver

from django_idempotency import Policy
from django_idempotency.extending import conf, resolve
from django_idempotency.extending.requests import (
    PROBLEM_JSON,
    REPLAYED,
    is_about_caching,
    is_browsable_page,
    may_be_stored,
    policy_by_path,
)

# These headers belong to one response of the server, not to the operation.
OF_ONE_RESPONSE = frozenset({REPLAYED.lower(), "server-timing", "x-request-id"})
SHOWN = 200
Effects = Callable[[], Any] | QuerySet[Any] | None
Observed = Mapping[str, Any]

OWN_APP = "django_idempotency"
# A session is state of the connection to a client, and every request may touch it.
NO_EFFECTS = frozenset({"sessions.session"})
# If a table has more rows, only their number is compared.
MOST_ROWS = 10_000


def differences(first: Any, second: Any) -> Iterator[str]:
    """Describe how status and body differ. The body is compared only if it is
    stored.
    """
    if first.status_code != second.status_code:
        yield f"status {first.status_code}, then {second.status_code}"
    if _is_stored(first, second) and first.content != second.content:
        yield f"body {_shown(first.content)}, then {_shown(second.content)}"


def differences_of_headers(
    first: Any, second: Any, ignore: Collection[str] = ()
) -> Iterator[str]:
    """Describe how headers differ that are the same in a replay. ``ignore``: names of
    headers to leave out.
    """
    if not _is_stored(first, second):  # the headers describe the body
        return
    sent = {name.lower() for response in (first, second) for name in response.headers}
    for name in sorted(sent - OF_ONE_RESPONSE - {name.lower() for name in ignore}):
        before, after = first.headers.get(name), second.headers.get(name)
        if before != after and may_be_stored(name) and not is_about_caching(name):
            yield f"header {name} {before!r}, then {after!r}"


def _is_stored(first: Any, second: Any) -> bool:
    """Whether the body is stored as it is: it is not a stream, not too large, and not a
    page of the browsable API.
    """
    unstored = _streams(first) or _streams(second) or is_browsable_page(first)
    return not unstored and code(second) != "response_not_stored"


def _streams(response: Any) -> bool:
    return bool(getattr(response, "streaming", False))


def code(response: Any) -> str | None:
    """Return the ``code`` of a problem response; ``None`` for any other response."""
    if _streams(response) or PROBLEM_JSON not in response.headers.get(
        "Content-Type", ""
    ):
        return None
    try:
        found = json.loads(response.content)
    except ValueError:
        return None
    return found.get("code") if isinstance(found, dict) else None


def described(response: Any) -> str:
    if _streams(response):
        return f"{response.status_code}, streamed"
    return f"{response.status_code} {_shown(response.content)}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"


# --- Effects: by default rows of the project's models and mail, or else what a test
# observes itself ---


@dataclass(frozen=True, slots=True)
class Rows:
    """The number of rows of a table, and a digest of their contents that does not
    depend on their order.
    """

    count: int
    digest: int = 0


def observe(effects: Effects = None, *, ignore: Collection[str] = ()) -> Observed:
    """Return what there is now, by name.

    ``effects``: a QuerySet, or a callable that returns anything that can be compared.
    With ``None``, the rows of all models that the test may read are taken, except those
    of this app and of sessions, and the number of mails sent. ``ignore``: labels of
    further models to leave out, such as ``"audit.Request"``.
    """
    if effects is None:
        sent = {"mail.outbox": len(mail.outbox)} if hasattr(mail, "outbox") else {}
        return {**_tables({label.lower() for label in ignore} | NO_EFFECTS), **sent}
    seen = effects if isinstance(effects, QuerySet) else effects()
    return {
        "effects": _rows(seen.all()) if isinstance(seen, QuerySet) else deepcopy(seen)
    }


def changes(before: Observed, after: Observed) -> list[str]:
    """Describe what has changed, with a line for each name; an empty list if nothing
    has.
    """
    names = [
        name for name in {**before, **after} if before.get(name) != after.get(name)
    ]
    return [
        f"{name}: {_change(before.get(name, Rows(0)), after.get(name, Rows(0)))}"
        for name in names
    ]


def growth(before: Observed, after: Observed) -> dict[str, Any]:
    """Return by how much each name has grown. Names whose size is unchanged are left
    out.

    Raises ``TypeError`` for a value that has no size.
    """
    grown = {
        name: _size(after.get(name, 0)) - _size(before.get(name, 0))
        for name in {**before, **after}
    }
    return {name: size for name, size in grown.items() if size}


def _tables(ignore: Collection[str]) -> dict[str, Rows]:
    return {
        model._meta.label
        + ("" if connection.alias == "default" else f" on {connection.alias}"): _rows(
            model._base_manager.using(connection.alias).all()
        )
        for connection in connections.all()
        for model in _models(connection, ignore)
    }


def _models(
    connection: BaseDatabaseWrapper, ignore: Collection[str]
) -> Iterator[type[Model]]:
    if connection.settings_dict.get("TEST", {}).get("MIRROR"):
        return
    try:
        tables = set(connection.introspection.table_names())
    except (
        AssertionError,
        RuntimeError,
    ):  # Django's and pytest-django's: the test may not use this database
        return
    for model in apps.get_models(include_auto_created=True):
        options = model._meta
        if (
            options.app_label == OWN_APP
            or options.label_lower in ignore
            or options.proxy
        ):
            continue
        if options.db_table in tables and router.allow_migrate_model(
            connection.alias, model
        ):
            yield model


def _rows(found: QuerySet[Any]) -> Rows:
    count = found.count()
    if not 0 < count <= MOST_ROWS:
        return Rows(count)
    rows = found if found.query.is_sliced else found.order_by()
    plain = (
        [bytes(it) if isinstance(it, memoryview) else it for it in row]
        for row in rows.values_list().iterator()
    )
    return Rows(count, sum(hash(repr(row)) for row in plain))


def _size(value: Any) -> Any:
    if isinstance(value, Rows):
        return value.count
    size = len(value) if hasattr(value, "__len__") else value
    if not hasattr(size, "__sub__"):
        raise TypeError(
            f"effects returned {value!r}; here it has to return a number or a"
            " collection."
        )
    return size


def _change(before: Any, after: Any) -> str:
    if not isinstance(before, Rows) or not isinstance(after, Rows):
        return f"{_shown(before)}, then {_shown(after)}"
    if before.count == after.count:
        return "rows were changed"
    more = after.count - before.count
    return f"{abs(more)} {'more' if more > 0 else 'fewer'} row{'s' * (abs(more) != 1)}"


def policy_at(path: str, method: str) -> Policy:
    """Return the policy in force at ``path``; the project's if no view is protected
    there.
    """
    try:
        view = get_resolver().resolve(urlsplit(path).path).func
    except Resolver404:
        return conf().policy
    return resolve(policy_by_path(view, method.upper(), path) or Policy())
