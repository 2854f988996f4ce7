"""What can be wrong: settings and policies, views and the position of their entry
points, and databases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, starmap, takewhile
from types import FunctionType
from typing import Any

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import (
    OperationalError,
    ProgrammingError,
    connections,
    router,
    transaction,
)
from django.utils.module_loading import import_string

from django_idempotency import conf
from django_idempotency.checks.subjects import TABLE, Database, Source
from django_idempotency.http import ninja
from django_idempotency.http.closures import (
    closed_over,
    decorators_of,
    innermost,
    layers,
    opens_transaction,
)
from django_idempotency.http.placement import (
    MARK,
    entry_point_policy,
    is_async_api,
    view_class,
)
from django_idempotency.http.responses import REPLAYED
from django_idempotency.http.transactions import ProtectedClass
from django_idempotency.middleware import (
    covers,
    is_covering,
    policy_by_path,
    routes,
)
from django_idempotency.stores import configured
from django_idempotency.stores.codec import lack_of_encryption
from django_idempotency.stores.connections import aliases
from django_idempotency.values.outcomes import dotted_name
from django_idempotency.values.policy import REQUIRE, Lease, Policy, is_async
from django_idempotency.values.rules import nearest
from django_idempotency.values.scopes import tenant_databases

API_VIEW = "WrappedAPIView"  # the class that REST framework's decorator makes
API_KEY_PERMISSIONS = {"HasAPIKey"}  # of djangorestframework-api-key
UNSAFE = ("post", "put", "patch", "delete")
PACKAGE = "django_idempotency."
# Modules whose decorators let callers in or refuse them, and do nothing else.
GUARDS = frozenset(
    {
        "django.contrib.auth.decorators",
        "guardian.decorators",
        "oauth2_provider.decorators",
        "rules.contrib.views",
    }
)
# Not imported: that would need django.contrib.auth in INSTALLED_APPS.
ACCESS_MIXIN = "django.contrib.auth.mixins.AccessMixin"
UNLOGGED = (
    f"SELECT 1 FROM pg_class WHERE oid = '{TABLE}'::regclass AND relpersistence = 'u'"
)
UNGUESSABLE = 16  # characters
SHORT_LEASE = 5  # seconds
# EXPLAIN needs the privilege of the statement, but doesn't run it.
STATEMENTS = {
    "SELECT": f"SELECT * FROM {TABLE}",
    "INSERT": f"INSERT INTO {TABLE} SELECT * FROM {TABLE}",
    "UPDATE": f"UPDATE {TABLE} SET token = NULL",
    "DELETE": f"DELETE FROM {TABLE}",
}

# --- Settings and policies ------------------------------------------------------------


def is_public_and_guessable(source: Source) -> bool:
    policy = source.policy
    return (
        policy.scope == "public"
        and policy.key.pattern is None
        and policy.key.min_length < UNGUESSABLE
    )


def why_unencrypted(source: Source) -> tuple[str, str] | None:
    """Return why no response can be encrypted, and what comes of it."""
    why, encrypt = lack_of_encryption(), source.policy.body.encrypt
    effect = (
        "requests with a key get 503" if encrypt == REQUIRE else "no response is stored"
    )
    return (why, effect) if why and encrypt else None


def flat_settings(_settings: conf.Conf) -> Iterator[str]:
    yield from sorted(conf.flat_names())


def expires_before_a_waiter(source: Source) -> str | None:
    """Return which times of the policy are longer than its retention; ``None`` if they
    fit, or if another row of the catalogue says so.
    """
    policy = source.policy
    if policy.is_atomic:
        return "the wait" if policy.retention < (policy.wait or 0) else None
    left = policy.retention - policy.mode.seconds
    return "the lease and the wait together" if 0 <= left < (policy.wait or 0) else None


def lease_outlasts_delivery(consumer: Source) -> bool:
    waits = consumer.of.redelivered_after
    return (
        isinstance(consumer.policy.mode, Lease)
        and waits is not None
        and consumer.policy.mode.seconds >= waits
    )


def why_unusable(store: str) -> ImproperlyConfigured | None:
    try:
        configured(store)
    except ImproperlyConfigured as error:
        return error
    return None


def why_unfit(source: Source) -> str | None:
    """Return why the policy's store can't keep what the policy promises."""
    if why_unusable(source.policy.store):
        return None
    return configured(source.policy.store).backend.unfit_for(
        source.policy, source.policy.store
    )


def unknown_database(source: Source) -> str | None:
    using = source.policy.using
    return (
        nearest(using, connections)
        if isinstance(using, str) and using not in connections
        else None
    )


# --- Views ----------------------------------------------------------------------------


def other_database(view: Source) -> tuple[str, str] | None:
    """Return the database of the effects and those of the records, if they differ in
    atomic mode.
    """
    if not view.policy.is_atomic:
        return None
    records = aliases(view.policy)
    effects = _database_of(getattr(view.of, "model_admin", view.of))
    return (
        None
        if effects in (None, *records)
        else (repr(effects), " and ".join(map(repr, records)))
    )


def _database_of(view: Any) -> str | None:
    queryset = getattr(view, "queryset", None)
    model = getattr(view, "model", None) or getattr(queryset, "model", None)
    if queryset is not None and queryset._db:
        return str(queryset._db)
    return None if model is None else router.db_for_write(model)


# --- Positions of entry points --------------------------------------------------------


def why_callers_are_no_users(view: Source) -> str | None:
    """Return why some callers have no scope; ``None`` if all have one, or nothing is
    known.
    """
    if view.policy.scope is not None or view.policy.anonymous == "ignore":
        return None
    permissions = getattr(view.of, "permission_classes", ["unknown"])
    names = {getattr(permission, "__name__", "") for permission in permissions}
    if names <= {"AllowAny"}:
        return "lets anonymous callers in"
    if not getattr(view.of, "authentication_classes", ["unknown"]):
        return "has no authentication_classes"
    by = [*sorted(names & API_KEY_PERMISSIONS), *ninja.api_keys(view.of)]
    return f"authenticates callers by {by[0]}" if by else None


def revisions_in_a_transaction(_settings: conf.Conf) -> Iterator[str]:
    """Yield django-reversion's middleware, unless a subclass has turned its transaction
    off.
    """
    for path in conf.of_project("MIDDLEWARE"):
        bases = getattr(found := import_string(path), "__mro__", ())
        if any(base.__module__ == "reversion.middleware" for base in bases) and getattr(
            found, "atomic", False
        ):
            yield path


def unread_policies(cls: Any) -> Iterator[tuple[str, str]]:
    """Yield the class and each attribute with a policy, if no base of this package has
    such an attribute.
    """
    read = {
        name
        for base in cls.__mro__
        if base.__module__.startswith(PACKAGE)
        for name in vars(base)
    }
    for base in cls.__mro__:
        for name, value in vars(base).items():
            if isinstance(value, Policy) and name not in read:
                yield dotted_name(cls), name


def unused_handler(cls: Any) -> tuple[str, str] | None:
    """Return the class and a handler, around which the entry point is, if ``dispatch``
    uses nothing of the class.
    """
    handler = next((name for name in UNSAFE if hasattr(cls, name)), None)
    if handler is None or not (hasattr(cls, MARK) or is_covering()):
        return None
    dispatches = (
        vars(base)["dispatch"] for base in cls.__mro__ if "dispatch" in vars(base)
    )
    dispatch = next(
        innermost(each) for each in dispatches if each is not ProtectedClass.dispatch
    )
    used = (
        dispatch.__code__.co_names
        if isinstance(dispatch, FunctionType)
        else ["getattr"]
    )
    return (
        None
        if any(name == "getattr" or hasattr(cls, name) for name in used)
        else (dotted_name(cls), handler)
    )


def has_to_be_awaited(view: Any) -> bool:
    """Whether this is an async function, class of views or operation of Ninja."""
    if isinstance(view, type):
        return bool(getattr(view, "view_is_async", False))
    return bool(getattr(view, "is_async", False)) or is_async(view)


def inside_transaction(route: tuple[str, Any]) -> str | None:
    """Return the view if its entry point is inside ``transaction.atomic``, which is
    around the view or its class's ``dispatch``.
    """
    view = route[1]
    above = [*takewhile(lambda part: not _is_entry_point(part), layers(view))]
    order = getattr(cls := view_class(view), "__mro__", ())
    if ProtectedClass in order:
        outside = order[: order.index(ProtectedClass)]
        above += [vars(base).get("dispatch") for base in outside]
    elif not any(map(_is_entry_point, layers(view))):
        return None
    return dotted_name(cls or view) if any(map(opens_transaction, above)) else None


def below_api_view(route: tuple[str, Any]) -> str | None:
    """Return the view if ``@api_view`` has made a class of a protected function."""
    cls = view_class(route[1])
    if getattr(cls, "__qualname__", "") != API_VIEW:
        return None
    handlers = (getattr(cls, method, None) for method in UNSAFE)
    is_protected = any(
        MARK in getattr(part, "__dict__", ())
        for part in chain.from_iterable(map(closed_over, handlers))
    )
    return dotted_name(route[1]) if is_protected else None


def undescribed_keys(_settings: conf.Conf) -> Iterator[str]:
    """Yield what makes documents of the API without its keys."""
    if apps.is_installed("django_idempotency.contrib.openapi"):
        return
    if apps.is_installed("drf_spectacular"):
        yield "drf-spectacular"
    if any(starmap(_is_in_a_document_of_ninja, routes())):
        yield "Django Ninja"


def _is_in_a_document_of_ninja(path: str, view: Any) -> bool:
    """Whether a protected operation is in the OpenAPI document of its Ninja API."""
    return any(
        policy is not None and method in conf.resolve(policy).methods
        for operation in ninja.operations(view)
        if operation.include_in_schema and operation.api.openapi_url
        for method in operation.methods
        for policy in [policy_by_path(view, method, path)]
    )


def hidden_from_browsers(settings: conf.Conf) -> Iterator[tuple[str, str, str]]:
    """Yield what django-cors-headers keeps from scripts of other origins."""
    if "corsheaders.middleware.CorsMiddleware" not in conf.of_project("MIDDLEWARE"):
        return
    if isinstance(name := settings.policy.key.source, str) and conf.cors_lacks(
        "CORS_ALLOW_HEADERS", name
    ):
        yield "CORS_ALLOW_HEADERS", name.lower(), "send keys"
    if conf.cors_lacks("CORS_EXPOSE_HEADERS", REPLAYED):
        yield "CORS_EXPOSE_HEADERS", REPLAYED, "tell replays"


def async_api(route: tuple[str, Any]) -> str | None:
    path, view = route
    unprotected = is_covering() and covers(view, "POST", path)
    return dotted_name(view_class(view)) if unprotected and is_async_api(view) else None


# --- Guards inside an entry point, which do not run before a replay -------------------


def guards_inside(route: tuple[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield authentication and permissions inside an entry point, so a replay comes
    before them.
    """
    path, view = route
    policy = _policy(path, view)
    if policy is None or policy.may_replay is not None:
        return
    if (cls := view_class(view)) is not None:
        yield from _inside_class(cls, policy)
        return
    parts = list(layers(view))
    covered = not any(map(_is_entry_point, parts))  # by the middleware
    yield from _after_entry_point(
        layers(innermost(view)) if covered else parts, dotted_name(view), inside=covered
    )


