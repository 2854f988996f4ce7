"""The run of one request: it begins where the view's handler is called, and ends when
the view has ended.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from django_idempotency import engine
from django_idempotency.http.closures import inside_method
from django_idempotency.http.handlers import by_middleware
from django_idempotency.http.key_sources import has_key
from django_idempotency.http.requests import (
    context_of,
    expect_request,
    identify,
    is_keyed,
)
from django_idempotency.http.responses import refusal, replay, restore, seal_of
from django_idempotency.http.transactions import is_atomic_request, open_atomic_requests
from django_idempotency.http.unprotected import is_unprotected, note, report
from django_idempotency.http.verdicts import verdict_of, verdict_on
from django_idempotency.values.exceptions import (
    Hold,
    IdempotencyError,
    MissingKey,
    ReplayForbidden,
    StoreUnavailable,
    TerminalFailure,
)
from django_idempotency.values.keys import DEFAULT_HEADER
from django_idempotency.values.outcomes import (
    Duplicate,
    EntryPoint,
    Fail,
    OnHold,
    Operation,
    Replay,
    StoredResponse,
    Unprotected,
    Verdict,
    dotted_name,
    is_header,
)
from django_idempotency.values.policy import Policy
from django_idempotency.values.problems import problem

T = TypeVar("T")
Refused = Duplicate | IdempotencyError


class RequestRun:
    """Responds to one request: runs its view once, or returns what came of it before.

    ``perform(view)`` calls the view. The view calls its handler through ``guarded``,
    which claims the key: before that come the checks that a replay must pass, and
    afterwards whatever the view makes of the handler's result, which is stored. An
    async view is its own handler, and ``aperform`` does both.
    """

    replayed_as: type[HttpResponse] = HttpResponse
    is_rolled_back = False  # by what has handled an exception of the view

    def __init__(
        self,
        request: HttpRequest,
        policy: Policy,
        *,
        sender: object,
        entry_point: EntryPoint,
    ) -> None:
        expect_request(request)
        self.request = request
        self.policy = policy
        self.sender = sender
        self.entry_point = entry_point
        self.is_keyed = is_keyed(request, policy)
        self.outer = running(request)
        self.key: str | None = None
        self.run: engine.Run | None = None
        self.transactional_on: str | None = None
        # whether an exception would have undone the view's effects without a key
        self.is_undone = False
        self.failure: TerminalFailure | Hold | None = None
        self.inside: engine.entered | None = None
        self.transactions: ExitStack | None = None
        # the stored response, its replay, and what that is equal to as long as nobody
        # changes it
        self.replayed: tuple[StoredResponse, HttpResponse, object] | None = None
        if self.outer is None:
            if request.idempotency:  # type: ignore[attr-defined]  # an earlier run's
                request.idempotency = engine.Unclaimed()  # type: ignore[attr-defined]
            note(request, Unprotected.NO_HANDLER if self.is_keyed else None)

    # --- The view

    def perform(self, view: Callable[[], HttpResponseBase]) -> HttpResponseBase:
        """Call the view, and return the response to send, or raise."""
        returned, raised = None, None
        try:
            try:
                with ExitStack() as self.transactions:
                    if not self.is_keyed:
                        self._open_transactions()
                    try:
                        returned = self.rendered(view())
                    except Exception as error:
                        returned = self.handled(error)
                    self._raise_failure(returned)
            finally:
                self._leave()
        except (
            Exception
        ) as error:  # a signal's handler may raise one from the block above, too
            raised = error
        except BaseException as error:
            if self.run is not None:
                self.run.end(error=error)
            raise
        return self._finish(returned, raised)

    def guarded(self, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Claim the key and call the handler, or return what ``refuse`` returns."""
        refused = self._enter(self._begin(engine.begin) if self.is_keyed else None)
        if refused is not None:
            return self.refuse(refused)
        if self.is_keyed:
            self._open_transactions()
        try:
            return handler(*args, **kwargs)
        except (TerminalFailure, Hold) as failure:
            return self._failed(failure)

    async def aperform(self, view: Callable[[], Awaitable[Any]]) -> HttpResponseBase:
        """``perform`` and ``guarded`` for async views, in lease mode only, because a
        transaction belongs to a thread.

        The begin and the end are shielded from cancellation, so that a caller that
        hangs up can't undo them.
        """
        if self.policy.is_atomic:
            view_name = dotted_name(self.sender)
            raise ImproperlyConfigured(
                f'{view_name} is an async view in atomic mode; set mode="lease" for it.'
            )
        returned, raised = None, None
        try:
            try:
                try:
                    refused = self._enter(
                        await self._begin_waiting() if self.is_keyed else None
                    )
                    returned = (
                        self.rendered(await view())
                        if refused is None
                        else self.refuse(refused)
                    )
                except (TerminalFailure, Hold) as failure:
                    returned = self.rendered(self._failed(failure))
                except Exception as error:
                    returned = self.handled(error)
                self._raise_failure(returned)
            finally:
                self._leave()
        except Exception as error:
            raised = error
        except BaseException as error:
            if self.run is not None:
                await engine.shielded(partial(self.run.end, error=error))
            raise
        finish = partial(self._finish, returned, raised)
        waits = self.run is not None or is_unprotected(self.request, returned)
        return await engine.shielded(finish) if waits else finish()

    async def _begin_waiting(self) -> engine.Run | Refused | None:
        return await engine.awaited(
            partial(self._begin, engine.begin_or_wait),
            lambda pending: self._unless_refused(
                pending.operation, partial(engine.begin_again, pending)
            ),
        )

    def rendered(self, result: Any) -> HttpResponseBase:
        """Return the response that the view's framework makes of what the view has
        returned.
        """
        response: HttpResponseBase = result
        return response

    def handled(self, error: Exception) -> HttpResponseBase:
        """Return the response that the view's framework makes of an exception inside
        the view, or raise it.
        """
        raise error

    def refuse(self, outcome: Refused) -> HttpResponseBase:
        """Return the response to a caller for whom the handler is not run. Raises an
        error that stands for none.
        """
        if isinstance(outcome, Replay):
            replayed = self.replay(outcome.response)
            self.replayed = outcome.response, replayed, seal_of(replayed)
            return replayed
        return refusal(problem(outcome), self.request, self.policy)

    def echoed(self, response: HttpResponseBase) -> HttpResponseBase:
        """Return ``response`` with the key on it, if the policy says so."""
        source = self.policy.key.source
        name = source if isinstance(source, str) else DEFAULT_HEADER
        key: Any = self.request.META.get(self.policy.key.meta_name, self.key)
        if self.policy.echo_key and self.is_keyed and is_header(name, key):
            response.headers[name] = key
        return response

    def replay(self, response: StoredResponse) -> HttpResponse:
        return replay(response, self.replayed_as)

    def _enter(self, begun: engine.Run | Refused | None) -> Refused | None:
        """Let the view see its run, if one has begun. Return what its caller gets
        instead if it is not to run.
        """
        if isinstance(begun, Refused):
            note(self.request, None)
            return begun
        if begun is not None:
            self.run = begun
            using = self.transactional_on = begun.transactional_on
            within = connections if using is None else (using,)
            self.is_undone = any(
                map(partial(is_atomic_request, request=self.request), within)
            )
            if not self.is_undone:
                begun.outlive_handled_errors()
            self.request.idempotency = begun.context  # type: ignore[attr-defined]
        if self.run is not None or self.outer is None:
            self.inside = engine.entered(self.request.idempotency)  # type: ignore[attr-defined]
            self.inside.__enter__()
        return None

    def _leave(self) -> None:
        if self.inside is not None:
            self.inside.__exit__()
        if self.run is not None:
            self.request.idempotency = self.outer or self.run.context  # type: ignore[attr-defined]

    def _open_transactions(self) -> None:
        """Open Django's transactions, unless an outer entry point has opened them for
        the same run.
        """
        if self.transactions is not None and (
            self.run is not None or self.outer is None
        ):
            open_atomic_requests(
                self.transactions, self.request, but=self.transactional_on
            )

    def _failed(self, failure: TerminalFailure | Hold) -> HttpResponseBase:
        """Give the view the response of ``failure``, which propagates once the view has
        ended.
        """
        if isinstance(failure, TerminalFailure):
            self.failure = failure
            return failure.response
        if self.run is None:
            raise failure
        self.failure = failure
        return self.refuse(OnHold(failure.reason))

    def _raise_failure(self, response: HttpResponseBase) -> None:
        if self.failure is not None:
            self.failure.response = response  # type: ignore[assignment]
            raise self.failure

    # --- The begin

    def _begin(self, begin: Callable[[Operation, Policy], T]) -> T | Refused | None:
        """Begin the run of the request's key; return ``None`` if the handler is to run
        without a claim of its own.

        That is the case if a callable finds no key, without a scope if the key is
        ignored then, without a store if the policy sets ``fail_open``, and inside
        another entry point that has claimed the same record.
        """
        try:
            operation: Any = self.identify()
        except IdempotencyError as error:
            if self.policy.required or not isinstance(error, MissingKey):
                return error
            note(self.request, None)
            return None
        if isinstance(operation, Refused):  # by a lookup
            return operation
        if operation is None:
            is_lost = has_key(self.request, self.policy)
            note(self.request, Unprotected.NO_SCOPE if is_lost else None)
            return None
        self.key = operation.key
        if self.outer is not None and self.outer.claim.id == operation.id:
            return None
        return self._unless_refused(operation, partial(begin, operation, self.policy))

    def identify(self, caller: HttpRequest | None = None) -> Operation | None:
        return identify(
            self.request,
            self.policy,
            sender=self.sender,
            entry_point=self.entry_point,
            caller=caller,
        )

    def _unless_refused(
        self, operation: Operation, begin: Callable[[], T]
    ) -> T | IdempotencyError | None:
        try:
            return begin()
        except StoreUnavailable as error:
            if not (error.fails_open and self.policy.fail_open):
                return error
            note(self.request, Unprotected.FAIL_OPEN, operation)
            return None
        except IdempotencyError as error:
            return error

    # --- The end

    def _finish(
        self, response: HttpResponseBase | None, raised: Exception | None
    ) -> HttpResponseBase:
        """End the run with what the view has returned or raised, and return the
        response to send, or raise.
        """
        if self.replayed is not None:  # decorators have seen it, but don't change it
            stored, replayed, seal = self.replayed
            if seal_of(replayed) != seal:
                restore(replayed, self.replay(stored))
            return replayed
        if self.run is None:
            if isinstance(raised, TerminalFailure) and self.outer is None:
                return raised.response
            if raised is not None:
                raise raised
            report(
                self.request,
                response,
                self.sender,
                self.entry_point,
                self.policy,
            )
            return response  # type: ignore[return-value]
        verdict: Verdict | None = None
        try:
            verdict, response = self._verdict(self.run, response, raised)
            raised = raised if response is None else None
        except Exception as error:  # from a middleware, or from rendering
            raised = error
        except BaseException as error:
            self.run.end(error=error)
            raise
        refused = _finish_run(self.run, verdict, raised)
        return response if refused is None else self.refuse(refused)  # type: ignore[return-value]

    def _verdict(
        self,
        run: engine.Run,
        response: HttpResponseBase | None,
        raised: Exception | None,
    ) -> tuple[Verdict, HttpResponseBase | None]:
        """Return what the view's end means for its record, and its response; none if
        Django makes that of ``raised``.

        The response is that of a ``TerminalFailure`` or of a middleware if the view has
        ``raised``. It is rendered.
        """
        # else a claim meanwhile would take the run for one that nobody ends
        run.context.responding = True
        try:
            is_terminal, undone = (
                isinstance(raised, TerminalFailure),
                self.is_rolled_back or (self.is_undone and raised is not None),
            )
            if isinstance(raised, Hold) and raised.response is not None:
                return Fail(raised.reason, on_hold=True), raised.response
            if isinstance(raised, TerminalFailure):
                response = raised.response
            elif raised is not None:
                response = by_middleware(self.request, raised, run.transactional_on)
                if response is None:
                    return verdict_on(raised, run.policy, rollback=undone), None
            return (
                verdict_of(run, response, terminal=is_terminal, rollback=undone),
                response,
            )
        finally:
            run.context.responding = False


