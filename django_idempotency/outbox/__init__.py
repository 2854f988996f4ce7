"""The transactional outbox: events written with the effects they tell of, and published once those have committed."""

from __future__ import annotations
