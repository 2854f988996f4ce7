"""What the checks look at, each collected once per run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import Model
from django.views import View

from django_idempotency import conf
from django_idempotency.http import ninja
from django_idempotency.http.closures import layers
from django_idempotency.http.placement import (
    MARK,
    entry_point_policy,
    view_class,
)
from django_idempotency.messages.runner import Runner, runner_at
from django_idempotency.middleware import routes
from django_idempotency.models import IdempotencyRecord
from django_idempotency.stores import DEFAULT, Store, configured, stores_of
from django_idempotency.stores.connections import aliases
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.outcomes import dotted_name
from django_idempotency.values.policy import Limits, Policy
from django_idempotency.values.rules import is_for_good

TABLE = IdempotencyRecord._meta.db_table


@dataclass(frozen=True)
class Source:
    """Where a policy is set: the ``IDEMPOTENCY`` setting, a view or a consumer.
    ``str()`` gives its name.

    ``policy``: the one in force there. ``of``: the view, its class, Ninja's operation
    or the runner.
    """

    name: str
    policy: Policy
    of: Any = None

    def __str__(self) -> str:
        return self.name

    @property
    def is_setting(self) -> bool:
        return self.of is None


@dataclass(frozen=True, eq=False)
class Database:
    """A database that holds records under ``policies``. ``str()`` quotes its alias."""

    using: str
    policies: list[Policy]

    def __str__(self) -> str:
        return repr(self.using)

    @property
    def connection(self) -> BaseDatabaseWrapper:
        return connections[self.using]

    @property
    def vendor(self) -> str:
        return self.connection.vendor

    @property
    def claims_by_lock(self) -> bool:
        return any(policy.claims_by_lock for policy in self.policies)

    @cached_property
    def has_table(self) -> bool:
        return not self.lacks(IdempotencyRecord)

    def lacks(self, model: type[Model]) -> bool:
        """Whether the table of ``model`` is missing."""
        tables = self.connection.introspection.table_names()
        return model._meta.db_table not in tables

    @property
    def keeps_for_good(self) -> bool:
        """Whether a policy keeps its records for good, or there are such records."""
        return (
            any(is_for_good(policy.retention) for policy in self.policies)
            or IdempotencyRecord.objects.using(self.using).kept_for_good().exists()
        )


class Project:
    """``databases``: the aliases that may be queried. Without readable settings, only
    ``errors`` has items.
    """

    def __init__(self, databases: Iterable[str] = ()) -> None:
        self.may_query = frozenset(databases)

    @cached_property
    def errors(self) -> list[str]:
        """Why the ``IDEMPOTENCY`` setting can't be read."""
        try:
            _ = conf.conf().digests  # calls whatever provides keys
        except (ImproperlyConfigured, TypeError) as error:
            return [str(error)]
        return []

    @cached_property
    def settings(self) -> list[conf.Conf]:
        return [] if self.errors else [conf.conf()]

    # --- policies and views

    @cached_property
    def sources(self) -> list[Source]:
        """The setting, and every view with an entry point of its own."""
        return [
            *(Source("The IDEMPOTENCY setting", s.policy) for s in self.settings),
            *self.views,
        ]

    @cached_property
    def policies(self) -> list[Policy]:
        return [source.policy for source in (*self.sources, *self.consumers)]

    @cached_property
    def limited(self) -> list[str]:
        """The cache that counts for limits, if any policy has one."""
        limits = any(isinstance(policy.admit, Limits) for policy in self.policies)
        return [conf.conf().limits_cache] if limits else []

    @cached_property
    def routes(self) -> list[tuple[str, Any]]:
        return [] if self.errors else list(routes())

    @cached_property
    def views(self) -> list[Source]:
        stated = (
            found for _route, callback in self.routes for found in _stated(callback)
        )
        return [
            Source(name, conf.resolve(policy), of)
            for name, policy, of in stated
            if isinstance(policy, Policy)
        ]

    @cached_property
    def classes(self) -> list[Any]:
        """The classes behind the views in the URLconf."""
        return list(
            dict.fromkeys(
                cls
                for _route, view in self.routes
                if (cls := view_class(view)) is not None
            )
        )

    @cached_property
    def runners(self) -> list[tuple[str, Runner[Any] | Exception]]:
        """The runners in ``CONSUMERS``, each with its path; or why there is none."""
        return [
            (path, _runner(path))
            for settings in self.settings
            for path in settings.consumers
        ]

    @cached_property
    def consumers(self) -> list[Source]:
        found = (
            (path, runner)
            for path, runner in self.runners
            if isinstance(runner, Runner)
        )
        return [
            Source(path, conf.resolve(runner.consumer.policy or Policy()), of=runner)
            for path, runner in found
        ]

    # --- databases and stores

    @cached_property
    def stores(self) -> list[str]:
        """The aliases of the stores, those that policies choose included."""
        named = (alias for settings in self.settings for alias in settings.stores)
        return sorted({*named, *(policy.store for policy in self.policies)})

    @cached_property
    def databases(self) -> list[Database]:
        held: dict[str, list[Policy]] = {}
        for policy in filter(is_in_database, self.policies):
            for using in aliases(policy):
                held.setdefault(using, []).append(policy)
        return [
            Database(using, policies)
            for using, policies in sorted(held.items())
            if using in connections
        ]

    @cached_property
    def queried(self) -> list[Database]:
        """The databases that may be queried."""
        return [
            database for database in self.databases if database.using in self.may_query
        ]

    @cached_property
    def migrated(self) -> list[Database]:
        """Those of them that have the table."""
        return [database for database in self.queried if database.has_table]

    @cached_property
    def asked_stores(self) -> list[tuple[str, list[str] | StoreUnavailable]]:
        """The stores in use by name, if servers may be asked; each with its objections,
        or why it has none.
        """
        chosen = [
            policy
            for policy in self.policies
            if policy.store != DEFAULT or conf.conf().stores
        ]
        stores = {
            (type(store), store.name): store
            for policy in chosen
            for store in _bound(policy)
        }
        return (
            [(store.name, _objections(store)) for store in stores.values()]
            if self.may_query
            else []
        )


