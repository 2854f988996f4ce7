"""What a release says of itself is the same everywhere, and its migrations block no
claims.
"""

from __future__ import annotations

import re
import tomllib
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest
from django.db import migrations, models

import django_idempotency

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "django_idempotency"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README, INSTALL = (
    (ROOT / "README.md").read_text(),
    (ROOT / "docs" / "install.md").read_text(),
)
CHANGELOG, SECURITY = (
    (ROOT / "CHANGELOG.md").read_text(),
    (ROOT / "SECURITY.md").read_text(),
)
# of Keep a Changelog
CATEGORIES = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def supported(what):
    """The versions of Python or of Django in the classifiers, oldest first."""
    found = re.compile(rf"{what} :: (\d+\.\d+)").fullmatch
    return [
        match[1]
        for classifier in PROJECT["project"]["classifiers"]
        if (match := found(classifier))
    ]


@pytest.mark.parametrize(
    ("what", "classifier"),
    [("Python", "Programming Language :: Python"), ("Django", "Framework :: Django")],
)
def test_the_supported_versions_are_the_same_everywhere(what, classifier):
    versions = supported(classifier)
    (row,) = re.findall(rf"^\| {what} \| (.*) \|$", INSTALL, re.MULTILINE)
    assert re.findall(r"\d+\.\d+", row) == versions
    assert f"{what} ≥ {versions[0]}" in README


def test_the_versions_that_ci_runs_are_supported_and_the_others_are_named():
    part = (
        (ROOT / "docs" / "evidence" / "compatibility.md")
        .read_text()
        .partition("## Versions")[2]
        .partition("\n## ")[0]
    )
    run = re.findall(r"^\| (\d+\.\d+) \| (\d+\.\d+)", part, re.MULTILINE)
    for number, classifier in enumerate(
        ["Programming Language :: Python", "Framework :: Django"]
    ):
        versions = {row[number] for row in run}
        assert versions <= set(supported(classifier))
        assert supported(classifier)[0] in versions
        (sentence,) = [line for line in part.splitlines() if "not run in CI" in line]
        assert all(
            version in sentence for version in set(supported(classifier)) - versions
        )


def test_the_forge_tests_every_version_and_only_what_django_supports():
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    rows = re.findall(
        r'- \{ python: "(.*)", django: "(.*)", database: "(.*):(.*)" \}', workflow
    )
    pairs = {(python, django) for python, django, _database, _version in rows}
    too_old = {("3.11", "6.0"), ("3.11", "6.1")}  # Django 6.0 asks for Python 3.12
    assert (
        pairs
        == set(
            product(
                supported("Programming Language :: Python"),
                supported("Framework :: Django"),
            )
        )
        - too_old
    )
    assert {version for *_, database, version in rows if database == "postgres"} == {
        "14",
        "15",
        "16",
        "17",
        "18",
    }
    assert "mariadb" in {database for *_, database, _version in rows}
    # Django 6.1 asks for PostgreSQL 15
    assert not [row for row in rows if row[1:] == ("6.1", "postgres", "14")]


def test_the_address_of_the_repository_is_stated_in_one_place():
    urls = PROJECT["project"]["urls"]
    source = urls["Source"]
    assert urls["Issues"] == f"{source}/issues"
    assert urls["Changelog"] == f"{source}/blob/main/CHANGELOG.md"
    elsewhere = [
        path.relative_to(ROOT).as_posix()
        for path in files()
        if path != ROOT / "pyproject.toml"
        and re.search(r"github\.com/[\w-]+/django-idempotency\b", path.read_text())
    ]
    assert elsewhere == []


def files():
    """What people read and what builds the package; a test may name its own repository
    otherwise.
    """
    yield from (
        path
        for path in ROOT.iterdir()
        if path.suffix in {".md", ".toml", ".yml"} or path.name == "Makefile"
    )
    for folder, pattern in (
        ("docs", "**/*.md"),
        (".github", "**/*.*"),
        ("django_idempotency", "**/*.py"),
    ):
        yield from (ROOT / folder).glob(pattern)


