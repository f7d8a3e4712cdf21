"""Imports point down only, every module has a layer, and importing pdstage stays light."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

from tests.processes import python

ROOT = Path(__file__).resolve().parent.parent

# The layer table. A name covers the module and everything below it; a new module is added here, by its layer.
LAYERS = {
    0: ["environment", "errors", "arguments", "layout", "tensors", "native", "shared", "closing"],
    1: ["plan", "metrics", "columns", "log_limit"],
    2: ["protocol"],
    3: ["kernels"],
    4: ["stager", "probe", "metadata", "control", "transport"],
    5: ["manager"],
    6: ["integrations", "watch"],
    7: ["tools", "bench", "cli", "__main__"],
}
LAYER = {name: layer for layer, names in LAYERS.items() for name in names}
# Where each folder of the checkout is installed.
FOLDERS = {"pdstage": "pdstage", "kernels": "pdstage.kernels", "bench": "pdstage.bench"}
# Who may import what at the top of a module: each heavy dependency stays behind its own door.
DOORS = {
    "zmq": {"control"},
    "mooncake": {"transport"},
    "nixl": {"transport"},
    "nixl_cu13": {"transport"},
    "mori": {"transport"},
    "triton": {"kernels"},
    "cupy": {"kernels", "transport"},
}
PURE = {0, 1, 2}  # no thread, no socket, no clock in these
IMPURE = {"threading", "socket", "time", "asyncio", "selectors", "subprocess", "multiprocessing", "torch"}
LIGHT = {"torch", "zmq", "mooncake", "nixl", "nixl_cu13", "mori", "triton", "cupy", "transformers"}
LIGHT |= {"prometheus_client"}


class Import(NamedTuple):
    """`module` imports `target` at `where` (file:line); `guarded` under TYPE_CHECKING, `lazy` inside a function."""

    module: str
    target: str
    where: str
    guarded: bool = False
    lazy: bool = False


def sources() -> Iterator[tuple[str, Path]]:
    """Every module of the package with its file, by the name it installs as; symlinked folders once."""
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inner = path.relative_to(ROOT / folder)
            if any((ROOT / folder / parent).is_symlink() for parent in inner.parents):
                continue
            parts = inner.with_suffix("").parts
            yield ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts))), path


@cache
def imports_of(module: str, path: Path) -> tuple[Import, ...]:
    """All imports of a module, absolute, `from a import b` as a.b."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def visit(node: ast.AST, guarded: bool, lazy: bool) -> Iterator[Import]:
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, where, guarded, lazy)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                anchor = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*anchor, base] if base else anchor)
            for alias in node.names:
                yield Import(module, f"{base}.{alias.name}", where, guarded, lazy)
        in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            inside = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body
            yield from visit(child, guarded or inside, lazy or in_function)

    return tuple(visit(ast.parse(path.read_text()), guarded=False, lazy=False))


def layer_of(name: str) -> int | None:
    """The layer of a dotted name under pdstage; None for the package itself and for names the table does not hold."""
    parts = name.split(".")
    return LAYER.get(parts[1]) if len(parts) > 1 else None


def problem(found: Import) -> str:
    """What the layer table says against an import; empty if nothing."""
    own, part, top = layer_of(found.module), [*found.module.split("."), ""][1], found.target.split(".")[0]
    said = f"{found.where}: {found.module} imports {found.target}"
    if found.target.split(".")[-1] == "_native" and found.module != "pdstage.native":
        return f"{said}; import pdstage.native instead"
    if top in {"kernels", "bench"}:
        return f"{said}, which installs as pdstage.{top}"
    if top in DOORS and part not in DOORS[top] and own < 6 and not found.guarded:
        return f"{said}, which stays behind {sorted(DOORS[top])}"
    if own in PURE and top in IMPURE and not found.guarded and found.module != "pdstage.layout.arrays":
        return f"{said}, but layer {own} is pure"
    if top != "pdstage" or own is None:
        return ""
    target = layer_of(found.target)
    if target is None:
        name = [*found.target.split("."), ""][1]
        if own >= 6 and name[:1].isupper():  # the public API, as users import it
            return ""
        return "" if name in {"", "_native"} else f"{said}, which no layer holds"
    if target > own:
        return f"{said}, from layer {own} up to layer {target}"
    if own == target == 4 and part != found.target.split(".")[1]:
        return f"{said}, and parts of layer 4 never import each other"
    return ""


