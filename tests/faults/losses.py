"""What a history may show if a store may lose what it has acknowledged."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tests.faults.trials import Verdict

LOST = "key lost by a failover"


def without_losses(verdict: Verdict, counts: Counter[str]) -> Verdict:
    """Count the keys that ran twice as lost, and judge the others: asynchronous replication may lose a record."""
    lost = {violation.key for violation in verdict.violations if violation.law.startswith("took effect ")}
    counts[LOST] += len(lost)
    return replace(verdict, violations=tuple(one for one in verdict.violations if one.key not in lost))
