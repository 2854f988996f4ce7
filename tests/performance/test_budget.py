"""The budget of a request: what can be counted does not wobble, so nothing may creep
back.

Counted by the benchmark's own program, on a server and a PostgreSQL of their own.
``docs/evidence/performance.md`` tells what each figure is made of.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest

pytestmark = [pytest.mark.postgresql, pytest.mark.server, pytest.mark.slow]

# WAL with an answer of 200 bytes and 100 bytes of headers. Counters, counts of replays
# and autovacuum are not of any one request: their WAL and buffers are what the
# fractions allow for; their statements are not counted. Several statements may share a
# round trip: those are counted in test_statements.py. They only add to what a request
# spends, above all when they open a connection, so the least of some counts is its
# own.
BUDGETS = {
    "atomic": {
        "statements": 6.1,
        "synchronous_commits": 1.1,
        "wal_bytes": 1400,
        "buffers": 26,
    },
    "lock": {
        "statements": 6.1,
        "synchronous_commits": 1.1,
        "wal_bytes": 1000,
        "buffers": 16,
    },
    "lease": {
        "statements": 5.1,
        "synchronous_commits": 3.1,
        "wal_bytes": 1400,
        "buffers": 24,
    },
}
REPLAY = {"statements": 1.1, "synchronous_commits": 0.1, "wal_bytes": 40, "buffers": 8}
REPLAYS = {"lock": REPLAY | {"statements": 4.1}}
COUNTED_AT_MOST = 8
# Calls of Python functions, compared with the same request unprotected: its handler
# does about 310, which a replay spares. A replay by lock begins and ends a transaction
# of Django's, for about 80. The slack is for other versions of Python and Django.
CALLS = {
    "atomic": {"a first request": 275, "a replay": -175},
    "lock": {"a first request": 245, "a replay": -80},
}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """A busy machine takes long to start a server."""
    monkeypatch.setattr("testproject.benchmarks.servers.PATIENCE", 120)


@pytest.mark.parametrize("mode", BUDGETS)
def test_a_request_keeps_to_its_budget(cluster, mode, tmp_path):
    from testproject.benchmarks import counting, servers

    servers.prepare(mode, cluster, None, tmp_path)
    over = _budgets(mode)
    for _ in range(COUNTED_AT_MOST):
        counts = counting.count(mode, cluster, None, tmp_path)
        assert counts["a first request"].statements > 3
        over = {
            each: most
            for each, most in over.items()
            if getattr(counts[each[0]], each[1]) > most
        }
        if not over:
            break
    assert not over, counts


@pytest.mark.drf
@pytest.mark.parametrize("mode", CALLS)
def test_a_request_calls_few_functions(cluster, mode, tmp_path):
    from testproject.benchmarks import servers

    def calls(name):
        servers.prepare(name, cluster, None, tmp_path)
        return servers.figures(
            "testproject.benchmarks.calls",
            *(30, cluster, servers.database(name), name),
        )

    plain = calls("unprotected")["a first request"]["total"]
    for request, counted in calls(mode).items():
        assert counted["total"] - plain <= CALLS[mode][request], counted["most"]


def _budgets(mode):
    budgets = {"a first request": BUDGETS[mode], "a replay": REPLAYS.get(mode, REPLAY)}
    return {
        (request, figure): most
        for request, budget in budgets.items()
        for figure, most in budget.items()
    }


@pytest.fixture(scope="session")
def cluster():
    """A private one, which ends with this process; its directory goes after it."""
    from testproject.benchmarks.cluster import Cluster

    directory = Path(tempfile.mkdtemp(prefix="budget-"))
    directory.chmod(0o755)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.delenv("DATABASE_URL", raising=False)
        return Cluster(directory / "postgresql")
