"""Make text from clients safe for terminals, log files and pages. The only place that does so. Pure.

Escape sequences can make a terminal hide or rewrite what it shows; bidirectional and invisible characters can make one
text look like another (CVE-2021-42574, https://trojansource.codes). Templates escape HTML.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return ``text`` with every character that is neither visible nor a plain space as an escape like ``\\x1b``."""
    return text if text.isprintable() else "".join(map(_printable, text))


def printable_lines(text: str) -> str:
    """Return ``text`` as ``printable`` does, but keep line feeds and tabs."""
    return "".join(character if character in "\n\t" else _printable(character) for character in text)


def is_blank(text: str) -> bool:
    """Return whether ``text`` has neither a letter nor a digit. Invisible characters are not white space."""
    return not any(map(str.isalnum, text))


def _printable(character: str) -> str:
    return character if character.isprintable() else ascii(character)[1:-1]
