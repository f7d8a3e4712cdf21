"""SGLang's staging functions on pdstage's kernels, against its own, byte for byte.

Its own run on the CPU by torch.
What stands in: streams, which the CPU has not, and the list of devices that SGLang's `StagingBuffer` takes.
"""

from __future__ import annotations

import logging
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt import plugins
from sglang.srt.disaggregation.common import staging_buffer as theirs
from sglang.srt.plugins.hook_registry import HookRegistry

from pdstage.errors import UsageError
from pdstage.integrations.sglang import staging as ours

if TYPE_CHECKING:
    from collections.abc import Iterator

GATHER, SCATTER = "gather_all_layers_to_staging", "scatter_staging_to_kv"
OWN = {name: getattr(theirs, name) for name in (GATHER, SCATTER)}
FILL = 0xA5
ROOT = Path(__file__).resolve().parents[3]
BYTES = 0x7F  # on the CPU torch makes quiet NaNs of signalling ones as it gathers bf16: no byte begins one


class HostStream:
    """A stream of the CPU: everything put into it is done already."""

    device = torch.device("cpu")

    def wait_stream(self, stream: object) -> None:
        del stream

    def synchronize(self) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, "_STAGING_SUPPORTED_DEVICE_TYPES", ("cpu",))
        patch.setattr(theirs, "_USE_TRITON_STAGING", False)
        patch.setattr(theirs, "create_device_stream", lambda device: HostStream())
        patch.setattr(theirs.StagingBuffer, "producer_stream", lambda self: HostStream())
        yield


