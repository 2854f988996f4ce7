from __future__ import annotations

from testproject.benchmarks.contenders.statements import alone

CONTENDER = alone("lock")
