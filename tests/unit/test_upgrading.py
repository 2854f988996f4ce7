"""The page on upgrading has every migration, and none after the first release blocks claims."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from django.db import migrations

import django_idempotency

PACKAGE = Path(django_idempotency.__file__).parent
PAGE = PACKAGE.parent / "docs" / "upgrading.md"
FIRST_RELEASE = {
    *("0001_create_record", "0002_tune_record_on_postgresql", "0003_index_bodies_kept_for_audit"),
    *("0004_create_counter", "0005_claim_in_one_call_on_postgresql", "0006_compare_exactly_on_mariadb"),
    *("0007_create_observation", "0008_claim_by_lock_on_postgresql", "0001_create_outbox"),
}
# What reads the table, or rewrites it, under a lock that claims wait for.
BLOCKING = (migrations.AddIndex, migrations.AddConstraint, migrations.AlterField)


def names(folder):
    return {path.stem for path in folder.glob("0*.py")}


def blocks(migration):
    """Subclasses, such as ``AddIndexConcurrently`` and ``AddConstraintNotValid``, are made not to."""
    return any(type(operation) in BLOCKING for operation in migration.operations)


def migration(package, name):
    return import_module(f"django_idempotency.{package}.{name}").Migration


def test_every_migration_is_on_the_page():
    listed = set(re.findall(r"^\| `(\d{4}_\w+)`", PAGE.read_text(), re.MULTILINE))
    assert listed == names(PACKAGE / "migrations") | names(PACKAGE / "outbox" / "migrations")


def test_no_migration_after_the_first_release_blocks_claims():
    assert blocks(migration("migrations", "0003_index_bodies_kept_for_audit"))
    later = [
        name
        for package in ("migrations", "outbox.migrations")
        for name in names(PACKAGE / package.replace(".", "/")) - FIRST_RELEASE
        if blocks(migration(package, name))
    ]
    assert not later, "build indexes concurrently, and add constraints as NOT VALID"
