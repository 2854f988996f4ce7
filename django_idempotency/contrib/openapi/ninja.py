"""The OpenAPI documents of Django Ninja: what each protected operation requires of its
callers.

Ninja offers no extension point for this, so its method that describes an operation is
wrapped, once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

from django.urls import URLResolver, get_resolver
from ninja.openapi.schema import OpenAPISchema

from django_idempotency import Policy
from django_idempotency.contrib.openapi import published
from django_idempotency.extending import resolve
from django_idempotency.extending.requests import (
    ninja_operations,
    policy_by_path,
    routes,
)


def describe_operations() -> None:
    """Make Ninja describe the keys of protected operations, and of those that only the
    middleware covers.
    """
    details: Any = OpenAPISchema.operation_details
    if hasattr(details, "idempotency_described"):
        return

    @wraps(details)
    def operation_details(self: Any, operation: Any) -> dict[str, Any]:
        result: dict[str, Any] = details(self, operation)
        if (policy := _policy(operation)) is not None:
            _describe(result, operation, policy)
            self.add_schema_definitions({"IdempotencyProblem": published.PROBLEM})
        return result

    operation_details.idempotency_described = True  # type: ignore[attr-defined]
    OpenAPISchema.operation_details = operation_details  # type: ignore[method-assign]


def _policy(operation: Any) -> Policy | None:
    """Return the policy in force of an operation, by its own entry point or by its path
    in the URLconf.

    ``None`` if it takes no keys.
    """
    own = (
        getattr(part, "idempotency_policy", None)
        for part in (operation.run, operation.view_func)
    )
    route, view = _routed_operations(get_resolver()).get(operation, ("", None))
    by_path = (
        policy_by_path(view, method, route)
        for method in operation.methods
        if view is not None
    )
    policy = next(map(resolve, filter(None, (*own, *by_path))), None)
    return (
        None
        if policy is None or set(policy.methods).isdisjoint(operation.methods)
        else policy
    )


@lru_cache(maxsize=1)
def _routed_operations(
    _resolver: URLResolver,
) -> dict[Any, tuple[str, Callable[..., Any]]]:
    return {
        operation: (route, view)
        for route, view in routes()
        for operation in ninja_operations(view)
    }


def _describe(result: dict[str, Any], operation: Any, policy: Policy) -> None:
    if policy.key.meta_name:
        key = {
            "in": "header",
            "name": policy.key.source,
            "required": policy.required
            and set(operation.methods) <= set(policy.methods),
            "schema": published.key_schema(policy),
            "description": published.key_description(policy),
        }
        result["parameters"] = [*result.get("parameters", ()), key]
    result["description"] = "\n\n".join(
        filter(None, [result.get("description"), published.retry_rules(policy)])
    )
    responses = result["responses"] = {
        str(status): dict(response) for status, response in result["responses"].items()
    }
    published.add(responses, getattr(operation.view_func, "deferred_responses", {}))
    published.describe(
        responses, policy, {"$ref": "#/components/schemas/IdempotencyProblem"}
    )
