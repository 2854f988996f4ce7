"""The checks of the core. The page ``docs/checks.md`` has a section for each id."""

from __future__ import annotations

from django.core.cache import caches
from django.db import connections

from django_idempotency.checks import causes
from django_idempotency.checks.registry import Check, each
from django_idempotency.conf import conf, debug, in_test_run
from django_idempotency.maintenance.stats import DAY, HOUR, alarms, due
from django_idempotency.middleware import is_covering
from django_idempotency.stores.claim_function import can_claim
from django_idempotency.values.exceptions import StoreUnavailable
from django_idempotency.values.policy import Lease
from django_idempotency.values.rules import nearest

CHECKS = (
    # --- Settings and policies
    Check("E001", each("errors", str), "{it}", "Correct the IDEMPOTENCY setting."),
    Check(
        "E001",
        each("settings", causes.flat_settings),
        "Nothing reads the setting IDEMPOTENCY_{found}.",
        'Write IDEMPOTENCY = {{"{found}": …}} instead.',
    ),
    Check(
        "E002",
        each(
            "sources",
            lambda it: (
                isinstance(it.policy.mode, Lease)
                and it.policy.mode.seconds > it.policy.retention
            ),
        ),
        "{it}: a lease of {it.policy.mode.seconds:g} s is longer than the retention of"
        " {it.policy.retention:g} s.",
        "Shorten the lease or lengthen `retention`.",
    ),
    Check(
        "E002",
        each(
            "sources",
            causes.expires_before_a_waiter,
        ),
        "{it}: the retention of {it.policy.retention:g} s is shorter than {found}.",
        "A waiting caller could outlive the response it waits for; lengthen"
        " `retention`.",
    ),
    Check(
        "E003",
        each("sources", causes.why_unencrypted),
        "{it}: `encrypt` is set, but {found[0]}: {found[1]}.",
        "Set ENCRYPTION_KEYS in the IDEMPOTENCY setting, and pip install"
        ' "django-idempotency[cryptography]".',
    ),
    Check(
        "E004",
        each(
            "databases",
            lambda it: it.vendor != "postgresql" and it.claims_by_lock and it.vendor,
        ),
        'claim is "lock", but the database {it} is {found}, where claims are made by'
        " record.",
        'Leave claim="lock" out of Atomic(…).',
    ),
    Check(
        "E005",
        each(
            "sources",
            lambda it: it.policy.scope == "public" and it.policy.store_cookies,
        ),
        '{it}: `scope` is "public" and `store_cookies` is on: every caller that sends'
        " the key gets the cookies that were set for its first caller.",
        "Turn off `store_cookies`, or set a scope that tells callers apart.",
    ),
    Check(
        "W006",
        each("sources", causes.is_public_and_guessable),
        '{it}: `scope` is "public", and any key is accepted: another caller\'s response'
        " is only a guess away.",
        f"Set Key(pattern=…) or Key(min_length={causes.UNGUESSABLE}), or a scope that"
        " tells callers apart.",
    ),
    Check(
        "W007",
        each("sources", lambda it: it.policy.required and it.policy.fail_open),
        "{it}: `required` is on, but with `fail_open` a request runs unprotected while"
        " the store can't be reached.",
        "Turn off `fail_open` where a key is required, or silence this if running twice"
        " is the lesser evil.",
    ),
    Check(
        "W008",
        each(
            "sources", lambda it: it.policy.required and it.policy.anonymous == "ignore"
        ),
        '{it}: `required` is on, but with `anonymous` "ignore" a caller without a'
        " scope, such as one whose session has expired, runs unprotected, with or"
        " without a key.",
        'Set `anonymous` to "refuse", or turn off `required` if the view is for'
        " anonymous callers.",
    ),
    Check(
        "W008",
        each(
            "settings",
            lambda it: (
                is_covering() and it.policy.required and it.policy.anonymous is None
            ),
        ),
        "REQUIRED is on, but anonymous callers of the views that only"
        " IdempotencyMiddleware covers need no key, and run unprotected.",
        'Set ANONYMOUS to "refuse", and add the paths of login pages and other forms to'
        " EXEMPT_PATHS.",
    ),
    Check(
        "W009",
        each(
            "sources",
            lambda it: (
                isinstance(it.policy.mode, Lease)
                and it.policy.mode.seconds < causes.SHORT_LEASE
            ),
        ),
        "{it}: a lease of {it.policy.mode.seconds:g} s may lapse because its process"
        " or the store is busy for a moment.",
        f"Make leases last at least {causes.SHORT_LEASE} s.",
    ),
    Check(
        "W012",
        each("settings", lambda it: not it.enabled),
        "ENABLED is off in the IDEMPOTENCY setting: keys of requests are ignored, and"
        " retries run again.",
        "Turn it on, unless this is an emergency.",
        deploy=True,
    ),
    Check(
        "W012",
        each("settings", lambda it: it.enabled and not it.protects),
        "An app makes entry points only observe requests, so retries run again.",
        "Turn it off (for example, OBSERVE of the dashboard) once you have seen"
        " enough.",
        deploy=True,
    ),
    # --- Views and their entry points
    Check(
        "E010",
        each(
            "views", lambda it: it.policy.is_atomic and causes.has_to_be_awaited(it.of)
        ),
        "{it} is async, but its policy is in atomic mode: a transaction belongs to a"
        " thread, so requests with a key fail.",
        'Set mode="lease" for the view, or make it sync.',
    ),
    Check(
        "E011",
        each("routes", causes.inside_transaction),
        "{found}: @transaction.atomic is above the entry point, so a claim would be"
        " hidden from other requests: requests with a key fail.",
        "Put @transaction.atomic below @idempotent, or remove it: in atomic mode, the"
        " entry point opens the transaction.",
    ),
    Check(
        "E012",
        each("routes", causes.below_api_view),
        "{found}: @idempotent is below @api_view, so it gets REST framework's request:"
        " requests with a key fail.",
        "Put @idempotent above @api_view.",
    ),
    Check(
        "E013",
        each("settings", causes.revisions_in_a_transaction),
        "{found} opens a transaction around every view, in which no key can be claimed:"
        " requests with a key fail.",
        "Use reversion.create_revision() inside the views instead.",
    ),
    Check(
        "E015",
        each("classes", causes.unread_policies),
        "{found[0]} has a policy in its attribute {found[1]}, which nothing reads.",
        "Call it idempotency_policy, and make IdempotentMixin its first base, or put"
        " @idempotent(…) on the class.",
    ),
    Check(
        "W016",
        each("routes", causes.async_api),
        "{found} is an async class of REST framework, for which IdempotencyMiddleware"
        " has no entry point: it runs unprotected.",
        "Make it sync, write an async view of Django, or put @idempotency_exempt on"
        " it.",
    ),
    Check(
        "E019",
        each("views", causes.other_database),
        "{it} is in atomic mode, but writes to {found[0]} while its records are in"
        " {found[1]}.",
        'Set using=… to the database of the effects, or mode="lease".',
    ),
    Check(
        "W020",
        each("views", causes.why_callers_are_no_users),
        "{it} {found}, but has no scope for callers who are not users: their requests"
        " with a key are refused.",
        'Set scope="public", or a callable that takes the request and returns the id of'
        ' the account; or set anonymous="ignore", or authenticate users.',
    ),
    Check(
        "W021",
        each("routes", causes.guards_inside),
        "{found[1]}: {found[0]} is inside the entry point, so a replay is sent before"
        " it runs.",
        "Put @idempotent below the decorators that authenticate, directly above the"
        ' view. For a class, decorate "dispatch" with them, and put @idempotent or'
        " IdempotentMixin on the class.",
    ),
    Check(
        "W022",
        each("classes", causes.unused_handler),
        "{found[0]} is not protected: its dispatch() does not call the handler"
        " {found[1]}().",
        "Call super().dispatch(), or remove the handler, so that the entry point is"
        " around dispatch().",
    ),
    Check(
        "W017",
        each("settings", causes.undescribed_keys),
        "{found} describes the API, but not its keys:"
        " django_idempotency.contrib.openapi is not in INSTALLED_APPS.",
        "Add it, so that clients learn of the header and of the responses.",
    ),
    Check(
        "W018",
        each("settings", causes.hidden_from_browsers),
        "{found[0]} of django-cors-headers lacks {found[1]!r}, so scripts of other"
        " origins can't {found[2]}.",
        "Add it to {found[0]}, unless only servers send keys.",
    ),
    # --- Stores and databases
    Check(
        "E023",
        each("stores", causes.why_unusable),
        "{found}",
        "Correct STORES in the IDEMPOTENCY setting, or install the store's extra.",
    ),
    Check(
        "E023",
        each("sources", causes.unknown_database),
        "{it}: `using` is {it.policy.using!r}, which is not in DATABASES.",
        "{found}",
    ),
    Check(
        "E023",
        each(
            "settings",
            lambda it: (
                (name, nearest(name, connections))
                for name in it.shards
                if name not in connections
            ),
        ),
        "SHARDS names the database {found[0]!r}, which is not in DATABASES.",
        "{found[1]}",
    ),
    Check(
        "E023",
        each("sources", lambda it: callable(it.policy.using) and not conf().shards),
        "{it}: `using` is a callable, and SHARDS names no database for it to choose.",
        "List in SHARDS the aliases that it returns.",
    ),
    Check(
        "E023",
        each(
            "limited",
            lambda it: it not in caches.settings and nearest(it, caches.settings),
        ),
        "LIMITS_CACHE is {it!r}, which is not in CACHES: Limits(…) limits nothing.",
        "{found}",
    ),
    Check(
        "E024",
        each("sources", causes.why_unfit),
        "{it}: {found}",
        "Such requests fail with ImproperlyConfigured.",
    ),
    Check(
        "E025",
        each(
            "databases",
            lambda it: it.vendor == "sqlite" and not (debug() or in_test_run()),
        ),
        "The idempotency records are in SQLite (database {it}), and DEBUG is off.",
        "SQLite has no row locks, so every request waits for every other; use"
        " PostgreSQL or MariaDB.",
    ),
    Check(
        "E027",
        each("queried", causes.lacks_table),
        "The database {it} has no table for the idempotency records.",
        "Run manage.py migrate --database {it.using}. Until then, requests with a key"
        " are refused.",
        database=True,
        deploy=True,
    ),
    Check(
        "E028",
        each("migrated", causes.lacks_privileges),
        "The application can't {found[0]} the idempotency records in {it}: {found[1]}",
        "Requests with a key fail; in lease mode, after their effects. Grant its role"
        " what is missing. If a pooler refuses transactions, set its mode to"
        " transaction or session.",
        database=True,
    ),
    Check(
        "W029",
        each("queried", lambda it: not can_claim(it.connection)),
        "The database {it} has the table of the idempotency records, but no claim"
        " function that this role can call.",
        "Requests with a key get 503. Run migrate, or grant the application's role"
        " EXECUTE on the function django_idempotency_claim.",
        database=True,
    ),
    Check(
        "W030",
        each("migrated", causes.is_unlogged),
        "The table of the idempotency records in the database {it} is UNLOGGED: a crash"
        " of the server empties it, and retries run again.",
        "Set it LOGGED again.",
        database=True,
    ),
    Check(
        "E031",
        each("queried", causes.lacks_skip_locked),
        "The database {it} does not support SELECT … FOR UPDATE with SKIP LOCKED and"
        " NOWAIT.",
        "Use PostgreSQL, or MariaDB 10.6 or later.",
        database=True,
    ),
    Check(
        "W032",
        each("databases", causes.loses_an_hour),
        "The database {it} is read with psycopg2, USE_TZ is off, and {found} has"
        " daylight saving time: times in the hour that is repeated in autumn are"
        " ambiguous.",
        "Set USE_TZ = True, or use psycopg 3.",
    ),
    Check(
        "W033",
        each("asked_stores", lambda it: isinstance(it[1], StoreUnavailable) and it[1]),
        "The store {it[0]!r} can't be reached: {found}",
        "Requests with a key are refused with 503 in the meantime.",
        database=True,
    ),
    Check(
        "E034",
        each("asked_stores", lambda it: iter(it[1] if isinstance(it[1], list) else ())),
        "{found}",
        "Change the configuration of the store's server.",
        database=True,
    ),
    # --- Maintenance
    Check(
        "W035",
        each("migrated", lambda it: due(using=it.using)["lag"] > DAY),
        "Records in the database {it} have been due for deletion for more than a day:"
        " idempotency_cleanup is not scheduled, or does not keep up.",
        "Schedule idempotency_cleanup; idempotency_stats shows how far behind it is.",
        database=True,
        deploy=True,
    ),
    Check(
        "W035",
        each("migrated", lambda it: alarms(using=it.using)["stuck_oldest"] > HOUR),
        "The owners of keys in the database {it} have been gone for more than an hour:"
        " idempotency_reap is not scheduled, or fails.",
        "Schedule idempotency_reap. Until then such records are never cleaned up.",
        database=True,
        deploy=True,
    ),
    # --- Consumers
    Check(
        "E037",
        each("runners", lambda it: it[1] if isinstance(it[1], Exception) else None),
        "CONSUMERS names {it[0]}: {found}",
        "Use the dotted path of a runner, or of a function that returns one.",
    ),
    Check(
        "W038",
        each(
            "consumers",
            causes.lease_outlasts_delivery,
        ),
        "{it}: its lease of {it.policy.mode.seconds:g} s is not shorter than the"
        " {it.of.redelivered_after:g} s after which its broker redelivers.",
        "A dead consumer's messages are redelivered while its lease lasts; shorten the"
        " lease.",
    ),
    Check(
        "W038",
        each("consumers", lambda it: it.policy.retention < it.of.redelivered_for),
        "{it}: a message is remembered for {it.policy.retention:g} s, but can be"
        " redelivered for {it.of.redelivered_for:g} s.",
        "Lengthen retention in the consumer's policy, or set the runner's"
        " redelivered_for.",
    ),
    Check(
        "W039",
        each(
            "consumers",
            lambda it: it.policy.claims_by_lock and not it.of.tells_redeliveries,
        ),
        "{it}: a message that kills its process is never given up.",
        "Its broker does not report redeliveries, and claims by lock do not count"
        ' crashes. Set mode=Atomic(claim="record") in the consumer\'s policy.',
    ),
)
