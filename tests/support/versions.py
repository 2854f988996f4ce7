"""Several versions of the package side by side, each with its own test project in a
directory of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

from tests.support.servers import ROOT, Server, running_server

SERVICE = ROOT / "tests" / "deployment" / "versions"
PARTS = ("django_idempotency", "testproject")
MIGRATION = """
from django.db import migrations, models

class Migration(migrations.Migration):
    dependencies = [("django_idempotency", "{last}")]
    operations = [{operation}]
"""


def this_version(directory: Path) -> Path:
    """A copy of this checkout's package and test project."""
    for part in PARTS:
        shutil.copytree(
            ROOT / part, directory / part, ignore=shutil.ignore_patterns("__pycache__")
        )
    return _with_service(directory)


def unpacked(name: str, directory: Path) -> Path:
    """The package and the test project of a commit or tag; of a wheel, the package with
    this test project.
    """
    if name.endswith(".whl"):
        shutil.copytree(ROOT / "testproject", directory / "testproject")
        with zipfile.ZipFile(name) as wheel:
            wheel.extractall(directory)
    else:
        archive = subprocess.run(
            ["git", "archive", name, *PARTS],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            check=True,
        )
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
            files.extractall(directory, filter="data")
    return _with_service(directory)


def next_version(
    directory: Path, operation: str, model: tuple[str, str] | None = None
) -> Path:
    """This version with one more migration, and with one text replaced in its
    models.
    """
    this_version(directory)
    package = directory / "django_idempotency"
    last = max(path.stem for path in (package / "migrations").glob("0*.py"))
    text = MIGRATION.format(last=last, operation=operation)
    (package / "migrations" / f"{int(last[:4]) + 1:04}_next.py").write_text(text)
    if model:
        models = (package / "models.py").read_text()
        assert model[0] in models
        (package / "models.py").write_text(models.replace(*model))
    return directory


def _with_service(directory: Path) -> Path:
    shutil.copytree(
        SERVICE, directory / SERVICE.name, ignore=shutil.ignore_patterns("__pycache__")
    )
    return directory


def environment(version: Path) -> dict[str, str]:
    return {
        "PYTHONPATH": str(version),
        "DJANGO_SETTINGS_MODULE": f"{SERVICE.name}.settings",
    }


def run(version: Path, database_url: str, code: str) -> str:
    """What ``code`` prints in a process with this version, where ``manage`` runs a
    command.
    """
    begin = (
        "import django; django.setup(); from django.core.management import call_command"
        " as manage; "
    )
    done = subprocess.run(
        [sys.executable, "-c", begin + code],
        **{"cwd": version, "capture_output": True, "text": True},
        env=os.environ | environment(version) | {"DATABASE_URL": database_url},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def serving(version: Path, database_url: str, directory: Path) -> Iterator[Server]:
    """A server of this version whose connections outlive requests, as they do in
    production.
    """
    options = environment(version) | {"CONN_MAX_AGE": "600"}
    with running_server(
        database_url, directory, workers=1, code=version, **options
    ) as server:
        assert server.request("GET", "/code/").text.startswith(str(version))
        yield server
