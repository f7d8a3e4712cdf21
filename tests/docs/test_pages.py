"""The reader of pages itself: what it takes for a block, a command and a mark."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import pages
from tests.docs.pages import blocks, commands, programs

README_LINES = 125


def test_the_readme_fits_two_screens() -> None:
    n = len((pages.ROOT / "README.md").read_text().splitlines())
    assert n <= README_LINES, f"README.md has {n} lines: move details to docs/"


PAGE = """Words, `inline`.

<!-- not run: gpu -->
```sh
one # a comment
```

* a list
  <!-- run as: two --quick -->
  <!-- serves: at (?P<ADDRESS>.*) -->
  ```console
  $ two --long \\
      way
  what it says
  ```

```python
x = "```"[0:0]
```
"""


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pages, "ROOT", tmp_path)

    def write(text: str) -> Path:
        (tmp_path / "page.md").write_text(text)
        return tmp_path / "page.md"

    return write


def test_fences_with_their_marks(page) -> None:
    first, second, third = blocks(page(PAGE))
    assert (first.where, first.language, first.marks) == ("page.md:4", "sh", {"not run": "gpu"})
    assert first.commands == ["one # a comment"]
    assert second.marks == {"run as": "two --quick", "serves": "at (?P<ADDRESS>.*)"}
    assert (third.language, third.marks) == ("python", {})


def test_a_mark_in_front_of_no_fence_is_refused(page) -> None:
    with pytest.raises(ValueError, match="page.md:2: a mark stands in front of a fence"):
        blocks(page("<!-- not run: gpu -->\n\n```sh\none\n```\n"))


def test_a_fence_that_does_not_close_is_refused(page) -> None:
    with pytest.raises(ValueError, match="does not close"):
        blocks(page("```sh\none\n"))


def test_commands_of_a_script_and_of_a_console() -> None:
    assert commands("a b \\\n  c\n# no\n\nd 'e # f'\n") == ["a b    c", "d 'e # f'"]
    assert commands("$ a\nsaid\n$ b\n", prompt=True) == ["a", "b"]


def test_the_tests_own_arguments_are_of_the_same_programs() -> None:
    shown = programs(["X=1 pdstage bootstrap --bind 0.0.0.0:1", "make fuzz ARGS='--runs 9'"])
    assert shown == programs(["pdstage bootstrap --bind 127.0.0.1:0 --keys k", "make fuzz ARGS='--runs 1'"])
    assert shown != programs(["pdstage instances", "make fuzz"])
