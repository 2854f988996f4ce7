"""The run of one request: it begins where the view's handler is called, and ends when the view has ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing, nullcontext
from functools import partial, wraps
from typing import Any, TypeVar, cast

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase

from django_idempotency import engine
from django_idempotency.http.handlers import by_middleware
from django_idempotency.http.requests import expect_request, identify, is_keyed
from django_idempotency.http.responses import mark_refusal, problem_response, replay
from django_idempotency.http.transactions import is_atomic_request, open_atomic_requests
from django_idempotency.http.verdicts import verdict_of, verdict_on
from django_idempotency.reporting.logs import is_due, log
from django_idempotency.values.exceptions import (
    IdempotencyError,
    ReplayForbidden,
    StoreUnavailable,
    TerminalFailure,
)
from django_idempotency.values.outcomes import (
    Duplicate,
    EntryPoint,
    Operation,
    Replay,
    StoredResponse,
    Verdict,
    dotted_name,
)
from django_idempotency.values.policy import Policy
from django_idempotency.values.problems import problem

T = TypeVar("T")
Refused = Duplicate | IdempotencyError


class RequestRun:
    """Responds to one request: runs its view once, or returns what came of it before.

    ``perform(view)`` calls the view. The view calls its handler through ``guarded``, which claims the key: before that
    come the checks that a replay must pass, and afterwards whatever the view makes of the handler's result, which is
    stored. An async view is its own handler, and ``aperform`` does both.
    """

    replayed_as: type[HttpResponse] = HttpResponse

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
        self.is_reached = False
        self.run: engine.Run | None = None
        self.failure: TerminalFailure | None = None
        self.transactions: ExitStack | None = None
        if self.outer is None:
            request.idempotency = None  # type: ignore[attr-defined]

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
        return self._end(returned, raised)

    def guarded(self, handler: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Claim the key and call the handler, or return what ``refuse`` returns."""
        self.is_reached = True
        refused = self._enter(self._begin(engine.begin) if self.is_keyed else None)
        if refused is not None:
            return self.refuse(refused)
        if self.is_keyed:
            self._open_transactions()
        try:
            return handler(*args, **kwargs)
        except TerminalFailure as failure:
            return self._failed(failure)

    async def aperform(self, view: Callable[[], Awaitable[Any]]) -> HttpResponseBase:
        """``perform`` and ``guarded`` for async views, in lease mode only, because a transaction belongs to a thread.

        The begin and the end are shielded from cancellation, so that a caller that hangs up can't undo them.
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
                except TerminalFailure as failure:
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
        end = partial(self._end, returned, raised)
        return end() if self.run is None else await engine.shielded(end)

    async def _begin_waiting(self) -> engine.Run | Refused | None:
        begun = await engine.shielded(
            partial(self._begin, engine.begin_or_wait), undo=engine.give_back
        )
        with closing(begun) if isinstance(begun, engine.Pending) else nullcontext():
            while isinstance(begun, engine.Pending):
                await asyncio.sleep(begun.pause)
                again = partial(
                    self._unless_refused,
                    begun.operation,
                    partial(engine.begin_again, begun),
                )
                begun = await engine.shielded(again, undo=engine.give_back)
        return begun

    def rendered(self, result: Any) -> HttpResponseBase:
        """Return the response that the view's framework makes of what the view has returned."""
        return cast("HttpResponseBase", result)

    def handled(self, error: Exception) -> HttpResponseBase:
        """Return the response that the view's framework makes of an exception inside the view, or raise it."""
        raise error

    def refuse(self, outcome: Refused) -> HttpResponseBase:
        """Return the response to a caller for whom the handler is not run. Raises an error that stands for none."""
        if isinstance(outcome, Replay):
            return self.replay(outcome.response)
        response = problem_response(problem(outcome))
        mark_refusal(response)
        return response

    def replay(self, response: StoredResponse) -> HttpResponse:
        return replay(response, self.replayed_as)

    def _enter(self, begun: engine.Run | Refused | None) -> Refused | None:
        """Let the view see its run, if one has begun. Return what its caller gets instead if it is not to run."""
        if begun is None or isinstance(begun, Refused):
            return begun
        self.run = begun
        if not self.is_undone:
            begun.outlive_handled_errors()
        begun.context.running = True
        self.request.idempotency = begun.context  # type: ignore[attr-defined]
        return None

    def _leave(self) -> None:
        if self.run is not None:
            self.run.context.running = False
            self.request.idempotency = self.outer or self.run.context  # type: ignore[attr-defined]

    def _open_transactions(self) -> None:
        """Open Django's transactions, unless an outer entry point has opened them for the same run."""
        if self.transactions is not None and (
            self.run is not None or self.outer is None
        ):
            open_atomic_requests(
                self.transactions, self.request, but=self.transactional_on
            )

    @property
    def transactional_on(self) -> str | None:
        return None if self.run is None else self.run.transactional_on

    @property
    def is_undone(self) -> bool:
        """Whether an exception would have undone the view's effects if there had been no key."""
        using = self.transactional_on
        return using is not None and is_atomic_request(using, self.request)

    def _failed(self, failure: TerminalFailure) -> HttpResponseBase:
        """Give the view the response of a ``TerminalFailure``, which propagates once the view has ended."""
        self.failure = failure
        return failure.response

    def _raise_failure(self, response: HttpResponseBase) -> None:
        if self.failure is not None:
            self.failure.response = response  # type: ignore[assignment]
            raise self.failure

    # --- The begin

    def _begin(
        self, begin: Callable[[Operation, Policy], T]
    ) -> T | IdempotencyError | None:
        """Begin the run of the request's key; return ``None`` if the handler is to run without a claim of its own.

        That is the case without a scope if the key is ignored then, without a store if the policy sets ``fail_open``,
        and inside another entry point that has claimed the same record.
        """
        try:
            operation = self.identify()
        except IdempotencyError as error:
            return error
        if operation is None or (
            self.outer is not None and self.outer.claim.id == operation.id
        ):
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
            if error.claimed or not self.policy.fail_open:
                return error
            log(
                logging.ERROR,
                "unprotected",
                "idempotency record %s: the store can't be reached, so it runs unprotected, as the policy says",
                operation.id,
                operation=operation,
            )
            return None
        except IdempotencyError as error:
            return error

    # --- The end

    def _end(
        self, response: HttpResponseBase | None, raised: Exception | None
    ) -> HttpResponseBase:
        """End the run with what the view has returned or raised, and return the response to send, or raise."""
        if self.run is None:
            if isinstance(raised, TerminalFailure) and self.outer is None:
                return raised.response
            if raised is not None:
                raise raised
            return cast("HttpResponseBase", response)
        verdict: Verdict | None = None
        try:
            verdict, response = self._verdict(self.run, response, raised)
            raised = raised if response is None else None
        except Exception as error:  # from a middleware, or from rendering
            raised = error
        except BaseException as error:
            self.run.end(error=error)
            raise
        refused = _end_with(self.run, verdict, raised)
        return (
            cast("HttpResponseBase", response)
            if refused is None
            else self.refuse(refused)
        )

    def _verdict(
        self,
        run: engine.Run,
        response: HttpResponseBase | None,
        raised: Exception | None,
    ) -> tuple[Verdict, HttpResponseBase | None]:
        """Return what the view's end means for its record, and its response; none if Django makes that of ``raised``.

        The response is that of a ``TerminalFailure`` or of a middleware if the view has ``raised``. It is rendered.
        """
        run.context.ending = (
            True  # else a claim meanwhile would take the run for one that nobody ends
        )
        try:
            is_terminal, undone = (
                isinstance(raised, TerminalFailure),
                self.is_undone and raised is not None,
            )
            if isinstance(raised, TerminalFailure):
                response = raised.response
            elif raised is not None:
                response = by_middleware(self.request, raised, run.transactional_on)
                if response is None:
                    return verdict_on(raised, run.policy, rollback=undone), None
            return verdict_of(
                run, response, terminal=is_terminal, rollback=undone
            ), response
        finally:
            run.context.ending = False


