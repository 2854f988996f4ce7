"""The door for Django REST framework: APIViews, generic views, viewsets and their ``@action``s."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from django.http import HttpRequest
from django.http.response import HttpResponseBase
from rest_framework.exceptions import APIException
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from django_idempotency import engine
from django_idempotency.conf import resolve
from django_idempotency.doors import (
    after_losing,
    atomic_requests,
    claim_or_fail_open,
    identify,
    is_keyed,
    settle,
    take_over_atomic_requests,
    verdict_on,
)
from django_idempotency.exceptions import ClaimLost, IdempotencyError, StoreUnavailable, TerminalFailure
from django_idempotency.outcomes import Claimed, Door, Outcome, Replay
from django_idempotency.policy import Policy
from django_idempotency.responses import PROBLEM_JSON, Problem, Refusal, problem, replay


class IdempotencyProblem(APIException):
    """An answer of ours, on its way through the project's exception handler.

    ``problem`` holds all of it; ``detail``, ``status_code``, ``get_codes()`` and ``wait`` (seconds, sent as
    ``Retry-After``) are what handlers of REST framework expect.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(detail=problem.detail or problem.title, code=problem.code)
        self.problem = problem
        self.status_code = problem.status
        if problem.retry_after is not None:
            self.wait = problem.retry_after


class IdempotentMixin:
    """Makes the unsafe methods of a view run once for each idempotency key.

    Stands before ``APIView`` or a viewset among the bases. The key is claimed after ``initial()``, so authentication,
    permissions and throttles have run, on replays too. ``idempotency`` states the view's policy; an action states its
    own as ``@action(…, idempotency=Policy(…))``.
    """

    idempotency: Policy = Policy()
    idempotency_door: Door = Door.MIXIN

    @classmethod
    def as_view(cls, *args: Any, **initkwargs: Any) -> Any:
        return take_over_atomic_requests(super().as_view(*args, **initkwargs))  # type: ignore[misc]

    def dispatch(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        request.idempotency = None  # type: ignore[attr-defined]
        policy = resolve(self.idempotency)
        name = (request.method or "").lower()
        handler = getattr(self, name, None) if name in self.http_method_names else None
        if handler is None or not is_keyed(request, policy):
            with atomic_requests(_non_atomic(self)):
                return _dispatch(self, request, *args, **kwargs)
        run = _Run(self, policy, handler)
        setattr(self, name, run)
        return run.dispatch(request, *args, **kwargs)

    def handle_exception(self: Any, exc: Exception) -> Response:
        response: Response = super().handle_exception(exc)  # type: ignore[misc]
        if isinstance(exc, IdempotencyProblem):
            _shape_problem(self.request, response, exc)
        return response


def _dispatch(view: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
    response: HttpResponseBase = super(IdempotentMixin, view).dispatch(request, *args, **kwargs)
    return response


def _non_atomic(view: APIView) -> frozenset[str]:
    return getattr(type(view).dispatch, "_non_atomic_requests", frozenset())


def _shape_problem(request: Request, response: Response, exc: IdempotencyProblem) -> None:
    for name, value in exc.problem.headers():
        response.headers.setdefault(name, value)
    if getattr(response, "data", None) == {"detail": exc.detail}:  # what REST framework's own handler makes of it
        response.data = exc.problem.members()
        if getattr(request, "accepted_renderer", None) and request.accepted_renderer.media_type == "application/json":
            response.content_type = PROBLEM_JSON


class _Run:
    """One request with a key: stands in the handler's place in ``dispatch()``, and completes what that returned."""

    def __init__(self, view: Any, policy: Policy, handler: Callable[..., Any]) -> None:
        self.view = view
        self.policy = policy
        self.handler = handler
        self.open = ExitStack()
        self.execution: engine.Execution | None = None
        self.replayed: HttpResponseBase | None = None
        self.error: Exception | None = None

    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        try:
            with self.open:
                response = _dispatch(self.view, request, *args, **kwargs)
                if self.execution is not None:
                    settle(self.execution, response, error=self.error)
        except (ClaimLost, StoreUnavailable) as error:
            return self._answer_after_losing(error, *args, **kwargs)
        return response if self.replayed is None else self.replayed

    def __call__(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponseBase:
        outcome = self._claim(request)
        if isinstance(outcome, Claimed):
            outcome = self._open(outcome)
        if isinstance(outcome, Replay):
            self.replayed = replay(outcome.response)
            return self.replayed
        if outcome is not None:
            raise IdempotencyProblem(problem(outcome))
        return self._handle(request, *args, **kwargs)

    def _claim(self, request: Request) -> Outcome | IdempotencyError | None:
        if request._request.content_type == "multipart/form-data":
            _ = request.data  # parsed by the view's own parsers, which may refuse it
        try:
            operation = identify(
                request._request,
                self.policy,
                sender=type(self.view),
                door=self.view.idempotency_door,
                caller=request,
            )
            return None if operation is None else claim_or_fail_open(operation, self.policy)
        except IdempotencyError as error:
            return error

    def _open(self, claimed: Claimed) -> Replay | Refusal | None:
        try:
            self.execution = self.open.enter_context(engine.execution(claimed, self.policy))
        except (ClaimLost, StoreUnavailable) as error:
            return after_losing(error, claimed.operation, self.policy)
        return None

    def _handle(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponseBase:
        transactional_on = None
        if self.execution is not None:
            request._request.idempotency = self.execution.context  # type: ignore[attr-defined]
            transactional_on = self.execution.transactional_on
        try:
            with atomic_requests(_non_atomic(self.view), but=transactional_on):
                response: HttpResponseBase = self.handler(request, *args, **kwargs)
                return response
        except Exception as error:
            self.error = error
            if isinstance(error, TerminalFailure):
                return error.response
            if self.execution is not None:
                self.execution.settle(verdict_on(error, self.policy))
            raise

    def _answer_after_losing(self, error: ClaimLost | StoreUnavailable, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if self.execution is None:
            raise error
        outcome = after_losing(error, self.execution.claim.operation, self.policy)
        if isinstance(outcome, Replay):
            return replay(outcome.response)
        view = self.view
        response = view.handle_exception(IdempotencyProblem(problem(outcome)))
        view.response = view.finalize_response(view.request, response, *args, **kwargs)
        finalized: HttpResponseBase = view.response
        return finalized
