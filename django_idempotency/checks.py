"""System checks: what is wrong with a configuration, before it costs anybody money.

Each has a stable id; ``docs/checks.md`` says more of each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from importlib.util import find_spec
from inspect import iscoroutinefunction
from typing import Any

from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, Tags, Warning, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils.module_loading import import_string

from django_idempotency import conf
from django_idempotency.middleware import IdempotencyMiddleware
from django_idempotency.partition_layout import TABLE, Layout, covered_until, half_detached, is_short, layout, stamp
from django_idempotency.placement import view_class
from django_idempotency.policy import Mode, Policy, WhenInFlight
from django_idempotency.stores.claim_function import can_claim
from django_idempotency.stores.database import UNTIL, alias

MIDDLEWARE = f"{IdempotencyMiddleware.__module__}.{IdempotencyMiddleware.__qualname__}"
Apps = Sequence[AppConfig] | None


@register(Tags.compatibility)
def check_settings(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E001 unknown or impossible settings; E002, E003 and E010 times that don't fit; E012 no encryption."""
    try:
        policy = conf.conf().policy
    except (ImproperlyConfigured, TypeError) as error:
        return [Error(str(error), hint="Correct the IDEMPOTENCY setting.", id="django_idempotency.E001")]
    where = "The IDEMPOTENCY setting"
    return [*_times(policy, where), *_encryption(policy, where)]


def _times(policy: Policy, where: str) -> Iterator[CheckMessage]:
    if policy.lease > policy.retention:
        yield Error(
            f"{where}: a lease of {policy.lease} s is longer than the retention of {policy.retention} s.",
            hint="A key could expire while it is being processed; shorten LEASE or lengthen RETENTION.",
            id="django_idempotency.E002",
        )
    elif policy.retention < policy.lease + _wait(policy):
        yield Error(
            f"{where}: the retention of {policy.retention} s is shorter than the lease and the wait together.",
            hint="A caller that waits could outlive the answer it waits for; lengthen RETENTION.",
            id="django_idempotency.E003",
        )

    if policy.late_after is not None and policy.late_after > policy.retention:
        yield Error(
            f"{where}: late_after, {policy.late_after} s, is longer than the retention of {policy.retention} s.",
            hint="A retry that is older than the one and younger than the other is run again; shorten LATE_AFTER.",
            id="django_idempotency.E010",
        )


def _encryption(policy: Policy, where: str) -> Iterator[CheckMessage]:
    if not policy.encrypt:
        return
    if not conf.conf().encryption_keys:
        yield Error(
            f"{where}: encrypt is on, and there is no key: no answer is stored.",
            hint="State ENCRYPTION_KEYS in the IDEMPOTENCY setting.",
            id="django_idempotency.E012",
        )
    elif find_spec("cryptography") is None:
        yield Error(
            f"{where}: encrypt is on, and the package cryptography is not installed: no answer is stored.",
            hint='pip install "django-idempotency[cryptography]"',
            id="django_idempotency.E012",
        )


def _wait(policy: Policy) -> float:
    return policy.wait if policy.in_flight == WhenInFlight.WAIT else 0


