"""The status of an operation, and a receipt for any key, without a retry."""

from __future__ import annotations

from base64 import b64encode
from copy import copy
from functools import partial
from io import BufferedIOBase
from typing import Any, ClassVar
from uuid import UUID

from django.core.exceptions import (
    ImproperlyConfigured,
    PermissionDenied,
    SuspiciousOperation,
)
from django.http import (
    Http404,
    HttpRequest,
    JsonResponse,
    QueryDict,
    RawPostDataException,
    UnreadablePostError,
)
from django.http.response import HttpResponseBase
from django.views import View

from django_idempotency import Policy, StoreUnavailable
from django_idempotency.extending import resolve
from django_idempotency.extending.operators import progress_of
from django_idempotency.extending.requests import (
    REPLAYED,
    has_entry_point,
    key_of,
    problem,
    refusal,
    respond,
    scope_of,
)
from django_idempotency.extending.stores import (
    LIVE,
    IdempotencyRecord,
    InFlight,
    MalformedKey,
    Mismatch,
    MissingKey,
    Operation,
    Replay,
    Snapshot,
    Status,
    StoredResponse,
    configured,
    databases,
    in_utc,
    replayed,
    store_errors,
    store_for,
)

RUNNING, SUCCEEDED, FAILED = "running", "succeeded", "failed"
LONGEST_RETRY_AFTER = 30  # seconds
REFUSALS = (
    *(Http404, PermissionDenied, SuspiciousOperation),
    *(UnreadablePostError, RawPostDataException),
)
# what a request has worked out, and what was said of its body and its response
DERIVED = ("headers", "accepted_types", "_body", "_post", "_files")
OF_CONTENT = ("CONTENT_", "HTTP_IF_", "HTTP_RANGE", "HTTP_ACCEPT")
FORM = "application/x-www-form-urlencoded"
TEXT = {"type": "string"}
IDENTITY = {
    "id": TEXT | {"format": "uuid"},
    "status": TEXT | {"enum": ["running", "succeeded", "failed", "on_hold"]},
}
STORED = {
    "status": {"type": "integer"},
    "content_type": TEXT | {"nullable": True},
    "body": TEXT | {"nullable": True},
    "body_base64": TEXT | {"description": "A body that is not UTF-8."},
}
RECEIPT = {
    **IDENTITY,
    "attempt": {"type": "integer"},
    "operation": TEXT | {"description": "The name of a deferred operation."},
    "step": TEXT | {"description": "The last step that is done."},
    "response": {"type": "object", "nullable": True, "properties": STORED},
}
# Django and REST framework would read such a body, and this package would not.
BODY = {
    "CONTENT_LENGTH": "1",
    "CONTENT_TYPE": FORM,
    "HTTP_TRANSFER_ENCODING": "chunked",
}


class OperationStatus(View):
    """Show what became of one of the caller's keys, as JSON.

    The key is that of the record ``id`` in the URL, or without one the key that the
    request has where ``policy`` expects it. ``policy``: whose keys these are, by its
    ``scope``, and in which database they are. For REST framework, make this the first
    base of an ``APIView``.

    Whatever a retry of the request by this caller would not get, is 404: the view of
    the first request is asked, with its middleware, decorators, authentication,
    permissions, throttles and ``may_replay``, but is not run. It is asked without the
    query and the body; a check that reads the body refuses.

    A request raises ``ImproperlyConfigured`` with ``scope="public"``, because anybody
    may guess a key, and with a store outside the database, which does not know the
    view.
    """

    http_method_names = ("get", "head")
    policy: Policy = Policy()
    receipt_schema: ClassVar[Any] = {
        "type": "object",
        "properties": RECEIPT,
        "required": [*IDENTITY, "attempt", "response"],
    }

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        self.sent = copy(request)  # before REST framework authenticates its caller
        return super().dispatch(request, *args, **kwargs)

    def get(self, request: Any, id: UUID | None = None) -> HttpResponseBase:
        policy = resolve(self.policy)
        _refuse_unfit(policy)
        try:
            with store_errors():
                record = self._record(request, policy, id)
        except (MissingKey, MalformedKey, StoreUnavailable) as error:
            return refusal(problem(error), request, policy)
        return _Lookup(record).response(self.sent)

    def _record(
        self, request: Any, policy: Policy, id: UUID | None
    ) -> IdempotencyRecord:
        if (scope := scope_of(request, policy)) is None:
            raise Http404
        if id is None:
            if (key := key_of(request, policy)) is None:
                raise MissingKey
            id = Operation(scope, key, b"").id
        for using in databases():
            records = IdempotencyRecord.objects.using(using).with_id(id)
            record = records.defer("response_headers", "response_body").first()
            if record and f"{record.scope} ".startswith(f"{scope} "):  # or at a path
                return record
        raise Http404


