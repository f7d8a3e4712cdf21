"""Calls of the driver that CuPy does not have, by ctypes: their arguments against NVIDIA's header."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pdstage.kernels.driver import Cuda as Driver
from pdstage.plan.spans import Spans

COMPILER = shutil.which("g++")
SOURCE = Path(__file__).parent / "driver_double.cpp"


def header():
    """The folder of cuda.h that Triton brings."""
    found = importlib.util.find_spec("triton")
    folder = Path(found.origin).parent / "backends/nvidia/include" if found and found.origin else Path()
    return folder if (folder / "cudaTypedefs.h").exists() else None


@pytest.mark.skipif(COMPILER is None or header() is None, reason="needs g++ and CUDA's header")
@pytest.mark.parametrize("defines", [[], ["-DHAS_V13"]], ids=["12.8", "13.0"])
def test_a_batch_is_what_the_header_says(tmp_path, defines):
    library = tmp_path / "libcuda.so"
    command = [COMPILER, "-std=c++17", "-shared", "-fPIC", f"-I{header()}", *defines, str(SOURCE), "-o", str(library)]
    subprocess.run(command, check=True)
    driver = Driver(str(library))
    assert driver.has_batches
    src, dst = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    at, nbytes = np.array([40, 3, 20]), np.array([8, 2, 16])
    spans = Spans(src.ctypes.data + at, dst.ctypes.data + at, nbytes)
    assert driver.copy_batch(spans, 0x1234) == 0
    want = np.zeros(64, np.uint8)
    for begin, n in zip(at, nbytes, strict=True):
        want[begin : begin + n] = src[begin : begin + n]
    np.testing.assert_array_equal(dst, want)
    assert driver.copy_batch(spans, 0x99) == 1, "the stream is the caller's"


def test_a_library_without_batches_has_none():
    assert not Driver("libc.so.6").has_batches
