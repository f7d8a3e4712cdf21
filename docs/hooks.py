"""What `mkdocs build` needs besides: files of the checkout that pages link to, and pages that a checkout may lack.

Pages link to files outside docs/ as a reader of the repository does (`../tests/...`). The site holds a copy of each
such file, so that no link leaves it; a link to a file that is not there stays as it is, and fails the build.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
import reference

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
LINK = re.compile(r"\]\((\.\./[^)#\s]+)")
OWN_LINK = re.compile(r"\]\(((?!https?:|#)[^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Adds the pages that live at the top of the checkout, and every file outside docs/ that a page links to."""
    for name in ("CONTRIBUTING.md", "CHANGELOG.md"):
        files.append(File.generated(config, PAGES[name], content=_from_docs((ROOT / name).read_text())))
    linked = {link for file in files.documentation_pages() for link in LINK.findall(file.content_string)}
    for link in sorted(linked):
        path = (Path(config.docs_dir) / link).resolve()
        if path.is_file() and path.relative_to(ROOT).as_posix() not in PAGES:
            files.append(File.generated(config, _copy_of(path), abs_src_path=str(path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, **_: object) -> str:
    """Points links that leave docs/ at the site's copies, and has mkdocstrings write the reference."""

    def here(found: re.Match[str]) -> str:
        path = (Path(config.docs_dir) / found[1]).resolve()
        if not path.is_file():
            return found[0]
        name = path.relative_to(ROOT).as_posix()
        return f"]({PAGES.get(name) or _copy_of(path)}"

    return LINK.sub(here, reference.directives(markdown))


def _copy_of(path: Path) -> str:
    """Sources as text, so that a browser shows them."""
    return f"source/{path.relative_to(ROOT).as_posix()}.txt"


def _from_docs(text: str) -> str:
    """A page of the checkout's top as if it lay in docs/."""
    return OWN_LINK.sub(lambda found: f"](../{found[1]}", text).replace("](../docs/", "](")
