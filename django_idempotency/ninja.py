"""Entry points inside the operations of Django Ninja: after its checks, around its rendering. Imports nothing of it.

What Ninja looks for on a function (``_ninja_contribute_to_operation``) and on an operation (``_run_decorators``) is
what its own ``decorate_view`` uses. ``add_decorator(…, mode="view")`` hands us the ``run`` of each operation.
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
from django_idempotency.http.runner import aperform, perform
from django_idempotency.outcomes import EntryPoint
from django_idempotency.policy import Mode, Policy

CONTRIBUTIONS = "_ninja_contribute_to_operation"
BY_RUN = "idempotency_by_run"
POLICY = "idempotency_policy"
View = Callable[..., Any]


def path_view(view: Any) -> Any:
    """What Ninja has at one path, behind the view that it gave to Django.

    ``None`` for any other view, and for a Ninja whose operations can't be copied.
    """
    if getattr(view, "__module__", "") != "ninja.operation" or not isinstance(view, FunctionType):
        return None
    contents = [cell.cell_contents for cell in view.__closure__ or ()]
    return next((part for part in contents if hasattr(part, "operations") and hasattr(part, "clone")), None)


def is_operation(view: Any) -> bool:
    return hasattr(view, "_ninja_operation")


def view_functions(view: Any) -> list[Any]:
    """The functions of all operations behind ``view``, or none if it is not Ninja's."""
    return [operation.view_func for operation in getattr(path_view(view), "operations", ())]


def functions(view: Any, method: str) -> Iterator[Any]:
    """The functions in which the operation for ``method`` may have an entry point."""
    for operation in getattr(path_view(view), "operations", ()):
        if method.upper() in operation.methods:
            yield from (operation.run, operation.view_func)


def contribute(protected: Any, view: View, policy: Policy, way: EntryPoint) -> None:
    """Have Ninja, if it makes an operation of ``protected``, run ``view`` behind an entry point inside of it."""
    earlier = getattr(view, CONTRIBUTIONS, [])
    setattr(protected, CONTRIBUTIONS, [*earlier, partial(_protect, view=view, policy=policy, way=way)])
    if isinstance(view, FunctionType):
        protected.__signature__ = _evaluated(signature(view), unwrap(view).__globals__)


def _evaluated(stated: Signature, names: dict[str, Any]) -> Signature:
    """The signature with its annotations evaluated where the view was written: Ninja would look in this package."""
    parameters = []
    for parameter in stated.parameters.values():
        holder = type("Holder", (), {"__annotations__": {parameter.name: parameter.annotation}})
        with suppress(Exception):  # a name for type checkers only, such as that of the request
            hints = (
                get_type_hints(holder, names, include_extras=True) if parameter.annotation != Signature.empty else {}
            )
            parameter = parameter.replace(annotation=hints.get(parameter.name, parameter.annotation))
        parameters.append(parameter)
    return stated.replace(parameters=parameters)


def protect_operation(function: Any, policy: Policy) -> Any:
    """``@idempotent`` above ``@api.post``.

    ``add_decorator`` in Ninja's mode ``"operation"`` calls it with the same arguments, and with no operation that could
    be protected: what is returned then refuses to run in Ninja.
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
    """The functions behind Ninja's ``view`` on which ``add_decorator`` has put ``@idempotent`` in the wrong mode."""
    functions = [operation.view_func for operation in _operations(view)]
    return [function for function in functions if hasattr(function, "idempotency_above")]


def _operations(view: Any) -> list[Any]:
    """The operations behind Ninja's ``view``, of any version."""
    if not getattr(view, "__module__", "").startswith("ninja."):
        return []
    parts = [
        getattr(view, "__self__", None),
        *(cell.cell_contents for cell in getattr(view, "__closure__", None) or ()),
    ]
    return [operation for part in parts for operation in getattr(part, "operations", ())]


def is_run(view: Any) -> bool:
    """Whether ``view`` is what runs an operation: ``add_decorator(…, mode="view")`` and ``decorate_view`` give that."""
    run = unwrap(view)
    return getattr(run, "__name__", "") == "run" and hasattr(getattr(run, "__self__", None), "_result_to_response")


def protect_run(run: View, policy: Policy) -> View:
    """Protect the operation that ``run`` belongs to, inside its checks, unless it has an entry point or is exempt.

    The line of a router counts before that of its API. An async operation is in lease mode unless ``policy`` says more.
    """
    bound: Any = unwrap(run)
    operation = bound.__self__
    view: Any = operation.view_func
    if _marks(view).get(BY_RUN) is view:
        view = operation.view_func.__wrapped__
    elif hasattr(view, BY_RUN):
        raise ImproperlyConfigured(
            f"{view.__qualname__} has an entry point already, and a decorator around it. Add @idempotent before others."
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
    """A copy of Ninja's ``view`` whose operations have entry points, those that have one of their own excepted."""
    original = path_view(view)
    copy = original.clone()
    for operation, of in zip(copy.operations, original.operations, strict=True):
        operation.api = of.api
        if not hasattr(of.view_func, "idempotency_entry_point"):
            mode = policy or (Policy(mode=Mode.LEASE) if operation.is_async else Policy())
            _protect(operation, of.view_func, mode, way)
    protected: View = copy.get_view()
    return protected


def _protect(operation: Any, view: View, policy: Policy, way: EntryPoint) -> None:
    if _streams(operation):
        _refuse_stream(view)

    def into(run: View) -> View:  # Ninja calls it again for each copy that it makes of the operation
        bound: Any = unwrap(run)
        bound.__self__.view_func = _protected(bound.__self__, view, policy, way)
        return run

    operation._run_decorators = [*getattr(operation, "_run_decorators", []), into]
    operation.run = into(operation.run)


def _streams(operation: Any) -> bool:
    return bool(getattr(operation, "stream_format", None))


def _refuse_stream(view: View) -> NoReturn:
    raise ImproperlyConfigured(
        f"{view.__qualname__} streams, and its items are made after the response: they can't be replayed. Take "
        "@idempotent away, or return a response without a stream; @idempotency_exempt leaves it out of add_decorator."
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


def describe_operations() -> None:
    """Have Ninja's OpenAPI documents describe the keys of protected operations.

    Ninja has no place for extensions there: its method that describes an operation is wrapped, once.
    """
    schema: Any = import_module("ninja.openapi.schema").OpenAPISchema
    details = schema.operation_details
    if hasattr(details, "idempotency_described"):
        return

    @wraps(details)
    def operation_details(self: Any, operation: Any) -> dict[str, Any]:
        result: dict[str, Any] = details(self, operation)
        if (policy := operation_policy(operation)) is not None:
            _describe(result, operation, policy)
            self.add_schema_definitions({"IdempotencyProblem": published.PROBLEM})
        return result

    operation_details.idempotency_described = True  # type: ignore[attr-defined]
    schema.operation_details = operation_details


def operation_policy(operation: Any) -> Policy | None:
    """The policy in force of an operation with an entry point; ``None`` if there is none, or it heeds no key."""
    stated = next((vars(part)[POLICY] for part in (operation.run, operation.view_func) if POLICY in _marks(part)), None)
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
