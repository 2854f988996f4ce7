"""Run the scenario with the newest packages: ``python -m tests.compatibility [NAME…]``.

Makes a virtual environment for each name in ``--cache``, installs the newest versions
and this project there, runs the scenario on a PostgreSQL server (``--database``),
prints a table, and with ``--write`` puts its rows into the docs. Healthchecks is an
application: ``HEALTHCHECKS`` names the directory of its source. Needs PyPI and some
minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.compatibility.setups import SETUPS, Setup

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/evidence/compatibility.md"
BEGIN, END = "<!-- python -m tests.compatibility -->\n", "<!-- end -->\n"
COLUMNS = ("replay", "other body", "released", "concurrent", "package")
HEAD = (
    "Setup",
    "Versions",
    "Retry replayed",
    "Other body 422",
    "Bookkeeping kept",
    "Duplicates run once",
    "Unbroken",
)
SAID = {None: "yes", "-": "keeps none"}
ALWAYS = ["psycopg[binary]", "django-environ"]
VERSIONS = """
import json, sys
from importlib.metadata import version
print(json.dumps({name: version(name) for name in sys.argv[1:]}))
"""


def main() -> int:
    given = arguments()
    rows, failed = [], False
    for name in given.names or SETUPS:
        found = run(name, SETUPS[name], given)
        rows += [
            row(title, steps, found["versions"])
            for title, steps in found["projects"].items()
        ]
        failed |= complain(name, found["projects"])
    print(table(rows))
    if given.write and not failed:
        write(rows)
    return int(failed)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.compatibility", description=__doc__
    )
    parser.add_argument(
        "names",
        nargs="*",
        choices=[*SETUPS, []],
        metavar="NAME",
        help=", ".join(SETUPS),
    )
    parser.add_argument(
        "--cache",
        type=Path,
        default=ROOT / ".venv" / "compatibility",
        help="for the environments",
    )
    parser.add_argument(
        "--python", default=sys.executable, help="the Python to make them of"
    )
    parser.add_argument(
        "--database", default="postgres://postgres@127.0.0.1:5432/compatibility"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="put the rows into docs/evidence/compatibility.md",
    )
    return parser.parse_args()


def run(name: str, setup: Setup, given: argparse.Namespace) -> dict[str, Any]:
    if setup.checkout and not os.environ.get(setup.checkout):
        return {
            "versions": {},
            "projects": {f"{name} (not run: {setup.checkout} names no directory)": {}},
        }
    python = environment(name, setup, given)
    output = subprocess.run(
        [python, "-m", "tests.compatibility.scenario", setup.settings],
        cwd=ROOT,
        env=os.environ | {"DATABASE_URL": given.database},
        stdout=subprocess.PIPE,
        check=True,
    ).stdout
    stated = ["django", *setup.requires]
    versions = subprocess.run(
        [python, "-c", VERSIONS, *stated], stdout=subprocess.PIPE, check=True
    ).stdout
    return {
        "versions": json.loads(versions),
        "projects": json.loads(output.splitlines()[-1]),
    }


def environment(name: str, setup: Setup, given: argparse.Namespace) -> Path:
    """The Python of a virtual environment with the newest versions in it."""
    directory = given.cache / name
    python: Path = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([given.python, "-m", "venv", directory], check=True)
    listed = (
        ["-r", f"{os.environ[setup.checkout]}/requirements.txt"]
        if setup.checkout
        else []
    )
    install = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--upgrade",
    ]
    subprocess.run(
        [*install, *setup.requires, *listed, *ALWAYS, "-e", str(ROOT)], check=True
    )
    return python


def row(
    title: str, steps: dict[str, str | None], versions: dict[str, str]
) -> tuple[str, ...]:
    own = [
        f"{name} {number}"
        for name, number in versions.items()
        if name in title and name != "django"
    ]
    stated = ", ".join([*own, f"Django {versions['django']}"]) if versions else ""
    return (
        title,
        stated,
        *(
            SAID.get(steps[column], "**no**") if steps else "not run"
            for column in COLUMNS
        ),
    )


def complain(name: str, projects: dict[str, dict[str, str | None]]) -> bool:
    failures = [
        (title, text)
        for title, steps in projects.items()
        for text in steps.values()
        if text not in SAID
    ]
    for title, text in failures:
        print(f"{name}: {title}\n{text}", file=sys.stderr)
    return bool(failures)


def table(rows: list[tuple[str, ...]]) -> str:
    lines = [HEAD, ("---",) * len(HEAD), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def write(rows: list[tuple[str, ...]]) -> None:
    """Replace the rows that were run, and add new ones; the others stay as they are."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    written, _, after = rest.partition(END)
    by_title = {
        line[0]: line
        for line in (
            tuple(text[2:-2].split(" | ")) for text in written.splitlines()[2:]
        )
    }
    by_title |= {line[0]: line for line in rows if "not run" not in line}
    PAGE.write_text(before + BEGIN + table([*by_title.values()]) + END + after)


if __name__ == "__main__":
    sys.exit(main())
