"""https://pypi.org/project/drf-idempotencykey/, "Quick start"."""

from __future__ import annotations

from typing import Any

from testproject.benchmarks.contenders import Contender, behind


def protect(view: Any) -> Any:
    from drf_idempotencykey.mixins import DrfIdempotencyKeyMixin

    return behind(DrfIdempotencyKeyMixin, view)


CONTENDER = Contender(
    title="drf-idempotencykey",
    requirements=["drf-idempotencykey==0.2.0"],
    apps=["drf_idempotencykey"],
    protect=protect,
)
