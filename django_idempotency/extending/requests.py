"""Requests: keys, entry points and problems. Unstable until 1.0."""

from __future__ import annotations

from django_idempotency.http.handlers import respond
from django_idempotency.http.key_sources import (
    BodyField,
    has_key,
    has_moderate_body,
    key_of,
)
from django_idempotency.http.ninja import operations as ninja_operations
from django_idempotency.http.placement import (
    entry_point_policy,
    handler_of,
    has_entry_point,
    view_class,
)
from django_idempotency.http.requests import (
    observed_operation,
    scope_and_key,
    scope_of,
)
from django_idempotency.http.responses import REPLAYED, is_browsable_page, refusal
from django_idempotency.middleware import is_covering, policy_by_path, routes
from django_idempotency.values.fingerprints import canonical_json
from django_idempotency.values.keys import MAX_LENGTH
from django_idempotency.values.policy import is_async
from django_idempotency.values.problems import BY_CODE as PROBLEMS
from django_idempotency.values.problems import PROBLEM_JSON, problem
from django_idempotency.values.response_headers import is_about_caching, may_be_stored
from django_idempotency.values.scopes import CUSTOM, tenant_databases

__all__ = [
    "CUSTOM",
    "MAX_LENGTH",
    "PROBLEMS",
    "PROBLEM_JSON",
    "REPLAYED",
    "BodyField",
    "canonical_json",
    "entry_point_policy",
    "handler_of",
    "has_entry_point",
    "has_key",
    "has_moderate_body",
    "is_about_caching",
    "is_async",
    "is_browsable_page",
    "is_covering",
    "key_of",
    "may_be_stored",
    "ninja_operations",
    "observed_operation",
    "policy_by_path",
    "problem",
    "refusal",
    "respond",
    "routes",
    "scope_and_key",
    "scope_of",
    "tenant_databases",
    "view_class",
]
