"""System checks of the partitions, described in ``docs/partitions.md``."""

from __future__ import annotations

from django_idempotency.contrib.partitions.catalog import read_layout
from django_idempotency.contrib.partitions.layout import UNTIL, Layout, stamp
from django_idempotency.extending.operators import Check, Database, each


def _layout(database: Database) -> Layout | None:
    return (
        read_layout(using=database.using) if database.vendor == "postgresql" else None
    )


def end_that_is_near(database: Database) -> str | None:
    layout = _layout(database)
    return (
        stamp(layout.covered_until)
        if layout and layout.covered_until and layout.is_short()
        else None
    )


def is_half_enabled(database: Database) -> bool:
    layout = _layout(database)
    return layout is not None and bool(layout.halfway) and not layout.partitioned


def half_detached_partition(database: Database) -> str | None:
    layout = _layout(database)
    found = (
        partition.half_detached for partition in (layout.partitions if layout else ())
    )
    return next(filter(None, found), None)


def keeps_for_good(database: Database) -> bool:
    layout = _layout(database)
    return layout is not None and layout.partitioned and database.keeps_for_good


ENSURE = "manage.py idempotency_partitions ensure --database {it.using}"
CHECKS = (
    Check(
        "W001",
        each("migrated", end_that_is_near),
        "The idempotency records in {it} have partitions only until {found}.",
        f"Without a partition, requests with a key are refused. Run {ENSURE}, and"
        " schedule it.",
        database=True,
    ),
    Check(
        "W002",
        each("migrated", is_half_enabled),
        "Partitioning the idempotency records in {it} was interrupted and left a"
        f" CHECK ({UNTIL}) behind.",
        "In a day or two it will refuse new records. Run manage.py"
        " idempotency_partitions enable again.",
        database=True,
    ),
    Check(
        "W002",
        each("migrated", half_detached_partition),
        "Claims can't see a partition of the idempotency records in {it}: {found}",
        "Operations with its keys can run again. Finish detaching it, and attach it"
        " again if the keys are needed.",
        database=True,
    ),
    Check(
        "E003",
        each("migrated", keeps_for_good),
        "The table of the idempotency records in {it} is partitioned, but some are kept"
        " for good (retention=None): their partitions can never be dropped.",
        "Keep such records in another database (`using`) or store, or set `retention`.",
        database=True,
    ),
)
