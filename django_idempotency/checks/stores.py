"""Checks of the stores that policies choose."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from django.core.checks import CheckMessage, Error, Tags, register
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_idempotency import conf
from django_idempotency.checks.settings import Apps, are_usable
from django_idempotency.checks.views import views
from django_idempotency.options import nearest
from django_idempotency.policy import Policy
from django_idempotency.stores import Store, stores_of
from django_idempotency.stores.configured import DEFAULT, configured


@register(Tags.urls)
def check_stores(app_configs: Apps, **kwargs: Any) -> list[CheckMessage]:
    """E070: stores that can't be made. E075: databases that can't be chosen. And what each store reports."""
    if not are_usable():
        return []
    found = [*_unusable(), *_missing_databases()]
    found += [] if any(message.id == "django_idempotency.E075" for message in found) else _told(ask=False)
    return list({f"{message.id} {message.msg}": message for message in found}.values())


@register(Tags.database)
def check_store_servers(app_configs: Apps, databases: Iterable[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    """Report what each store finds out from its server."""
    return _told(ask=True) if databases and are_usable() else []


def _policies() -> Iterator[tuple[str, Policy]]:
    yield "The IDEMPOTENCY setting", conf.conf().policy
    for view, policy in views():
        yield f"{view.__module__}.{view.__qualname__}", policy


def _unusable() -> Iterator[CheckMessage]:
    chosen = {policy.store for _where, policy in _policies()}
    for alias in sorted({*conf.conf().stores, *chosen}):
        try:
            configured(alias)
        except ImproperlyConfigured as error:
            yield Error(
                str(error),
                hint="Correct STORES in the IDEMPOTENCY setting, or install the store's extra.",
                id="django_idempotency.E070",
            )


def _missing_databases() -> Iterator[CheckMessage]:
    stated = {f"SHARDS names the database {alias!r}": alias for alias in conf.conf().shards}
    for where, policy in _policies():
        if isinstance(policy.using, str):
            stated[f"{where}: `using` names the database {policy.using!r}"] = policy.using
        elif policy.using is not None and not conf.conf().shards:
            yield Error(
                f"{where}: `using` is a callable, and SHARDS names no database for it to choose.",
                hint="List in SHARDS the aliases that it returns.",
                id="django_idempotency.E075",
            )
    for sentence, alias in stated.items():
        if alias not in connections:
            yield Error(
                f"{sentence}, which is not in DATABASES.",
                hint=nearest(alias, connections),
                id="django_idempotency.E075",
            )


def _told(*, ask: bool) -> list[CheckMessage]:
    policies = [policy for _where, policy in _policies() if policy.store != DEFAULT or conf.conf().stores]
    by_place = {(type(store), store.name): store for policy in policies for store in _bound(policy)}
    return [message for store in by_place.values() for message in store.check(ask=ask)]


def _bound(policy: Policy) -> list[Store]:
    try:
        return list(stores_of(policy))
    except ImproperlyConfigured:
        return []
