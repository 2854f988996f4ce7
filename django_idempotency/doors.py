"""What the doors share: which operation a request asks for, and a run of the view inside the engine."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Any

from asgiref.sync import sync_to_async
from django.core.exceptions import BadRequest, ImproperlyConfigured, PermissionDenied, SuspiciousOperation
from django.db import connections, transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.http.multipartparser import MultiPartParserError
from django.http.response import HttpResponseBase

from django_idempotency import engine, fingerprints, signals
from django_idempotency.conf import conf
from django_idempotency.exceptions import (
    AnonymousKey,
    ClaimLost,
    IdempotencyError,
    MalformedKey,
    MissingKey,
    StoreUnavailable,
    TerminalFailure,
)
from django_idempotency.keys import born, parse_key, parse_sent
from django_idempotency.logs import log
from django_idempotency.outcomes import (
    Claimed,
    Door,
    Duplicate,
    Fail,
    Operation,
    Outcome,
    Release,
    Replay,
    StoredResponse,
    Verdict,
)
from django_idempotency.policy import Mode, Policy
from django_idempotency.responses import judge, problem, problem_response, replay, stored

View = Callable[..., Any]


# --- Before the run --------------------------------------------------------------------------------------------------


def is_keyed(request: HttpRequest, policy: Policy) -> bool:
    """Whether ``request`` is of a method that heeds the header, and carries it or has to."""
    return request.method in policy.methods and (policy.required or conf().meta_name in request.META)


def identify(
    request: HttpRequest,
    policy: Policy,
    *,
    sender: object,
    door: Door | None = None,
    caller: HttpRequest | None = None,
) -> Operation | None:
    """The operation that ``request`` asks for, or ``None`` if it carries no key and needs none.

    ``caller``: the request as the view's framework has authenticated it, for the scope.
    Raises ``MissingKey``, ``MalformedKey`` and ``AnonymousKey``, and whatever Django raises for an unreadable body.
    """
    caller = caller or request
    if not is_keyed(request, policy):
        return None
    header = request.META.get(conf().meta_name)
    if header is None:
        raise MissingKey
    key = parse_key(header, strict=policy.strict)
    return Operation(
        key=key,
        scope=_scope(caller, policy),
        fingerprint=_fingerprint(request, caller, policy),
        method=request.method or "",
        path=request.path.replace("\0", "\N{SYMBOL FOR NULL}"),
        sender=sender,
        door=door,
        sent=_sent(request, key) if policy.late_after is not None else None,
    )


def _scope(caller: HttpRequest, policy: Policy) -> str:
    scope = policy.scope(caller) if callable(policy.scope) else policy.scope or _user_scope(caller)
    if not scope:
        raise AnonymousKey
    if "\0" in scope:
        raise MalformedKey(f"The scope {scope!a} of this request holds a NUL character.")
    return scope


def _user_scope(caller: HttpRequest) -> str | None:
    user = getattr(caller, "user", None)
    return f"user:{user.pk}" if user is not None and user.is_authenticated else None


def _fingerprint(request: HttpRequest, caller: HttpRequest, policy: Policy) -> bytes:
    if policy.fingerprint is not None:
        return fingerprints.of_bytes(request, policy.fingerprint(caller))
    return fingerprints.fingerprint(request, only=policy.fingerprint_fields, exclude=policy.fingerprint_exclude)


def _sent(request: HttpRequest, key: str) -> datetime | None:
    header = request.META.get(conf().sent_meta_name or "")
    return born(key) if header is None else parse_sent(header)


def answer(outcome: Outcome | IdempotencyError) -> HttpResponse:
    """The answer to a caller who is not to run. Raises an error that is nobody's answer."""
    if isinstance(outcome, Replay):
        return replay(outcome.response)
    assert not isinstance(outcome, Claimed)
    return problem_response(problem(outcome))


# --- ATOMIC_REQUESTS -------------------------------------------------------------------------------------------------


def take_over_atomic_requests(door: View) -> View:
    """Keep Django from opening its transactions around ``door``, which opens them itself, by ``atomic_requests``."""
    door._non_atomic_requests = set(connections)  # type: ignore[attr-defined]
    return door


@contextmanager
def atomic_requests(non_atomic: Collection[str], *, but: str | None = None) -> Iterator[None]:
    """The transactions that ``ATOMIC_REQUESTS`` asks for, but for one that is open already."""
    with ExitStack() as stack:
        for using in connections:
            wanted = connections.settings[using]["ATOMIC_REQUESTS"] and using not in non_atomic
            if wanted and using != but:
                stack.enter_context(transaction.atomic(using=using))
        yield


# --- The run ---------------------------------------------------------------------------------------------------------


def verdict_on(error: Exception, policy: Policy) -> Verdict:
    """What an exception means for the record that Django, not the view, makes an answer of."""
    match error:
        case Http404():
            status = 404
        case PermissionDenied():
            status = 403
        case BadRequest() | SuspiciousOperation() | MultiPartParserError():
            status = 400
        case _:
            status = 500
    return Release() if status in policy.release_statuses else Fail(type(error).__name__)