def _refuse_unfit(policy: Policy) -> None:
    if policy.scope == "public":
        raise ImproperlyConfigured(
            'The status view has scope="public", so anybody who guesses a key gets its'
            " response; set a policy whose scope names the caller."
        )
    if not configured(policy.store).backend.transactional:
        raise ImproperlyConfigured(
            f"The status view has the store {policy.store!r}, which does not keep the"
            " path of a request, so its view can't be asked who may see the response;"
            " set a policy with a store in the database."
        )


class _Lookup:
    """Asks the view of the record's request whether this caller would get a replay."""

    seen: Snapshot | None = None
    stored: StoredResponse | None = None

    def __init__(self, record: IdempotencyRecord) -> None:
        self.record, self.key = record, record.key

    def __call__(
        self, operation: Operation, policy: Policy
    ) -> Replay | InFlight | Mismatch:
        """Return what the caller gets in the place of the view's handler."""
        store = store_for(policy, operation)
        seen = store.read(operation.id)  # in the scope that the caller has there
        if seen is None or not self._is_same(seen) or _has_expired(seen):
            return Mismatch()
        if (response := seen.response) is None:
            self.seen = seen
            return InFlight(1)
        replay = replayed(response, seen, operation, store)
        self.seen, self.stored = seen, replay.response
        return replay

    def _is_same(self, seen: Snapshot) -> bool:
        """Whether the key was not used again, for another view, since its record was
        read.
        """
        read = self.record
        return seen.created_at == in_utc(read.created_at, read._state.db or "")

    def response(self, sent: HttpRequest) -> HttpResponseBase:
        # before the response is read, which may become the operation's meanwhile
        progress = progress_of(self.record)
        try:
            response = respond(
                _as_first_sent(sent, self.record),
                self,
                partial(has_entry_point, method=self.record.method),
            )
        except REFUSALS:
            raise Http404 from None
        if response is None or self.seen is None:
            # The caller is the right one: let it know that it has to wait.
            if response is not None and response.status_code in (429, 503):
                return response
            raise Http404
        if self.stored is not None and REPLAYED not in response.headers:
            raise Http404
        return self._shown(self.seen, response, progress)

    def _shown(
        self, seen: Snapshot, response: Any, progress: dict[str, Any]
    ) -> HttpResponseBase:
        shown = {
            "id": str(seen.id),
            "status": status_of(seen),
            "attempt": seen.attempts,
        }
        shown |= progress
        # not the 202 of a deferred operation
        has_ended = shown["status"] in (SUCCEEDED, FAILED)
        stored = self.stored if has_ended else None
        shown["response"] = stored and _content(response, stored)
        headers = {"Cache-Control": "no-store"}
        if shown["status"] == RUNNING:
            elapsed = (seen.now - seen.created_at).total_seconds()
            seconds = max(1, min(int(elapsed / 2), LONGEST_RETRY_AFTER))
            headers["Retry-After"] = str(seconds)
        return JsonResponse(shown, headers=headers)


def _has_expired(seen: Snapshot) -> bool:
    may_expire = seen.status not in LIVE and not seen.on_hold
    return may_expire and seen.expires_at <= seen.now


def status_of(seen: Snapshot | IdempotencyRecord) -> str:
    if seen.on_hold:
        return "on_hold"
    if seen.status in LIVE:
        return RUNNING
    return SUCCEEDED if seen.status == Status.COMPLETED else FAILED


def _content(response: Any, stored: StoredResponse) -> dict[str, Any]:
    """Return what a replay has. A body that is not UTF-8 is in ``body_base64``."""
    shown = {"status": response.status_code, "content_type": None, "body": None}
    if stored.body is None:
        return shown
    shown["content_type"] = response.headers.get("Content-Type")
    try:
        return shown | {"body": response.content.decode()}
    except UnicodeDecodeError:
        return shown | {"body_base64": b64encode(response.content).decode()}


def _as_first_sent(request: HttpRequest, record: IdempotencyRecord) -> HttpRequest:
    """Return a copy of ``request`` for the view of the first one, whose body is unknown
    and can't be read.
    """
    again = copy(request)
    for name in DERIVED:
        vars(again).pop(name, None)
    prefix = request.path.removesuffix(request.path_info)
    path_info = record.path.removeprefix(prefix)
    said = {
        "REQUEST_METHOD": record.method,
        "PATH_INFO": path_info,
        "QUERY_STRING": "",
    }
    kept = {
        name: value
        for name, value in request.META.items()
        if not name.startswith(OF_CONTENT)
    }
    vars(again).update(
        META=kept | said | BODY,
        GET=QueryDict(),
        method=record.method,
        path=record.path,
        path_info=path_info,
        content_type=FORM,
        _stream=BufferedIOBase(),
        _read_started=False,
        _dont_enforce_csrf_checks=True,  # nothing is run
    )
    return again
