"""Clients that openapi-python-client generates."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


@contextmanager
def generated_client(document: dict[str, Any], directory: Path) -> Iterator[ModuleType]:
    """The package that is generated from an OpenAPI document, importable inside the
    block.
    """
    name = f"generated_{uuid.uuid4().hex}"
    (directory / "document.json").write_text(json.dumps(document))
    (directory / "plain.yml").write_text("post_hooks: []\n")
    arguments = (
        "generate --path document.json --config plain.yml --meta none --output-path"
        f" {name} --fail-on-warning"
    )
    command = [sys.executable, "-m", "openapi_python_client", *arguments.split()]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    sys.path.insert(0, str(directory))
    try:
        yield importlib.import_module(name)
    finally:
        sys.path.remove(str(directory))
        for module in [module for module in sys.modules if module.startswith(name)]:
            del sys.modules[module]
