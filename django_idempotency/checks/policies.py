"""What can be wrong with the ``IDEMPOTENCY`` setting, what it names, and what a policy combines."""

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
from django_idempotency.checks.project import Source
from django_idempotency.conf import EXAMPLES, Conf
from django_idempotency.middleware import is_covering
from django_idempotency.policy import REQUIRE, Lease
from django_idempotency.stores.codec import lack_of_encryption
from django_idempotency.stores.configured import configured
from django_idempotency.values.options import nearest

# The settings of wings, and the apps that read them.
WINGS = {"outbox": "django_idempotency.contrib.outbox", "dashboard": "django_idempotency.contrib.dashboard"}
EFFECTS = {True: "no response is stored", REQUIRE: "requests with a key get 503"}
UNGUESSABLE = 16  # characters
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})  # RFC 9110 section 9.2.1
# What is wrong with counting in one of Django's own caches.
LOCAL = "each process counts separately, so a scope gets the full limit from each of them"
BAD_COUNTERS = {
    "dummy.DummyCache": "it counts nothing",
    "db.DatabaseCache": "it loses counts of concurrent requests, and runs extra statements for each new key",
    "filebased.FileBasedCache": "it loses counts of concurrent requests",
    "locmem.LocMemCache": LOCAL,
}

# --- Combinations ----------------------------------------------------------------------------------------------------
FEWEST = 16  # distinct bytes; one random key in 10 ** 20 has fewer


def lease_outlasts_retention(source: Source) -> bool:
    return isinstance(source.policy.mode, Lease) and source.policy.mode.seconds > source.policy.retention


def wait_outlasts_retention(source: Source) -> bool:
    policy = source.policy
    lease = policy.mode.seconds
    return lease <= policy.retention < lease + (policy.wait or 0)


def requests_outlast_retention(source: Source) -> bool:
    policy = source.policy
    return policy.keys.max_age is not None and policy.keys.max_age > policy.retention


def effect_without_key(source: Source) -> str | None:
    """Return what happens without an encryption key."""
    return None if conf.conf().encryption else EFFECTS.get(source.policy.body.encrypt)


def effect_without_cryptography(source: Source) -> str | None:
    return EFFECTS.get(source.policy.body.encrypt) if conf.conf().encryption and lack_of_encryption() else None


def gives_cookies_to_everybody(source: Source) -> bool:
    return source.policy.scope == "public" and source.policy.store_cookies


def is_public_and_guessable(source: Source) -> bool:
    policy = source.policy
    return policy.scope == "public" and policy.keys.pattern is None and policy.keys.min_length < UNGUESSABLE


def requires_nothing_of_anonymous_callers(source: Source) -> bool:
    return source.policy.required and source.policy.anonymous == "ignore"


def requires_nothing_by_middleware(settings: conf.Conf) -> bool:
    """Whether anonymous callers of the views that only the middleware covers need no key."""
    return is_covering() and settings.policy.required and settings.policy.anonymous is None


def lease_outlasts_delivery(consumer: Source) -> bool:
    waits = consumer.of.redelivered_after
    return isinstance(consumer.policy.mode, Lease) and waits is not None and consumer.policy.mode.seconds >= waits


def safe_methods(source: Source) -> str:
    return ", ".join(sorted(SAFE_METHODS.intersection(source.policy.methods)))


# --- What is named, but is not there or not fit ----------------------------------------------------------------------


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


def chooses_from_nothing(source: Source) -> bool:
    return callable(source.policy.using) and not conf.conf().shards


def unknown_shards(settings: conf.Conf) -> Any:
    return ((alias, nearest(alias, connections)) for alias in settings.shards if alias not in connections)


def unknown_cache(alias: str) -> str | None:
    return None if alias in caches.settings else nearest(alias, caches.settings)


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


def weak_keys(settings: Conf) -> Iterator[tuple[str, int, str]]:
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
