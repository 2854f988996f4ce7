"""What goes wrong in published packages of this kind, entry by entry: that it does not
go wrong here.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from django.http import HttpResponse

import django_idempotency
from django_idempotency import conf
from django_idempotency.models import IdempotencyRecord, Status
from django_idempotency.values.policy import Policy
from django_idempotency.values.rules import rules
from tests.support.callers import effects, entry_point, is_replay, pay, paying, record
from tests.support.sql import value_of
from tests.support.views_of_laws import in_both_modes

pytestmark = pytest.mark.usefixtures("payer")

PACKAGE = Path(django_idempotency.__file__).parent


@in_both_modes
@pytest.mark.parametrize("status", [400, 401, 403, 404, 405, 406, 415, 422, 429])
def test_3_a_refusal_is_not_kept(mode, status):
    refused = entry_point(lambda request: HttpResponse(status=status), mode=mode)()
    assert refused.status_code == status
    assert record() is None
    assert entry_point(paying, mode=mode)().status_code == 201


@in_both_modes
@pytest.mark.parametrize("error", [ArithmeticError, KeyboardInterrupt, SystemExit])
def test_8_after_an_exception_a_retry_runs_at_once(mode, error):
    def view(request):
        raise error

    with pytest.raises(error):
        entry_point(view, mode=mode)()
    assert record().status == Status.FAILED
    assert entry_point(paying, mode=mode)().status_code == 201
    assert effects() == 1


@in_both_modes
def test_10_a_header_that_can_not_be_stored_does_not_make_a_retry_run_again(mode):
    def view(request):
        return HttpResponse(pay().id.hex, headers={"X-Note": "a\0b"}, status=201)

    send = entry_point(view, mode=mode)
    assert (send().status_code, is_replay(send()), effects()) == (201, True, 1)


def test_11_nothing_is_pickled():
    imported = {name for path in PACKAGE.rglob("*.py") for name in imports(path)}
    assert "json" in imported
    assert not imported & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


@pytest.mark.postgresql
def test_11_the_table_is_logged():
    table = [IdempotencyRecord._meta.db_table]
    kind = "SELECT relpersistence FROM pg_class WHERE oid = %s::regclass"
    assert value_of(kind, table) == "p"


READ_BY_WINGS = (
    set() if (PACKAGE / "contrib").is_dir() else {"outbox", "stats_retention"}
)


@pytest.mark.parametrize(
    "name", sorted((rules(Policy).keys() | conf.GLOBAL_NAMES) - READ_BY_WINGS)
)
def test_14_every_setting_is_read(name):
    policies = PACKAGE / "values" / "policy.py"
    readers = [
        path
        for path in PACKAGE.rglob("*.py")
        if path != policies and name in reads(path)
    ]
    assert readers or (name in {"audit_retention"} and name in reads(policies))


@cache
def reads(path):
    """The names of the attributes that the module reads."""
    return {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
