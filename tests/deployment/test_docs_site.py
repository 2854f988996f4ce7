"""The documentation as a site: it is built without warnings, loads nothing from
elsewhere, and can be searched.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from tests.support.requirements import ROOT

pytestmark = pytest.mark.docs_site

DOCS = ROOT / "docs"
LOADS = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "link": "href",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    directory = tmp_path_factory.mktemp("site")
    build = [
        sys.executable,
        "-m",
        "properdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        directory,
    ]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


class Loads(HTMLParser):
    """Collects what a browser fetches to show the page."""

    def __init__(self, page):
        super().__init__()
        self.addresses = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag in LOADS and given.get("rel") not in ("next", "prev", "canonical"):
            self.addresses.append(given.get(LOADS[tag]) or "")


def test_pages_load_nothing_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    loaded = {
        (page.name, address)
        for page in pages
        for address in Loads(page.read_text()).addresses
    }
    assert len(loaded) > 10
    assert {load for load in loaded if re.match(r"(https?:)?//", load[1])} == set()


def test_style_sheets_and_drawings_load_nothing_from_elsewhere(site):
    styles = {path: path.read_text() for path in site.rglob("*.css")}
    assert {
        path
        for path, css in styles.items()
        if re.search(r"url\(\s*[\"']?(https?:)?//|@import", css)
    } == set()
    drawings = [
        ElementTree.parse(path).getroot()
        for path in site.rglob("*.svg")
        if path.parent.name == "img"
    ]
    loading = [
        element.get("href", "") for drawing in drawings for element in drawing.iter()
    ]
    assert [address for address in loading if address.startswith(("http", "//"))] == []


def test_search_finds_every_page_but_evidence(site):
    index = json.loads((site / "search" / "search_index.json").read_text())
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    pages = {
        str(page.relative_to(DOCS)).removesuffix(".md").removesuffix("index")
        for page in DOCS.rglob("*.md")
        if page.parent.name != "evidence"
    }
    assert found == {f"{page.rstrip('/')}/" if page else "" for page in pages}


@pytest.mark.parametrize("name", ["protocol", "claim", "atomic", "states"])
def test_a_diagram_is_described_and_has_colours_for_the_dark(name):
    drawing = DOCS / "img" / f"{name}.svg"
    root = ElementTree.parse(drawing).getroot()
    described = {child.tag.rpartition("}")[2]: child.text for child in root}
    assert described["title"]
    assert len(described["desc"]) > len(described["title"])
    assert "prefers-color-scheme: dark" in drawing.read_text()
    assert any(f"img/{name}.svg" in page.read_text() for page in DOCS.rglob("*.md"))
