"""The pages of the documentation, as tests read them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text(name):
    return (DOCS / name).read_text()


def prose(page):
    """The page without its code blocks."""
    return FENCE.sub("", page.read_text())


def headings(page, level):
    return re.findall(rf"^{'#' * level} (.+)$", prose(page), re.MULTILINE)


def slug(heading):
    kept = re.sub(r"[^\w\s-]", "", heading.replace("`", "").lower()).strip()
    return re.sub(r"[-\s]+", "-", kept)


def anchors(page):
    """What a link to a part of the page may name: a heading, or what the page says is
    an anchor.
    """
    slugs = {
        slug(heading) for level in (1, 2, 3, 4) for heading in headings(page, level)
    }
    return slugs.union(
        re.findall(r'(?:<a id="|^#.* \{#)([\w-]+)', prose(page), re.MULTILINE)
    )


def section(name, heading):
    """What stands under ``heading``."""
    return re.split(
        r"^## ",
        text(name).partition(f"\n## {heading}\n")[2],
        maxsplit=1,
        flags=re.MULTILINE,
    )[0]


def rows(markdown):
    """The cells of all tables, heads and rules left out."""
    lines = [
        line.strip("|").split("|")
        for line in markdown.splitlines()
        if line.startswith("|")
    ]
    cells = [[cell.strip() for cell in line] for line in lines]
    rules = [
        number for number, line in enumerate(cells) if set("".join(line)) <= set("-: ")
    ]
    heads = {number - 1 for number in rules}
    return [
        line for number, line in enumerate(cells) if number not in heads.union(rules)
    ]


def code(cell):
    return re.findall(r"`([^`]+)`", cell)
