"""The site builds without a warning, holds every public name, and needs nothing from elsewhere to be read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

import pdstage
from tests.docs.pages import PAGES, ROOT

pytest.importorskip("mkdocs", reason="needs the extra docs")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(folder)], cwd=ROOT, check=False, text=True,
        capture_output=True, timeout=900, env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Seen(HTMLParser):
    """What a page loads, where it leads, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.leads: list[str] = []
        self.anchors: set[str] = set()
        self.classes: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.add(given.get("id", ""))
        self.classes |= set(given.get("class", "").split())
        if "src" in given:
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") in {"stylesheet", "preconnect", "icon", "preload"}:
            self.loads.append(given["href"])
        elif tag == "a" and "href" in given:
            self.leads.append(given["href"])


@pytest.fixture(scope="module")
def seen(site: Path) -> dict[Path, Seen]:
    return {path.relative_to(site): Seen(path) for path in sorted(site.rglob("*.html"))}


def test_every_public_name_is_in_the_reference(seen: dict[Path, Seen]) -> None:
    missing = [name for name in pdstage.__all__ if f"pdstage.{name}" not in seen[Path("api.html")].anchors]
    assert not missing, f"put them into docs/api.md: {missing}"


def test_every_call_that_pages_name_is_in_the_reference(seen: dict[Path, Seen]) -> None:
    owners = {"node": ("PrefillNode", "DecodeNode"), "sender": ("Sender",), "receiver": ("Receiver",)}
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"\b(node|sender|receiver)\.(?!kubernetes\.io)([a-z]\w*)", text))
    assert len(named) > 15
    anchors = seen[Path("api.html")].anchors
    attributes = {"bootstrap_address", "error"}  # plain ones, which have no entry of their own
    missing = [
        f"{who}.{name}"
        for who, name in sorted(named)
        if name not in attributes and not any(f"pdstage.{owner}.{name}" in anchors for owner in owners[who])
    ]
    assert not missing


def test_nothing_comes_from_elsewhere(seen: dict[Path, Seen]) -> None:
    """No font, script or picture of another host; and no diagram that a script from a CDN would have to draw."""
    outside = {str(page): [url for url in one.loads if re.match(r"(https?:)?//", url)] for page, one in seen.items()}
    assert not {page: urls for page, urls in outside.items() if urls}
    assert not [str(page) for page, one in seen.items() if "mermaid" in one.classes]


def test_every_link_of_the_site_leads_somewhere(site: Path, seen: dict[Path, Seen]) -> None:
    broken = []
    for page, one in seen.items():
        for url in one.leads + one.loads:
            if re.match(r"\w+:|//", url) or page.name == "404.html":
                continue
            target, _, anchor = unquote(url).partition("#")
            path = (site / page.parent / target).resolve() if target else site / page
            path = path / "index.html" if path.is_dir() else path
            if not path.is_file():
                broken.append(f"{page}: {url}")
            elif anchor and path.suffix == ".html" and anchor not in seen[path.relative_to(site)].anchors:
                broken.append(f"{page}: {url} has no such anchor")
    assert not broken, broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_the_checkout_leads_somewhere(page: Path) -> None:
    """As one reads the repository, where the site's copies are not."""
    text = re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = [unquote(link).partition("#")[0] for link in LINK.findall(text) if not re.match(r"\w+:|#", link)]
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken, f"{page.name}: {broken}"
