"""What can be wrong with the ``IDEMPOTENCY`` setting, what it names, what a policy combines, and where records are."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from django.apps import apps
from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_idempotency import conf
from django_idempotency.checks.project import Database, Source, refusals
from django_idempotency.conf import EXAMPLES
from django_idempotency.engine.digests import UNKEYED, key_id_of
from django_idempotency.maintenance.records import HAS_BODY, records
from django_idempotency.policy import Lease
from django_idempotency.stores.codec import encryption_key_of, key_id
from django_idempotency.stores.configured import configured
from django_idempotency.stores.database import ahead
from django_idempotency.values.options import nearest
from django_idempotency.values.scopes import tenant_databases

# The settings of wings, and the apps that read them.
WINGS = {"outbox": "django_idempotency.contrib.outbox", "dashboard": "django_idempotency.contrib.dashboard"}
UNGUESSABLE = 16  # characters
# What is wrong with counting in one of Django's own caches.
LOCAL = "each process counts separately, so a scope gets the full limit from each of them"
BAD_COUNTERS = {
    "dummy.DummyCache": "it counts nothing",
    "db.DatabaseCache": "it loses counts of concurrent requests, and runs extra statements for each new key",
    "filebased.FileBasedCache": "it loses counts of concurrent requests",
    "locmem.LocMemCache": LOCAL,
}

FEWEST = 16  # distinct bytes; one random key in 10 ** 20 has fewer
DAY = 24 * 60 * 60
SAMPLE = 1000  # records from each end


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


def why_counts_are_wrong(alias: str) -> str | None:
    backend = caches.settings.get(alias, {}).get("BACKEND", "").removeprefix("django.core.cache.backends.")
    why = BAD_COUNTERS.get(backend)
    return None if why == LOCAL and (conf.debug() or conf.in_test_run()) else why


def unscheduled_tasks(_settings: conf.Conf) -> str:
    """Return the tasks that Celery beat lacks, if it has a schedule."""
    celery: Any = sys.modules.get("celery")
    scheduled = {entry.get("task") for entry in celery.current_app.conf.beat_schedule.values()} if celery else set()
    missing = {"django_idempotency.cleanup", "django_idempotency.reap"} - scheduled
    return " and ".join(sorted(missing)) if scheduled else ""


# --- Keys that can be guessed, or are set twice ----------------------------------------------------------------------


def weak_keys(settings: conf.Conf) -> Iterator[tuple[str, int, str]]:
    keys = {"ENCRYPTION_KEYS": settings.encryption, "DIGEST_KEYS": settings.own_digest_keys}
    times = Counter(key for values in keys.values() for key in values)
    for name, values in keys.items():
        for index, key in enumerate(values):
            if why := weakness(key) or ("is listed twice" if times[key] > 1 else None):
                yield name, index, why


def weakness(key: bytes) -> str | None:
    """Return why ``key`` can't come from a random generator, or is not secret; ``None`` if neither is known."""
    if key in EXAMPLES:
        return "is an example from the documentation"
    if all(32 <= byte < 127 for byte in key):
        return "is text"
    steps = {(later - before) % 256 for before, later in pairwise(key)}
    return "is not random" if min(len(set(key)), len(steps)) < FEWEST else None


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


def missing_keys(database: Database) -> Iterator[tuple[str, str]]:
    """Look at the records that are purged first, whose keys are the oldest, and at those that are purged last."""
    ended = records(database.using).terminal().annotate(has_body=HAS_BODY)
    values = ended.values_list("response_headers", "has_body", "fingerprint")
    found = [*values.order_by("purge_at")[:SAMPLE], *values.order_by("-purge_at")[:SAMPLE]]
    digests = {key_id_of(bytes(fingerprint)) for _headers, _has_body, fingerprint in found} - {UNKEYED}
    encryption = {encryption_key_of(headers, has_body) or "" for headers, has_body, _fingerprint in found} - {""}
    for id in sorted(encryption - set(map(key_id, conf.conf().encryption))):
        yield id, "is not in ENCRYPTION_KEYS"
    for digest in sorted(digests - conf.conf().digests.keys()):
        yield digest.hex(), "is neither in DIGEST_KEYS nor derived from ENCRYPTION_KEYS"


def has_records_to_delete(database: Database) -> bool:
    overdue = records(database.using).purgeable().filter(purge_at__lt=ahead(-DAY)).order_by("purge_at")
    return bool(overdue[:1])
