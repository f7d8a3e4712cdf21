"""The machine code of the CUDA kernels, for several generations of GPUs: access widths, registers, spills. No GPU.

In a kernel of 16-byte accesses or wider every store is payload, and payload loads are those that L1 does not keep
(`NA`). What else it loads, by how the source reads it:
"""

from __future__ import annotations

import re
from itertools import product

import pytest

from pdstage.kernels import cuda_convert, cuda_copy, nvrtc
from pdstage.kernels.cuda_runtime import CudaRuntime
from pdstage.kernels.cuda_tables import LISTED, LISTED_LARGE
from tests import disassembly
from tests.kernels.test_cuda_nvrtc import needs_nvrtc
from tests.rows import everything, rows

WAYS = {"gather": cuda_copy.TO_STAGING, "scatter": cuda_copy.FROM_STAGING, "copy": cuda_copy.TO_PEER}
SUMS = {"gather": (0, 1), "scatter": (0, 1), "copy": (0,)}
SHAPES = {"flat": (1, 0), "token-major": (0, 0), "head-major": (0, 1)}
TABLES = {"LDG.E", "LDG.E.64", "LD.E", "LD.E.64"}  # Params, Group, View
INDEX_LISTS = {"LDG.E.CONSTANT", "LDG.E.64.CONSTANT"}  # table()
PAYLOAD_LOAD, PAYLOAD_STORE = "LDG.E.NA.128.CONSTANT", "STG.E.NA.128"
BULK = {"UBLKCP.S.G", "UBLKCP.G.S"}
PAYLOAD_LOAD_32, PAYLOAD_STORE_32 = "LDG.E.NA.ENL2.256.CONSTANT", "STG.E.NA.ENL2.256"
ACCESS = re.compile(r"\b((?:LDG?|STG?|LDL|STL|ATOM\w*|UBLKCP)(?:\.\w+)*)\s")
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
ARCHITECTURES_32 = ["sm_100", "sm_103", "sm_120"]
pytestmark = [needs_nvrtc, pytest.mark.skipif(disassembly.missing(), reason="needs cuobjdump and nvdisasm")]


def macros(way, shape, narrow=0, summed=0, listed=0, far=0):
    flat, head_major = SHAPES[shape]
    return {
        "PDSTAGE_WAY": WAYS[way],
        "PDSTAGE_FLAT": flat,
        "PDSTAGE_HEAD_MAJOR": head_major,
        "PDSTAGE_NARROW": narrow,
        "PDSTAGE_FAR": far,
        "PDSTAGE_SUM": summed,
        "PDSTAGE_LISTED": listed,
    }


def plain(way, shape, summed, listed=0, access=16, far=0, longest=16):
    n_units = cuda_copy.units(WAYS[way], summed=bool(summed), access=access, longest=longest, far=bool(far))
    more = {"PDSTAGE_LONGEST": longest} | cuda_copy.plain_macros(CudaRuntime, n_units, access)
    return cuda_copy.SOURCE, macros(way, shape, int(access < 16), summed, listed, far) | more


def bulk(way, shape, listed=0):
    return cuda_copy.BULK_SOURCE, macros(way, shape, listed=listed) | cuda_copy.bulk_macros(CudaRuntime)


@pytest.fixture
def accesses_of(request, monkeypatch):
    """The accesses of each kernel, in order. None of the kernels spills, each fits its registers. Machine code is kept
    from one run to the next.
    """
    monkeypatch.setenv("PDSTAGE_CACHE_DIR", str(request.config.cache.mkdir("pdstage-nvrtc")))

    def found(kernels, architecture, *, most_registers=64, code=True):
        """Kernels by what tells them apart; without `code`, which costs the time, no accesses."""
        built = [nvrtc.compile_kernel(name, defines, architecture) for name, defines in kernels.values()]
        machines = disassembly.disassembled(built, architecture, code=code)
        for key, machine in zip(kernels, machines, strict=True):
            assert machine.stack == 0, key
            assert machine.registers <= most_registers, key
        return {key: ACCESS.findall(machine.sass) for key, machine in zip(kernels, machines, strict=True)}

    return found


def payload_of(accesses):
    return [access for access in accesses if access not in TABLES | INDEX_LISTS]


by_architecture = pytest.mark.parametrize("architecture", rows(ARCHITECTURES, full={"sm_80", "sm_100"}))


@by_architecture
@pytest.mark.parametrize("way", WAYS)
def test_every_kernel_reads_its_payload_once_in_the_widest_accesses(accesses_of, architecture, way):
    """Every load is issued before the first store. Bulk copies pass the registers by. A list in the parameters is no
    load.
    """
    lists = (0,) if way == "copy" else (0, LISTED, LISTED_LARGE)
    kernels = {key: plain(way, *key) for key in product(SHAPES, SUMS[way], lists)}
    if architecture != "sm_80":
        kernels |= {key: bulk(way, key[0], key[2]) for key in product(SHAPES, ("bulk",), lists)}
    for key, accesses in accesses_of(kernels, architecture).items():
        _, summed, listed = key
        units = cuda_copy.units(WAYS[way], summed=bool(summed))
        if summed == "bulk":
            assert set(payload_of(accesses)) == BULK, key
        else:
            assert payload_of(accesses) == [PAYLOAD_LOAD] * units + [PAYLOAD_STORE] * units, key
        assert not listed or not INDEX_LISTS & set(accesses), key


