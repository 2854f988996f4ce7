"""Entry points inside the operations of Django Ninja: after its checks, around its rendering.

This module does not import Ninja up front. It sets the attributes that Ninja's own ``decorate_view`` uses:
``_ninja_contribute_to_operation`` on a function and ``_run_decorators`` on an operation.
``add_decorator(…, mode="view")`` calls the decorator with the ``run`` of each operation.
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
from django_idempotency.http.requests import is_keyed
from django_idempotency.http.run import RequestRun, guard
from django_idempotency.http.transactions import take_over_atomic_requests
from django_idempotency.policy import Policy
from django_idempotency.values.outcomes import EntryPoint

CONTRIBUTIONS = "_ninja_contribute_to_operation"
BY_RUN = "idempotency_by_run"
View = Callable[..., Any]


def path_view(view: Any) -> Any:
    """Return Ninja's object for one path, which is behind the view that Ninja gave to Django.

    ``None`` for any other view, and for a version of Ninja whose operations can't be copied.
    """
    if getattr(view, "__module__", "") != "ninja.operation" or not isinstance(view, FunctionType):
        return None
    contents = [cell.cell_contents for cell in view.__closure__ or ()]
    return next((part for part in contents if hasattr(part, "operations") and hasattr(part, "clone")), None)


def is_operation(view: Any) -> bool:
    return hasattr(view, "_ninja_operation")


def operations(view: Any) -> list[Any]:
    """Return all operations behind ``view``; none if it is not Ninja's."""
    return list(getattr(path_view(view), "operations", ()))


def functions(view: Any, method: str) -> Iterator[Any]:
    """Yield the functions on which the operation for ``method`` may have an entry point."""
    for operation in operations(view):
        if method.upper() in operation.methods:
            yield from (operation.run, operation.view_func)


def api_keys(operation: Any) -> list[str]:
    """Return the names of the classes that authenticate the callers of an operation by API keys."""
    kinds = [type(callback) for callback in getattr(operation, "auth_callbacks", ())]
    modules = {kind: {base.__module__ for base in kind.__mro__} for kind in kinds}
    return [
        kind.__qualname__
        for kind in kinds
        if "ninja.security.apikey" in modules[kind] and "ninja.security.session" not in modules[kind]
    ]


def contribute(protected: Any, view: View, policy: Policy, way: EntryPoint) -> None:
    """Make Ninja, if it turns ``protected`` into an operation, run ``view`` behind an entry point inside it."""
    earlier = getattr(view, CONTRIBUTIONS, [])
    setattr(protected, CONTRIBUTIONS, [*earlier, partial(_protect, view=view, policy=policy, way=way)])
    if isinstance(view, FunctionType):
        names = getattr(unwrap(view), "__globals__", {})  # none inside a decorator around a partial or an object
        protected.__signature__ = _evaluated(signature(view), names)


def _evaluated(stated: Signature, names: dict[str, Any]) -> Signature:
    """Return the signature with its annotations evaluated in the view's module; Ninja would look in this package."""
    parameters = []
    for parameter in stated.parameters.values():
        holder = type("Holder", (), {"__annotations__": {parameter.name: parameter.annotation}})
        with suppress(Exception):  # a name that only type checkers know, such as that of the request
            hints = (
                get_type_hints(holder, names, include_extras=True) if parameter.annotation != Signature.empty else {}
            )
            parameter = parameter.replace(annotation=hints.get(parameter.name, parameter.annotation))
        parameters.append(parameter)
    return stated.replace(parameters=parameters)


def refuse_operation(function: Any) -> NoReturn:
    """``@idempotent`` above ``@api.post``, or in the default mode of ``add_decorator``, got the whole ``function``."""
    raise ImproperlyConfigured(
        f"@idempotent can't protect {function.__qualname__} where it is, because Ninja renders the result afterwards. "
        'Put it below the operation\'s decorator, or write add_decorator(idempotent, mode="view").'
    )


def is_run(view: Any) -> bool:
    """Whether ``view`` is the ``run`` that ``add_decorator(…, mode="view")`` and ``decorate_view`` pass on."""
    run = unwrap(view)
    return getattr(run, "__name__", "") == "run" and hasattr(getattr(run, "__self__", None), "_result_to_response")