def is_in_database(policy: Policy) -> bool:
    try:
        return configured(policy.store).backend.transactional
    except ImproperlyConfigured:  # a check of its own
        return False


def _bound(policy: Policy) -> list[Store]:
    try:
        return list(stores_of(policy))
    except ImproperlyConfigured:  # a check of its own
        return []


def _objections(store: Store) -> list[str] | StoreUnavailable:
    try:
        return list(store.objections())
    except StoreUnavailable as error:
        return error
    except ImproperlyConfigured as error:  # of its client
        return [str(error)]


def _stated(callback: Any) -> Iterator[tuple[str, Policy | None, Any]]:
    """Yield a name and a policy, if there is one, for whatever may have one of its own
    behind a view.
    """
    for operation in ninja.operations(callback):
        yield (
            dotted_name(operation.view_func),
            entry_point_policy(callback, operation.methods[0]),
            operation,
        )
    if (cls := view_class(callback)) is None:
        yield dotted_name(callback), entry_point_policy(callback, None), callback
        return
    given = getattr(callback, "initkwargs", {}).get("idempotency_policy")
    for method, name in _handlers(callback, cls).items():
        handler = getattr(cls, name)
        own = (
            f".{name}"
            if any(MARK in getattr(layer, "__dict__", ()) for layer in layers(handler))
            else ""
        )
        yield dotted_name(cls) + own, given or entry_point_policy(callback, method), cls


def _handlers(callback: Any, cls: type) -> dict[str, str]:
    """Return the names of the class's methods, by the HTTP methods that they handle;
    ``dispatch`` may handle all.
    """
    names = [
        name
        for name in View.http_method_names
        if name != "options" and hasattr(cls, name)
    ]
    return (
        getattr(callback, "actions", None)
        or dict(zip(names, names, strict=True))
        or {"post": "dispatch"}
    )


def _runner(path: str) -> Runner[Any] | Exception:
    try:
        return runner_at(path)
    except Exception as error:
        # importing a project's module, or calling its function, may raise anything
        return error
