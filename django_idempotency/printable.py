"""Text that came from a client, made safe for terminals, log files and pages. The one place that does it. Pure.

Escape sequences can make a terminal hide or rewrite what it shows; bidirectional and invisible characters can make one
text look like another (CVE-2021-42574, https://trojansource.codes). Quoting for HTML is the templates' job.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return ``text`` with all that is neither visible nor a plain space written as an escape, such as ``\\x1b``."""
    return text if text.isprintable() else "".join(map(_printable, text))


def printable_lines(text: str) -> str:
    """Return ``printable`` text that keeps its line feeds and tabs."""
    return "".join(character if character in "\n\t" else _printable(character) for character in text)


def _printable(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]
