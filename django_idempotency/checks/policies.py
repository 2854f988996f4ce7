"""What can be wrong with the ``IDEMPOTENCY`` setting, what it names, what a policy combines, and where records are."""

from __future__ import annotations

from collections.abc import Iterator

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_idempotency import conf
from django_idempotency.checks.project import Database, Source, refusals
from django_idempotency.policy import Lease
from django_idempotency.stores.configured import configured
from django_idempotency.values.options import nearest
from django_idempotency.values.scopes import tenant_databases

# The settings of wings, and the apps that read them.
WINGS = {"outbox": "django_idempotency.contrib.outbox", "dashboard": "django_idempotency.contrib.dashboard"}
UNGUESSABLE = 16  # characters


def is_public_and_guessable(source: Source) -> bool:
    policy = source.policy
    return policy.scope == "public" and policy.keys.pattern is None and policy.keys.min_length < UNGUESSABLE


def lease_outlasts_delivery(consumer: Source) -> bool:
    waits = consumer.of.redelivered_after
    return isinstance(consumer.policy.mode, Lease) and waits is not None and consumer.policy.mode.seconds >= waits


def settings_of_absent_apps(settings: conf.Conf) -> Iterator[tuple[str, str]]:
    for name, app in WINGS.items():
        if getattr(settings, name) and not apps.is_installed(app):
            yield name.upper(), app


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
    return configured(source.policy.store).objection(source.policy)


def unknown_database(source: Source) -> str | None:
    using = source.policy.using
    return nearest(using, connections) if isinstance(using, str) and using not in connections else None


# --- Databases, and the records in them ------------------------------------------------------------------------------


def has_no_tenants_but_others_have(database: Database) -> bool:
    tenants = set(tenant_databases())
    has_default_scope = any(policy.scope is None for policy in database.policies)
    return len(tenants) > 1 and database.using not in tenants and has_default_scope


def lacks_table(database: Database) -> bool:
    """Whether the table is missing. It may be in the schemas of tenants, which are not looked into."""
    return not database.has_table and database.using not in tenant_databases()


def lacks_privileges(database: Database) -> tuple[str, str] | None:
    refused = dict(refusals(database.using))
    return (", ".join(refused), next(iter(refused.values()))) if refused else None


def lacks_skip_locked(database: Database) -> bool:
    features = database.connection.features
    both = features.has_select_for_update_skip_locked and features.has_select_for_update_nowait
    return bool(features.has_select_for_update and not both)
