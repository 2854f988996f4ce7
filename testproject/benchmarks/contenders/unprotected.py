from __future__ import annotations

from testproject.benchmarks.contenders import Contender

CONTENDER = Contender(title="unprotected")