def _policy(route: str, view: Any) -> Policy | None:
    """Return the policy in force for the view of ``route``; ``None`` if no entry point
    covers it.
    """
    stated = next(
        filter(None, (entry_point_policy(view, method) for method in UNSAFE)), None
    )
    if stated is not None:
        return conf.resolve(stated)
    return conf.conf().policy if is_covering() and covers(view, "POST", route) else None


def _inside_class(cls: Any, policy: Policy) -> Iterator[tuple[str, str]]:
    bases = [
        base
        for base in cls.__mro__
        if "dispatch" in vars(base) and base is not ProtectedClass
    ]
    dispatch = [
        part for base in bases for part in (base, *_parts(vars(base)["dispatch"]))
    ]
    yield from _after_entry_point(dispatch, f"{dotted_name(cls)}.dispatch")
    is_around = any(map(_is_entry_point, dispatch))
    for method in sorted(policy.methods):
        handler = getattr(cls, method.lower(), None)
        parts, inside = list(_parts(handler)), is_around
        if not (is_around or any(map(_is_entry_point, parts))):
            inside = hasattr(cls, MARK) or is_covering()
            parts = list(_parts(innermost(handler) if inside and handler else handler))
        yield from _after_entry_point(
            parts, f"{dotted_name(cls)}.{method.lower()}", inside=inside
        )


