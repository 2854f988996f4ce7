"""A partitioned record table for tests, divided more finely than in practice, so that
tests cross its bounds.

With ``IDEMPOTENCY_PARTITIONED=1`` in the environment, the whole suite runs with one.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from itertools import pairwise

from django.db import connection, transaction

from tests.support.pages import FENCE, section

WANTED = os.environ.get("IDEMPOTENCY_PARTITIONED") == "1"
WIDTH, COUNT = timedelta(seconds=10), 30
PARAMETERS = "autovacuum_vacuum_scale_factor = 0.01"  # as in the migration


def divide(*bounds: datetime) -> None:
    """Partitions that end at each of ``bounds``, and a last one without end, for a
    table without rows.
    """
    from django_idempotency.contrib.partitions.catalog import read_layout, template
    from django_idempotency.contrib.partitions.conversion import enable
    from django_idempotency.contrib.partitions.layout import TABLE, creation

    enable()
    found = read_layout()
    with transaction.atomic(), connection.cursor() as cursor:
        like = template(cursor, found.partitions)
        for partition in found.partitions:
            cursor.execute(f"DROP TABLE {partition.name}")
        for number, (lower, upper) in enumerate(pairwise([None, *bounds, None])):
            name = f"{found.schema}.{TABLE}_p{number}"
            for statement in creation(found.schema, name, lower, upper, like):
                cursor.execute(statement)


def divide_finely() -> None:
    """Minutes of partitions, from now on."""
    from django_idempotency.contrib.partitions.catalog import read_layout

    divide(*(read_layout().now + number * WIDTH for number in range(COUNT)))


def make_plain() -> None:
    """Make the table plain again, with its rows, by the statements of the page on
    partitions.
    """
    from django_idempotency.contrib.partitions.catalog import read_layout
    from django_idempotency.contrib.partitions.conversion import INDEXES
    from django_idempotency.contrib.partitions.layout import TABLE

    if not read_layout().partitioned:
        return
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(INDEXES)
        indexes = [
            definition for _name, _aside, definition, _is_primary in cursor.fetchall()
        ]
        ((_language, documented),) = FENCE.findall(
            section("partitions.md", "Going back")
        )
        for statement in (
            documented.replace("BEGIN;", "").replace("COMMIT;", ""),
            f"ALTER TABLE {TABLE} SET ({PARAMETERS})",
            f"ALTER TABLE {TABLE} ADD CONSTRAINT {TABLE}_pkey PRIMARY KEY (id)",
            *indexes,
        ):
            cursor.execute(statement)
