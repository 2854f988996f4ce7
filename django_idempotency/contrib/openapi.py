"""OpenAPI by drf-spectacular: what each protected operation asks of its callers, made from its policy.

Loaded by itself where ``drf_spectacular`` is in ``INSTALLED_APPS``. It adds to every operation of a view with
``IdempotentMixin`` the ``Idempotency-Key`` header, the responses of our own with their problem document, and the rules
for retries as text.
"""

from __future__ import annotations

from typing import Any

from drf_spectacular.extensions import OpenApiViewExtension
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import ResolvedComponent
from drf_spectacular.utils import OpenApiParameter

from django_idempotency.conf import conf, resolve
from django_idempotency.http import published
from django_idempotency.http.problems import PROBLEM_JSON
from django_idempotency.http.published import PROBLEM, REPLAYED, RETRY_AFTER
from django_idempotency.policy import Policy


class IdempotentView(OpenApiViewExtension):  # type: ignore[no-untyped-call]
    """Gives views with ``IdempotentMixin`` a schema that tells of their keys."""

    target_class = "django_idempotency.rest_framework.IdempotentMixin"
    match_subclasses = True

    def view_replacement(self) -> Any:
        schema = self.target.schema
        described = type(schema) if isinstance(schema, AutoSchema) else AutoSchema
        return type(self.target.__name__, (self.target,), {"schema": _idempotent(described)()})


def _idempotent(base: type[AutoSchema]) -> type[AutoSchema]:
    return base if issubclass(base, IdempotentSchema) else type(base.__name__, (IdempotentSchema, base), {})


class IdempotentSchema(AutoSchema):
    """What a policy means for the description of an operation."""

    @property
    def policy(self) -> Policy | None:
        """The policy of this operation, or ``None`` if its method ignores the header."""
        policy = resolve(self.view.idempotency_policy)  # type: ignore[attr-defined]
        return policy if self.method in policy.methods else None

    def get_override_parameters(self) -> list[Any]:
        parameters = list(super().get_override_parameters())
        return [*parameters, key_parameter(self.policy)] if self.policy else parameters

    def get_description(self) -> str:  # type: ignore[override]
        texts = [super().get_description() or "", published.retry_rules(self.policy) if self.policy else ""]
        return "\n\n".join(filter(None, texts))

    def _get_response_bodies(self, direction: Any = "response") -> Any:
        responses = super()._get_response_bodies(direction)
        if direction == "response" and self.policy:
            for response in responses.values():
                response["headers"] = response.get("headers", {}) | REPLAYED
            for status, description in published.own_responses(self.policy).items():
                responses.setdefault(status, self._problem(status, description))
        return responses

    def _problem(self, status: str, description: str) -> dict[str, Any]:
        problem = ResolvedComponent(  # type: ignore[no-untyped-call]
            name="IdempotencyProblem", type=ResolvedComponent.SCHEMA, object="IdempotencyProblem", schema=PROBLEM
        )
        self.registry.register_on_missing(problem)
        headers = {"headers": RETRY_AFTER} if status in published.WITH_RETRY_AFTER else {}
        return {"description": description, "content": {PROBLEM_JSON: {"schema": problem.ref}}, **headers}


def key_parameter(policy: Policy) -> OpenApiParameter:
    """Return the header that carries the key."""
    return OpenApiParameter(
        name=conf().header,
        location=OpenApiParameter.HEADER,
        required=policy.required,
        type=published.key_schema(policy),
        description=published.key_description(policy),
    )
