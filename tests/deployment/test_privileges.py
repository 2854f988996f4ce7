"""A role that lacks a privilege on the records is told of it by a check, not by a request."""

from __future__ import annotations

import pytest
from django.db import connection, transaction

from django_idempotency.checks.databases import check_privileges

NEEDED = ["SELECT", "INSERT", "UPDATE", "DELETE"]


@pytest.mark.postgresql
@pytest.mark.parametrize("lacking", [None, "INSERT", "UPDATE", "DELETE"])
def test_a_privilege_that_the_role_lacks_is_an_error(transactional_db, lacking):
    granted = ", ".join(privilege for privilege in NEEDED if privilege != lacking)
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            "CREATE ROLE idempotency_clerk; GRANT USAGE ON SCHEMA public TO idempotency_clerk;"
            f"GRANT {granted} ON django_idempotency_record TO idempotency_clerk; SET LOCAL ROLE idempotency_clerk"
        )
        found = check_privileges(None, databases=["default"])
        cursor.execute("RESET ROLE")
        transaction.set_rollback(True)
    assert [message.id for message in found] == (["django_idempotency.E040"] if lacking else [])
    assert all(f"may not {lacking} the" in message.msg for message in found)


def test_the_role_of_these_tests_lacks_nothing(transactional_db):
    assert check_privileges(None, databases=["default"]) == []
