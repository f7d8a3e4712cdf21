"""The machine code of the CUDA kernels, for several generations of GPUs: access widths, registers, spills. No GPU.

In a kernel of 16-byte accesses or wider every store is payload, and payload loads are those that L1 does not keep
(`NA`). What else it loads, by how the source reads it:
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from itertools import product

import pytest

from pdstage.bench.instructions import SHAPES, WAYS, tool
from pdstage.kernels import cuda_convert, cuda_copy, nvrtc
from pdstage.kernels.cuda_tables import LISTED, LISTED_LARGE
from pdstage.kernels.cupy_runtime import CupyRuntime
from tests.rows import rows

TABLES = {"LDG.E", "LDG.E.64", "LD.E", "LD.E.64"}  # Params, Group, View
INDEX_LISTS = {"LDG.E.CONSTANT", "LDG.E.64.CONSTANT"}  # table()
PAYLOAD_LOAD, PAYLOAD_STORE = "LDG.E.NA.128.CONSTANT", "STG.E.NA.128"
PAYLOAD_LOAD_32, PAYLOAD_STORE_32 = "LDG.E.NA.ENL2.256.CONSTANT", "STG.E.NA.ENL2.256"
ACCESS = re.compile(r"\b((?:LDG?|STG?|LDL|STL|ATOM\w*|UBLKCP)(?:\.\w+)*)\s")
ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]
ARCHITECTURES_32 = ["sm_100", "sm_103", "sm_120"]
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("cupy") is None or nvrtc.missing() != "", reason="needs CuPy and NVRTC"
    ),
    pytest.mark.skipif(not (tool("cuobjdump") and tool("nvdisasm")), reason="needs cuobjdump and nvdisasm"),
]


def said(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def macros(way, shape, narrow=0, summed=0, listed=0):
    flat, head_major = SHAPES[shape]
    return {
        "PDSTAGE_WAY": WAYS[way],
        "PDSTAGE_FLAT": flat,
        "PDSTAGE_HEAD_MAJOR": head_major,
        "PDSTAGE_NARROW": narrow,
        "PDSTAGE_SUM": summed,
        "PDSTAGE_LISTED": listed,
        "PDSTAGE_MANY": 0,
    }


def plain(way, shape, narrow, summed, listed=0, access=16):
    more = cuda_copy.plain_macros(CupyRuntime, WAYS[way], summed=bool(summed), access=access)
    return cuda_copy.SOURCE, macros(way, shape, narrow, summed, listed) | more


def bulk(way, shape, listed=0):
    return cuda_copy.BULK_SOURCE, macros(way, shape, listed=listed) | cuda_copy.bulk_macros(CupyRuntime)


@pytest.fixture(scope="module")
def inspect(tmp_path_factory, request):
    """(registers, stack bytes, accesses in order) of a kernel; images are kept from one run to the next."""
    folder = tmp_path_factory.mktemp("cubin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSTAGE_CACHE_DIR", str(request.config.cache.mkdir("pdstage-nvrtc")))

        def found(name, defines, architecture):
            path = folder / "kernel.cubin"
            path.write_bytes(nvrtc.compile_kernel(name, defines, architecture))
            usage = said(tool("cuobjdump"), "-res-usage", path)
            code = said(tool("nvdisasm"), "-c", path)
            registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()
            return int(registers), int(stack), ACCESS.findall(code)

        yield found


@pytest.mark.parametrize("architecture", rows(ARCHITECTURES, full={"sm_100"}))
@pytest.mark.parametrize(("way", "shape", "summed"), list(product(WAYS, SHAPES, (0, 1))))
def test_16_byte_kernels_access_payload_in_16_bytes_only(inspect, architecture, way, shape, summed):
    registers, stack, accesses = inspect(*plain(way, shape, 0, summed), architecture)
    assert stack == 0
    assert registers <= 64
    units = cuda_copy.units(WAYS[way], summed=bool(summed))
    payload = [access for access in accesses if access not in TABLES | INDEX_LISTS]
    assert payload == [PAYLOAD_LOAD] * units + [PAYLOAD_STORE] * units, "every load is issued before the first store"


@pytest.mark.parametrize("architecture", rows(ARCHITECTURES_32, full={"sm_103", "sm_120"}))
@pytest.mark.parametrize(("way", "shape", "summed"), list(product(WAYS, SHAPES, (0, 1))))
def test_32_byte_kernels_access_payload_in_32_bytes_only(inspect, architecture, way, shape, summed):
    for many, listed in product((0, 1) if way == "gather" else (0,), (0,) if way == "copy" else (0, LISTED_LARGE)):
        name, defines = plain(way, shape, 0, summed, listed, access=32)
        registers, stack, accesses = inspect(name, defines | {"PDSTAGE_MANY": many}, architecture)
        assert stack == 0
        assert registers <= 64
        n = cuda_copy.units(WAYS[way], summed=bool(summed), access=32) // 2
        payload = [access for access in accesses if access not in TABLES | INDEX_LISTS]
        assert payload == [PAYLOAD_LOAD_32] * n + [PAYLOAD_STORE_32] * n


@pytest.mark.parametrize("architecture", rows(ARCHITECTURES, full={"sm_100"}))
@pytest.mark.parametrize(("way", "shape", "summed"), list(product(WAYS, SHAPES, (0, 1))))
def test_narrow_kernels_fit_their_registers(inspect, architecture, way, shape, summed):
    registers, stack, accesses = inspect(*plain(way, shape, 1, summed), architecture)
    assert stack == 0
    assert registers <= 64
    assert not {PAYLOAD_LOAD, PAYLOAD_STORE} & set(accesses), "groups of 16-byte access have a launch of their own"


@pytest.mark.parametrize("architecture", rows(ARCHITECTURES[1:], full={"sm_100"}))
@pytest.mark.parametrize(("way", "shape"), list(product(WAYS, SHAPES)))
def test_bulk_kernels_move_payload_past_the_registers(inspect, architecture, way, shape):
    registers, stack, accesses = inspect(*bulk(way, shape), architecture)
    assert stack == 0
    assert registers <= 64, "a CTA is alone on its multiprocessor, for its rings"
    assert {access for access in accesses if access not in TABLES | INDEX_LISTS} == {"UBLKCP.S.G", "UBLKCP.G.S"}


@pytest.mark.parametrize("architecture", rows(ARCHITECTURES, full={"sm_100"}))
@pytest.mark.parametrize(("way", "shape"), list(product(["gather", "scatter"], SHAPES)))
@pytest.mark.parametrize("room", [LISTED, LISTED_LARGE])
def test_kernels_with_lists_in_their_parameters_read_no_list_and_fit_their_registers(
    inspect, architecture, way, shape, room
):
    kernels = [plain(way, shape, narrow, summed, room) for narrow, summed in product((0, 1), (0, 1))]
    kernels += [bulk(way, shape, room)] if architecture != "sm_80" else []
    for kernel in kernels:
        registers, stack, accesses = inspect(*kernel, architecture)
        assert stack == 0
        assert registers <= 64
        if not kernel[1]["PDSTAGE_NARROW"]:
            assert not INDEX_LISTS & set(accesses)


@pytest.mark.parametrize("architecture", rows(ARCHITECTURES, full={"sm_100"}))
@pytest.mark.parametrize("shape", SHAPES)
def test_gathers_to_several_destinations_read_once_and_fit_their_registers(inspect, architecture, shape):
    for narrow, summed, listed in product((0, 1), (0, 1), (0, LISTED_LARGE)):
        name, defines = plain("gather", shape, narrow, summed, listed)
        registers, stack, accesses = inspect(name, defines | {"PDSTAGE_MANY": 1}, architecture)
        assert stack == 0
        assert registers <= 64
        if not narrow:
            payload = [access for access in accesses if access not in TABLES | INDEX_LISTS]
            units = cuda_copy.units(cuda_copy.TO_STAGING, summed=bool(summed))
            assert payload == [PAYLOAD_LOAD] * units + [PAYLOAD_STORE] * units, "the stores are a loop"
        elif architecture != "sm_80" and not summed:
            name, defines = bulk("gather", shape, listed)
            registers, stack, accesses = inspect(name, defines | {"PDSTAGE_MANY": 1}, architecture)
            assert stack == 0
            assert registers <= 64
            assert {one for one in accesses if one not in TABLES | INDEX_LISTS} == {"UBLKCP.S.G", "UBLKCP.G.S"}


KINDS = {"tensor divide": 1, "tensor bf16": 2, "token head": 3, "mx floor": 4, "mx ceil": 5}
OF_ITSELF = {"ST.E", "ST.E.U8"}  # scales of a head, of a block
DECODED_SCALES = {"LDG.E.U8.CONSTANT"}


def converting(way, kinds, narrow=0, listed=0):
    more = cuda_convert.convert_macros(CupyRuntime, kinds) | {"PDSTAGE_UNITS": cuda_convert.UNITS[WAYS[way]]}
    return cuda_convert.SOURCE, macros(way, "token-major", narrow, listed=listed) | more


@pytest.mark.parametrize("architecture", rows(ARCHITECTURES, full={"sm_100"}))
@pytest.mark.parametrize(("way", "kind"), list(product(["gather", "scatter"], KINDS)))
def test_converting_kernels_access_values_in_16_bytes_only(inspect, architecture, way, kind):
    registers, stack, accesses = inspect(*converting(way, [KINDS[kind]]), architecture)
    assert stack == 0
    assert registers <= 64
    units = cuda_convert.UNITS[WAYS[way]]
    payload = [access for access in accesses if access not in TABLES | INDEX_LISTS | OF_ITSELF | DECODED_SCALES]
    pool = 4 * units if kind == "token head" and way == "gather" else 2 * units  # long heads are read once more
    loads, stores = (pool, units) if way == "gather" else (units, pool)
    assert sorted(payload) == [PAYLOAD_LOAD] * loads + [PAYLOAD_STORE] * stores


@pytest.mark.parametrize("architecture", rows(ARCHITECTURES, full={"sm_100"}))
@pytest.mark.parametrize("kinds", [[3], [4], [0, 1], [0, 3], [0, 5], [0, 1, 4]], ids=str)
@pytest.mark.parametrize(("way", "narrow"), list(product(["gather", "scatter"], [0, 1])))
def test_converting_kernels_of_several_kinds_and_widths_fit_their_registers(inspect, architecture, way, kinds, narrow):
    for listed in (0, LISTED_LARGE):
        registers, stack, _ = inspect(*converting(way, kinds, narrow, listed), architecture)
        assert stack == 0
        assert registers <= (64 if len(kinds) == 1 else 128)


@pytest.mark.parametrize("architecture", rows(ARCHITECTURES, full={"sm_100"}))
@pytest.mark.parametrize("narrow", [0, 1])
def test_sums_of_staged_cells_fit_their_registers(inspect, architecture, narrow):
    more = cuda_convert.sum_macros(CupyRuntime) | {"PDSTAGE_UNITS": cuda_convert.SUM_UNITS}
    defines = macros("gather", "token-major", narrow) | more
    registers, stack, accesses = inspect(cuda_convert.SUM_SOURCE, defines, architecture)
    assert stack == 0
    assert registers <= 64
    assert accesses.count(PAYLOAD_LOAD) == (0 if narrow else cuda_convert.SUM_UNITS)
