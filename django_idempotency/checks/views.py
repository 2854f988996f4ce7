"""Checks of the views in the URLconf."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from inspect import iscoroutinefunction
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.db import router

from django_idempotency import conf, ninja
from django_idempotency.checks.policies import claim_messages, policy_messages
from django_idempotency.checks.settings import Apps, are_usable
from django_idempotency.http.routes import routes
from django_idempotency.middleware import is_covering
from django_idempotency.policy import Anonymous, Mode, Policy
from django_idempotency.stores.connections import aliases
from django_idempotency.wrapping import opens_durable_block, view_class

METRICS_VIEW = ("django_idempotency.instrumentation.prometheus", "scrape")


@register(Tags.urls)
def check_views(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E002, E003, E005, E006, W009, E010, E012, E042, E071 and E084, for every view with an entry point."""
    if not are_usable():
        return []
    found: dict[str, CheckMessage] = {}
    of_setting = {message.msg for message in policy_messages(conf.conf().policy, "")}  # check_settings
    for view, stated in _stated_views():
        where, policy = f"{view.__module__}.{view.__qualname__}", conf.resolve(stated)
        own = [each for each in policy_messages(policy, where) if each.msg.removeprefix(where) not in of_setting]
        of_claim = claim_messages(stated, policy, where)
        for message in (*own, *_view_messages(view, policy, where), *of_claim):
            found.setdefault(f"{message.id} {message.msg}", message)
    return list(found.values())


@register(Tags.urls)
def check_ninja(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """W011: views of an old Django Ninja under the middleware, which stays outside their authentication."""
    if not (are_usable() and is_covering()):
        return []
    exempt, methods = conf.conf().exempt, conf.conf().policy.methods
    covered = [
        route for route, callback in routes() if _is_ninja(callback, methods) and not (exempt and exempt.search(route))
    ]
    return [
        Warning(
            f"{len(covered)} views of Django Ninja, such as {covered[0]}, are behind IdempotencyMiddleware, which "
            "can't get inside them: a replay is sent before Ninja's own authentication.",
            hint="Update Ninja, or add their paths to EXEMPT_PATHS and put @idempotent below @api.post.",
            id="django_idempotency.W011",
        )
        for _once in covered[:1]
    ]


@register(Tags.urls)
def check_ninja_decorators(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E079: ``add_decorator(idempotent)`` in the mode of Ninja in which it can protect nothing."""
    misplaced = {
        f"{function.__module__}.{function.__qualname__}": route
        for route, callback in routes()
        for function in ninja.in_operation_mode(callback)
    }
    return [
        Error(
            f"{name}, at {route}, is not protected: @idempotent was added in Ninja's default mode.",
            hint='Write add_decorator(idempotent, mode="view").',
            id="django_idempotency.E079",
        )
        for name, route in misplaced.items()
    ]


@register(Tags.urls)
def check_metrics(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """W066: the metrics view without a token, so that it refuses every scrape."""
    if not are_usable() or conf.conf().metrics_tokens:
        return []
    guarded = [route for route, view in routes() if (view.__module__, getattr(view, "__name__", "")) == METRICS_VIEW]
    return [
        Warning(
            f"{route} is the metrics view, and METRICS_TOKENS is empty: every scrape is refused.",
            hint="Set METRICS_TOKENS and have Prometheus send one, or route unguarded_scrape where only Prometheus "
            "can reach it.",
            id="django_idempotency.W066",
        )
        for route in guarded
    ]


def _is_ninja(callback: Any, methods: Collection[str]) -> bool:
    """Whether it handles one of ``methods``, in a version of Ninja whose operations can't be copied."""
    if getattr(callback, "__module__", "") != "ninja.operation" or ninja.path_view(callback) is not None:
        return False
    contents = [getattr(callback, "__self__", None), *(cell.cell_contents for cell in callback.__closure__ or ())]
    operations = [operation for part in contents for operation in getattr(part, "operations", ())]
    return not operations or any(not set(operation.methods).isdisjoint(methods) for operation in operations)


def _view_messages(view: Any, policy: Policy, where: str) -> Iterator[CheckMessage]:
    if policy.mode == Mode.ATOMIC and (effects := _database_of(view)) not in (None, *aliases(policy)):
        yield Error(
            f"{where} is in atomic mode, but writes to {effects!r} while its records are in "
            f"{' and '.join(map(repr, aliases(policy)))}.",
            hint='Set using=… to the database of the effects, or mode="lease".',
            id="django_idempotency.E005",
        )
    if policy.mode == Mode.ATOMIC and _is_async(view):
        yield Error(
            f"{where} is an async view in atomic mode.",
            hint='A transaction belongs to a thread; set mode="lease".',
            id="django_idempotency.E006",
        )
    if policy.mode == Mode.ATOMIC and any(map(opens_durable_block, _functions(view))):
        yield Error(
            f"{where} is in atomic mode, but opens a durable block inside the transaction of its key.",
            hint='Remove durable=True, because the key\'s transaction is the outermost, or set mode="lease".',
            id="django_idempotency.E042",
        )
    if policy.scope is None and policy.anonymous != Anonymous.IGNORE and _is_public(view):
        yield Warning(
            f"{where} lets anonymous callers in, but has no scope for them: their requests with a key are refused.",
            hint='Set scope="public" or a callable, or anonymous="ignore", or require authentication.',
            id="django_idempotency.W009",
        )


def _functions(view: Any) -> Iterator[Any]:
    """Yield the view, or the methods of its class, and everything that their decorators wrap."""
    handlers = [getattr(view, name, None) for name in getattr(view, "http_method_names", ())]
    for function in handlers if isinstance(view, type) else [view]:
        while function is not None:
            yield function
            function = getattr(function, "__wrapped__", None)


def views() -> Iterator[tuple[Any, Policy]]:
    """Yield every function or class in the URLconf that has an entry point, with its policy in force."""
    yield from ((view, conf.resolve(stated)) for view, stated in _stated_views())


def _stated_views() -> Iterator[tuple[Any, Policy]]:
    for _route, callback in routes():
        view = view_class(callback) or callback
        initial = getattr(callback, "initkwargs", {}).get("idempotency_policy")
        for part in (view, *(operation.view_func for operation in ninja.operations(callback))):
            stated = initial or getattr(part, "idempotency_policy", None)
            if isinstance(stated, Policy):
                yield part, stated


def _database_of(view: Any) -> str | None:
    view = getattr(view, "model_admin", view)
    queryset = getattr(view, "queryset", None)
    model = getattr(view, "model", None) or getattr(queryset, "model", None)
    if queryset is not None and queryset._db:
        return str(queryset._db)
    return None if model is None else router.db_for_write(model)


def _is_async(view: Any) -> bool:
    return bool(getattr(view, "view_is_async", False)) or iscoroutinefunction(view)


def _is_public(view: Any) -> bool:
    names = {getattr(permission, "__name__", "") for permission in getattr(view, "permission_classes", ["unknown"])}
    return not names or names == {"AllowAny"}
