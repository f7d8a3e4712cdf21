"""What docs/api.md says of each name, from its docstring, for who reads it without the site.

A directive of mkdocstrings stands in a comment, with what is written here behind it. `hooks` puts the directive in the
place of both, so that the site has annotations and links too.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from enum import Enum, EnumMeta
from typing import TYPE_CHECKING, is_typeddict

if TYPE_CHECKING:
    from collections.abc import Iterator

ENTRY = re.compile(r"<!-- (::: ([\w.]+)(?:\n    options: \{(.*?)\})?)\n-->\n.*?<!-- /::: -->", re.DOTALL)
LISTED = re.compile(r"(inherited_members|members): \[([^]]*)\]")


def written(page: str) -> str:
    """The page with what stands behind each directive made anew."""
    return ENTRY.sub(lambda found: f"<!-- {found[1]}\n-->\n{_entry(found[2], found[3] or '')}\n<!-- /::: -->", page)


def directives(page: str) -> str:
    """The page with nothing but its directives."""
    return ENTRY.sub(lambda found: found[1], page)


def _entry(path: str, options: str) -> str:
    module, _, name = path.rpartition(".")
    held = getattr(importlib.import_module(module), name, None) or importlib.import_module(path)
    listed = {kind: re.findall(r"\w+", names) for kind, names in LISTED.findall(options)}
    if inspect.isclass(held):
        inherits = "inherited_members: true" in options
        kept = {*vars(held), *listed.get("inherited_members", ())}
        names = [one for one in dir(held) if (inherits or one in kept) and not inspect.isclass(getattr(held, one))]
        lines = [f"### `{name}`", "", *_wrapped(f"`{_call(name, held)}`", ""), "", inspect.getdoc(held) or "", ""]
        if issubclass(held, Enum):
            lines += [f"* `{one.name}`: {one.value}" for one in held]
    else:
        names = listed["members"]
        lines = [f"### `{path}`", "", inspect.getdoc(held) or "", ""]
    for one in names:
        lines += _member(one, getattr(held, one))
    return "\n".join(lines).rstrip()


def _member(name: str, value: object) -> Iterator[str]:
    if name.startswith("_") or not (inspect.isroutine(value) or inspect.isclass(value) or isinstance(value, property)):
        return
    first, _, _ = (inspect.getdoc(value) or "").partition("\n\n")
    yield from _wrapped(f"* `{_call(name, value)}`: {' '.join(first.split())}", "  ")


def _call(name: str, value: object) -> str:
    """Its parameters and their defaults; the site has the annotations. A class that takes none is not called."""
    uncalled = is_typeddict(value) or getattr(value, "_is_protocol", False) or isinstance(value, EnumMeta)
    if uncalled or not callable(value):
        return name
    bare = [one.replace(annotation=one.empty) for one in inspect.signature(value).parameters.values()]
    text = str(inspect.Signature([one for one in bare if one.name != "self"]))
    return name if inspect.isclass(value) and text == "()" else f"{name}{text}"


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
