"""What `cupy.cuda.nvrtc` is for a GPU: an image names a library for the CPU. The driver's double makes it of the same
source when a kernel of it is first launched.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_MAGIC, _HEAD_NBYTES = b"kernels of the double of CUDA", 64
_HERE = Path(__file__).parent


class NVRTCError(RuntimeError):
    """Never raised: the compiler has not run yet."""


class _Program(NamedTuple):
    name: str
    texts: dict[str, str]
    images: list[bytes]


def getVersion() -> tuple[int, int]:  # noqa: N802  (CuPy's names)
    return 99, 0


def getSupportedArchs() -> list[int]:  # noqa: N802
    return [75, 80, 90]


def createProgram(text: str, name: str, headers: list[bytes], names: list[bytes]) -> _Program:  # noqa: N802
    texts = {named.decode(): held.decode() for named, held in zip(names, headers, strict=True)}
    return _Program(name, texts | {name: text}, [])


def compileProgram(program: _Program, options: tuple[str, ...]) -> None:  # noqa: N802
    target, command = recipe(program.texts, program.name, [one for one in options if one.startswith("-D")])
    image = _MAGIC.ljust(_HEAD_NBYTES, b"\0") + str(target).encode() + b"\0" + command.encode() + b"\0"
    program.images.append(image)


def recipe(texts: Mapping[str, str], name: str, macros: Iterable[str]) -> tuple[Path, str]:
    """The library of a kernel of these sources, and the shell's command that makes it."""
    from tests.cuda_double import COMPILER, KERNEL_OPTIONS, folder  # noqa: PLC0415

    made_of = hashlib.sha256(repr(sorted(texts.items())).encode()).hexdigest()[:16]
    sources = folder() / f"sources-{made_of}"
    if not sources.exists():
        partial = sources.with_name(f"{sources.name}.{os.getpid()}")
        partial.mkdir(exist_ok=True)
        for named, text in texts.items():
            (partial / named).write_text(text)
        for path in [*_HERE.glob("*.cuh"), _HERE / "device.cpp", _HERE / "launch.cpp"]:
            shutil.copy(path, partial)
        try:
            partial.rename(sources)
        except OSError:  # another process was first
            shutil.rmtree(partial)
    given = sorted(macros)
    target = sources / f"{hashlib.sha256(repr([name, *given]).encode()).hexdigest()[:16]}.so"
    compiler = f"{shlex.quote(COMPILER)} {KERNEL_OPTIONS}"
    defines = shlex.join([*given, f'-DPDSTAGE_SOURCE="{name}"'])
    return target, (
        f"cd {shlex.quote(str(sources))} && "
        f"(test -f device.o || ({compiler} -c device.cpp -o $$.o && mv $$.o device.o)) && "
        f"{compiler} -shared {defines} launch.cpp device.o -o $$.so && mv $$.so {target.name}"
    )


def getCUBIN(program: _Program) -> bytes:  # noqa: N802
    return program.images[-1]


def getProgramLog(program: _Program) -> str:  # noqa: N802
    del program
    return ""


def destroyProgram(program: _Program) -> None:  # noqa: N802
    del program
