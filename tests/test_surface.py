"""What `import pdstage` shows: typed, documented, the same on both sides, and nothing else."""

from __future__ import annotations

import ast
import enum
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pdstage
from pdstage import DecodeNode, PrefillNode, Receiver, Sender

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """
import asyncio

from pdstage import AuxRow, Config, DecodeNode, Items, MetadataBuffers, Pool, PrefillNode, Receiver, Sender, State
from pdstage import Topology


def engine(pool: Pool, rows: MetadataBuffers) -> None:
    config = Config(wait_s=5.0, checksums=True)
    with (
        PrefillNode(pool, Topology(), transport="local", config=config, metadata=rows) as prefill,
        DecodeNode(pool, Topology(), transport="local", config=config, keys="cluster.key") as decode,
    ):
        receiver = decode.receive("room", prefill=prefill.bootstrap_address, deadline_s=60.0)
        reveal_type(receiver)
        receiver.bind({"kv": Items([1, 2]), "swa": [3]}, {"kv": (0, 30)}, prefix_tokens=16, aux=rows.allocate())
        sender = prefill.send(7)
        reveal_type(sender)
        sender.chunk([1, 2], 30, layers=(0, 4))
        sender.finish(b"token", states={"mamba": [5]})
        reveal_type(receiver.wait(timeout_s=5.0))
        reveal_type(receiver.aux)
        reveal_type(receiver.error)
        reveal_type(sender.max_chunk_tokens)
        reveal_type(decode.completions())
        reveal_type(prefill.completions())
        reveal_type(decode.poll_many([receiver]))
        reveal_type(decode.close())
    if receiver.state is State.SUCCESS and isinstance(receiver.aux, AuxRow):
        rows.free(receiver.aux)


async def server(decode: DecodeNode, sender: Sender) -> list[Receiver]:
    reveal_type(await sender.wait_async(1.0))
    async with decode:
        return [receiver async for receiver in decode.completions_async()]
"""
REVEALED = [
    "Receiver", "Sender", "State", "bytes | AuxRow | None", "PdstageError | None", "int | None", "list[Receiver]",
    "list[Sender]", "tuple[ndarray[tuple[Any, ...], dtype[signedinteger[_8Bit]]], "
    "ndarray[tuple[Any, ...], dtype[unsignedinteger[_8Bit]]]]", "bool", "State",
]  # fmt: skip
WRONG = {
    "receiver.bind(pages=[1])": "Unexpected keyword argument",
    'sender.finish("text")': "has incompatible type",
    "DecodeNode(pool, Topology(), bootstrap='x')": "Unexpected keyword argument",
    "receiver.state = State.SUCCESS": "read-only",
}
INI = """
[mypy]
strict = true
python_version = 3.11
follow_imports = silent
[mypy-torch.*,triton.*,cupy.*,nixl.*,mooncake.*,mori.*,transformers.*,pdstage._native]
follow_imports = skip
ignore_missing_imports = true
"""


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


def test_a_small_program_types_strictly_and_a_wrong_one_does_not(tmp_path):
    """By mypy, against the package as a user sees it."""
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(INI)
    wrong = [f"    {line}" for line in WRONG]
    head = PROGRAM[: PROGRAM.index("def engine")]
    (tmp_path / "user.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text(
        "\n".join([head, "def f(pool: Pool, receiver: Receiver, sender: Sender) -> None:", *wrong])
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", "--no-error-summary"]
    done = subprocess.run(
        [*command, "user.py", "wrong.py"],
        cwd=tmp_path, env={"MYPYPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    short = [re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", line.replace("*", "")) for line in lines]
    revealed = [re.findall(r'"(.*)"', line)[0] for line in short if "Revealed" in line]
    errors = [line for line in lines if ": error:" in line]
    assert not [line for line in errors if line.startswith("user.py")], done.stdout + done.stderr
    assert [simple(one) for one in revealed] == [simple(one) for one in REVEALED], done.stdout
    assert len(errors) == len(WRONG), done.stdout
    for line, why in zip(errors, WRONG.values(), strict=True):
        assert why in line


def simple(said: str) -> str:
    """numpy's own words for its types are another in each version."""
    return re.sub(r"ndarray\[.*", "arrays", said)


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
def test_everything_public_is_documented_and_annotated(name) -> None:
    kind = getattr(pdstage, name)
    assert (kind.__doc__ or "").strip(), name
    if issubclass(kind, enum.Enum):
        return
    for member, held in public(kind):
        function = function_of(held)
        if inspect.isfunction(function):
            assert inspect.getdoc(function), f"{name}.{member} has no docstring"
            signature = inspect.signature(function)
            assert signature.return_annotation is not inspect.Signature.empty, f"{name}.{member}"
            for parameter in list(signature.parameters.values())[1:]:
                assert not parameter.name.startswith("_"), f"{name}.{member}({parameter.name})"
                assert parameter.annotation is not inspect.Parameter.empty, f"{name}.{member}({parameter.name})"


def parameters(function) -> dict[str, tuple[object, object]]:
    found = inspect.signature(function).parameters.values()
    return {one.name: (one.kind, one.default) for one in found if one.name != "self"}


def test_both_nodes_are_made_alike() -> None:
    prefill, decode = parameters(PrefillNode.__init__), parameters(DecodeNode.__init__)
    assert set(prefill) - set(decode) == {"bootstrap", "publish", "instance", "n_buffers", "calibration"}
    assert set(decode) - set(prefill) == {"n_lanes"}
    assert {name: prefill[name] for name in prefill if name in decode} == {
        name: decode[name] for name in decode if name in prefill
    }
    for role in (prefill, decode):
        loose = [name for name, (kind, _) in role.items() if kind is not inspect.Parameter.KEYWORD_ONLY]
        assert loose == ["pool", "topology"]


def test_both_handles_are_used_alike() -> None:
    common = {"poll", "wait", "wait_released", "wait_async", "wait_released_async", "abort", "state", "released"}
    for member in common:
        assert hasattr(Sender, member)
        assert hasattr(Receiver, member)
    assert parameters(Sender.abort) == parameters(Receiver.abort)
    for function in (Sender.chunk, Sender.finish, Receiver.bind):
        loose = [name for name, (kind, _) in parameters(function).items() if kind is not inspect.Parameter.KEYWORD_ONLY]
        assert loose in (["items", "tokens"], ["aux"]), "what comes after is named at the call"


def test_every_option_of_a_node_is_told_of() -> None:
    """In the docstring of one of the two: decode's says only what differs."""
    told = f"{PrefillNode.__doc__} {DecodeNode.__doc__}"
    missing = [name for name in {**parameters(PrefillNode), **parameters(DecodeNode)} if f"`{name}`" not in told]
    assert missing == []