@register(Tags.compatibility)
def check_middleware(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E004 a middleware that has to run before the view stands after ours."""
    installed = conf.middleware()
    ours = next((place for place, path in enumerate(installed) if _is_ours(path)), len(installed))
    later = [path for path in installed[ours + 1 :] if _looks_at_views(path)]
    return [
        Error(
            f"{path} stands after IdempotencyMiddleware, which calls the view itself: it would be passed over.",
            hint="Put IdempotencyMiddleware last in MIDDLEWARE.",
            id="django_idempotency.E004",
        )
        for path in later
    ]


def _is_ours(path: str) -> bool:
    middleware = import_string(path)
    return isinstance(middleware, type) and issubclass(middleware, IdempotencyMiddleware)


def _looks_at_views(path: str) -> bool:
    return hasattr(import_string(path), "process_view")


@register(Tags.compatibility)
def check_databases(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E007 SQLite in production."""
    return [
        Error(
            f"The idempotency records are in SQLite (database {using!r}), and DEBUG is off.",
            hint="SQLite has no row locks, so every request waits for every other; use PostgreSQL or MariaDB.",
            id="django_idempotency.E007",
        )
        for using in record_databases()
        if connections[using].vendor == "sqlite" and not (conf.debug() or conf.in_test_run())
    ]


@register(Tags.database)
def check_row_locks(app_configs: Apps, databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """E008 a database without ``SKIP LOCKED`` or ``NOWAIT``."""
    return [
        Error(
            f"The database {using!r} has no SELECT … FOR UPDATE with SKIP LOCKED and NOWAIT.",
            hint="Use PostgreSQL, or MariaDB from 10.6.",
            id="django_idempotency.E008",
        )
        for using in set(databases or ()) & record_databases()
        if not _locks_rows_without_waiting(using)
    ]


@register(Tags.database)
def check_claim_function(
    app_configs: Apps, databases: Iterable[str] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    """W025 a PostgreSQL whose function for claims is not there, or not for this role."""
    return [
        Warning(
            f"The database {using!r} has the table of the idempotency records, but no function to claim in it.",
            hint="Every request with a key fails. Run migrate, or let the role of the application EXECUTE "
            "the function django_idempotency_claim.",
            id="django_idempotency.W025",
        )
        for using in set(databases or ()) & record_databases()
        if not can_claim(connections[using])
    ]


def _locks_rows_without_waiting(using: str) -> bool:
    features = connections[using].features
    return not features.has_select_for_update or bool(  # without row locks at all it is SQLite: E007
        features.has_select_for_update_skip_locked and features.has_select_for_update_nowait
    )


@register(Tags.database)
def check_partitions(app_configs: Apps, databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """W026 few future partitions; W027 ones that claims read whole; W028 a half ``enable``; W029 a half ``DETACH``."""
    found: list[CheckMessage] = []
    for using in sorted(set(databases or ()) & record_databases()):
        if connections[using].vendor == "postgresql" and TABLE in connections[using].introspection.table_names():
            found += _partition_messages(layout(using=using), using)
    return found


def _partition_messages(found: Layout, using: str) -> Iterator[CheckMessage]:
    command = f"manage.py idempotency_partitions ensure --database {using}"
    until = covered_until(found.partitions, found.now)
    if found.partitioned and until is not None and is_short(found.partitions, found.now):
        yield Warning(
            f"The idempotency records in {using!r} have partitions until {stamp(until)} only.",
            hint=f"Without one, requests with a key are refused. Run {command}, and schedule it.",
            id="django_idempotency.W026",
        )
    if unkeyed := [partition.name for partition in found.partitions if not partition.keyed and not partition.default]:
        yield Warning(
            f"Partitions of the idempotency records without a unique index on id: {', '.join(unkeyed)}.",
            hint=f"Every claim reads them whole. {command} mends those of the future.",
            id="django_idempotency.W027",
        )
    if found.halfway and not found.partitioned:
        yield Warning(
            f"Partitioning the idempotency records in {using!r} was interrupted: it left a CHECK ({UNTIL}).",
            hint=f"In a day or two it refuses new records. Run {command}, which takes it back, or enable again.",
            id="django_idempotency.W028",
        )
    if pending := half_detached(found.partitions):
        yield Warning(
            f"A partition of the idempotency records in {using!r} is out of the claims' sight: {pending}",
            hint="Operations with its keys can run again. Finish it, and attach it again if they are still wanted.",
            id="django_idempotency.W029",
        )


def record_databases() -> set[str]:
    try:
        return {alias(policy) for policy in [conf.conf().policy, *(policy for _view, policy in _views())]}
    except (ImproperlyConfigured, TypeError):
        return set()  # E001 says why


@register(Tags.urls)
def check_views(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E002, E003, E005, E006, W009, E010 and E012, for every view with a door."""
    try:
        conf.conf()
    except (ImproperlyConfigured, TypeError):
        return []  # E001 says why
    found: dict[str, CheckMessage] = {}
    for view, policy in _views():
        where = f"{view.__module__}.{view.__qualname__}"
        for message in (*_times(policy, where), *_encryption(policy, where), *_view_messages(view, policy, where)):
            found.setdefault(f"{message.id} {message.msg}", message)
    return list(found.values())


@register(Tags.urls)
def check_ninja(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """W011 views of Django Ninja under the middleware, which stays outside of their authentication."""
    try:
        exempt, methods = conf.conf().exempt, conf.conf().policy.methods
    except (ImproperlyConfigured, TypeError):
        return []  # E001 says why
    if not any(map(_is_ours, conf.middleware())):
        return []
    covered = [
        route
        for route, callback in _routes(get_resolver().url_patterns)
        if _is_ninja(callback, methods) and not (exempt and exempt.search(route))
    ]
    return [
        Warning(
            f"{len(covered)} views of Django Ninja, such as {covered[0]}, are behind IdempotencyMiddleware, which "
            "can't get inside them: a replay comes before Ninja's own authentication.",
            hint="Name their paths in EXEMPT_PATHS, and put @idempotent below the operations' decorators.",
            id="django_idempotency.W011",
        )
        for _once in covered[:1]
    ]


def _is_ninja(callback: Any, methods: Collection[str]) -> bool:
    """Whether it is an operation of Ninja's that heeds one of ``methods``."""
    if getattr(callback, "__module__", "") != "ninja.operation":
        return False
    contents = [getattr(callback, "__self__", None), *(cell.cell_contents for cell in callback.__closure__ or ())]
    operations = [operation for part in contents for operation in getattr(part, "operations", ())]
    return not operations or any(not set(operation.methods).isdisjoint(methods) for operation in operations)


def _view_messages(view: Any, policy: Policy, where: str) -> Iterator[CheckMessage]:
    if policy.mode == Mode.ATOMIC and (effects := _database_of(view)) not in (None, alias(policy)):
        yield Error(
            f"{where} is in atomic mode, but writes to {effects!r} while its records are in {alias(policy)!r}.",
            hint='State using=… with the database of the effects, or mode="lease".',
            id="django_idempotency.E005",
        )
    if policy.mode == Mode.ATOMIC and _is_async(view):
        yield Error(
            f"{where} is an async view in atomic mode.",
            hint='A transaction belongs to a thread; state mode="lease".',
            id="django_idempotency.E006",
        )
    if policy.scope is None and _lets_anybody_in(view):
        yield Warning(
            f"{where} lets anonymous callers in, but states no scope for them: with a key they are refused.",
            hint='State scope="public" or a callable, or require authentication.',
            id="django_idempotency.W009",
        )


def _views() -> Iterator[tuple[Any, Policy]]:
    """Every function or class in the URLconf that has a door, with its policy in force."""
    for _route, callback in _routes(get_resolver().url_patterns):
        cls = view_class(callback)
        stated = getattr(callback, "initkwargs", {}).get("idempotency") or getattr(cls or callback, "idempotency", None)
        if isinstance(stated, Policy):
            yield cls or callback, conf.resolve(stated)


def _routes(patterns: Iterable[URLPattern | URLResolver], prefix: str = "/") -> Iterator[tuple[str, Any]]:
    for pattern in patterns:
        route = prefix + str(pattern.pattern).removeprefix("^")
        if isinstance(pattern, URLResolver):
            yield from _routes(pattern.url_patterns, route)
        else:
            yield route, pattern.callback


def _database_of(view: Any) -> str | None:
    queryset = getattr(view, "queryset", None)
    model = getattr(view, "model", None) or getattr(queryset, "model", None)
    if queryset is not None and queryset._db:
        return str(queryset._db)
    return None if model is None else router.db_for_write(model)


def _is_async(view: Any) -> bool:
    return bool(getattr(view, "view_is_async", False)) or iscoroutinefunction(view)


def _lets_anybody_in(view: Any) -> bool:
    names = {getattr(permission, "__name__", "") for permission in getattr(view, "permission_classes", ["unknown"])}
    return not names or names == {"AllowAny"}