@st.composite
def cases(draw: st.DrawFn) -> SimpleNamespace:
    """A model, two TP sizes, pools and pages; one in some has bytes that pdstage leaves to SGLang."""
    src_tp, dst_tp = draw(
        st.sampled_from([(1, 2), (2, 1), (4, 2), (2, 4), (1, 4), (4, 1), (8, 2), (2, 8), (2, 2), (3, 1)])
    )
    total = draw(st.sampled_from([2, 4, 8])) if src_tp != 3 else 6
    return SimpleNamespace(
        src_tp=src_tp,
        dst_tp=dst_tp,
        total=total,
        dst_rank=draw(st.integers(0, dst_tp - 1)),
        n_layers=draw(st.integers(1, 3)),
        width=draw(
            st.sampled_from([(torch.bfloat16, 64), (torch.uint8, 128), (torch.float32, 32), (torch.bfloat16, 8)])
        ),
        page_size=draw(st.sampled_from([1, 4, 16])),
        n_pages=draw(st.integers(1, 9)),
        spare=draw(st.integers(0, 3)),
        integer=draw(st.sampled_from([np.int32, np.int64])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def pool(
    case: SimpleNamespace, tp: int, draws: np.random.Generator | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """K and V of all layers: random, or one value where the case draws none."""
    dtype, n_elements = case.width
    n_slots = (case.n_pages + case.spare + 1) * case.page_size + case.spare % case.page_size
    shape = (n_slots, max(1, case.total // tp), n_elements)

    def one() -> torch.Tensor:
        nbytes = int(np.prod(shape)) * dtype.itemsize
        memory = np.full(nbytes, FILL, np.uint8) if draws is None else draws.integers(0, BYTES, nbytes, np.uint8)
        return torch.from_numpy(memory).view(dtype).reshape(shape)

    return [one() for _ in range(case.n_layers)], [one() for _ in range(case.n_layers)]


def pages(case: SimpleNamespace, draws: np.random.Generator) -> np.ndarray:
    return draws.permutation(case.n_pages + case.spare + 1)[: case.n_pages].astype(case.integer)


def content(buffers: tuple[list[torch.Tensor], list[torch.Tensor]]) -> bytes:
    return b"".join(one.view(torch.uint8).numpy().tobytes() for side in buffers for one in side)


def staging(nbytes: int) -> theirs.StagingBuffer:
    made = theirs.StagingBuffer(nbytes, "cpu", 0)
    made.device = torch.device("cpu")  # it is "cpu:0", which the CPU's tensors do not say they are on
    made.buffer = torch.from_numpy(np.full(nbytes + 128, FILL, np.uint8))  # 128: nothing may be written behind
    return made


def writers(case: SimpleNamespace) -> range:
    return range(max(1, case.src_tp // case.dst_tp))


def one_life(case: SimpleNamespace, gather: object, scatter: object) -> tuple[bytes, bytes]:
    """What all writers of one decode rank stage, and what that rank's pool holds after the scatter."""
    draws = np.random.default_rng(case.seed)
    head_nbytes = case.width[0].itemsize * case.width[1]
    n_tokens = case.n_pages * case.page_size
    sizes = case.src_tp, case.dst_tp
    layout = theirs.compute_staging_layout(*sizes, case.dst_rank, case.total, n_tokens, head_nbytes, case.n_layers)
    region = np.full(layout[2] + 128, FILL, np.uint8)
    at = 0
    for rank, nbytes in zip(writers(case), layout[1], strict=True):
        start, n_heads, _, _ = theirs.compute_head_slice_params(*sizes, rank, case.dst_rank, case.total)
        out = staging(nbytes)
        k, v = pool(case, case.src_tp, draws)
        assert gather(k, v, pages(case, draws), out, start, n_heads, case.page_size) == nbytes
        region[at : at + nbytes] = out.buffer.numpy()[:nbytes]
        assert (out.buffer.numpy()[nbytes:] == FILL).all(), "written behind the end"
        at += nbytes
    target = pool(case, case.dst_tp, None)
    where = torch.from_numpy(pages(case, draws))
    scatter(torch.from_numpy(region), *target, where, case.page_size, *sizes, case.dst_rank, case.total)
    return region.tobytes(), content(target)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_the_same_bytes_as_sglangs_own(case: SimpleNamespace) -> None:
    """Staged, and in the pool; bytes beside the named heads and pages stay as they are."""
    staged, arrived = one_life(case, OWN[GATHER], OWN[SCATTER])
    got = one_life(case, ours.gather_all_layers_to_staging, ours.scatter_staging_to_kv)
    assert got[0] == staged
    assert got[1] == arrived


MODEL = SimpleNamespace(
    src_tp=2, dst_tp=1, total=4, dst_rank=0, n_layers=2, width=(torch.bfloat16, 64), page_size=4, n_pages=3, spare=1,
    integer=np.int32, seed=1,
)  # fmt: skip


@pytest.mark.parametrize("where", ["pages", "heads", "staging", "device"])
def test_a_gather_that_does_not_fit_writes_nothing(where: str) -> None:
    k, v = pool(MODEL, 2, np.random.default_rng(1))
    listed = np.array([0, 1, 99 if where == "pages" else 2], np.int32)
    out = staging(2 * 2 * 12 * 2 * 128)
    if where == "staging":
        out.buffer = out.buffer[: 2 * 2 * 12 * 2 * 128 - 1]
    if where == "device":
        k, v = ([one.to("meta") for one in side] for side in (k, v))
    with pytest.raises(UsageError):
        ours.gather_all_layers_to_staging(k, v, listed, out, 1 if where == "heads" else 0, 2, 4)
    assert (out.buffer == FILL).all()


@pytest.mark.parametrize("where", ["pages", "twice", "staging"])
def test_a_scatter_that_does_not_fit_writes_nothing(where: str) -> None:
    """Also where only the second writer's part would not: no page is half of one request."""
    target = pool(MODEL, 1, None)
    listed = torch.tensor([0, {"pages": 99, "twice": 0}.get(where, 1), 2], dtype=torch.int32)
    region = torch.zeros(2 * 2 * 2 * 12 * 2 * 128 - (where == "staging"), dtype=torch.uint8)
    with pytest.raises(UsageError):
        ours.scatter_staging_to_kv(region, *target, listed, 4, 2, 1, 0, 4)
    assert set(content(target)) == {FILL}


def test_no_pages_are_no_bytes() -> None:
    out = staging(128)
    k, v = pool(MODEL, 2, np.random.default_rng(1))
    assert ours.gather_all_layers_to_staging(k, v, np.empty(0, np.int32), out, 0, 2, 4) == 0
    target = pool(MODEL, 1, None)
    ours.scatter_staging_to_kv(out.buffer, *target, torch.empty(0, dtype=torch.int32), 4, 2, 1, 0, 4)
    assert set(content(target)) == {FILL}


@pytest.mark.parametrize("odd", ["width", "layers"])
def test_what_is_left_to_sglang_is_said_once(
    odd: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "_told", set())
    calls = []
    monkeypatch.setitem(ours._OWN, GATHER, lambda *args: calls.append(args) or 7)
    case = SimpleNamespace(**{**vars(MODEL), "width": (torch.uint8, 8), "page_size": 1, "n_pages": 1})
    k, v = pool(case if odd == "width" else MODEL, 2, None)
    if odd == "layers":
        v[1] = v[1][:-1]
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            out = staging(1 << 14)
            assert ours.gather_all_layers_to_staging(k, v, np.zeros(1, np.int32), out, 0, 2, 1) == 7
    assert len(calls) == 2
    assert [record.message for record in caplog.records if GATHER in record.message] == caplog.messages[:1]


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang's registry, empty, and its functions put back in the end."""
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(HookRegistry, "_hooks", type(HookRegistry._hooks)(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    held = {name: getattr(theirs, name) for name in OWN}
    yield
    for name, own in held.items():
        setattr(theirs, name, own)


def test_install_replaces_what_sglang_calls(hooks: None) -> None:
    """Both functions, which its backends import as they call them; what is left to SGLang still reaches its own."""
    ours.install_staging()
    with pytest.raises(UsageError):  # SGLang's own would read beyond the pool
        theirs.gather_all_layers_to_staging(*pool(MODEL, 2, None), np.array([99]), staging(1 << 14), 0, 2, 4)
    odd = SimpleNamespace(**{**vars(MODEL), "width": (torch.uint8, 8), "page_size": 1, "n_pages": 1})
    assert one_life(odd, getattr(theirs, GATHER), getattr(theirs, SCATTER)) == one_life(odd, *OWN.values())


@pytest.mark.parametrize("wanted", ["", "0", "1"])
def test_sglangs_loader_finds_the_plugin(wanted: str, hooks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point as pyproject.toml has it, through SGLang's own loader; it does nothing unless it is asked to."""
    monkeypatch.setenv("PDSTAGE_SGLANG_STAGING", wanted)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = project["entry-points"][plugins.GENERAL_PLUGINS_GROUP]
    point = EntryPoint("pdstage-staging", group["pdstage-staging"], plugins.GENERAL_PLUGINS_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [point] if group == point.group else [])
    plugins.load_plugins()
    replaced = [name for name, own in OWN.items() if getattr(theirs, name) is not own]
    assert replaced == (list(OWN) if wanted == "1" else [])
