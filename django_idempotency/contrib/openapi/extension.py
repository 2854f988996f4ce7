"""OpenAPI with drf-spectacular: what each protected operation requires of its callers,
according to its policy.

Add ``django_idempotency.contrib.openapi`` to ``INSTALLED_APPS``, beside
``drf_spectacular``. This module then adds the header with the key, this
package's own responses with their problem document, and the rules for retries as text,
for every operation with an entry point and for those that only the middleware covers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, cast
from weakref import proxy

from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import ResolvedComponent
from drf_spectacular.utils import OpenApiParameter

from django_idempotency import Policy
from django_idempotency.contrib.openapi import published
from django_idempotency.extending import resolve
from django_idempotency.extending.requests import (
    has_entry_point,
    is_covering,
    policy_by_path,
)


def describe_operations() -> None:
    """Make drf-spectacular describe the keys of protected operations, whatever else
    describes these operations.

    One of drf-spectacular's own extensions would not know the path, and
    ``@extend_schema`` on a method would override it. So the method that creates the
    view of an operation is wrapped, once.
    """
    create_view = SchemaGenerator.create_view
    if hasattr(create_view, "idempotency_described"):
        return

    @wraps(create_view)
    def create_described_view(
        self: Any, callback: Any, method: str, request: Any = None
    ) -> Any:
        view = create_view(self, callback, method, request)  # type: ignore[no-untyped-call]
        is_protected = has_entry_point(callback, method) or is_covering()
        if is_protected or hasattr(view, "receipt_schema"):
            view.idempotency_schema = _described(
                view.schema, partial(policy_by_path, callback, method)
            )
            view.idempotency_schema.deferred = _deferred(callback, view, method)
            # REST framework would keep the schema itself alive forever
            view.schema = proxy(view.idempotency_schema)
        return view

    create_described_view.idempotency_described = True  # type: ignore[attr-defined]
    SchemaGenerator.create_view = create_described_view  # type: ignore[method-assign]


def _deferred(callback: Any, view: Any, method: str) -> dict[str, Any]:
    """Return the responses of a view that defers an operation."""
    handler = getattr(view, getattr(view, "action", None) or method.lower(), None)
    stated = (getattr(each, "deferred_responses", None) for each in (handler, callback))
    return next(filter(None, stated), {})


def _described(
    stated: Any, policy_at: Callable[[str], Policy | None]
) -> IdempotentSchema:
    """Return a copy of the schema ``stated``, which may be a weak proxy, that also
    describes keys.
    """
    base = stated.__class__ if issubclass(stated.__class__, AutoSchema) else AutoSchema
    schema: IdempotentSchema = object.__new__(
        type(base.__name__, (IdempotentSchema, base), {})
    )
    vars(schema).update(stated.__dict__, policy_at=policy_at)
    return schema


class IdempotentSchema(AutoSchema):
    """Adds what a policy means to the description of an operation. The project's own
    descriptions have precedence.
    """

    policy_at: Callable[[str], Policy | None]  # as set for the view at a path
    deferred: dict[str, Any]

    @property
    def policy(self) -> Policy | None:
        """The policy of this operation; ``None`` if it has none or its method ignores
        the header.
        """
        if (stated := self.policy_at(self.path)) is None:
            return None
        policy = resolve(getattr(self.view, "idempotency_policy", stated))
        return policy if self.method in policy.methods else None

    def get_override_parameters(self) -> list[Any]:
        parameters = list(super().get_override_parameters())
        policy, view = self.policy, cast("Any", self.view)
        if hasattr(view, "receipt_schema") and "{" not in self.path:
            policy = resolve(view.policy).derive(required=True)
        if policy is None or not isinstance(policy.key.source, str):
            return parameters
        key = OpenApiParameter(
            name=policy.key.source,
            location=OpenApiParameter.HEADER,
            required=policy.required,
            type=published.key_schema(policy),
            description=published.key_description(policy),
        )
        return [key, *parameters]

    def get_response_serializers(self) -> Any:
        receipt = getattr(self.view, "receipt_schema", None)
        return super().get_response_serializers() if receipt is None else {200: receipt}

    def get_description(self) -> str:  # type: ignore[override]
        texts = [
            super().get_description() or "",
            published.retry_rules(self.policy) if self.policy else "",
        ]
        return "\n\n".join(filter(None, texts))

    def _get_response_bodies(self, direction: Any = "response") -> Any:
        responses = super()._get_response_bodies(direction)
        if direction == "response" and self.policy:
            problem = ResolvedComponent(  # type: ignore[no-untyped-call]
                name="IdempotencyProblem",
                type=ResolvedComponent.SCHEMA,
                object="IdempotencyProblem",
                schema=published.PROBLEM,
            )
            self.registry.register_on_missing(problem)
            published.add(responses, self.deferred)
            published.describe(responses, self.policy, problem.ref)
        return responses