def settle(execution: engine.Execution, response: HttpResponseBase, *, error: Exception | None = None) -> None:
    """Render the response and settle on what it means, where it stands for an ``error`` too.

    Raises what rendering raises; the effects have happened then.
    """
    _expect_response(response)
    status, policy = response.status_code, execution.policy
    kind = {"raised": error is not None, "terminal": isinstance(error, TerminalFailure)}
    if not getattr(response, "is_rendered", True):
        execution.settle(judge(status, policy, lambda: StoredResponse(status, body=None), **kind))
        response.render()  # type: ignore[attr-defined]
    execution.settle(judge(status, policy, lambda: stored(response, policy), **kind))


def _expect_response(response: Any) -> None:
    if not isinstance(response, HttpResponseBase):
        raise TypeError(
            f"The view returned {type(response).__name__}, not an HttpResponse: there is no answer to store. Apply the "
            "door where there is one (outside what makes a response of a result)."
        )


def perform(
    request: HttpRequest,
    policy: Policy,
    run: Callable[[], HttpResponseBase],
    *,
    sender: object,
    door: Door,
    non_atomic: Collection[str] = (),
) -> HttpResponseBase:
    """Answer a request: by running the view once, or by what came of it before."""
    outcome = claim(request, policy, sender=sender, door=door)
    if outcome is None:
        with atomic_requests(non_atomic):
            return run()
    if isinstance(outcome, Claimed):
        try:
            with engine.execution(outcome, policy) as execution:
                return _run(request, execution, run, non_atomic)
        except (ClaimLost, StoreUnavailable) as error:
            outcome = after_losing(error, outcome.operation, policy)
    return answer(outcome)


def _run(
    request: HttpRequest, execution: engine.Execution, run: Callable[[], HttpResponseBase], non_atomic: Collection[str]
) -> HttpResponseBase:
    request.idempotency = execution.context  # type: ignore[attr-defined]
    try:
        with atomic_requests(non_atomic, but=execution.transactional_on):
            response = run()
    except TerminalFailure as failure:
        settle(execution, failure.response, error=failure)
        return failure.response
    except Exception as error:
        execution.settle(verdict_on(error, execution.policy))
        raise
    settle(execution, response)
    return response


async def aperform(
    request: HttpRequest, policy: Policy, run: Callable[[], Awaitable[HttpResponseBase]], *, sender: object, door: Door
) -> HttpResponseBase:
    """``perform`` for async views: in lease mode only, because a transaction belongs to a thread."""
    if policy.mode != Mode.LEASE:
        raise ImproperlyConfigured(f'{sender!r} is an async view in atomic mode; state mode="lease" for it.')
    outcome = await sync_to_async(claim)(request, policy, sender=sender, door=door)
    if outcome is None:
        return await run()
    if isinstance(outcome, Claimed):
        try:
            async with engine.aexecution(outcome, policy) as execution:
                return await _arun(request, execution, run)
        except (ClaimLost, StoreUnavailable) as error:
            outcome = await sync_to_async(after_losing)(error, outcome.operation, policy)
    return answer(outcome)


async def _arun(
    request: HttpRequest, execution: engine.Execution, run: Callable[[], Awaitable[HttpResponseBase]]
) -> HttpResponseBase:
    request.idempotency = execution.context  # type: ignore[attr-defined]
    try:
        response = await run()
    except TerminalFailure as failure:
        await sync_to_async(settle)(execution, failure.response, error=failure)
        return failure.response
    except Exception as error:
        execution.settle(verdict_on(error, execution.policy))
        raise
    await sync_to_async(settle)(execution, response)
    return response


def claim(request: HttpRequest, policy: Policy, *, sender: object, door: Door) -> Outcome | IdempotencyError | None:
    """What the engine says of a request's key; ``None`` if it is to run unprotected."""
    request.idempotency = None  # type: ignore[attr-defined]
    try:
        operation = identify(request, policy, sender=sender, door=door)
        return None if operation is None else claim_or_fail_open(operation, policy)
    except IdempotencyError as error:
        return error


def claim_or_fail_open(operation: Operation, policy: Policy) -> Outcome | None:
    try:
        engine.refuse_late(operation, policy)
        return engine.claim(operation, policy)
    except StoreUnavailable as error:
        signals.send(signals.store_failed, operation, error=error)
        if not policy.fail_open:
            raise
        log(
            logging.ERROR,
            "unprotected",
            "idempotency record %s: no store, so it runs unprotected, as the policy says",
            operation.id,
            operation=operation,
        )
        return None


def after_losing(
    error: ClaimLost | StoreUnavailable, operation: Operation, policy: Policy
) -> Duplicate | StoreUnavailable:
    """What a caller is told whose run came to nothing."""
    if isinstance(error, StoreUnavailable):
        return error
    try:
        return engine.duplicate(operation, policy)
    except StoreUnavailable as unreachable:
        return unreachable
