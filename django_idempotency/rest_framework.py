"""The entry point for Django REST framework: APIViews, generic views, viewsets and their ``@action``s.

Put ``IdempotentMixin`` before ``APIView`` or a viewset among the bases. The unsafe methods of the view then run once
for each idempotency key. The key is claimed after ``initial()``, so authentication, permissions and throttles run
first, on replays too. Set the view's policy as ``idempotency_policy``; an action sets its own with
``@action(…, idempotency_policy=Policy(…))``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from difflib import get_close_matches
from functools import cached_property, partial, wraps
from inspect import iscoroutinefunction
from typing import Any, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.http import HttpRequest, HttpResponse, RawPostDataException
from django.http.response import HttpResponseBase
from django.views import View
from rest_framework.exceptions import APIException, UnsupportedMediaType
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView, set_rollback

from django_idempotency import engine
from django_idempotency.conf import resolve
from django_idempotency.exceptions import ClaimLost, IdempotencyError, StoreUnavailable, TerminalFailure
from django_idempotency.http.observing import keep_body, observe
from django_idempotency.http.problems import PROBLEM_JSON, Problem, Refusal, mark_refusal, problem
from django_idempotency.http.requests import has_moderate_body, is_keyed
from django_idempotency.http.responses import replay
from django_idempotency.http.runner import after_losing, claim, running, stop_running
from django_idempotency.http.transactions import (
    NonAtomic,
    atomic_requests,
    is_atomic_request,
    stated_on_class,
    take_over_atomic_requests,
)
from django_idempotency.http.verdicts import settle, verdict_on
from django_idempotency.outcomes import Claimed, EntryPoint, Outcome, Replay, StoredResponse
from django_idempotency.policy import Policy

Dispatch = Callable[..., HttpResponseBase]


class IdempotencyProblem(APIException):
    """Carries a problem response of this package through the project's exception handler.

    ``problem`` is the complete problem. ``detail``, ``status_code``, ``get_codes()`` and ``wait`` (seconds, sent as
    ``Retry-After``) are what REST framework's handlers expect.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(detail=str(problem.detail), code=problem.code)
        self.problem = problem
        self.status_code = problem.status
        if problem.retry_after is not None:
            self.wait = problem.retry_after