def test_every_module_has_a_layer() -> None:
    homeless = [
        f"{path.relative_to(ROOT)} ({name})" for name, path in sources() if name != "pdstage" and layer_of(name) is None
    ]
    assert not homeless, f"add them to LAYERS in {Path(__file__).name}: {homeless}"


def test_imports_point_down() -> None:
    problems = [said for name, path in sources() for found in imports_of(name, path) if (said := problem(found))]
    assert not problems, "\n".join(["imports that DESIGN does not allow:", *problems])


# Who takes behaviour from a class of another file, and from which: everything else has its parts.
HEIRS = {
    "protocol/decode_rooms.py:DecodeRoom": "Room",
    "protocol/destinations.py:PrefillRoom": "Room",
    "manager/prefill.py:Sender": "Handle",
    "manager/decode.py:Receiver": "Handle",
    "manager/decode.py:DecodeNode": "Node",
    "manager/prefill.py:PrefillNode": "Node",
}


def _behaves(node: ast.ClassDef) -> bool:
    """Whether a method of the class does anything; those of an interface are abstract or a docstring."""
    for one in node.body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            abstract = any("abstractmethod" in ast.dump(mark) for mark in one.decorator_list)
            if not abstract and not all(isinstance(line, ast.Expr | ast.Pass) for line in one.body):
                return True
    return False


def test_cores_and_nodes_are_composed() -> None:
    classes: dict[str, dict[str, ast.ClassDef]] = {}
    for package in ("protocol", "manager"):
        for path in sorted((ROOT / "pdstage" / package).glob("*.py")):
            held = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))
            for node in held:
                classes.setdefault(node.name, {})[f"{package}/{path.name}"] = node
    found = {}
    for name, files in classes.items():
        for file, node in files.items():
            for base in (ast.unparse(base).split("[")[0] for base in node.bases):
                if any(other != file and _behaves(one) for other, one in classes.get(base, {}).items()):
                    found[f"{file}:{name}"] = base
    assert found == HEIRS


def test_modules_import_in_no_circle() -> None:
    """Inside functions too: whoever reads one module of a circle has to read all. A part may name the type of what has
    it, under TYPE_CHECKING. A circle is a `CycleError` that names it.
    """
    modules = dict(sources())
    imported: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for found in imports_of(name, path):
            target = found.target
            while target and target not in modules:
                target = target.rpartition(".")[0]
            imported[name] |= {target} - {target if found.guarded else ""} - {"", name, "pdstage"}
    del imported["pdstage"]
    TopologicalSorter(imported).prepare()


def test_only_tools_read_the_time_of_day() -> None:
    """Two hosts' clocks differ, so nothing that decides may compare them: durations travel, and times never."""
    of_day = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}
    read = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for name, path in sources()
        if (layer_of(name) or 0) < 7 and name != "pdstage.integrations.sglang.receiver"  # SGLang's own field
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in of_day
    ]
    assert not read, f"the time of day, which another host has otherwise: {read}"


def test_imports_inside_kernels_are_relative() -> None:
    absolute = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for name, path in sources()
        if name.startswith("pdstage.kernels")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("pdstage.kernels")
    ]
    assert not absolute, f"kernels/ installs under another name; keep its own imports relative: {absolute}"


def test_importing_pdstage_is_light() -> None:
    code = f"import pdstage.tensors, sys; print(*sorted({LIGHT!r} & set(sys.modules)))"
    done = python("-c", code, check=True, cwd=ROOT)
    assert not done.stdout.strip(), f"import pdstage pulls in {done.stdout.strip()}"
