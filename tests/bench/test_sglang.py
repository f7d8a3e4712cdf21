"""The comparison with SGLang, on a stand-in file of the same functions: what is loaded, recorded and compared.

The stand-in's launches are plain Python; nothing of SGLang is needed or kept.
"""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")

from pdstage.bench import harness, shapes  # noqa: E402  (needs torch)
from pdstage.bench.bed import Bed  # noqa: E402
from pdstage.bench.peers import sglang  # noqa: E402
from pdstage.environment import SGLANG  # noqa: E402
from pdstage.errors import UsageError  # noqa: E402

STAND_IN = """
import torch
from sglang.kernels.ops.memory.ptr_table import make_ptr_table
from sglang.srt.environ import envs
from sglang.srt.utils import create_device_stream, device_stream_context

USE_TRITON = not envs.SOME_SETTING.get()
calls = []


class JITFunction:
    def __init__(self, run):
        self.run = run

    def __getitem__(self, grid):
        return self.run


class StagingBuffer:
    def __init__(self, size_bytes, device, gpu_id):
        self.buffer = torch.zeros(size_bytes, dtype=torch.uint8)


def slots(pages, page_size):
    return (pages.reshape(-1, 1) * page_size + torch.arange(page_size)).reshape(-1)


@JITFunction
def gather_kernel(buffers, where, out, start, n):
    out.copy_(torch.cat([b[where, start : start + n].reshape(-1) for b in buffers]).view(torch.uint8))


@JITFunction
def scatter_kernel(buffers, where, staged, starts, n):
    parts = staged.view(buffers[0].dtype).view(len(starts), len(buffers), where.numel(), n, -1)
    for start, part in zip(starts, parts):
        for b, rows in zip(buffers, part):
            b[where, start : start + n] = rows


def gather_all_layers_to_staging(
    k_buffers, v_buffers, page_indices_np, staging_buffer, src_head_start, num_heads, page_size
):
    calls.append("gather")
    where = slots(torch.from_numpy(page_indices_np).long(), page_size)
    gather_kernel[1](k_buffers + v_buffers, where, staging_buffer.buffer, src_head_start, num_heads)


def compute_head_slice_params(src_tp, dst_tp, src_rank, dst_rank, total):
    n, held = total // max(src_tp, dst_tp), total // dst_tp
    return (0, n, src_rank * n % held, n) if src_tp > dst_tp else (dst_rank * n % (total // src_tp), n, 0, n)


def scatter_staging_to_kv(
    staging_buffer_view, k_buffers, v_buffers, page_idx_tensor, page_size,
    prefill_attn_tp_size, decode_attn_tp_size, dst_tp_rank, total_kv_heads,
):
    calls.append("scatter")
    writers = max(1, prefill_attn_tp_size // decode_attn_tp_size)
    n = k_buffers[0].shape[1] // writers
    where = slots(page_idx_tensor, page_size)
    scatter_kernel[1](k_buffers + v_buffers, where, staging_buffer_view, [w * n for w in range(writers)], n)
"""
TINY = shapes.Model(
    "tiny", tuple(shapes.Block("kv", range(2), (shapes.Array(role, "kv_head", 8, 256),)) for role in "kv"), page=4
)


@pytest.fixture
def bed():
    return Bed("cpu")


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "x" / sglang.FILE.name
    file.parent.mkdir()
    file.write_text(STAND_IN)
    return file


@pytest.fixture
def peer(path):
    return sglang.Peer(path)


def test_the_file_is_found_by_its_folder_or_itself(path, monkeypatch):
    for given in (path, path.parent.parent):
        monkeypatch.setenv(SGLANG.name, str(given))
        assert sglang.find() == path
    monkeypatch.setenv(SGLANG.name, str(path.parent.parent / "y"))
    with pytest.raises(UsageError, match=r"PDSTAGE_SGLANG='.*/y': there is no such file or folder"):
        sglang.find()


def test_without_it_the_comparison_is_left_out(monkeypatch, bed, tmp_path):
    monkeypatch.setenv(SGLANG.name, str(tmp_path))
    assert list(sglang.rows(bed, True)) == []
    assert len(bed.left_out) == 1
    assert "SGLang" in bed.left_out[0]


def test_stand_ins_for_its_imports_do_not_stay(path):
    before = {name for name in sys.modules if name.partition(".")[0] == "sglang"}
    assert sglang.Peer(path).module.USE_TRITON is True
    assert {name for name in sys.modules if name.partition(".")[0] == "sglang"} == before


@pytest.mark.parametrize("tp", [(4, 8), (8, 4), (2, 4)], ids=str)
def test_both_sides_move_the_same_bytes(bed, peer, tp):
    pair = shapes.Pair(TINY, *tp)
    rows = [*sglang._gathers(bed, peer, pair, 24), *sglang._scatters(bed, peer, pair, 24)]
    assert {(row.point["way"], row.point["what"]) for row in rows} == {
        (way, what) for way in ("gather", "scatter") for what in ("kernel", "whole call")
    }
    assert all(row.ratio > 0 for row in rows)
    in_its_place = [row.point["what"] for row in rows if row.point["variant"] == sglang.DROP_IN]
    assert in_its_place == ["whole call", "whole call"]
    assert [row.point["way"] for row in sglang.means(rows)] == ["gather", "scatter"]


def test_other_bytes_are_not_timed(bed, peer):
    peer.module.gather_kernel._kernel.run = lambda buffers, where, out, start, n: out.fill_(1)
    with pytest.raises(RuntimeError, match="SGLang gather different bytes"):
        list(sglang._gathers(bed, peer, shapes.Pair(TINY, 4, 8), 24))


def test_other_bytes_in_its_place_are_not_timed(bed, peer):
    def gather_all_layers_to_staging(
        k_buffers, v_buffers, page_indices_np, staging_buffer, src_head_start, num_heads, page_size
    ):
        staging_buffer.buffer.fill_(1)

    peer.drop_in.gather_all_layers_to_staging = gather_all_layers_to_staging
    with pytest.raises(RuntimeError, match="takes the place of SGLang's gathers different bytes"):
        list(sglang._gathers(bed, peer, shapes.Pair(TINY, 4, 8), 24))


def test_kernels_are_repeated_without_the_call(bed, peer):
    case = sglang.model_case(bed, shapes.Pair(TINY, 4, 8), 24, "gather")
    out = peer.module.StagingBuffer(case.nbytes, "cpu", 0)
    again = peer.kernels_of(sglang.gather_call(peer, shapes.Pair(TINY, 4, 8), case, out))
    assert peer.module.calls == ["gather"]
    expected = out.buffer.clone()
    out.buffer.zero_()
    again()
    assert torch.equal(out.buffer, expected)
    assert peer.module.calls == ["gather"]


def test_the_target_is_of_the_geometric_mean_of_kernels_alone():
    rows = [
        harness.Row(
            name="", value=value, baseline=1.0, unit="GB/s", point={"what": what, "way": "gather", "variant": "v"}
        )
        for what, value in (("kernel", 1.0), ("kernel", 4.0), ("whole call", 100.0))
    ]
    (mean,) = sglang.means(rows)
    assert mean.value == pytest.approx(2.0)
    assert mean.met is True
    assert "of 2 shapes" in mean.name