def test_extras_are_for_users_and_groups_for_contributors():
    extras, groups = (
        PROJECT["project"]["optional-dependencies"],
        PROJECT["dependency-groups"],
    )
    assert not extras.keys() & groups.keys()
    # .ci/run installs dev alone
    assert {"serve", "test", "lint", "release", "dev"} <= flattened("dev") | {"dev"}
    used = set(re.findall(r": \.venv/\.(\w+)", (ROOT / "Makefile").read_text()))
    assert used | {"peers"} == groups.keys()  # tests/migrating installs peers by hand


def flattened(group):
    """The groups that ``group`` includes."""
    included = {
        each["include-group"]
        for each in PROJECT["dependency-groups"][group]
        if isinstance(each, dict)
    }
    return included.union(*map(flattened, included))


def test_versions_older_than_the_classifiers_are_not_accepted():
    project = PROJECT["project"]
    assert (
        project["requires-python"]
        == f">={supported('Programming Language :: Python')[0]}"
    )
    assert f"django>={supported('Framework :: Django')[0]}" in project["dependencies"]
    assert PROJECT["tool"]["ruff"]["target-version"] == "py" + project[
        "requires-python"
    ].strip(">=").replace(".", "")


def test_the_changelog_begins_with_this_version():
    releases = re.findall(r"^## \[(.*?)\] - (.*)$", CHANGELOG, re.MULTILINE)
    assert releases[0][0] == django_idempotency.__version__
    assert all(
        re.fullmatch(r"\d{4}-\d{2}-\d{2}", date) for _version, date in releases[1:]
    )
    versions = [tuple(map(int, version.split("."))) for version, _date in releases]
    assert versions == sorted(versions, reverse=True)
    assert set(re.findall(r"^### (.*)$", CHANGELOG, re.MULTILINE)) <= CATEGORIES
    assert (releases[0][1] == "Unreleased") == (
        f"{releases[0][0]} is not released yet" in SECURITY
    )


def test_the_map_of_the_house_names_every_room():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    named = set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\| .* \|$", page, re.MULTILINE)))
    ) - {"django_idempotency"}
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {
        "migrations",
        "templatetags",
    }
    assert rooms - named == set()
    assert {
        name
        for name in named
        if not (PACKAGE / name).is_dir() and not (PACKAGE / f"{name}.py").is_file()
    } == set()


def test_the_table_of_hard_modules_names_files_that_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text()
    table = page.partition("## Where concurrency is hard")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+(?:/|\.(?:py|sql)))`", table)
    assert len(named) > 30
    for path in named:
        assert (ROOT / path).exists() or (PACKAGE / path).exists(), path


FIRST_RELEASE = {"0001_create_record", "0001_create_counters", "0001_create_outbox"}
# What reads the table, or rewrites it, under a lock that claims wait for.
BLOCKING = (migrations.AddIndex, migrations.AddConstraint, migrations.AlterField)


def modules():
    """Every migration: of the core and of the wings."""
    return {
        path.stem: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in PACKAGE.rglob("migrations/0*.py")
    }


def blocks(migration):
    """Subclasses, such as ``AddIndexConcurrently`` and ``AddConstraintNotValid``, are
    made not to.
    """
    return any(type(operation) in BLOCKING for operation in migration.operations)


def test_every_migration_is_on_the_page():
    page = (ROOT / "docs" / "upgrading.md").read_text()
    listed = set(re.findall(r"^\| `(\d{4}_\w+)`", page, re.MULTILINE))
    assert listed == set(modules())


def test_a_plain_index_counts_as_blocking():
    class Migration:
        operations = (
            migrations.AddIndex("record", models.Index(fields=["key"], name="of_keys")),
        )

    assert blocks(Migration)


def test_migrations_after_the_first_release_do_not_block_claims():
    later = {
        name: path for name, path in modules().items() if name not in FIRST_RELEASE
    }
    blocking = [
        name for name, path in later.items() if blocks(import_module(path).Migration)
    ]
    assert not blocking, "build indexes concurrently, and add constraints as NOT VALID"
