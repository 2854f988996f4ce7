"""The package builds, holds what it should, and works in an empty project."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.reader import follow_the_quickstart, reader

ROOT = Path(__file__).parents[2]
PACKAGE = "django_idempotency"

NEW_YEAR = "1767225600"  # of 2026, in seconds since 1970

pytestmark = [pytest.mark.build, pytest.mark.slow]


def run(*arguments: object, cwd: Path, **environment: str) -> str:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name != "DJANGO_SETTINGS_MODULE"
    }
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=inherited | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The directory with the source distribution and the wheel made from it."""
    return build(ROOT, tmp_path_factory.mktemp("dist"))


def build(source, directory):
    run(
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        directory,
        source,
        cwd=directory,
        SOURCE_DATE_EPOCH=NEW_YEAR,
    )
    return directory


@pytest.fixture(scope="module")
def wheel(built):
    (wheel,) = built.glob("django_idempotency-*.whl")
    return wheel


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    package = {
        f"django_idempotency/{path.relative_to(ROOT / 'django_idempotency')}"
        for path in sources()
    }
    assert package <= set(names)
    assert {
        "django_idempotency/py.typed",
        "django_idempotency/migrations/__init__.py",
    } <= set(names)
    others = {
        name.partition("/")[0]
        for name in names
        if not name.startswith("django_idempotency/")
    }
    assert all(other.endswith(".dist-info") for other in others)


def sources():
    kinds = {".py", ".html", ".css", ".js", ".po", ".mo"}
    return (
        path
        for path in (ROOT / "django_idempotency").rglob("*.*")
        if path.suffix in kinds
    )


def test_the_source_distribution_builds_and_holds_the_licence(built):
    (archive,) = built.glob("django_idempotency-*.tar.gz")
    with tarfile.open(archive) as contents:
        names = {name.partition("/")[2] for name in contents.getnames()}
    assert {
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "SECURITY.md",
        "pyproject.toml",
    } <= names
    assert {
        "django_idempotency/models.py",
        "Makefile",
        "docs/index.md",
        "properdocs.yml",
    } <= names
    tests = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")
    }
    assert tests | {"testproject/settings.py"} <= names
    assert not [
        name
        for name in names
        if name.startswith((".venv", ".git/", "site/")) or "__pycache__" in name
    ]


def test_a_second_build_of_the_same_sources_is_the_same_to_the_byte(built, tmp_path):
    """From another directory, in which the files are newer and have other
    permissions.
    """
    copy, again = tmp_path / "copy", tmp_path / "dist"
    for directory in (copy, again):
        directory.mkdir()
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copyfile(path, copy / path.name)
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (PACKAGE, "testproject", "tests", "docs"):
        shutil.copytree(
            ROOT / name, copy / name, ignore=ignored, copy_function=shutil.copyfile
        )
    for path in copy.rglob("*.py"):
        path.chmod(0o600)
    assert digests(build(copy, again)) == digests(built)


def digests(directory):
    """Of the archives in ``directory``, by their names."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.iterdir()
    }


def test_pytest_finds_the_plugin_without_being_needed(wheel):
    (entry_points,) = (
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if name.endswith("entry_points.txt")
    )
    lines = zipfile.ZipFile(wheel).read(entry_points).decode().splitlines()
    assert lines == [
        "[pytest11]",
        "django_idempotency = django_idempotency.contrib.testing.plugin",
    ]


def metadata(wheel):
    (name,) = (
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if name.endswith(".dist-info/METADATA")
    )
    return zipfile.ZipFile(wheel).read(name).decode()


@pytest.mark.twine
def test_the_distributions_pass_twines_check(built):
    run("-m", "twine", "check", "--strict", *built.iterdir(), cwd=built)


def test_the_metadata_has_nothing_for_contributors(wheel):
    lines = metadata(wheel).partition("\n\n")[0].splitlines()
    requirements = [
        Requirement(line.partition(": ")[2])
        for line in lines
        if line.startswith("Requires-Dist")
    ]
    assert {each.name for each in requirements if each.marker is None} == {
        "django",
        "http-sf",
    }
    assert len(requirements) <= 25
    extras = {
        line.partition(": ")[2] for line in lines if line.startswith("Provides-Extra")
    }
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert {
        extra
        for extra in extras
        if not re.search(rf"django-idempotency\[{extra}\]|`{extra}`", pages)
    } == set()


def test_links_in_the_description_on_pypi_lead_somewhere(wheel):
    head, _blank, description = metadata(wheel).partition("\n\n")
    for label in ("Documentation", "Source", "Issues", "Changelog"):
        assert f"Project-URL: {label}, https://" in head
    links = re.findall(r"\]\(([^)]*)\)", description)
    assert links
    assert [link for link in links if not link.startswith("https://")] == []
    site = "https://django-idempotency.readthedocs.io/en/stable/"
    pages = {
        link.removeprefix(site).partition("#")[0].rstrip("/")
        for link in links
        if link.startswith(site)
    }
    docs = ROOT / "docs"
    assert [
        page
        for page in pages
        if not (docs / f"{page or 'index'}.md").is_file()
        and not (docs / page).is_file()  # a picture
    ] == []


@pytest.fixture
def bare_python(wheel, tmp_path):
    """A Python that has the wheel, what it declares to need, and nothing else."""
    run("-m", "venv", "--without-pip", tmp_path / "bare", cwd=tmp_path)
    (site,) = (tmp_path / "bare").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    stated = [
        line.partition(": ")[2]
        for line in metadata(wheel).splitlines()
        if line.startswith("Requires-Dist")
    ]
    for name in needed(stated, set()):
        files = {file.parts[0] for file in distribution(name).files or ()} - {
            "..",
            "__pycache__",
        }
        for file in files:
            (site / file).symlink_to(distribution(name).locate_file(file))
    return tmp_path / "bare" / "bin" / "python"


def needed(requirements, found):
    """The distributions that ``requirements`` without extras need, and theirs."""
    for stated in map(Requirement, requirements):
        if stated.name not in found and (
            stated.marker is None or stated.marker.evaluate({"extra": ""})
        ):
            found.add(stated.name)
            needed(distribution(stated.name).requires or (), found)
    return found


@pytest.mark.curl
def test_the_quickstart_works_with_the_wheel_and_what_it_needs(bare_python, tmp_path):
    (tmp_path / "shop").mkdir()
    with reader(tmp_path / "shop", python=bare_python, path="") as someone:
        someone.run(
            "-c",
            "import django_idempotency as us; assert"
            f" us.__file__.startswith({str(tmp_path)!r})",
        )
        absent = (
            "from importlib.util import find_spec; assert not any(map(find_spec,"
            " ('rest_framework', 'psycopg')))"
        )
        someone.run("-c", absent)
        follow_the_quickstart(someone)
