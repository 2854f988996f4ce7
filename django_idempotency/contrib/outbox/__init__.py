"""The transactional outbox: events are written with the effects that they
describe, and published after the commit.
"""

from __future__ import annotations
