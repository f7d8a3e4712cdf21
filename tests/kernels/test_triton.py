"""Triton's kernels: in its interpreter against the reference, and as machine code for GPUs that are not here."""

from __future__ import annotations

import ast
import ctypes
import os
import re
from collections import Counter
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from pdstage.kernels import backends, driver, triton_copy
from pdstage.kernels.cuda_runtime import CudaRuntime
from pdstage.kernels.triton_copy import COPY, DEPTH, GATHER, SCATTER
from pdstage.kernels.triton_device import THREADS, ConvertVariant, Gpu, SumVariant, Variant, build, interpreted
from tests import cuda_double, disassembly, processes
from tests.rows import rows

triton = pytest.importorskip("triton")
pytest.importorskip("torch")
if interpreted():
    pytest.skip("these compile, and TRITON_INTERPRET is set", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402  (after the check that it is there)

from pdstage.kernels import triton_convert_kernels, triton_kernels, triton_sum_kernels  # noqa: E402


@pytest.mark.parametrize("suite", ["interpreted_triton.py", "interpreted_convert.py"])
def test_everything_in_the_interpreter(suite, request):
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    here = Path(__file__).parent
    everything = ["--full"] if request.config.getoption("--full") else []
    words = ("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *everything, str(here / suite))
    processes.python(*words, check=True, cwd=here.parent.parent, env=os.environ | {"TRITON_INTERPRET": "1"})


@pytest.mark.parametrize("module", [triton_convert_kernels, triton_kernels, triton_sum_kernels])
def test_no_kernel_negates_a_number(module):
    """Triton's -x is 0 - x: on a GPU it has no negative zero. A sign is set by its bit."""
    tree = ast.parse(Path(module.__file__).read_text())
    negated = (
        node.operand for node in ast.walk(tree) if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
    )
    assert [ast.unparse(one) for one in negated if not isinstance(one, ast.Constant)] == []


SIDES = {GATHER: 1, SCATTER: 1, COPY: 2}
WAYS = [(GATHER, False), (GATHER, True), (SCATTER, False), (SCATTER, True), (COPY, False)]


def variant(way, head_major, access, summed, general=True):
    """A kernel as plans ask for it; a general one knows segments, shards and two levels of rows."""
    unit = max(access, 8) if summed else access
    units = THREADS * DEPTH[way, summed] * access // unit
    return Variant(
        way, head_major, access, general, general or head_major, general, general and way == COPY, summed, unit, units
    )


def source_of_loads(code, instruction):
    """The source line, as text, of each place where `instruction` stands in PTX."""
    lines = Path(triton_kernels.__file__).read_text().splitlines()
    found, at, begun = [], 0, 0
    for line in code.splitlines():
        if located := re.match(r"\s*\.loc\s+\d+\s+(\d+)", line):
            at = int(located[1])
        elif "begin inline asm" in line:
            begun = at  # inside, the numbers count the assembler's own lines
        elif re.search(instruction, line):
            found.append(lines[begun - 1].strip())
    return found


def machines(variants, arch, *, code=True):
    """Of each kernel what tells it apart, PTX and machine code. None of them spills, each fits its registers."""
    if disassembly.missing():
        pytest.skip("needs cuobjdump and nvdisasm")
    built = [build(one, GPUTarget("cuda", arch, 32)).asm for one in variants.values()]
    found = disassembly.disassembled([asm["cubin"] for asm in built], f"sm_{arch}", code=code)
    for key, machine in zip(variants, found, strict=True):
        assert machine.registers <= 64, key
        assert machine.stack == 0, key
    return zip(variants, [asm["ptx"] for asm in built], found, strict=True)


@pytest.mark.parametrize(("way", "head_major"), WAYS)
@pytest.mark.parametrize("arch", rows([80, 90, 100], full={80, 100}))
def test_16_byte_accesses_on_nvidia(arch, way, head_major):
    variants = {
        (summed, general): variant(way, head_major, 16, summed, general)
        for summed, general in product([False, True][: 1 + (way != COPY)], [True, False])
    }
    for (summed, _), ptx, machine in machines(variants, arch):
        n = DEPTH[way, summed]
        assert len(re.findall(r"ld\.global\.(v4\.b32|v2\.b64)", ptx)) == n
        assert len(re.findall(r"st\.global\.(v4\.b32|v2\.b64)", ptx)) == n
        assert len(re.findall(r"st\.global", ptx)) == n, "all stores are of payload"
        # Narrower loads are those of the tables and of the list of items; a unit's item is loaded by one of two widths.
        narrow = Counter(source_of_loads(ptx, r"ld\.global\.b\d+"))
        assert all(line.startswith(("return tl.load(table.", "item = tl.load(items.")) for line in narrow), narrow
        assert sum(k for line, k in narrow.items() if "items." in line) == 2 * n * SIDES[way]
        assert set(re.findall(r"\bSTG\S*", machine.sass)) == {"STG.E.128"}
        assert len(re.findall(r"\bLDG\.E\.128\b", machine.sass)) == n
        assert not re.findall(r"\b(?:LDL|STL)\b", machine.sass)
        assert ("BAR.SYNC" in machine.sass) == summed, "warps never wait for each other but to add up"


@pytest.mark.parametrize("way", [GATHER, COPY])
def test_narrow_accesses_fit_registers_too(way):
    variants = {
        (access, summed): variant(way, False, access, summed)
        for access, summed in product([8, 4, 2, 1], [False, True][: 1 + (way != COPY)])
    }
    for (access, _), ptx, _ in machines(variants, 80, code=False):
        assert f"st.global.b{8 * access}" in ptx


@pytest.mark.parametrize(("way", "head_major", "summed"), [(*way, s) for way in WAYS for s in (False, way[0] != COPY)])
def test_16_byte_accesses_on_amd(way, head_major, summed):
    kernel = build(variant(way, head_major, 16, summed), GPUTarget("hip", "gfx942", 64))
    code, n = kernel.asm["amdgcn"], DEPTH[way, summed]
    assert re.findall(r"\bglobal_store_\w+", code) == ["global_store_dwordx4"] * n
    assert len(re.findall(r"\bglobal_load_dwordx4\b", code)) >= n
    assert not re.findall(r"\b(?:scratch|flat|buffer)_(?:load|store)\w*", code)
    numbers = dict(re.findall(r"\.(vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size):\s*(\d+)", code))
    assert numbers == {"vgpr_spill_count": "0", "sgpr_spill_count": "0", "private_segment_fixed_size": "0"}


@pytest.mark.parametrize("way", [GATHER, SCATTER])
@pytest.mark.parametrize("arch", rows([80, 90], full={80}))
def test_conversions_on_nvidia_are_wide_and_round_as_ieee_says(arch, way):
    variants = {kind: ConvertVariant(way, kind, 0, 128, 64, ALIGNED=True) for kind in (0, 1, 3, 4)}
    for kind, ptx, machine in machines(variants, arch):
        sass = machine.sass
        assert ".ftz" not in ptx
        assert not re.findall(r"\b(?:fma|mad)\.\w+\.f32", ptx), "a product rounded once with a sum"
        assert ("div.rn.f32" in ptx) == (way == GATHER and kind in (1, 3))
        assert "div.full" not in ptx
        # Of 8 values a thread, bf16 on the pool's side and bytes on the other's.
        assert len(re.findall(r"\bLDG\.E\.128\b", sass)) == (way == GATHER and kind != 0)
        assert len(re.findall(r"\bSTG\.E\.128\b", sass)) == (way == SCATTER and kind != 0)
        assert re.findall(r"\bSTG\.E\.64\b" if way == GATHER else r"\bLDG\.E\.64\b", sass)


@pytest.mark.parametrize(
    ("kernel", "access"),
    [
        (ConvertVariant(GATHER, 4, 0, 128, 64, ALIGNED=True), "global_load_dwordx4"),
        (ConvertVariant(SCATTER, 4, 0, 128, 64, ALIGNED=True), "global_store_dwordx4"),
        (SumVariant(16, 16, THREADS * 2), "global_load_dwordx4"),
    ],
)
def test_conversions_and_sums_on_amd(kernel, access):
    code = build(kernel, GPUTarget("hip", "gfx942", 64)).asm["amdgcn"]
    assert access in code
    assert re.findall(r"\.vgpr_spill_count:\s*(\d+)", code) == ["0"]


@pytest.mark.parametrize("arch", rows([80, 90], full={80}))
def test_sums_of_what_is_staged_on_nvidia(arch):
    units = {16: 16, 4: 8, 1: 8}
    variants = {access: SumVariant(access, unit, THREADS * 2 * access // unit) for access, unit in units.items()}
    for access, _, machine in machines(variants, arch):
        assert not re.findall(r"\bSTG\b", machine.sass)
        assert bool(re.findall(r"\bLDG\.E\.128\b", machine.sass)) == (access == 16)


def test_a_calls_tables_are_in_use_until_its_stream_is_past_it():
    """Even if one of its launches could not be made: others were."""
    with cuda_double.use() as double:
        double.reset()
        double["held"] = 1
        gpu = Gpu.__new__(Gpu)
        gpu.runtime = runtime = CudaRuntime(0)
        with runtime.current():
            stream = driver.cuda().new_stream()
        table = gpu.put(np.arange(8).reshape(4, 2))
        with (
            mock.patch.object(runtime, "wait", wraps=runtime.wait) as wait,
            pytest.raises(ValueError, match="a launch"),
            gpu.call([table, table], [], stream) as placed,
        ):
            assert placed == []
            raise ValueError("a launch")
        assert [given.args[1] for given in wait.call_args_list] == [stream], "for the upload, on the device"
        (event,) = table._place.events.values()
        assert not runtime.done(event)
        double["held"] = 0
        while not runtime.done(event):
            pass
        assert np.frombuffer((ctypes.c_int64 * 8).from_address(table.ptr), np.int64).tolist() == list(range(8))


def test_what_is_missing_is_said_in_words(monkeypatch):
    util = triton_copy.importlib.util
    found = util.find_spec
    monkeypatch.setattr(util, "find_spec", lambda name, *package: None if name == "triton" else found(name, *package))
    assert triton_copy.missing() == "install pdstage[triton]"
    assert backends()["triton"] == "install pdstage[triton]"
