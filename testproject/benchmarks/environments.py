"""A virtual environment for each published package, because their requirements need not
agree.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

from testproject.benchmarks.contenders import Contender

# The same versions in each environment, so that the packages differ in nothing else.
SHARED = ("django", "djangorestframework", "gunicorn", "psycopg", "psycopg-binary")


class CannotInstall(Exception):
    """Its message is pip's."""


def python(contender: Contender, directory: Path) -> str:
    """Return the interpreter that ``contender`` runs on."""
    if not contender.requirements:
        return sys.executable
    home = directory / "-".join(contender.requirements).translate(
        str.maketrans("[]=", "---")
    )
    interpreter = home / "bin" / "python"
    wanted = [*(f"{name}=={version(name)}" for name in SHARED), *contender.requirements]
    ready = home / "requirements.txt"
    if not ready.exists() or ready.read_text() != "\n".join(wanted):
        venv.create(home, clear=True, with_pip=True)
        _install(interpreter, wanted)
        ready.write_text("\n".join(wanted))
    return str(interpreter)


def _install(interpreter: Path, wanted: list[str]) -> None:
    command = [
        str(interpreter),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *wanted,
    ]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        errors = [
            line for line in result.stderr.splitlines() if line.startswith("ERROR")
        ]
        raise CannotInstall(" ".join(errors) or result.stderr.strip())