def _after_entry_point(
    parts: Iterable[Any], where: str, *, inside: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield the guards that come after the entry point among ``parts``, which are
    ordered from the outermost.
    """
    for part in parts:
        if inside and _module(part) in GUARDS:
            yield f"a decorator of {_module(part)}", where
        if inside and ACCESS_MIXIN in map(dotted_name, getattr(part, "__mro__", ())):
            yield part.__name__, where
        inside = inside or _is_entry_point(part)


def _parts(method: Any) -> Iterator[Any]:
    """Yield a method and its decorators, from the outermost; for ``method_decorator``,
    the decorators given to it.
    """
    for layer in layers(method):
        yield from reversed(decorators_of(layer) or [layer])


def _is_entry_point(part: Any) -> bool:
    """Whether ``part`` is ``@idempotent``, with or without arguments, or what that has
    made of a view.
    """
    made = part.func if isinstance(part, partial) else type(part)
    return str(getattr(made, "__module__", "")).startswith(PACKAGE) or _module(
        part
    ).startswith(PACKAGE)


def _module(part: Any) -> str:
    """Return the module in which a function was written; ``functools.wraps`` changes
    only its ``__module__``.
    """
    return (
        str(part.__globals__.get("__name__", ""))
        if isinstance(part, FunctionType)
        else ""
    )


# --- Databases, and the records in them -----------------------------------------------


def lacks_table(database: Database) -> bool:
    """Whether the table is missing. It may be in the schemas of tenants, which are not
    looked into.
    """
    return not database.has_table and database.using not in tenant_databases()


def lacks_privileges(database: Database) -> tuple[str, str] | None:
    """Return what the database refuses this role on the table, with its first
    reason.
    """
    refused: dict[str, str] = {}
    for privilege, statement in (
        STATEMENTS.items() if database.vendor != "sqlite" else ()
    ):
        try:
            with (
                transaction.atomic(using=database.using),
                database.connection.cursor() as cursor,
            ):
                cursor.execute(f"EXPLAIN {statement}")
        except (OperationalError, ProgrammingError) as error:
            refused[privilege] = str(error).partition("\n")[0]
    return (", ".join(refused), next(iter(refused.values()))) if refused else None


def is_unlogged(database: Database) -> bool:
    if database.vendor != "postgresql":
        return False
    with database.connection.cursor() as cursor:
        cursor.execute(UNLOGGED)
        return bool(cursor.fetchone())


def loses_an_hour(database: Database) -> str | None:
    """Return the zone with summer time whose times psycopg2 reads without their
    offset.
    """
    driver = getattr(database.connection, "Database", None)
    is_psycopg2 = getattr(driver, "__name__", "") == "psycopg2"
    return conf.ambiguous_zone() if is_psycopg2 else None


def lacks_skip_locked(database: Database) -> bool:
    features = database.connection.features
    both = (
        features.has_select_for_update_skip_locked
        and features.has_select_for_update_nowait
    )
    return bool(features.has_select_for_update and not both)
