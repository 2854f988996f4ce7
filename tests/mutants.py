"""Mutation testing of the deciding code: ``python -m tests.mutants``, or ``make mutants``.

mutmut makes the mutants and tries them in forks, after everything is imported. What it finds to survive is tried again
in a process of its own: a mutant of what runs at import, or of a generator, shows only there. Works on a copy.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = (
    "django_idempotency",
    "testproject",
    "tests",
    "docs",
    "pyproject.toml",
    "Makefile",
    "README.md",
    "CHANGELOG.md",
)
# The modules that decide, with the tests that are about them.
PARTS = {
    ("keys.py", "fingerprints.py", "policy.py"): (
        "test_keys.py",
        "test_fingerprints.py",
        "test_policy.py",
        "test_conf.py",
    ),
    ("engine.py", "stores/*.py"): ("test_engine.py", "test_stores.py"),
}
CONFIGURATION = """
[tool.mutmut]
source_paths = ["django_idempotency"]
only_mutate = {modules!r}
also_copy = ["testproject", "docs", "README.md", "Makefile", "CHANGELOG.md"]
pytest_add_cli_args_test_selection = {tests!r}
pytest_add_cli_args = ["-p", "no:cacheprovider"]
"""


def copied(directory: Path) -> None:
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, directory / name)


def mutmut(directory: Path, *arguments: str, quiet: bool = True) -> str:
    command = [sys.executable, "-m", "mutmut", *arguments]
    pipe = subprocess.PIPE if quiet else None
    return subprocess.run(command, cwd=directory, stdout=pipe, text=True).stdout or ""


def survives(directory: Path, mutant: str, tests: list[str]) -> bool:
    """Whether the tests pass with ``mutant`` in the source itself."""
    with tempfile.TemporaryDirectory() as saved:
        shutil.copytree(directory / "django_idempotency", saved, dirs_exist_ok=True)
        mutmut(directory, "apply", mutant)
        tried = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        outcome = subprocess.run(tried, cwd=directory, env=os.environ | {"PYTHONPATH": "."}, capture_output=True)
        shutil.copytree(saved, directory / "django_idempotency", dirs_exist_ok=True)
    return outcome.returncode == 0


def survivors(directory: Path, modules: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
    tests = [f"tests/{name}" for name in names]
    given = CONFIGURATION.format(modules=[f"django_idempotency/{module}" for module in modules], tests=tests)
    with (directory / "pyproject.toml").open("a") as configuration:
        configuration.write(given)
    mutmut(directory, "run", "--max-children", "1", quiet=False)  # they share one test database
    found = re.findall(r"(\S+): survived", mutmut(directory, "results"))
    return [mutant for mutant in found if survives(directory, mutant, tests)]


def main() -> None:
    for modules, names in PARTS.items():
        with tempfile.TemporaryDirectory() as made:
            copied(Path(made))
            for mutant in survivors(Path(made), modules, names):
                print(mutant, *re.findall(r"^[-+] .*", mutmut(Path(made), "show", mutant), re.MULTILINE), sep="\n")


if __name__ == "__main__":
    main()
