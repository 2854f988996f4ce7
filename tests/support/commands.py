"""Commands that answer in JSON."""

from __future__ import annotations

import json
from io import StringIO
from typing import Any

from django.core.management import call_command


def told(*arguments: str, exits: int = 0, **options: Any) -> list[dict[str, Any]]:
    """Run a command that ends with the code ``exits``; the objects that it printed, one
    a line.
    """
    out, code = StringIO(), 0
    try:
        call_command(*arguments, "--json", stdout=out, **options)
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == exits
    return [json.loads(line) for line in out.getvalue().splitlines()]