class IdempotentMixin:
    # No docstring: schema generators would show it as the description of every view without one.

    idempotency_policy: Policy = Policy()
    idempotency_entry_point: EntryPoint = EntryPoint.MIXIN
    idempotency_non_atomic = NonAtomic()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_order(cls)
        _refuse_policy(cls, cls.idempotency_policy)
        _refuse_misspelt_policy(cls)

    @classmethod
    def as_view(cls, *args: Any, **initkwargs: Any) -> Any:
        _refuse_policy(cls, initkwargs.get("idempotency_policy", cls.idempotency_policy))
        if getattr(cls, "view_is_async", False):
            _refuse_async(cls.__qualname__)
        non_atomic = NonAtomic(stated_on_class(cls))
        view = super().as_view(*args, **initkwargs, idempotency_non_atomic=non_atomic)  # type: ignore[misc]
        if cls.dispatch is IdempotentMixin.dispatch:  # Django has copied nothing from the one that it hides
            vars(view).update(vars(super().dispatch) | vars(view))  # type: ignore[misc]
        return take_over_atomic_requests(view, non_atomic)

    def dispatch(self: Any, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        way, stated = self.idempotency_entry_point, self.idempotency_non_atomic.stated
        return dispatch(self, self.idempotency_policy, way, stated, super().dispatch, request, *args, **kwargs)  # type: ignore[misc]


def _refuse_order(cls: type) -> None:
    order = cls.__mro__
    if View in order and APIView not in order:
        raise ImproperlyConfigured(
            f"{cls.__qualname__} is not one of REST framework's views: put @idempotent on the class instead of "
            "IdempotentMixin among its bases."
        )
    if APIView in order and order.index(APIView) < order.index(IdempotentMixin):
        bases = sorted(cls.__bases__, key=lambda base: not issubclass(base, IdempotentMixin))
        raise ImproperlyConfigured(
            f"{cls.__qualname__} is not protected: IdempotentMixin comes after APIView. Write class "
            f"{cls.__name__}({', '.join(base.__name__ for base in bases)})."
        )


def _refuse_async(name: str) -> NoReturn:
    raise ImproperlyConfigured(
        f"{name} is async, but the entry point for REST framework runs only sync handlers. Make it sync, or write an "
        'async Django view with @idempotent(mode="lease").'
    )


def _refuse_policy(cls: type, policy: object) -> None:
    if not isinstance(policy, Policy):
        raise ImproperlyConfigured(
            f"{cls.__qualname__}: idempotency_policy is {policy!r}; write idempotency_policy = Policy(…)."
        )


def _refuse_misspelt_policy(cls: type) -> None:
    policies = [name for name, value in vars(cls).items() if isinstance(value, Policy)]
    nearly = get_close_matches("idempotency_policy", policies, cutoff=0.8)
    for name in (*nearly, "idempotency"):
        if name in vars(cls) and name != "idempotency_policy":
            raise ImproperlyConfigured(f"Nothing reads {cls.__qualname__}.{name}: write idempotency_policy.")


def dispatch(
    view: Any,
    policy: Policy,
    entry_point: EntryPoint,
    non_atomic: Collection[str],
    dispatch: Dispatch,
    request: HttpRequest,
    *args: Any,
    **kwargs: Any,
) -> HttpResponseBase:
    """Run ``dispatch`` of ``view`` with an entry point around the handler that it calls."""
    policy = resolve(policy)
    if running(request) is None:
        request.idempotency = None  # type: ignore[attr-defined]
    name = (request.method or "").lower()
    handler = getattr(view, name, None) if name in view.http_method_names else None
    if handler is None or not is_keyed(request, policy):
        watched = keep_body(request, policy)
        if handler is not None and running(request) is None and not iscoroutinefunction(handler):
            setattr(view, name, wraps(handler)(partial(_handle_unclaimed, handler)))
        with atomic_requests(non_atomic):
            response = dispatch(request, *args, **kwargs)
        if watched:
            caller = getattr(view, "request", request)
            observe(request, policy, response, sender=type(view), entry_point=entry_point, caller=caller)
        return response
    if iscoroutinefunction(handler):
        _refuse_async(f"{type(view).__qualname__}.{name}")
    if policy.fingerprint is None and request.content_type != "multipart/form-data" and has_moderate_body(request):
        # A permission may read the data, and most parsers leave nothing of it for the fingerprint.
        with suppress(RawPostDataException):
            _ = request.body
    run = _Run(view, policy, entry_point, non_atomic, handler)
    setattr(view, name, wraps(handler)(partial(run)))  # with its attributes, which permissions may ask for
    return run.dispatch(dispatch, request, *args, **kwargs)


def _handle_unclaimed(handler: Callable[..., HttpResponseBase], *args: Any, **kwargs: Any) -> HttpResponseBase:
    """Call ``handler`` without a claim. A ``TerminalFailure`` is the response then, too."""
    try:
        return handler(*args, **kwargs)
    except TerminalFailure as failure:
        set_rollback()
        return failure.response


class ReplayedResponse(HttpResponse):
    """A stored response. ``data`` is its parsed JSON, as on a ``Response``, or ``None`` if it is not JSON."""

    @cached_property
    def data(self) -> Any:
        try:
            return json.loads(self.content)
        except ValueError:
            return None


# Note [Two phases of a dispatch]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# APIView.dispatch() calls initial(), the handler, handle_exception() and finalize_response(), and has no hook between
# the first two. The claim must come after initial(), which runs authentication, permissions and throttles; what is
# stored is the rendered response after finalize_response(). So the run is in two places. _Run replaces the handler on
# the view, where it claims and opens the execution (__call__). It also wraps dispatch(), where it settles on a verdict
# and closes the execution (dispatch). An ExitStack keeps the execution open in between. handle_exception() is replaced
# as well, because REST framework has turned the error into a response by then.
class _Run:
    """One request with a key. It replaces the handler in ``dispatch()``, and completes what that returned."""

    def __init__(
        self,
        view: Any,
        policy: Policy,
        entry_point: EntryPoint,
        non_atomic: Collection[str],
        handler: Callable[..., Any],
    ) -> None:
        self.view = view
        self.policy = policy
        self.entry_point = entry_point
        self.non_atomic = non_atomic
        self.handler = handler
        self.open = ExitStack()
        self.open_requests = ExitStack()
        self.execution: engine.Execution | None = None
        self.replayed: StoredResponse | None = None
        self.error: Exception | None = None
        self.view_handle_exception, view.handle_exception = view.handle_exception, self.handle_exception

    def dispatch(self, dispatch: Dispatch, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        outer = running(request)
        try:
            with self.open:
                with self.open_requests:
                    response = dispatch(request, *args, **kwargs)
                if self.execution is not None:
                    settle(self.execution, response, error=self.error)
                elif isinstance(self.error, TerminalFailure):  # inside another entry point, which is to roll back
                    raise TerminalFailure(response) from self.error  # type: ignore[arg-type]
        except (ClaimLost, StoreUnavailable) as error:
            return self._respond_after_losing(error, *args, **kwargs)
        except Exception:  # if finalizing a replay fails, the stored response is sent all the same
            if self.replayed is None:
                raise
        finally:
            if self.execution is not None:
                stop_running(request, self.execution.context, outer)
        # A replay is sent as stored, because the stored response has already been through finalize_response.
        return response if self.replayed is None else self._replay(self.replayed)

    @property
    def non_atomic_on(self) -> str | None:
        """The database of the run's transaction, if the view would have had no transaction there without a key."""
        using = self.execution.transactional_on if self.execution else None
        return using if using is not None and not is_atomic_request(using, self.non_atomic) else None

    def __call__(self, request: Request, *args: Any, **kwargs: Any) -> HttpResponseBase:
        outcome = self._claim(request)
        if isinstance(outcome, Claimed):
            outcome = self._open(outcome)
        if isinstance(outcome, Replay):
            self.replayed = outcome.response
            return self._replay(outcome.response)
        if outcome is not None:
            raise IdempotencyProblem(problem(outcome))
        return self._handle(request, *args, **kwargs)

    def handle_exception(self, exc: Exception) -> Response:
        with _unmarked(self.non_atomic_on):
            response: Response = self.view_handle_exception(exc)
        if isinstance(exc, IdempotencyProblem):
            _shape_problem(self.view.request, response, exc)
        return response

    def _replay(self, response: StoredResponse) -> HttpResponse:
        return replay(response, ReplayedResponse, cacheable=self.policy.cacheable_replays)

    def _claim(self, request: Request) -> Outcome | IdempotencyError | None:
        if request._request.content_type == "multipart/form-data":
            try:
                _ = request.data  # parse it with the view's own parsers, which may refuse it
            except UnsupportedMediaType:  # the view may not need it
                _ = request._request.body
        return claim(
            request._request, self.policy, sender=type(self.view), entry_point=self.entry_point, caller=request
        )

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
        self.open_requests.enter_context(atomic_requests(self.non_atomic, but=transactional_on))
        try:
            if self.execution is None and running(request._request) is None:
                return _handle_unclaimed(self.handler, request, *args, **kwargs)
            response: HttpResponseBase = self.handler(request, *args, **kwargs)
            return response
        except Exception as error:  # raised by the view
            self.error = error
            if isinstance(error, TerminalFailure):
                return error.response
            if self.execution is not None:
                undone = transactional_on is not None and self.non_atomic_on is None
                self.execution.settle(verdict_on(error, self.policy, rollback=undone), passing=error)
            raise

    def _respond_after_losing(self, error: ClaimLost | StoreUnavailable, *args: Any, **kwargs: Any) -> HttpResponseBase:
        if self.execution is None:
            raise error
        view, refusal = self.view, self._outcome_after_losing(error, self.execution)
        if isinstance(refusal, Replay):
            return self._replay(refusal.response)
        response = view.handle_exception(refusal)
        view.response = view.finalize_response(view.request, response, *args, **kwargs)
        finalized: HttpResponseBase = view.response
        return finalized

    def _outcome_after_losing(
        self, error: ClaimLost | StoreUnavailable, execution: engine.Execution
    ) -> Replay | Exception:
        try:
            outcome = after_losing(error, execution.claim.operation, self.policy)
        except Exception as raised:  # raised by ``may_replay``
            return raised
        return outcome if isinstance(outcome, Replay) else IdempotencyProblem(problem(outcome))


@contextmanager
def _unmarked(using: str | None) -> Iterator[None]:
    """Undo the mark for rollback that REST framework sets on any transaction that is open on ``using``."""
    is_open = using is not None and transaction.get_connection(using).in_atomic_block
    marked = is_open and transaction.get_rollback(using)
    yield
    if is_open and not marked:
        transaction.set_rollback(False, using=using)


def _shape_problem(request: Request, response: Response, exc: IdempotencyProblem) -> None:
    mark_refusal(response)
    for name, value in exc.problem.headers():
        response.headers.setdefault(name, value)
    if getattr(response, "data", None) == {"detail": exc.detail}:  # what REST framework's own handler returns
        response.data = exc.problem.members()
        if getattr(request, "accepted_renderer", None) and request.accepted_renderer.media_type == "application/json":
            response.content_type = PROBLEM_JSON
