from __future__ import annotations

import atexit
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cluster():
    """A private one, which ends with this process; its directory goes after it."""
    from testproject.benchmarks.cluster import Cluster

    directory = Path(tempfile.mkdtemp(prefix="budget-"))
    directory.chmod(0o755)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.delenv("DATABASE_URL", raising=False)
        return Cluster(directory / "postgresql")
