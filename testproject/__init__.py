"""A small payments service, which the demo, the tests, the benchmarks and outside
clients drive.
"""

from __future__ import annotations
