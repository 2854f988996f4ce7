"""Other versions of the package, each unpacked into a directory of its own: a commit, a tag or a wheel."""

from __future__ import annotations

import re
import shutil
import subprocess
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, PROJECT = "django_idempotency", "testproject"


class NoSuchVersion(Exception):
    """Its message is git's, or names the file."""


def unpack(version: str, directory: Path, *parts: str) -> None:
    """Unpack ``parts`` of a commit or a tag, or all of a wheel. Raise ``NoSuchVersion`` if there is none."""
    if version.endswith(".whl"):
        if not Path(version).is_file():
            raise NoSuchVersion(f"There is no {version}.")
        with zipfile.ZipFile(version) as wheel:
            wheel.extractall(directory)
        return
    with tarfile.open(fileobj=BytesIO(_git("archive", version, *parts))) as files:
        files.extractall(directory, filter="data")


def unpack_beside_project(version: str, directory: Path) -> str:
    """Unpack the package at ``version`` beside a copy of this test project; return its name, for ``home()``."""
    name = name_of(version)
    place = home(name, directory)
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    unpack(version, place, PACKAGE)
    shutil.copytree(ROOT / PROJECT, place / PROJECT, ignore=shutil.ignore_patterns("__pycache__"))
    return name


def home(name: str, directory: Path) -> Path:
    return directory / re.sub(r"\W", "_", name)


def name_of(version: str) -> str:
    """Return what a version is called in reports: a wheel by its file, anything else by its commit.

    Raise ``NoSuchVersion`` if there is no such commit.
    """
    if version.endswith(".whl"):
        return Path(version).stem
    return _git("rev-parse", "--short", "--verify", f"{version}^{{commit}}").decode().strip()


def _git(*command: str) -> bytes:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, check=False)
    if done.returncode:
        raise NoSuchVersion(done.stderr.decode().strip())
    return done.stdout
