"""A history of operators' decisions that outlives the accounts of operators, and that
only an erasure changes.
"""

from __future__ import annotations
