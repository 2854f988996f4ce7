"""A small payments service: what the demo, the tests, the benches and outside clients drive."""

from __future__ import annotations
