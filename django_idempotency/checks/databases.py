"""What can be wrong with the databases that hold records, and with the records in them."""

from __future__ import annotations

from collections.abc import Iterator

from django_idempotency import conf
from django_idempotency.checks.project import Database
from django_idempotency.engine.digests import UNKEYED, key_id_of
from django_idempotency.maintenance.records import HAS_BODY, records
from django_idempotency.stores.codec import encryption_key_of, key_id
from django_idempotency.stores.database import ahead
from django_idempotency.values.scopes import tenant_databases

DAY = 24 * 60 * 60
SAMPLE = 1000  # records from each end


def has_no_tenants_but_others_have(database: Database) -> bool:
    tenants = set(tenant_databases())
    has_default_scope = any(policy.scope is None for policy in database.policies)
    return len(tenants) > 1 and database.using not in tenants and has_default_scope


def lacks_table(database: Database) -> bool:
    """Whether the table is missing. It may be in the schemas of tenants, which are not looked into."""
    return not database.has_table and database.using not in tenant_databases()


def lacks_privileges(database: Database) -> tuple[str, str] | None:
    refusals = database.refusals
    return (", ".join(refusals), next(iter(refusals.values()))) if refusals else None


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
