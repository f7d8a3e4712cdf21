"""Compiles csrc/cuda at run time through CuPy's binding of NVRTC, and caches the result on disk.

Machine code for any architecture can be made anywhere. Imports CuPy only when used.

The cache is a folder of files named by their inputs, each with its digest in front. Writers rename complete files into
place, so any number of processes may share it. A file whose digest does not match is made again.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import environment
from ..errors import PdstageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

SOURCES = Path(__file__).parent.parent / "csrc" / "cuda"
_DIGEST_NBYTES = 32
_PTX_8_8 = 12090


class CompileError(PdstageError):
    """A kernel did not compile; its field `log` is the compiler's log."""


def compile_kernel(
    name: str,
    macros: Mapping[str, int],
    architecture: str,
    sources: Path = SOURCES,
    options: tuple[str, ...] = (),
) -> bytes:
    """The image of csrc/cuda/`name` for `architecture`: machine code for "sm_90", PTX for "compute_90".

    `options` are NVRTC's, in addition to those of every kernel.

    Raises `CompileError` with the compiler's log, and `UsageError` if the sources or NVRTC are not installed.
    """
    texts, digest = _texts(sources)
    if name not in texts:
        raise UsageError(f"no {name} in {sources}", remedy="install pdstage with its CUDA sources", name=name)
    options = (
        f"--gpu-architecture={architecture}",
        "--std=c++17",
        *options,
        *(f"-D{macro}={value}" for macro, value in sorted(macros.items())),
    )
    path = cache_folder() / f"{_key(digest, name, options)}.bin"
    image = _read(path)
    if image is None:
        image = _compile(texts, name, options, architecture)
        _write(path, image)
    return image


def architecture_of(capability: int) -> str:
    """The target for a device of compute capability `capability`, such as 90: machine code if NVRTC knows it.

    A later device of a known major version runs the code of that version's first device, but not of any in between
    (such as an embedded one, as 101 was). A device of an unknown major version gets PTX.
    """
    known = [arch for arch in _nvrtc().getSupportedArchs() if arch <= capability]
    if not known:
        raise UsageError(f"no machine code for capability {capability}", remedy="use backend triton, or a newer GPU")
    first = capability // 10 * 10
    for exact in (capability, first):
        if exact in known:
            return f"sm_{exact}"
    return f"compute_{max(known)}"


def widest_access(architecture: str) -> int:
    """Bytes that a thread can load or store at once in code for `architecture`.

    32 from 100 on, by PTX ISA 8.8, which NVRTC 12.9 is the first to emit; earlier ptxas refuse it.
    """
    return 32 if int(architecture.partition("_")[2]) >= 100 and version() >= _PTX_8_8 else 16


def version() -> int:
    """NVRTC's version in the driver's form: 12010 for 12.1."""
    major, minor = _nvrtc().getVersion()
    return int(major) * 1000 + int(minor) * 10


def cache_folder() -> Path:
    """The folder for images: PDSTAGE_CACHE_DIR, else pdstage in XDG_CACHE_HOME, by default ~/.cache."""
    named = environment.CACHE_DIR.read()
    if named is not None:
        return named
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pdstage"
    except RuntimeError as error:
        raise UsageError(f"nowhere to keep compiled kernels ({error})", remedy="set PDSTAGE_CACHE_DIR") from error


def missing() -> str:
    """Why nothing can be compiled here; empty if it can."""
    try:
        _nvrtc().getVersion()
    except (ImportError, RuntimeError, OSError) as error:
        return f"install pdstage[cuda13] or pdstage[cuda12] ({error})"
    return ""


@lru_cache(maxsize=4)
def _texts(sources: Path) -> tuple[dict[str, str], bytes]:
    """Every source by its name, and a digest of them all."""
    texts = {path.name: path.read_text() for path in sorted(sources.glob("*.cu*"))}
    return texts, hashlib.sha256(repr(list(texts.items())).encode()).digest()


def _nvrtc() -> Any:  # noqa: ANN401  (a module without types)
    from cupy.cuda import nvrtc  # noqa: PLC0415

    return nvrtc


def _key(digest: bytes, name: str, options: Iterable[str]) -> str:
    made_of = repr((digest, name, tuple(options), _nvrtc().getVersion()))
    return hashlib.sha256(made_of.encode()).hexdigest()[:40]


def _compile(texts: Mapping[str, str], name: str, options: tuple[str, ...], architecture: str) -> bytes:
    nvrtc = _nvrtc()
    headers = [header for header in texts if header != name]
    program = nvrtc.createProgram(
        texts[name], name, [texts[header].encode() for header in headers], [header.encode() for header in headers]
    )
    try:
        nvrtc.compileProgram(program, options)
        if architecture.startswith("compute_"):
            return bytes(nvrtc.getPTX(program))
        return _whole(bytes(nvrtc.getCUBIN(program)))
    except nvrtc.NVRTCError as error:
        log = nvrtc.getProgramLog(program)
        raise CompileError(
            f"{name} does not compile for {architecture} with {' '.join(options)}:\n{log}",
            remedy="report it with the version of NVRTC",
            log=log,
        ) from error
    finally:
        nvrtc.destroyProgram(program)


def _whole(image: bytes) -> bytes:
    """The image with the last byte of its program headers restored: CuPy 14 cuts it off, as if the image were text."""
    at, size, n = struct.unpack_from("<Q", image, 32)[0], *struct.unpack_from("<HH", image, 54)
    return image.ljust(at + size * n, b"\0")


def _read(path: Path) -> bytes | None:
    try:
        held = path.read_bytes()
    except OSError:
        return None
    digest, image = held[:_DIGEST_NBYTES], held[_DIGEST_NBYTES:]
    return image if image and hashlib.sha256(image).digest() == digest else None


def _write(path: Path, image: bytes) -> None:
    # A cache that cannot be written only costs a compilation in each process.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(hashlib.sha256(image).digest() + image)
            Path(partial).replace(path)
        except OSError:
            Path(partial).unlink(missing_ok=True)
            raise
