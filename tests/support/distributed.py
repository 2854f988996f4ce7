"""A record table that Citus distributes, for a whole run of the tests: ``make
test-citus CITUS_URL=…``.

The URL leads to a database on the coordinator that has the extension and knows the
workers. The tests use databases of their own, and each of them is made on every worker,
too. Without the URL, ``IDEMPOTENCY_DISTRIBUTED=1`` has the tests use Citus's store on a
plain table.
"""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

from django.db import connection
from django.db.backends.base.creation import BaseDatabaseCreation

STORE_WANTED = os.environ.get("IDEMPOTENCY_DISTRIBUTED") == "1"
WANTED = STORE_WANTED and bool(os.environ.get("CITUS_URL"))
EFFECTS = "testproject_ledgerentry"
FUNCTION = """
SELECT format(
    'SELECT create_distributed_function(%L, ''new_id'','
    ' colocate_with := ''django_idempotency_record'')',
    oid::regprocedure
) FROM pg_proc WHERE proname = 'django_idempotency_claim'
"""
# For a transaction that also touches tables which refer to local ones.
ONE_SHARD_AT_A_TIME = "SET LOCAL citus.multi_shard_modify_mode = 'sequential'"
NODES = "SELECT nodename, nodeport FROM pg_dist_node ORDER BY groupid"


def distribute() -> None:
    """Make the default database, which has its tables, one of Citus, as
    ``docs/scaling.md`` says.
    """
    coordinator, *workers = nodes()
    for worker in workers:
        _make_on(worker, connection.settings_dict["NAME"])
    with _known() as servers, connection.cursor() as cursor:
        # each addition of a node alters roles, which all databases share
        servers.execute("SELECT pg_advisory_lock(1)")
        cursor.execute("CREATE EXTENSION citus")
        cursor.execute("SELECT citus_set_coordinator_host(%s, %s)", coordinator)
        for worker in workers:
            cursor.execute("SELECT citus_add_node(%s, %s)", worker)
        cursor.execute(
            "SELECT create_distributed_table('django_idempotency_record', 'id',"
            " colocate_with := 'none')"
        )
        cursor.execute(FUNCTION)
        ((statement,),) = cursor.fetchall()
        cursor.execute(statement)
        for table in ("counter", "observation"):
            cursor.execute(
                "SELECT create_reference_table(%s)", [f"django_idempotency_{table}"]
            )
        for table in ("event", "lane", "relay"):
            cursor.execute(
                "SELECT citus_add_local_table_to_metadata(%s)",
                [f"django_idempotency_outbox_{table}"],
            )
        cursor.execute(
            "SELECT citus_add_local_table_to_metadata(%s, cascade_via_foreign_keys :="
            " true)",
            [EFFECTS],
        )


def use_store() -> None:
    """Use Citus's store wherever a policy names none, in tests that change the
    IDEMPOTENCY setting, too.

    Claims by lock, which the store refuses where it is named, are claims by record
    then.
    """
    from django_idempotency import stores
    from django_idempotency.contrib.citus.store import CitusStore

    stores.PostgreSQLStore = stores.LockClaimStore = CitusStore


def drop_by_force() -> None:
    """Have Django end the sessions of Citus's maintenance daemon when it drops a test
    database, here and on the workers.
    """

    create = BaseDatabaseCreation._create_test_db

    def create_anew(creation: BaseDatabaseCreation, *options: Any) -> str:
        drop(creation._get_test_db_name())
        return create(creation, *options)

    BaseDatabaseCreation._create_test_db = create_anew
    BaseDatabaseCreation._destroy_test_db = lambda _self, name, _verbosity: drop(name)


def drop(name: str) -> None:
    """Drop that database on every node, whoever is connected."""
    for node in nodes():
        with to(node, "postgres") as server:
            server.execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


def nodes() -> list[tuple[str, int]]:
    """The coordinator, and the workers."""
    with _known() as servers:
        return list(servers.execute(NODES).fetchall())


def _known() -> Any:
    """A session with the database that knows the workers."""
    url = urlsplit(os.environ["CITUS_URL"])
    return to((url.hostname or "", url.port or 5432), url.path.lstrip("/"))


def _make_on(worker: tuple[str, int], name: str) -> None:
    with to(worker, "postgres") as server:
        server.execute(f'CREATE DATABASE "{name}"')
    with to(worker, name) as made:
        made.execute("CREATE EXTENSION citus")


def to(node: tuple[str, int], name: str) -> Any:
    """A session with the database ``name`` there."""
    import psycopg

    host, port = node
    user, password = (
        connection.settings_dict[part] or None for part in ("USER", "PASSWORD")
    )
    return psycopg.connect(
        host=host, port=port, dbname=name, user=user, password=password, autocommit=True
    )
