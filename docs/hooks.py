"""What the site shows that is written elsewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
NAME = re.compile(r"(?<=<code>)[^<]+")
BREAK = re.compile(r"(?<=\w)[._](?=\w)")


def on_config(config: Any, **_: Any) -> Any:
    """Link to the repository that ``pyproject.toml`` names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    config.repo_url, config.repo_name = project["urls"]["Source"], project["name"]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show the whole changelog on its page, which only points to it where the sources
    are read; and keep evidence out of the search, where it would hide the answers.
    """
    if page.file.src_uri.startswith("evidence/"):
        page.meta["search"] = {"exclude": True}
    return (
        (ROOT / "CHANGELOG.md").read_text()
        if page.file.src_uri == "changelog.md"
        else markdown
    )


def on_post_page(output: str, **_: Any) -> str:
    """Let the names in tables break after a dot or an underscore, and nowhere else."""
    return CELL.sub(
        lambda cell: NAME.sub(lambda name: BREAK.sub(r"\g<0><wbr>", name[0]), cell[0]),
        output,
    )
