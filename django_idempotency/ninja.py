"""Entry points inside the operations of Django Ninja: after its checks, around its rendering.

This module does not import Ninja up front. It sets the attributes that Ninja's own ``decorate_view`` uses:
``_ninja_contribute_to_operation`` on a function and ``_run_decorators`` on an operation.
``add_decorator(…, mode="view")`` calls the decorator with the ``run`` of each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from inspect import Signature, iscoroutinefunction, signature, unwrap
from types import FunctionType
from typing import Any, NoReturn, get_type_hints

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.http.response import HttpResponseBase

from django_idempotency.conf import conf, resolve
from django_idempotency.http import published
from django_idempotency.http.problems import PROBLEM_JSON
from django_idempotency.http.requests import is_keyed
from django_idempotency.http.runner import aperform, perform
from django_idempotency.outcomes import EntryPoint
from django_idempotency.policy import Mode, Policy

CONTRIBUTIONS = "_ninja_contribute_to_operation"
BY_RUN = "idempotency_by_run"
POLICY = "idempotency_policy"
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


def protect_operation(function: Any, policy: Policy) -> Any:
    """``@idempotent`` above ``@api.post``.

    ``add_decorator`` in Ninja's mode ``"operation"`` calls it with the same arguments, but with no operation that could
    be protected. The function returned then refuses to run in Ninja.
    """
    _protect(function._ninja_operation, function, policy, EntryPoint.DECORATOR)
    if iscoroutinefunction(function):

        @wraps(function)
        async def arun(request: HttpRequest, *args: Any, **values: Any) -> Any:
            _refuse_operation_mode(request, arun)
            return await function(request, *args, **values)

        return _above(arun)

    @wraps(function)
    def run(request: HttpRequest, *args: Any, **values: Any) -> Any:
        _refuse_operation_mode(request, run)
        return function(request, *args, **values)

    return _above(run)


def _above(function: Any) -> Any:
    function.idempotency_above = function
    return function


def _refuse_operation_mode(request: HttpRequest, function: View) -> None:
    served = getattr(getattr(request, "resolver_match", None), "func", None)
    if any(unwrap(operation.view_func, stop=lambda f: f is function) is function for operation in _operations(served)):
        raise ImproperlyConfigured(
            f'{function.__qualname__} is not protected: write add_decorator(idempotent, mode="view"). In Ninja\'s '
            "default mode @idempotent gets a function whose result it can't render."
        )


def in_operation_mode(view: Any) -> list[Any]:
    """Return the functions behind Ninja's ``view`` to which ``@idempotent`` was added in the wrong mode."""
    functions = [operation.view_func for operation in _operations(view)]
    return [function for function in functions if hasattr(function, "idempotency_above")]


def _operations(view: Any) -> list[Any]:
    """Return the operations behind Ninja's ``view``, in any version of Ninja."""
    if not getattr(view, "__module__", "").startswith("ninja."):
        return []
    parts = [
        getattr(view, "__self__", None),
        *(cell.cell_contents for cell in getattr(view, "__closure__", None) or ()),
    ]
    return [operation for part in parts for operation in getattr(part, "operations", ())]


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
    if _marks(view).get(BY_RUN) is view:
        view = operation.view_func.__wrapped__
    elif hasattr(view, BY_RUN):
        raise ImproperlyConfigured(
            f"{view.__qualname__} already has an entry point, and a decorator around it. Add @idempotent before the "
            "others."
        )
    elif hasattr(view, "idempotency_entry_point") or hasattr(view, "idempotency_exempt"):
        return run
    if operation.is_async or iscoroutinefunction(view):
        policy = policy.over(Policy(mode=Mode.LEASE))
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
        mode = policy or (Policy(mode=Mode.LEASE) if operation.is_async else Policy())
        if _streams(of):  # another operation at the same path may be protected
            operation.view_func = _refusing(of.view_func, mode)
        elif not hasattr(of.view_func, "idempotency_entry_point"):
            _protect(operation, of.view_func, mode, way)
    protected: View = copy.get_view()
    return protected


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
        f"{view.__qualname__} streams: its items are made after the response, so they can't be replayed. Remove "
        "@idempotent, or return a response without a stream; @idempotency_exempt leaves it out of add_decorator."
    )


