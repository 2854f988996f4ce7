"""The package builds, holds what it should, and works in an empty project."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.build


def run(*arguments: object, cwd: Path, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, env=inherited | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The directory with the source distribution and the wheel made from it."""
    directory = tmp_path_factory.mktemp("dist")
    run("-m", "build", "--outdir", directory, ROOT, cwd=directory)
    return directory


@pytest.fixture(scope="module")
def wheel(built):
    (wheel,) = built.glob("django_idempotency-*.whl")
    return wheel


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    package = {f"django_idempotency/{path.relative_to(ROOT / 'django_idempotency')}" for path in sources()}
    assert package <= set(names)
    assert {"django_idempotency/py.typed", "django_idempotency/migrations/__init__.py"} <= set(names)
    others = {name.partition("/")[0] for name in names if not name.startswith("django_idempotency/")}
    assert all(other.endswith(".dist-info") for other in others)


def sources():
    kinds = {".py", ".html", ".css", ".js"}
    return (path for path in (ROOT / "django_idempotency").rglob("*.*") if path.suffix in kinds)


def test_the_source_distribution_builds_and_holds_the_licence(built):
    (archive,) = built.glob("django_idempotency-*.tar.gz")
    with tarfile.open(archive) as contents:
        names = {name.partition("/")[2] for name in contents.getnames()}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "django_idempotency/models.py"} <= names
    assert not [name for name in names if name.startswith(("tests/", ".venv", ".git/"))]


def test_extras_are_extras(wheel):
    (metadata,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".dist-info/METADATA"))
    lines = zipfile.ZipFile(wheel).read(metadata).decode().splitlines()
    needed = {line.partition(": ")[2].lower() for line in lines if line.startswith("Requires-Dist") and ";" not in line}
    assert not [name for name in needed if name.startswith(("djangorestframework", "celery", "pytest", "redis"))]
    assert any(name.startswith("django>=") for name in needed)


def test_it_works_in_an_empty_project(wheel, tmp_path):
    site = tmp_path / "site"
    run("-m", "pip", "install", "--quiet", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    run("-m", "django", "startproject", "shop", cwd=tmp_path)
    project = tmp_path / "shop"
    settings = project / "shop" / "settings.py"
    settings.write_text(settings.read_text() + 'INSTALLED_APPS += ["django_idempotency"]\n')

    def manage(*arguments: str) -> str:
        return run("-W", "error", "manage.py", *arguments, cwd=project, PYTHONPATH=str(site))

    assert str(site) in manage("shell", "-c", "import django_idempotency; print(django_idempotency.__file__)")
    assert "Applying django_idempotency." in manage("migrate")
    assert "no issues" in manage("check")
    assert "No changes detected" in manage("makemigrations", "--check", "--dry-run")
    assert "0" in manage(
        "shell", "-c", "from django_idempotency.models import IdempotencyRecord as R; print(R.objects.count())"
    )
