"""Entry points inside the operations of Django Ninja: after its checks, around its
rendering.

This module does not import Ninja up front. It sets the attributes that Ninja's own
``decorate_view`` uses: ``_ninja_contribute_to_operation`` on a function and
``_run_decorators`` on an operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from inspect import Signature, iscoroutinefunction, signature, unwrap
from types import FunctionType
from typing import Any, NoReturn, get_type_hints

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from django_idempotency.conf import resolve
from django_idempotency.http.key_sources import has_key
from django_idempotency.http.requests import is_keyed
from django_idempotency.http.run import RequestRun, guard
from django_idempotency.http.transactions import without_atomic_requests
from django_idempotency.values.outcomes import EntryPoint
from django_idempotency.values.policy import Policy

CONTRIBUTIONS = "_ninja_contribute_to_operation"
View = Callable[..., Any]


def path_view(view: Any) -> Any:
    """Return Ninja's object for one path, which is behind the view that Ninja gave to
    Django; ``None`` for others.

    Raises ``ImproperlyConfigured`` if it can't be found: a replay would be sent before
    Ninja's authentication.
    """
    if getattr(view, "__module__", "") != "ninja.operation":
        return None
    contents = [cell.cell_contents for cell in getattr(view, "__closure__", None) or ()]
    for part in contents:
        if hasattr(part, "operations") and hasattr(part, "clone"):
            return part
    raise ImproperlyConfigured(
        "This version of Django Ninja is not supported: update it."
    )


def operations(view: Any) -> list[Any]:
    """Return all operations behind ``view``; none if it is not Ninja's."""
    return list(getattr(path_view(view), "operations", ()))


def functions(view: Any, method: str) -> Iterator[Any]:
    """Yield the functions on which the operation for ``method`` may have an entry
    point.
    """
    for operation in operations(view):
        if method.upper() in operation.methods:
            yield from (operation.run, operation.view_func)


def api_keys(operation: Any) -> list[str]:
    """Return the names of the classes that authenticate the callers of an operation by
    API keys.
    """
    kinds = [type(callback) for callback in getattr(operation, "auth_callbacks", ())]
    modules = {kind: {base.__module__ for base in kind.__mro__} for kind in kinds}
    return [
        kind.__qualname__
        for kind in kinds
        if "ninja.security.apikey" in modules[kind]
        and "ninja.security.session" not in modules[kind]
    ]


def contribute(protected: Any, view: View, policy: Policy, way: EntryPoint) -> None:
    """Make Ninja, if it turns ``protected`` into an operation, run ``view`` behind an
    entry point inside it.
    """
    earlier = getattr(view, CONTRIBUTIONS, [])
    setattr(
        protected,
        CONTRIBUTIONS,
        [*earlier, partial(_protect, view=view, policy=policy, way=way)],
    )
    if isinstance(view, FunctionType):
        # none inside a decorator around a partial or an object
        names = getattr(unwrap(view), "__globals__", {})
        protected.__signature__ = _evaluated(signature(view), names)


def _evaluated(stated: Signature, names: dict[str, Any]) -> Signature:
    """Return the signature with its annotations evaluated in the view's module; Ninja
    would look in this package.
    """
    parameters = []
    for parameter in stated.parameters.values():
        holder = type(
            "Holder", (), {"__annotations__": {parameter.name: parameter.annotation}}
        )
        # a name that only type checkers know, such as that of the request
        with suppress(Exception):
            hints = get_type_hints(holder, names, include_extras=True)
            parameter = parameter.replace(annotation=hints[parameter.name])
        parameters.append(parameter)
    return stated.replace(parameters=parameters)


def is_operation(view: Any) -> bool:
    """Whether Ninja has made an operation of ``view`` already, or ``view`` is the
    ``run`` of an operation.
    """
    return hasattr(view, "_ninja_operation") or hasattr(
        getattr(unwrap(view), "__self__", None), "_result_to_response"
    )


def refuse_operation(view: Any) -> NoReturn:
    """``@idempotent`` is above ``@api.post``, or was passed to ``add_decorator`` or
    ``decorate_view``.
    """
    raise ImproperlyConfigured(
        f"@idempotent can't protect {unwrap(view).__qualname__} where it is. Put it"
        " below the operation's decorator; to protect a whole API, use"
        " IdempotencyMiddleware."
    )


def behind_entry_points(view: Any, policy: Policy | None, way: EntryPoint) -> View:
    """Return a copy of Ninja's ``view`` with entry points for those of its operations
    that have none of their own.
    """
    original = path_view(view)
    copy = original.clone()
    for operation, of in zip(copy.operations, original.operations, strict=True):
        operation.api = of.api
        mode = policy or (Policy(mode="lease") if operation.is_async else Policy())
        if not hasattr(of.view_func, "idempotency_entry_point"):
            _protect(operation, of.view_func, mode, way)
    protected: View = copy.get_view()
    return without_atomic_requests(protected)


def _protect(operation: Any, view: View, policy: Policy, way: EntryPoint) -> None:
    def into(run: View) -> View:  # Ninja calls it again for each copy of the operation
        bound: Any = unwrap(run)
        bound.__self__.view_func = _protected(bound.__self__, view, policy, way)
        return run

    operation._run_decorators = [*getattr(operation, "_run_decorators", []), into]
    operation.run = into(operation.run)


def _refusing(view: View, policy: Policy) -> View:
    """Return ``view``, which streams, without protection: it refuses a request with a
    key, and no other.
    """

    @wraps(view)
    def refusing(request: HttpRequest, **values: Any) -> Any:
        stated = resolve(policy)
        if is_keyed(request, stated) and has_key(request, stated):
            raise ImproperlyConfigured(
                f"{view.__qualname__} streams: its items are generated after the"
                " response, so they can't be replayed. Remove @idempotent, or put"
                " @idempotency_exempt in its place."
            )
        return view(request, **values)

    return refusing


class OperationRun(RequestRun):
    """One request to an operation of Django Ninja, which renders what its function
    returns or raises.
    """

    def __init__(
        self,
        operation: Any,
        request: HttpRequest,
        values: dict[str, Any],
        **options: Any,
    ) -> None:
        super().__init__(request, **options)
        self.operation = operation
        self.values = values

    def rendered(self, result: Any) -> HttpResponseBase:
        operation, request = self.operation, self.request
        response = self.values.get(
            operation.signature.response_arg
        ) or operation.api.create_temporal_response(request)
        return operation._result_to_response(request, result, response)  # type: ignore[no-any-return]

    def handled(self, error: Exception) -> HttpResponseBase:
        return self.operation.api.on_exception(self.request, error)  # type: ignore[no-any-return]


def _protected(operation: Any, view: View, policy: Policy, way: EntryPoint) -> View:
    def run_of(request: HttpRequest, values: dict[str, Any]) -> OperationRun:
        return OperationRun(
            operation,
            request,
            values,
            policy=resolve(policy),
            sender=view,
            entry_point=way,
        )

    if getattr(operation, "stream_format", None):
        protected: Any = _refusing(view, policy)
    else:
        protected = guard(
            view, run_of, is_async=operation.is_async or iscoroutinefunction(view)
        )
    protected.idempotency_entry_point, protected.idempotency_policy = way, policy
    return protected  # type: ignore[no-any-return]
