"""What a new partition is modelled on, and the statements that make it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, timedelta
from typing import Any

from django_idempotency.contrib.partitions.layout import DAY, TABLE, Bounds, Partition, stamp


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """What a partition has beyond its columns. ``options``: storage parameters. ``identity``: for replication.

    ``columns``: how the columns' statistics are made, as clauses of ALTER TABLE, because LIKE does not copy them.
    """

    options: tuple[str, ...] = ()
    tablespace: str | None = None  # if it is not the database's
    columns: tuple[str, ...] = ()
    identity: str = "DEFAULT"
    owner: str | None = None  # if it is not the role that makes the partition

    def created(self, name: str, columns: str) -> str:
        """Return the statement that makes a table with ``columns``, for example a LIKE clause."""
        options = f" WITH ({', '.join(self.options)})" if self.options else ""
        return f"CREATE TABLE {name} ({columns}){options}{self.placed()}"

    def placed(self) -> str:
        return "" if self.tablespace is None else f" TABLESPACE {self.tablespace}"

    def measured(self, name: str) -> list[str]:
        return [f"ALTER TABLE {name} {', '.join(self.columns)}"] if self.columns else []

    def identified(self, name: str) -> list[str]:
        return [] if self.identity == "DEFAULT" else [f"ALTER TABLE {name} REPLICA IDENTITY {self.identity}"]

    def owned(self, name: str) -> list[str]:
        return [] if self.owner is None else [f"ALTER TABLE {name} OWNER TO {self.owner}"]


TEMPLATE = f"""
SELECT coalesce(part.reloptions, '{{}}') || ARRAY(SELECT 'toast.' || unnest(toast.reloptions)),
    CASE part.relreplident WHEN 'f' THEN 'FULL' WHEN 'n' THEN 'NOTHING' ELSE 'DEFAULT' END,
    CASE WHEN parent.relowner <> current_user::regrole THEN parent.relowner::regrole::text END,
    (SELECT quote_ident(spcname) FROM pg_tablespace WHERE oid = part.reltablespace),
    ARRAY(
        SELECT format('ALTER COLUMN %%I SET STATISTICS %%s', attname, attstattarget) FROM pg_attribute
        WHERE attrelid = part.oid AND attnum > 0 AND NOT attisdropped AND attstattarget >= 0
        UNION ALL
        SELECT format('ALTER COLUMN %%I SET (%%s = %%s)', attname, option_name, option_value)
        FROM pg_attribute, pg_options_to_table(attoptions)
        WHERE attrelid = part.oid AND attnum > 0 AND NOT attisdropped AND option_name LIKE 'n_distinct%%'
    )
FROM pg_class AS part LEFT JOIN pg_class AS toast ON toast.oid = part.reltoastrelid
    JOIN pg_class AS parent ON parent.oid = '{TABLE}'::regclass
WHERE part.oid = ANY (%(oids)s::oid[]) OR part.oid = parent.oid
ORDER BY part.oid = parent.oid, part.reloptions IS NULL, array_position(%(oids)s::oid[], part.oid) DESC
LIMIT 1
"""


def template(cursor: Any, partitions: Sequence[Partition]) -> Template:
    """Return the template of the latest partition with storage parameters, or of the table itself while it is plain."""
    cursor.execute(TEMPLATE, {"oids": [partition.oid for partition in partitions]})
    options, identity, owner, tablespace, columns = cursor.fetchone()
    return Template(
        options=tuple(options), tablespace=tablespace, columns=tuple(columns), identity=identity, owner=owner
    )


def creation(schema: str, name: str, bounds: Bounds, like: Template) -> list[str]:
    """Return the statements that make a partition. Their lock on the table conflicts with none of a claim's."""
    table = f"{schema}.{TABLE}"
    return [
        like.created(name, f"LIKE {table} INCLUDING ALL"),
        f"ALTER TABLE {name} ADD PRIMARY KEY (id)",
        *like.measured(name),
        *like.identified(name),
        *like.owned(name),
        f"ALTER TABLE {table} ATTACH PARTITION {name} FOR VALUES {_range(bounds)}",
    ]


def _range(bounds: Bounds) -> str:
    lower, upper = (end and f"'{stamp(end)}'" for end in (bounds.lower, bounds.upper))
    return f"FROM ({lower or 'MINVALUE'}) TO ({upper or 'MAXVALUE'})"


def name_of(schema: str, bounds: Bounds) -> str:
    """Return the name of a partition: by its lower bound, as pg_partman does, which reads times from names."""
    assert bounds.lower is not None
    assert bounds.width is not None
    precision = "%Y_%m_%d" if bounds.width % DAY == timedelta() else "%Y_%m_%d_%H%M"
    return f"{schema}.{TABLE}_p{bounds.lower.astimezone(UTC):{precision}}"
