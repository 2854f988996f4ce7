"""Partitions of the record table, on PostgreSQL: retention by DROP instead of
DELETE.
"""

from __future__ import annotations
