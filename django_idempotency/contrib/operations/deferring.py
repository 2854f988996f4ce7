"""Defer an operation from a view: it is kept in the transaction that stores the 202."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import reverse
from django.utils.http import parse_header_parameters

from django_idempotency.contrib.operations.models import DeferredOperation
from django_idempotency.contrib.operations.registry import DeferError, Deferrable
from django_idempotency.contrib.operations.signals import operation_due
from django_idempotency.contrib.operations.status import IDENTITY
from django_idempotency.extending import conf
from django_idempotency.extending.stores import (
    EPOCH,
    Binding,
    Context,
    DatabaseNow,
    StoredResponse,
    decoded,
    encrypted,
)

URL_NAME = "idempotency-operation"
RETRY_AFTER = 5  # seconds
ASYNC = "respond-async"
HEADERS: dict[str, dict[str, Any]] = {
    "Location": {"type": "string", "format": "uri-reference"},
    "Retry-After": {"type": "integer"},
    "Preference-Applied": {"type": "string", "enum": [ASYNC]},
}
ACCEPTED = {
    "description": (
        "The operation was deferred; Location shows its status. Retries get this"
        " response until it is done, and then that of the operation."
    ),
    "headers": {name: {"schema": schema} for name, schema in HEADERS.items()},
    "content": {
        "application/json": {"schema": {"type": "object", "properties": IDENTITY}}
    },
}
View = TypeVar("View", bound=Callable[..., Any])


def defers(view: View) -> View:
    """Have OpenAPI documents say that ``view`` returns what ``defer`` does."""
    view.deferred_responses = {"202": ACCEPTED}  # type: ignore[attr-defined]
    return view


def defer(
    request: HttpRequest, operation: Deferrable, /, **arguments: Any
) -> HttpResponse:
    """Have ``operation`` run once, later, with ``arguments``. Return the response 202
    for the view to return: with ``Location``, the URL that is named
    ``idempotency-operation``, and ``Retry-After``.

    The operation is stored in the view's transaction: it and the response are both
    committed, or neither is. Retries of the request get the same 202 until the
    operation is done, and then its response. ``Preference-Applied`` says so if the
    request prefers ``respond-async`` (RFC 7240, section 4.1); ``wait`` is not obeyed.

    Raises ``DeferError``: without a key, in lease mode, with another operation of this
    request that is not done, and for arguments that JSON can't hold.
    """
    context: Any = getattr(request, "idempotency", None)
    text = operation.dumped(arguments)
    using = _database_of(context, operation)
    location = reverse(URL_NAME, args=[context.record_id])
    made = DeferredOperation(
        record_id=context.record_id,
        scope=context.scope,
        key=f"deferred:{uuid4()}",
        name=operation.name,
        retention=context.policy.retention,
        created_at=DatabaseNow(),
        due_at=DatabaseNow(),
    )
    seal(made, text)
    rows = DeferredOperation.objects.using(using).filter(pk=made.pk)
    # by lock, its worker must not forget it while this request begins anew
    earlier = rows.select_for_update().first()
    if earlier is None:
        made.save(using=using, force_insert=True)
    elif earlier.due_at is None:  # of an earlier life of the key
        made.save(using=using, force_update=True)
    elif (earlier.name, opened(earlier)) != (made.name, text):
        raise DeferError(
            f"The operation {earlier.name!r} of this key is not done yet, so"
            f" {operation.name!r} can't be deferred. Defer only one operation in each"
            " request."
        )
    send = partial(operation_due.send_robust, operation.name, record_id=made.pk)
    transaction.on_commit(partial(send, using=using), using=using, robust=True)
    response = JsonResponse({"id": str(made.pk), "status": "running"}, status=202)
    response["Location"] = location
    response["Retry-After"] = str(RETRY_AFTER)
    if prefers_async(request):
        response["Preference-Applied"] = ASYNC
    return response


def _database_of(context: Any, operation: Deferrable) -> str:
    if not isinstance(context, Context):
        raise DeferError(
            f"{operation.name!r} was deferred without a key, which is what makes it"
            " run only once. Protect the view, with required=True."
        )
    if not context.policy.is_atomic or context.database is None:
        raise DeferError(
            f"{operation.name!r} was deferred in lease mode or with a store outside the"
            " database, where it can't be committed with the response. Set"
            ' mode="atomic" for the view; the operation itself may have a lease.'
        )
    if context.policy.body.encrypt == "require" and not conf().encryption:
        raise DeferError(
            "The arguments can't be encrypted: there is no encryption key."
        )
    return context.database


def prefers_async(request: HttpRequest) -> bool:
    """Return whether the request has ``Prefer: respond-async``, among others."""
    stated = request.headers.get("Prefer", "").split(",")
    return any(parse_header_parameters(one.strip())[0] == ASYNC for one in stated)


# --- Arguments ------------------------------------------------------------------------


def _binding(of: DeferredOperation) -> Binding:
    return Binding(of.record_id, of.scope, of.key, b"", EPOCH, of.name)


def seal(of: DeferredOperation, text: bytes) -> None:
    """Set the arguments, encrypted if there is a key. Raises ``DeferError`` if they
    can't be.
    """
    plain = StoredResponse(200, (), text)
    stored = encrypted(plain, _binding(of)) if conf().encryption else plain
    if stored is None:
        raise DeferError("The arguments can't be encrypted; the log says why.")
    of.headers, of.arguments = [list(pair) for pair in stored.headers], stored.body


def opened(of: DeferredOperation) -> bytes | None:
    """Return the arguments; ``None`` if they can't be decrypted."""
    return decoded(StoredResponse.of(200, of.headers, of.arguments), _binding(of)).body
