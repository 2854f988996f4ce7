"""Checks of what a policy combines: times, modes and stores, and options that are dangerous together.

They are the same for the project's policy and for a view's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from django.core.cache import caches
from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured

from django_idempotency import conf
from django_idempotency.options import nearest
from django_idempotency.policy import Anonymous, ClaimBy, Mode, OnConflict, Policy
from django_idempotency.stores.configured import configured

UNGUESSABLE = 16  # characters
# What is wrong with counting in one of Django's own caches.
LOCAL = "each process counts separately, so a scope gets the full limit from each of them"
BAD_COUNTERS = {
    "dummy.DummyCache": "it counts nothing",
    "db.DatabaseCache": "it loses counts of concurrent requests, and runs extra statements for each new key",
    "filebased.FileBasedCache": "it loses counts of concurrent requests",
    "locmem.LocMemCache": LOCAL,
}
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})  # RFC 9110 section 9.2.1


def policy_messages(policy: Policy, where: str) -> Iterator[CheckMessage]:
    """Yield what is wrong with the combination of values in ``policy``, wherever it is set.

    E002, E003, E010: times that don't fit. E012: no encryption. W050, E051, W052, W058, W068: dangerous combinations.
    E071: atomic mode on a store that doesn't have it. E064, W065: a cache in which limits can't be counted.
    """
    yield from _times(policy, where)
    yield from _encryption(policy, where)
    yield from _combinations(policy, where)
    yield from _mode_and_store(policy, where)
    yield from _limits(policy)


def _times(policy: Policy, where: str) -> Iterator[CheckMessage]:
    if policy.lease > policy.retention:
        yield Error(
            f"{where}: a lease of {policy.lease} s is longer than the retention of {policy.retention} s.",
            hint="Shorten LEASE or lengthen RETENTION.",
            id="django_idempotency.E002",
        )
    elif policy.retention < policy.lease + _wait(policy):
        yield Error(
            f"{where}: the retention of {policy.retention} s is shorter than the lease and the wait together.",
            hint="A waiting caller could outlive the response it waits for; lengthen RETENTION.",
            id="django_idempotency.E003",
        )

    if policy.max_request_age is not None and policy.max_request_age > policy.retention:
        yield Error(
            f"{where}: max_request_age is {policy.max_request_age} s, longer than the retention of {policy.retention} "
            "s.",
            hint="A retry that is older than the retention, but not older than MAX_REQUEST_AGE, is run again; "
            "shorten MAX_REQUEST_AGE.",
            id="django_idempotency.E010",
        )


def _wait(policy: Policy) -> float:
    return policy.wait_timeout if policy.on_conflict == OnConflict.WAIT else 0


def _encryption(policy: Policy, where: str) -> Iterator[CheckMessage]:
    if not policy.encrypt:
        return
    if not conf.conf().encryption:
        yield Error(
            f"{where}: encrypt is on, but there is no key: no response is stored, and fingerprints can be guessed.",
            hint="Set ENCRYPTION_KEYS in the IDEMPOTENCY setting.",
            id="django_idempotency.E012",
        )
    elif find_spec("cryptography") is None:
        yield Error(
            f"{where}: encrypt is on, but the package cryptography is not installed: no response is stored.",
            hint='pip install "django-idempotency[cryptography]"',
            id="django_idempotency.E012",
        )


def _combinations(policy: Policy, where: str) -> Iterator[CheckMessage]:
    if policy.fail_open and policy.required:
        yield Warning(
            f"{where}: required is on, but with fail_open a request runs unprotected while the store can't be reached.",
            hint="Turn off FAIL_OPEN where a key is required, or silence this if running twice is the lesser evil.",
            id="django_idempotency.W050",
        )
    if policy.required and policy.anonymous == Anonymous.IGNORE:
        yield Warning(
            f'{where}: required is on, but with anonymous "ignore" a caller without a scope, such as one whose '
            "session has expired, runs unprotected, with or without a key.",
            hint='Set anonymous="refuse", or turn off REQUIRED if the view is for anonymous callers.',
            id="django_idempotency.W068",
        )
    if policy.scope == "public" and policy.store_cookies:
        yield Error(
            f'{where}: scope is "public" and store_cookies is on: every caller that sends the key gets the '
            "cookies that were set for its first caller.",
            hint="Turn off STORE_COOKIES, or set a scope that tells callers apart.",
            id="django_idempotency.E051",
        )
    if policy.scope == "public" and policy.key_pattern is None and policy.min_key_length < UNGUESSABLE:
        yield Warning(
            f'{where}: scope is "public", and any key is accepted: another caller\'s response is only a guess away.',
            hint=f"Set KEY_PATTERN or a MIN_KEY_LENGTH of {UNGUESSABLE}, or a scope that tells callers apart.",
            id="django_idempotency.W058",
        )
    if safe := sorted(SAFE_METHODS.intersection(policy.methods)):
        yield Warning(
            f"{where}: methods includes {', '.join(safe)}. Safe methods change nothing: a replay would be outdated.",
            hint="Limit methods to POST, PUT, PATCH and DELETE.",
            id="django_idempotency.W052",
        )


def claim_messages(stated: Policy, policy: Policy, where: str) -> Iterator[CheckMessage]:
    """E084: a view that sets ``claim="lock"``, but is in lease mode. ``policy`` is the one in force."""
    if stated.claim == ClaimBy.LOCK and policy.mode == Mode.LEASE:
        yield Error(
            f'{where}: claim is "lock", but in lease mode no transaction holds a lock while the view runs.',
            hint='Set mode="atomic", or leave out claim.',
            id="django_idempotency.E084",
        )


def _limits(policy: Policy) -> Iterator[CheckMessage]:
    if policy.max_new_keys is None and policy.max_stored_bytes is None:
        return
    alias = conf.conf().limits_cache
    stated = caches.settings.get(alias)
    if stated is None:
        yield Error(
            f"LIMITS_CACHE is {alias!r}, which is not in CACHES: max_new_keys and max_stored_bytes limit nothing.",
            hint=nearest(alias, caches.settings),
            id="django_idempotency.E064",
        )
        return
    why = BAD_COUNTERS.get(stated["BACKEND"].removeprefix("django.core.cache.backends."))
    if why and (why != LOCAL or not (conf.debug() or conf.in_test_run())):
        yield Warning(
            f"max_new_keys and max_stored_bytes are counted in the cache {alias!r}: {why}.",
            hint="Set LIMITS_CACHE to a cache in Redis or memcached.",
            id="django_idempotency.W065",
        )


def _mode_and_store(policy: Policy, where: str) -> Iterator[CheckMessage]:
    if is_made(policy.store) and (why := configured(policy.store).objection(policy)):
        yield Error(
            f"{where}: {why}",
            hint="Such requests fail with ImproperlyConfigured.",
            id="django_idempotency.E071",
        )


def is_made(alias: str) -> bool:
    """Return whether the store can be made; E070 says why not."""
    try:
        configured(alias)
    except ImproperlyConfigured:
        return False
    return True