def guard(
    view: Callable[..., Any], run_of: Callable[..., RequestRun], *, is_async: bool
) -> Callable[..., Any]:
    """Return ``view`` behind its entry point. ``run_of``: returns the run of a request,
    with the view's arguments.
    """
    if is_async:

        @wraps(view)
        async def aguarded(
            request: HttpRequest, *args: Any, **kwargs: Any
        ) -> HttpResponseBase:
            run = run_of(request, kwargs)

            def inner(handler: Callable[..., Any]) -> Callable[..., Any]:
                return lambda *args, **kwargs: run.aperform(
                    partial(handler, *args, **kwargs)
                )

            response: HttpResponseBase = await inside_method(view, inner)(
                request, *args, **kwargs
            )
            return run.echoed(response)

        return aguarded

    @wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        run = run_of(request, kwargs)
        inner = inside_method(view, lambda handler: partial(run.guarded, handler))
        return run.echoed(run.perform(partial(inner, request, *args, **kwargs)))

    return guarded


def _finish_run(
    run: engine.Run, verdict: Verdict | None, raised: Exception | None
) -> Refused | None:
    """End the run with a verdict, and raise what was ``raised`` again. Without a
    verdict, that was not expected.

    Return what the caller gets instead if another attempt took over, or if the store
    failed.
    """
    try:
        lost = run.end(verdict, error=raised)
    except (StoreUnavailable, ReplayForbidden) as refusal:
        return refusal
    if isinstance(raised, StoreUnavailable):
        return raised
    if lost is None and raised is not None:
        raise raised
    return lost


def running(request: HttpRequest) -> engine.Context | None:
    """Return the context in which ``request`` is running already, inside another entry
    point; ``None`` outside.
    """
    seen = context_of(request)
    return seen if isinstance(seen, engine.Context) and seen.running else None