NARROW = [(1, 16), (4, 4), (4, 16), (8, 8)]
STORES = {1: "STG.E.U8", 4: "STG.E", 8: "STG.E.64"}


@by_architecture
@pytest.mark.parametrize("way", WAYS)
def test_narrow_kernels_fit_their_registers_with_several_units_in_flight(accesses_of, architecture, way):
    """And access as many bytes at a time as they are made for: 16 have a launch of their own."""
    lists = (0,) if way == "copy" else (0, LISTED_LARGE)
    kernels = {
        key: plain(way, shape, summed, listed, access, far, longest)
        for key in product(SHAPES, SUMS[way], lists, NARROW, (0, 1))
        for shape, summed, listed, (access, longest), far in [key]
    }
    most = SUMS[way][-1], lists[-1]
    tried = {key: kernels[key] for key in kernels if everything or (key[1:3] == most and key[4])}
    accesses_of(tried, architecture, code=False)
    of_each = {key: kernel for key, kernel in kernels.items() if key[1:3] == (0, 0)}
    for key, accesses in accesses_of(of_each, architecture).items():
        access, longest = key[3]
        n = cuda_copy.units(WAYS[way], summed=False, access=access, longest=longest, far=bool(key[4]))
        assert not {PAYLOAD_LOAD, PAYLOAD_STORE} & set(accesses), key
        assert [one for one in accesses if one.startswith("ST")] == [STORES[access]] * (n * longest // access), key


@pytest.mark.parametrize("architecture", rows(ARCHITECTURES_32, full={"sm_103", "sm_120"}))
@pytest.mark.parametrize("way", WAYS)
def test_32_byte_kernels_access_payload_in_32_bytes_only(accesses_of, architecture, way):
    lists = (0,) if way == "copy" else (0, LISTED_LARGE)
    kernels = {key: plain(way, *key, access=32) for key in product(SHAPES, SUMS[way], lists)}
    for key, accesses in accesses_of(kernels, architecture).items():
        n = cuda_copy.units(WAYS[way], summed=bool(key[1]), access=32) // 2
        assert payload_of(accesses) == [PAYLOAD_LOAD_32] * n + [PAYLOAD_STORE_32] * n, key


KINDS = {"tensor divide": 1, "tensor bf16": 2, "token head": 3, "mx floor": 4, "mx ceil": 5}
SCALES = {"STG.E", "STG.E.U8", "LDG.E.CONSTANT", "LDG.E.U8.CONSTANT"}  # of a head, of a block
CODES_LOAD = "LDG.E.64.CONSTANT"


def converting(way, kinds, access=cuda_convert.WIDE, listed=0):
    narrow = int(access != cuda_convert.WIDE)
    more = cuda_convert.convert_macros(CudaRuntime, kinds, access) | {"PDSTAGE_UNITS": cuda_convert.UNITS[WAYS[way]]}
    return cuda_convert.SOURCE, macros(way, "token-major", narrow, listed=listed, far=narrow) | more


@by_architecture
@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_converting_kernels_access_values_in_16_bytes_and_scattered_codes_in_8(accesses_of, architecture, way):
    # With lists in the parameters no load of one looks like a scatter's of staging.
    kernels = {kind: converting(way, [number], listed=LISTED) for kind, number in KINDS.items()}
    for kind, accesses in accesses_of(kernels, architecture).items():
        units = cuda_convert.UNITS[WAYS[way]]
        payload = [access for access in accesses if access not in TABLES | SCALES]
        if way == "gather":
            pool = 4 * units if kind == "token head" else 2 * units  # long heads are read once more
            expected = [PAYLOAD_LOAD] * pool + [PAYLOAD_STORE] * units
        else:  # two lanes a unit
            expected = [CODES_LOAD] * 2 * units + [PAYLOAD_STORE] * 2 * units
        assert sorted(payload) == expected, kind


SEVERAL_KINDS = [(3,), (4,), (0, 1), (0, 3), (0, 5), (0, 1, 4)]


@by_architecture
@pytest.mark.parametrize("kinds", rows(SEVERAL_KINDS, full={(4,), (0, 1), (0, 3)}), ids=str)
def test_converting_kernels_of_several_kinds_and_widths_fit_their_registers(accesses_of, architecture, kinds):
    kernels = {
        key: converting(way, kinds, access, listed)
        for key in product(["gather", "scatter"], range(cuda_convert.BYTES + 1), [0, LISTED_LARGE][1 - everything :])
        for way, access, listed in [key]
    }
    accesses_of(kernels, architecture, most_registers=64 if len(kinds) == 1 else 128, code=False)


@by_architecture
def test_sums_of_staged_cells_fit_their_registers(accesses_of, architecture):
    more = cuda_convert.sum_macros(CudaRuntime) | {"PDSTAGE_UNITS": cuda_convert.SUM_UNITS}
    kernels = {n: (cuda_convert.SUM_SOURCE, macros("gather", "token-major", n) | more) for n in (0, 1)}
    for narrow, accesses in accesses_of(kernels, architecture).items():
        assert accesses.count(PAYLOAD_LOAD) == (0 if narrow else cuda_convert.SUM_UNITS)
