"""Programs that tests start."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def program_beside_python(name: str) -> str | None:
    """The path of a program that is installed in this environment, or else in the system."""
    return shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
