"""What the site shows that is written elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHANGELOG = Path(__file__).parent.parent / "CHANGELOG.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show the whole changelog on its page, which only points to it where the sources are read."""
    return CHANGELOG.read_text() if page.file.src_uri == "changelog.md" else markdown