def _protected(operation: Any, view: View, policy: Policy, way: EntryPoint) -> View:
    describe_operations()
    protect = _aprotect if operation.is_async or iscoroutinefunction(view) else _protect_sync
    protected: Any = protect(operation, view, policy, way)
    protected.idempotency_entry_point, protected.idempotency_policy = way, policy
    return protected  # type: ignore[no-any-return]


def _protect_sync(operation: Any, view: View, policy: Policy, way: EntryPoint) -> View:
    @wraps(view)
    def protected(request: HttpRequest, **values: Any) -> HttpResponseBase:
        def run() -> HttpResponseBase:
            return _rendered(operation, request, view(request, **values), values)

        on_error = partial(operation.api.on_exception, request)
        return perform(request, resolve(policy), run, sender=view, entry_point=way, on_error=on_error)

    return protected


def _aprotect(operation: Any, view: View, policy: Policy, way: EntryPoint) -> View:
    @wraps(view)
    async def protected(request: HttpRequest, **values: Any) -> HttpResponseBase:
        async def run() -> HttpResponseBase:
            return _rendered(operation, request, await view(request, **values), values)

        on_error = partial(operation.api.on_exception, request)
        return await aperform(request, resolve(policy), run, sender=view, entry_point=way, on_error=on_error)

    return protected


def _rendered(operation: Any, request: HttpRequest, result: Any, values: dict[str, Any]) -> HttpResponseBase:
    response = values.get(operation.signature.response_arg) or operation.api.create_temporal_response(request)
    rendered: HttpResponseBase = operation._result_to_response(request, result, response)
    return rendered


# --- The OpenAPI document --------------------------------------------------------------------------------------------


def describe_operations(covered: Callable[[Any], Policy | None] | None = None) -> None:
    """Make Ninja's OpenAPI documents describe the keys of protected operations.

    ``covered`` returns the policy of an operation without an entry point. Ninja offers no extension point for this, so
    its method that describes an operation is wrapped, once.
    """
    schema: Any = import_module("ninja.openapi.schema").OpenAPISchema
    if covered is not None:
        schema.idempotency_covered = staticmethod(covered)
    details = schema.operation_details
    if hasattr(details, "idempotency_described"):
        return

    @wraps(details)
    def operation_details(self: Any, operation: Any) -> dict[str, Any]:
        result: dict[str, Any] = details(self, operation)
        if (policy := operation_policy(operation, getattr(self, "idempotency_covered", None))) is not None:
            _describe(result, operation, policy)
            self.add_schema_definitions({"IdempotencyProblem": published.PROBLEM})
        return result

    operation_details.idempotency_described = True  # type: ignore[attr-defined]
    schema.operation_details = operation_details


def operation_policy(operation: Any, covered: Callable[[Any], Policy | None] | None = None) -> Policy | None:
    """Return the policy in force of an operation; ``None`` if it is not protected or none of its methods heeds keys.

    ``covered`` returns the policy of an operation without an entry point of its own.
    """
    stated = next((vars(part)[POLICY] for part in (operation.run, operation.view_func) if POLICY in _marks(part)), None)
    if stated is None and covered is not None:
        stated = covered(operation)
    policy = stated and resolve(stated)
    return policy if policy and not set(policy.methods).isdisjoint(operation.methods) else None


def _marks(part: Any) -> dict[str, Any]:
    return getattr(part, "__dict__", {})


def _describe(result: dict[str, Any], operation: Any, policy: Policy) -> None:
    result["parameters"] = [*result.get("parameters", ()), _key_parameter(operation, policy)]
    result["description"] = "\n\n".join(filter(None, [result.get("description"), published.retry_rules(policy)]))
    responses = result["responses"] = {str(status): dict(told) for status, told in result["responses"].items()}
    for response in responses.values():
        response["headers"] = response.get("headers", {}) | published.REPLAYED
    for status, description in published.own_responses(policy).items():
        headers = {"headers": published.RETRY_AFTER} if status in published.WITH_RETRY_AFTER else {}
        content = {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/IdempotencyProblem"}}}
        responses.setdefault(status, {"description": description, "content": content, **headers})


def _key_parameter(operation: Any, policy: Policy) -> dict[str, Any]:
    return {
        "in": "header",
        "name": conf().header,
        "required": policy.required and set(operation.methods) <= set(policy.methods),
        "schema": published.key_schema(policy),
        "description": published.key_description(policy),
    }