def protect_run(run: View, policy: Policy) -> View:
    """Protect the operation that ``run`` belongs to, inside its checks, unless it has an entry point or is exempt.

    ``add_decorator`` on a router has precedence over that on its API. An async operation runs in lease mode unless
    ``policy`` sets the mode.
    """
    bound: Any = unwrap(run)
    operation = bound.__self__
    view: Any = operation.view_func
    if getattr(view, "__dict__", {}).get(BY_RUN) is view:
        view = operation.view_func.__wrapped__
    elif hasattr(view, BY_RUN):
        raise ImproperlyConfigured(
            f"{view.__qualname__} already has an entry point, and a decorator around it. Add @idempotent before the "
            "others."
        )
    elif hasattr(view, "idempotency_entry_point") or hasattr(view, "idempotency_exempt"):
        return run
    if operation.is_async or iscoroutinefunction(view):
        policy = policy.over(Policy(mode="lease"))
    if _streams(operation):
        if resolve(policy).methods and set(resolve(policy).methods).isdisjoint(operation.methods):
            return run
        _refuse_stream(view)
    operation.view_func = protected = _protected(operation, view, policy, EntryPoint.DECORATOR)
    setattr(protected, BY_RUN, protected)
    return run


def behind_entry_points(view: Any, policy: Policy | None, way: EntryPoint) -> View:
    """Return a copy of Ninja's ``view`` with entry points for those of its operations that have none of their own."""
    original = path_view(view)
    copy = original.clone()
    for operation, of in zip(copy.operations, original.operations, strict=True):
        operation.api = of.api
        mode = policy or (Policy(mode="lease") if operation.is_async else Policy())
        if _streams(of):  # another operation at the same path may be protected
            operation.view_func = _refusing(of.view_func, mode)
        elif not hasattr(of.view_func, "idempotency_entry_point"):
            _protect(operation, of.view_func, mode, way)
    protected: View = copy.get_view()
    return take_over_atomic_requests(protected)


def _protect(operation: Any, view: View, policy: Policy, way: EntryPoint) -> None:
    if _streams(operation):
        _refuse_stream(view)

    def into(run: View) -> View:  # Ninja calls it again for each copy of the operation
        bound: Any = unwrap(run)
        bound.__self__.view_func = _protected(bound.__self__, view, policy, way)
        return run

    operation._run_decorators = [*getattr(operation, "_run_decorators", []), into]
    operation.run = into(operation.run)


def _streams(operation: Any) -> bool:
    return bool(getattr(operation, "stream_format", None))


def _refusing(view: View, policy: Policy) -> View:
    """Return ``view``, which streams, without protection: it refuses a request with a key, and no other."""

    @wraps(view)
    def refusing(request: HttpRequest, **values: Any) -> Any:
        if is_keyed(request, resolve(policy)):
            _refuse_stream(view)
        return view(request, **values)

    return refusing


def _refuse_stream(view: View) -> NoReturn:
    raise ImproperlyConfigured(
        f"{view.__qualname__} streams: its items are generated after the response, so they can't be replayed. Remove "
        "@idempotent, or return a response without a stream; @idempotency_exempt leaves it out of add_decorator."
    )


class OperationRun(RequestRun):
    """One request to an operation of Django Ninja, which renders what its function returns or raises."""

    def __init__(self, operation: Any, request: HttpRequest, values: dict[str, Any], **options: Any) -> None:
        super().__init__(request, **options)
        self.operation = operation
        self.values = values

    def rendered(self, result: Any) -> HttpResponseBase:
        operation, request = self.operation, self.request
        response = self.values.get(operation.signature.response_arg) or operation.api.create_temporal_response(request)
        return operation._result_to_response(request, result, response)  # type: ignore[no-any-return]

    def handled(self, error: Exception) -> HttpResponseBase:
        return self.operation.api.on_exception(self.request, error)  # type: ignore[no-any-return]


def _protected(operation: Any, view: View, policy: Policy, way: EntryPoint) -> View:
    def run_of(request: HttpRequest, values: dict[str, Any]) -> OperationRun:
        return OperationRun(operation, request, values, policy=resolve(policy), sender=view, entry_point=way)

    protected: Any = guard(view, run_of, is_async=operation.is_async or iscoroutinefunction(view))
    protected.idempotency_entry_point, protected.idempotency_policy = way, policy
    return protected  # type: ignore[no-any-return]
