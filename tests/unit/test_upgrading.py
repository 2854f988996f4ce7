"""The page on upgrading has every migration, and none after the first release blocks claims."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

from django.db import migrations, models

import django_idempotency

PACKAGE = Path(django_idempotency.__file__).parent
PAGE = PACKAGE.parent / "docs" / "upgrading.md"
FIRST_RELEASE = {
    "0001_create_record",
    *("0001_create_counters", "0001_create_outbox"),
}
# What reads the table, or rewrites it, under a lock that claims wait for.
BLOCKING = (migrations.AddIndex, migrations.AddConstraint, migrations.AlterField)


def modules():
    """Every migration: of the core and of the wings."""
    return {
        path.stem: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in PACKAGE.rglob("migrations/0*.py")
    }


def blocks(migration):
    """Subclasses, such as ``AddIndexConcurrently`` and ``AddConstraintNotValid``, are made not to."""
    return any(type(operation) in BLOCKING for operation in migration.operations)


def test_every_migration_is_on_the_page():
    listed = set(re.findall(r"^\| `(\d{4}_\w+)`", PAGE.read_text(), re.MULTILINE))
    assert listed == set(modules())


def test_a_plain_index_counts_as_blocking():
    class Migration:
        operations = (migrations.AddIndex("record", models.Index(fields=["key"], name="of_keys")),)

    assert blocks(Migration)


def test_migrations_after_the_first_release_do_not_block_claims():
    later = {name: path for name, path in modules().items() if name not in FIRST_RELEASE}
    blocking = [name for name, path in later.items() if blocks(import_module(path).Migration)]
    assert not blocking, "build indexes concurrently, and add constraints as NOT VALID"
