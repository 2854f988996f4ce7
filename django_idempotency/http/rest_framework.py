"""The entry point for views of Django REST framework: around the handler that
``dispatch`` calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache, partial, wraps
from inspect import iscoroutinefunction
from typing import Any, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from django.http import HttpRequest, HttpResponse, RawPostDataException
from django.http.response import HttpResponseBase
from django.views import View
from rest_framework.exceptions import APIException, UnsupportedMediaType
from rest_framework.response import Response
from rest_framework.views import APIView

from django_idempotency.conf import conf, resolve
from django_idempotency.http.closures import inside_method
from django_idempotency.http.key_sources import has_moderate_body
from django_idempotency.http.responses import as_refusal
from django_idempotency.http.run import Refused, RequestRun
from django_idempotency.http.transactions import (
    ProtectedClass,
    is_marked_for_rollback,
)
from django_idempotency.http.unprotected import note
from django_idempotency.values.outcomes import (
    EntryPoint,
    Operation,
    Replay,
)
from django_idempotency.values.policy import Policy
from django_idempotency.values.problems import PROBLEM_JSON, Problem, problem

Dispatch = Callable[..., HttpResponseBase]


class IdempotencyProblem(APIException):
    """Carries a problem response of this package through the project's exception
    handler.

    ``problem`` is the complete problem. ``detail``, ``status_code``, ``get_codes()``
    and ``wait`` (seconds, sent as ``Retry-After``) are what REST framework's handlers
    expect.
    """

    def __init__(self, problem: Problem) -> None:
        super().__init__(detail=str(problem.detail), code=problem.code)
        self.problem = problem
        self.status_code = problem.status
        if problem.retry_after is not None:
            self.wait = problem.retry_after


class IdempotentMixin(ProtectedClass):
    # No docstring: schema generators would show it as the description of every view
    # without one.

    idempotency_entry_point: EntryPoint = EntryPoint.MIXIN

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _refuse_order(cls)
        _refuse_policy(cls, cls.idempotency_policy)
        _refuse_misspelt_policy(cls)

    @classmethod
    def as_view(cls, *args: Any, **initkwargs: Any) -> Any:
        _refuse_policy(
            cls, initkwargs.get("idempotency_policy", cls.idempotency_policy)
        )
        if getattr(cls, "view_is_async", False):
            _refuse_async(cls.__qualname__)
        return super().as_view(*args, **initkwargs)

    def idempotent_dispatch(
        self, inner: Dispatch, request: HttpRequest, *args: Any, **kwargs: Any
    ) -> HttpResponseBase:
        run = DispatchRun(
            self,
            request,
            resolve(self.idempotency_policy),
            self.idempotency_entry_point,
        )
        return run.dispatch(inner, *args, **kwargs)


def _refuse_order(cls: type) -> None:
    order = cls.__mro__
    if View in order and APIView not in order:
        raise ImproperlyConfigured(
            f"{cls.__qualname__} is not one of REST framework's views: put @idempotent"
            " on the class instead of IdempotentMixin among its bases."
        )
    if APIView in order and order.index(APIView) < order.index(IdempotentMixin):
        raise ImproperlyConfigured(
            f"{cls.__qualname__} is not protected: IdempotentMixin comes after APIView."
            " Make it the first base."
        )


# of functions: a bound method is another one for each request
_is_async = lru_cache(maxsize=1024)(iscoroutinefunction)


def _refuse_async(name: str) -> NoReturn:
    raise ImproperlyConfigured(
        f"{name} is async, but the entry point for REST framework runs only sync"
        " handlers. Make it sync, or write an async Django view with"
        ' @idempotent(mode="lease").'
    )


def _refuse_policy(cls: type, policy: object) -> None:
    if not isinstance(policy, Policy):
        raise ImproperlyConfigured(
            f"{cls.__qualname__}: idempotency_policy is {policy!r}; write"
            " idempotency_policy = Policy(…)."
        )


def _refuse_misspelt_policy(cls: type) -> None:
    for name, value in vars(cls).items():
        if isinstance(value, Policy) and "idempotency_policy" not in vars(cls):
            raise ImproperlyConfigured(
                f"Nothing reads {cls.__qualname__}.{name}: write idempotency_policy."
            )


class ReplayedResponse(HttpResponse):
    """A stored response. ``data`` is its parsed JSON, as on a ``Response``, or ``None``
    if it is not JSON.
    """

    @cached_property
    def data(self) -> Any:
        try:
            return json.loads(self.content)
        except ValueError:
            return None


# Note [Two phases of a dispatch] ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~ APIView.dispatch()
# calls initial(), the handler, handle_exception() and finalize_response(), and has no
# hook between the first two. The claim must come after initial(), which runs
# authentication, permissions and throttles; what is stored is the rendered response
# after finalize_response(). So the run begins in the handler, and ends after
# dispatch().
class DispatchRun(RequestRun):
    replayed_as = ReplayedResponse

    def __init__(
        self, view: Any, request: HttpRequest, policy: Policy, entry_point: EntryPoint
    ) -> None:
        super().__init__(request, policy, sender=type(view), entry_point=entry_point)
        self.view = view

    def dispatch(
        self, dispatch: Dispatch, *args: Any, **kwargs: Any
    ) -> HttpResponseBase:
        """Run ``dispatch`` of the view with an entry point around the handler that it
        calls.
        """
        name = (self.request.method or "").lower()
        handler = (
            getattr(self.view, name, None)
            if name in self.view.http_method_names
            else None
        )
        if _is_async(getattr(handler, "__func__", handler)):
            _refuse_async(f"{type(self.view).__qualname__}.{name}")
        if handler is None:
            self.is_keyed = False
        else:  # with the handler's attributes, which permissions may ask for
            setattr(self.view, name, inside_method(handler, self._guarding))
        if self.is_keyed:
            self.view_handle_exception, self.view.handle_exception = (
                self.view.handle_exception,
                self.handle_exception,
            )
            self._keep_body()
        try:
            response = self.perform(partial(dispatch, self.request, *args, **kwargs))
        except Exception as error:
            if self.run is None or not (
                self.run.lost or isinstance(error, IdempotencyProblem)
            ):
                raise
            response = self._finalized(error, *args, **kwargs)
        return self.echoed(response)

    def _guarding(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        return wraps(handler)(partial(self.guarded, handler))

    def _keep_body(self) -> None:
        """Keep the body for fingerprint and key: a permission may read the data, and
        most parsers leave nothing of it.
        """
        is_form = self.request.content_type == "multipart/form-data"
        if not is_form and has_moderate_body(self.request):
            try:  # noqa: SIM105 (suppress() would cost more than the body does)
                _ = self.request.body
            except RawPostDataException:
                pass

    def identify(self, caller: Any = None) -> Operation | None:
        caller = self.view.request
        if self.request.content_type == "multipart/form-data":
            try:
                # parse it with the view's own parsers, which may refuse it
                _ = caller.data
            except UnsupportedMediaType:  # the view may not need it
                _ = self.request.body
        return super().identify(caller)

    def refuse(self, outcome: Refused) -> HttpResponseBase:
        if isinstance(outcome, Replay) or self.policy.problems is not None:
            return super().refuse(outcome)
        raise IdempotencyProblem(problem(outcome))

    def handle_exception(self, exc: Exception) -> Response:
        note(self.request, None)  # raised in the handler, or in its place
        with _unmarked(None if self.is_undone else self.transactional_on):
            response: Response = self.view_handle_exception(exc)
        self.is_rolled_back = is_marked_for_rollback()
        if isinstance(exc, IdempotencyProblem):
            self._shape(response, exc)
        return response

    def _shape(self, response: Response, exc: IdempotencyProblem) -> None:
        as_refusal(response, exc.problem)
        # what REST framework's own handler returns
        if getattr(response, "data", None) == {"detail": exc.detail}:
            response.data = exc.problem.members(conf().problem_type_base_url)
            renderer = getattr(self.view.request, "accepted_renderer", None)
            if renderer and renderer.media_type == "application/json":
                response.content_type = PROBLEM_JSON

    def _finalized(
        self, error: Exception, *args: Any, **kwargs: Any
    ) -> HttpResponseBase:
        view = self.view
        response = view.handle_exception(error)
        view.response = view.finalize_response(view.request, response, *args, **kwargs)
        finalized: HttpResponseBase = view.response
        return finalized


@contextmanager
def _unmarked(using: str | None) -> Iterator[None]:
    """Undo the mark for rollback that REST framework sets on any transaction that is
    open on ``using``.
    """
    is_open = using is not None and transaction.get_connection(using).in_atomic_block
    marked = is_open and transaction.get_rollback(using)
    yield
    if is_open and not marked:
        transaction.set_rollback(False, using=using)
