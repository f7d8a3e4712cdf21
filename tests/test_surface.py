"""What `import pdstage` shows: typed, documented, the same on both sides, and nothing else."""

from __future__ import annotations

import ast
import enum
import inspect
from pathlib import Path

import pytest

import pdstage
from pdstage import DecodeNode, PrefillNode
from pdstage.manager.options import DEFAULTS, NodeOptions


def public(kind: type) -> list[tuple[str, object]]:
    """A class's own and inherited public members that this package defines."""
    return [
        (name, inspect.getattr_static(kind, name))
        for name in dir(kind)
        if not name.startswith("_")
        and any(name in vars(base) and base.__module__.startswith("pdstage") for base in kind.__mro__)
    ]


def function_of(member: object) -> object:
    if isinstance(member, classmethod | staticmethod):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    return getattr(member, "func", member)  # a cached property


def test_the_names_are_those_listed_and_no_other() -> None:
    assert sorted(pdstage.__all__) == list(pdstage.__all__)
    assert set(dir(pdstage)) == {*pdstage.__all__, "__version__"}
    names = set(pdstage._LAZY) | {n for n in pdstage.__all__ if n in vars(pdstage)}
    assert names == set(pdstage.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = pdstage.Nothing
    space: dict[str, object] = {}
    exec("from pdstage import *", space)
    assert set(space) - {"__builtins__"} == set(pdstage.__all__)
    assert (Path(pdstage.__file__).parent / "py.typed").is_file()


def test_lazy_names_are_typed_as_they_are() -> None:
    """The imports that only type checkers see name the same places."""
    tree = ast.parse(Path(pdstage.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == pdstage._LAZY


@pytest.mark.parametrize("name", pdstage.__all__)
def test_everything_public_is_documented(name) -> None:
    kind = getattr(pdstage, name)
    assert (kind.__doc__ or "").strip(), name
    if issubclass(kind, enum.Enum):
        return
    for member, held in public(kind):
        function = function_of(held)
        if inspect.isfunction(function):
            assert inspect.getdoc(function), f"{name}.{member} has no docstring"


def parameters(function) -> dict[str, tuple[object, object]]:
    found = inspect.signature(function).parameters.values()
    return {one.name: (one.kind, one.default) for one in found if one.name != "self"}


def test_both_nodes_are_made_alike() -> None:
    prefill, decode = parameters(PrefillNode.__init__), parameters(DecodeNode.__init__)
    assert set(prefill) - set(decode) == {"directory", "publish", "instance", "n_buffers", "calibration"}
    assert set(decode) - set(prefill) == {"n_lanes"}
    assert set(DEFAULTS) == set(NodeOptions.__annotations__)
    for role in (prefill, decode):
        loose = [name for name, (kind, _) in role.items() if kind is not inspect.Parameter.KEYWORD_ONLY]
        assert loose == ["pool", "topology", "options"]
    for make in (PrefillNode, DecodeNode):
        with pytest.raises(pdstage.UsageError, match="no option stagin_nbytes"):
            make(None, None, stagin_nbytes=1)


def test_every_option_of_a_node_is_told_of() -> None:
    """In the docstring of one of the two: decode's says only what differs."""
    told = f"{PrefillNode.__doc__} {DecodeNode.__doc__}"
    names = {**parameters(PrefillNode), **parameters(DecodeNode), **DEFAULTS}
    missing = [name for name in names if name != "options" and f"`{name}`" not in told]
    assert missing == []


def test_a_state_prints_its_name():
    assert f"{pdstage.State.SUCCESS} {pdstage.State.FAILED:>7}" == "SUCCESS  FAILED"
    assert str(pdstage.State.SUCCESS) == "SUCCESS"
