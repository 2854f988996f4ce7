"""https://pypi.org/project/idemkit/: its mixin for Django REST Framework, on
PostgreSQL.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

from testproject.benchmarks.contenders import Contender, behind


def protect(view: Any) -> Any:
    from idemkit import HttpConfig
    from idemkit.backends import PostgresBackend
    from idemkit.contrib.drf import idempotent_view

    backend = PostgresBackend.from_url(os.environ["DATABASE_URL"])
    mixin = idempotent_view(
        backend=backend, config=HttpConfig(scope=lambda request: str(request.user.pk))
    )
    return behind(mixin, view)


def prepare() -> None:
    subprocess.run(
        [sys.executable, "-m", "idemkit.cli", "init-pg", os.environ["DATABASE_URL"]],
        check=True,
    )


CONTENDER = Contender(
    title="idemkit (PostgreSQL)",
    requirements=["idemkit[postgres]==1.0.2"],
    protect=protect,
    prepare=prepare,
)
