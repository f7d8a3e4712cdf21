"""The site builds without a warning, holds every public name, and needs nothing from elsewhere to be read."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

import pytest

import pdstage
from tests.docs.pages import PAGES, ROOT
from tests.processes import python

pytest.importorskip("mkdocs", reason="needs the extra docs")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    done = python("-m", "mkdocs", "build", "--strict", "-d", str(folder), check=True, cwd=ROOT, env=env)
    assert "WARNING" not in done.stderr
    return folder


@pytest.fixture(scope="module")
def anchors(site: Path) -> set[str]:
    """Those of the reference."""
    return set(re.findall(r'id="([^"]+)"', (site / "api.html").read_text()))


def test_every_public_name_is_in_the_reference(anchors: set[str]) -> None:
    missing = [name for name in pdstage.__all__ if f"pdstage.{name}" not in anchors]
    assert not missing, f"put them into docs/api.md: {missing}"


def test_every_call_that_pages_name_is_in_the_reference(anchors: set[str]) -> None:
    owners = {"node": ("PrefillNode", "DecodeNode"), "sender": ("Sender",), "receiver": ("Receiver",)}
    text = "".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"\b(node|sender|receiver)\.(?!kubernetes\.io)([a-z]\w*)", text))
    assert len(named) > 15
    attributes = {"directory_address", "error"}  # plain ones, which have no entry of their own
    missing = [
        f"{who}.{name}"
        for who, name in sorted(named)
        if name not in attributes and not any(f"pdstage.{owner}.{name}" in anchors for owner in owners[who])
    ]
    assert not missing


def test_nothing_comes_from_elsewhere(site: Path) -> None:
    """No font, script or picture of another host; and no diagram that a script from a CDN would have to draw."""
    loads = r'<(?:link [^>]*href|(?:img|script|iframe) [^>]*src)="(?:https?:)?//[^"]*"|class="mermaid"'
    outside = {path.name: re.findall(loads, path.read_text()) for path in site.rglob("*.html")}
    assert not {page: urls for page, urls in outside.items() if [url for url in urls if 'rel="canonical"' not in url]}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_the_checkout_leads_somewhere(page: Path) -> None:
    """As one reads the repository, where the site's copies are not."""
    text = re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    links = [unquote(link).partition("#")[0] for link in LINK.findall(text) if not re.match(r"\w+:|#", link)]
    broken = [link for link in links if not (page.parent / link).exists()]
    assert not broken, f"{page.name}: {broken}"
