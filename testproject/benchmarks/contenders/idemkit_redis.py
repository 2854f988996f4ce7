"""https://pypi.org/project/idemkit/: its mixin for Django REST Framework, on Redis."""

from __future__ import annotations

import os
from typing import Any

from testproject.benchmarks.contenders import Contender, behind


def protect(view: Any) -> Any:
    from idemkit import HttpConfig
    from idemkit.backends import RedisBackend
    from idemkit.contrib.drf import idempotent_view

    backend = RedisBackend.from_url(os.environ["REDIS_URL"])
    mixin = idempotent_view(
        backend=backend, config=HttpConfig(scope=lambda request: str(request.user.pk))
    )
    return behind(mixin, view)


CONTENDER = Contender(
    title="idemkit (Redis)",
    requirements=["idemkit[redis]==1.0.2"],
    protect=protect,
    redis=True,
)