def guard(
    view: Callable[..., Any], run_of: Callable[..., RequestRun], *, is_async: bool
) -> Callable[..., Any]:
    """Return ``view`` behind its entry point. ``run_of``: returns the run of a request, with the view's arguments."""
    if is_async:

        @wraps(view)
        async def aguarded(
            request: HttpRequest, *args: Any, **kwargs: Any
        ) -> HttpResponseBase:
            run = run_of(request, kwargs)
            return await run.aperform(partial(view, request, *args, **kwargs))

        return aguarded

    @wraps(view)
    def guarded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        run = run_of(request, kwargs)
        return run.perform(partial(run.guarded, view, request, *args, **kwargs))

    return guarded


def _end_with(
    run: engine.Run, verdict: Verdict | None, raised: Exception | None
) -> Refused | None:
    """End the run with a verdict, and raise what was ``raised`` again. Without a verdict, that was not expected.

    Return what the caller gets instead if another attempt took over, or if the store failed.
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


def report_unguarded(
    view: type, request: HttpRequest, policy: Policy, response: object
) -> None:
    """Report a success without a call of the handler, around which the entry point is, if ``request`` is keyed.

    Raises ``ImproperlyConfigured`` if the key is required. Otherwise, it is logged, once a minute at most for a view.
    """
    if (
        not is_keyed(request, policy)
        or not 200 <= getattr(response, "status_code", 0) < 300
    ):
        return
    name = dotted_name(view)
    if policy.required:
        raise ImproperlyConfigured(
            f"{name} ran unprotected: its dispatch() returned a response to {request.method} without calling a "
            "handler, around which the entry point is. Call super().dispatch(). A class that is not of REST framework "
            "needs no handler."
        )
    if is_due(f"unprotected {name}"):
        log(
            logging.ERROR,
            "unprotected",
            "%s runs unprotected: its dispatch() does not call the handler",
            name,
        )


def running(request: HttpRequest) -> engine.Context | None:
    """Return the context in which ``request`` is running already, inside another entry point; ``None`` outside."""
    context: engine.Context | None = getattr(request, "idempotency", None)
    return context if context is not None and context.running else None
