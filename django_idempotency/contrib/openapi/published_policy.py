"""The page that tells API consumers how each operation treats its keys, made from the
policies.

The draft of the header asks for it:
https://www.ietf.org/archive/id/draft-ietf-httpapi-idempotency-key-header-07.html#section-2.3
It uses the texts of the OpenAPI documents. Like these it is in English and reveals no
scopes, stores or secrets.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from django.contrib.admindocs import utils as patterns
from django.views.generic import TemplateView

from django_idempotency import Policy
from django_idempotency.contrib.openapi import published
from django_idempotency.extending import conf, resolve
from django_idempotency.extending.requests import (
    entry_point_policy,
    is_covering,
    ninja_operations,
    routes,
    view_class,
)


class PublishedPolicyView(TemplateView):
    """Shows the policy of every operation with an entry point, and the one of those
    that only the middleware covers.

    ``paths``: a regular expression; only paths in which it is found are shown. The view
    itself doesn't restrict access. Everybody who may read the API's documentation may
    read this page.
    """

    template_name = "django_idempotency/published_policy.html"
    paths = ""

    def get_context_data(self, **kwargs: Any) -> dict[str, Any]:
        shown = [
            {"path": path, "methods": methods, **terms(policy)}
            for path, methods, policy in operations()
            if re.search(self.paths, path)
        ]
        others = terms(conf().policy) if is_covering() and conf().protects else None
        return super().get_context_data(operations=shown, others=others, **kwargs)


def terms(policy: Policy) -> dict[str, Any]:
    """Return what callers may know of ``policy``, which must be the policy in force."""
    return {
        "required": policy.required,
        "key": published.key_schema(policy),
        "is_in_header": bool(policy.key.meta_name),
        "pattern": policy.key.pattern and policy.key.pattern.pattern,
        "key_description": published.key_description(policy),
        "remembered": published.remembered(policy),
        "rules": published.retry_rules(policy),
        "statuses": published.status_rules(policy),
        "responses": published.own_responses(policy),
    }


def operations() -> Iterator[tuple[str, list[str], Policy]]:
    """Yield the path, the methods and the policy in force of every operation with an
    entry point of its own.
    """
    for route, callback in routes():
        path = _readable(route)
        # REST framework's second route to the same operation
        if path.endswith(("{format}", "{format}/")):
            continue
        by_policy: dict[Policy, list[str]] = {}
        for method, policy in _methods(callback) if conf().protects else ():
            by_policy.setdefault(policy, []).append(method)
        yield from (
            (path, sorted(methods), policy) for policy, methods in by_policy.items()
        )


def _methods(callback: Any) -> Iterator[tuple[str, Policy]]:
    initial = getattr(callback, "initkwargs", {}).get("idempotency_policy")
    for method in _handled(callback):
        own = entry_point_policy(callback, method)
        if own is not None and method in (policy := resolve(initial or own)).methods:
            yield method, policy


def _handled(callback: Any) -> Collection[str]:
    """Return the methods of a class-based view or of Ninja's operations; for a
    function, those of its policy.
    """
    if operations := ninja_operations(callback):
        return [method for operation in operations for method in operation.methods]
    cls: Any = view_class(callback)
    if cls is None:
        stated = entry_point_policy(callback, None)
        return resolve(stated).methods if stated else []
    actions = getattr(callback, "actions", None)
    return [
        name.upper()
        for name in actions or cls.http_method_names
        if actions or hasattr(cls, name)
    ]


def _readable(route: str) -> str:
    """Return the path of a route in readable form, such as ``/orders/{pk}/``."""
    plain = patterns.replace_unnamed_groups(
        patterns.replace_named_groups(patterns.remove_non_capturing_groups(route))
    )
    return re.sub(
        r"<(?:[^<>:]+:)?([^<>]+)>", r"{\1}", patterns.replace_metacharacters(plain)
    ).replace("\\", "")
