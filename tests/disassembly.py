"""Machine code of CUDA kernels as text. Many at a time: a disassembler's start takes longer than its work."""

from __future__ import annotations

import importlib.util
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_OFFSET = re.compile(r"\s*/\*([0-9a-f]{4,})\*/")


class Machine(NamedTuple):
    """A kernel's instructions, and what it needs of a multiprocessor. `stack`: bytes a thread, with what spilled."""

    sass: str
    registers: int
    stack: int


def tool(name: str) -> str | None:
    """A disassembler of the CUDA toolkit: from the PATH, or the one that Triton brings."""
    found = importlib.util.find_spec("triton")
    beside = Path(found.origin).parent / "backends/nvidia/bin" / name if found and found.origin else None
    return shutil.which(name) or (str(beside) if beside and beside.exists() else None)


def missing() -> bool:
    return not (tool("cuobjdump") and tool("nvdisasm"))


def disassembled(images: Iterable[bytes], architecture: str, *, code: bool = True) -> list[Machine]:
    """Of cubins for `architecture`, one kernel each; without `code`, which costs the time, no instructions."""
    images = list(images)
    with tempfile.TemporaryDirectory() as folder:
        usages = [_usage(image, Path(folder) / "kernel.cubin") for image in images]
        texts = [_text(image) for image in images] if code else []
        codes = _split(texts, architecture, Path(folder) / "all.bin") if code else [""] * len(images)
    return [Machine(sass, *usage) for sass, usage in zip(codes, usages, strict=True)]


def _said(*command: object) -> str:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout


def _usage(image: bytes, path: Path) -> tuple[int, int]:
    path.write_bytes(image)
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", _said(tool("cuobjdump"), "-res-usage", path))
    registers, stack, local = map(int, found)
    return registers, stack + local


def _text(image: bytes) -> bytes:
    """The section of an ELF file that holds the code of its one kernel."""
    (table,) = struct.unpack_from("<Q", image, 40)
    size, n, names = struct.unpack_from("<HHH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, table + at * size) for at in range(n)]
    first_name = sections[names][4]
    (found,) = (
        image[offset : offset + nbytes]
        for name, _, _, _, offset, nbytes, *_ in sections
        if image.startswith(b".text.", first_name + name)
    )
    return found


def _split(texts: list[bytes], architecture: str, path: Path) -> list[str]:
    """The instructions of each of `texts`, disassembled as one after the other."""
    path.write_bytes(b"".join(texts))
    said = _said(tool("nvdisasm"), "-b", architecture.replace("sm_", "SM"), "-ndf", path)
    ends = [sum(map(len, texts[: at + 1])) for at in range(len(texts))]
    codes: list[list[str]] = [[] for _ in texts]
    at = 0
    for line in said.splitlines():
        if offset := _OFFSET.match(line):
            while int(offset[1], 16) >= ends[at]:
                at += 1
        codes[at].append(line)
    return ["\n".join(lines) for lines in codes]
