"""A pooler in statement mode refuses transactions: a check says so, and a request's 503
has its cause in the log.
"""

from __future__ import annotations

import pytest
from django.core.management import call_command
from django.core.management.base import SystemCheckError
from django.db import connection

from tests.support.aliases import another_alias
from tests.support.callers import effects, entry_point, paying
from tests.support.checks import ids_found
from tests.support.pgbouncer import running_pgbouncer

pytestmark = [pytest.mark.postgresql, pytest.mark.pgbouncer]


@pytest.fixture
def pooled(payer, tmp_path, settings):
    """The alias of the database behind PgBouncer in statement mode, with the records in
    it.
    """
    tmp_path.chmod(0o755)
    with (
        running_pgbouncer(
            connection.settings_dict, tmp_path, pool_mode="statement"
        ) as port,
        another_alias("pooled", HOST="127.0.0.1", PORT=str(port)) as alias,
    ):
        settings.IDEMPOTENCY = {"USING": alias}
        yield alias


def test_e028_alone_blames_the_pooler_and_quotes_it(
    pooled,
):
    with pytest.raises(
        SystemCheckError,
        match=r"E028\) The application can't SELECT, .*'pooled': .*statement pool",
    ):
        call_command("check", databases=[pooled])
    assert ids_found("E028", "E031", databases=[pooled]) == ["E028"]


def test_a_request_is_refused_and_the_log_has_the_cause(pooled, caplog):
    refused = entry_point(paying, using=pooled)("k")
    assert (refused.status_code, effects()) == (503, 0)
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if record.name == "django_idempotency"
    ]
    assert line.endswith("(OperationalError 08P01) [tests.support.callers.paying]")
