"""What a new partition is modelled on, and the statements that make it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from django_idempotency.contrib.partitions.layout import TABLE, Partition, midnight, stamp


class Template(NamedTuple):
    """What a partition has beyond its columns: storage parameters, and the table's owner.

    ``owner`` is ``None`` if it is the role that makes the partition.
    """

    options: list[str]
    owner: str | None

    def owned(self, name: str) -> list[str]:
        return [] if self.owner is None else [f"ALTER TABLE {name} OWNER TO {self.owner}"]


TEMPLATE = f"""
SELECT coalesce(part.reloptions, '{{}}') || ARRAY(SELECT 'toast.' || unnest(toast.reloptions)),
    CASE WHEN parent.relowner <> current_user::regrole THEN parent.relowner::regrole::text END
FROM pg_class AS part LEFT JOIN pg_class AS toast ON toast.oid = part.reltoastrelid
    JOIN pg_class AS parent ON parent.oid = '{TABLE}'::regclass
WHERE part.oid = ANY (%(oids)s::oid[]) OR part.oid = parent.oid
ORDER BY part.oid = parent.oid, part.reloptions IS NULL, array_position(%(oids)s::oid[], part.oid) DESC
LIMIT 1
"""


def template(cursor: Any, partitions: Sequence[Partition]) -> Template:
    """Return the template of the latest partition with storage parameters, or of the table itself while it is plain."""
    cursor.execute(TEMPLATE, {"oids": [partition.oid for partition in partitions]})
    return Template(*cursor.fetchone())


def creation(schema: str, name: str, lower: datetime | None, upper: datetime | None, like: Template) -> list[str]:
    """Return the statements that make a partition. Their lock on the table conflicts with none of a claim's."""
    table = f"{schema}.{TABLE}"
    options = f" WITH ({', '.join(like.options)})" if like.options else ""
    begin, end = (bound and f"'{stamp(bound)}'" for bound in (lower, upper))
    return [
        f"CREATE TABLE {name} (LIKE {table} INCLUDING ALL){options}",
        f"ALTER TABLE {name} ADD PRIMARY KEY (id)",
        *like.owned(name),
        f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES FROM ({begin or 'MINVALUE'}) TO ({end or 'MAXVALUE'})",
    ]


def name_of(schema: str, lower: datetime) -> str:
    """Return the name of a partition: by its lower bound, as pg_partman does, which reads times from names."""
    precision = "%Y_%m_%d" if lower == midnight(lower) else "%Y_%m_%d_%H%M"
    return f"{schema}.{TABLE}_p{lower.astimezone(UTC):{precision}}"
