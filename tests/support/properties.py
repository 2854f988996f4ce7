"""``given`` of Hypothesis, on machines that may be busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis


def given(
    *strategies: Any, examples: int = 60
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with so many examples, however long each takes."""
    limits = hypothesis.settings(deadline=None, max_examples=examples)
    return lambda test: limits(hypothesis.given(*strategies)(test))
