"""The transactional outbox: events are written with the effects they tell of, and published after the commit."""

from __future__ import annotations
