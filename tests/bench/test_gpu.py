"""Everything of the GPU benchmark but its numbers: the shapes, the rows, and the sections run in small on the CPU."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdstage.bench import children, curves, gpu, gpu_compile, gpu_convert, gpu_ipc, gpu_kernels, gpu_rooms, shapes
from pdstage.bench.record import Record
from pdstage.bench.runner import Runner, Section
from pdstage.errors import UsageError
from pdstage.plan import Staging

torch = pytest.importorskip("torch")

from pdstage.bench.bed import Bed  # noqa: E402  (needs torch)

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = 1 << 20


@pytest.fixture
def bed():
    return Bed("cpu")


@pytest.mark.parametrize(
    ("curve", "wanted", "least"),
    [
        ({1: 30.0, 2: 60.0, 4: 100.0}, 50, 2),
        ({1: 30.0, 2: 60.0, 4: 100.0}, 60, 2),
        ({1: 30.0, 2: 60.0, 4: 100.0}, 80, 3),
        ({2: 60.0, 8: 120.0}, 61, 3),
        ({8: 120.0, 2: 60.0}, 120, 8),
        ({4: 90.0}, 50, 4),
        ({1: 30.0}, 50, None),
    ],
)
def test_a_curve_is_read_between_its_points(curve, wanted, least):
    assert curves.least_reaching(curve, wanted) == least


@pytest.mark.parametrize(
    ("bulk", "ahead"),
    [
        ({256: 1.0, 1024: 2.0, 4096: 5.0}, 4096),
        ({256: 9.0, 1024: 2.0, 4096: 4.0}, 4096),
        ({256: 3.0, 1024: 3.0}, 256),
        ({256: 3.0, 1024: 2.9}, None),
    ],
)
def test_bulk_copies_are_ahead_from_where_they_never_fall_behind_again(bulk, ahead):
    plain = {64: 3.0, 256: 3.0, 1024: 3.0, 4096: 4.0}
    assert curves.ahead_from(bulk, plain) == ahead
    assert gpu_kernels.bulk_ahead("gather", bulk, plain).value == (ahead or 2 * max(bulk))


def test_the_geometric_mean_is_of_ratios():
    assert curves.geometric_mean([0.5, 2.0]) == pytest.approx(1)
    assert curves.geometric_mean([2.0, 8.0]) == pytest.approx(4)
    assert math.isnan(curves.geometric_mean([]))


@pytest.mark.parametrize(
    ("name", "file"), [("NVIDIA H200", "nvidia-h200"), ("NVIDIA H100 80GB HBM3", "nvidia-h100-80gb-hbm3"), ("", "")]
)
def test_a_result_is_named_after_its_device(name, file):
    assert curves.slug(name) == file


@pytest.mark.parametrize("n_sms", [1, 16, 20, 132, 148])
def test_the_curve_ends_with_all_multiprocessors(n_sms):
    steps = curves.sm_steps(n_sms, quick=False)
    assert steps == sorted(set(steps))
    assert steps[-1] == n_sms


# Bytes of one token, and of one request's states, as the models' configurations give them.
TOKEN = {"Llama-70B": 80 * 2 * 8 * 256, "Qwen3-235B": 94 * 2 * 4 * 256, "DeepSeek-V3": 61 * 1152}
TOKEN["Qwen3-Next"] = 12 * 2 * 2 * 512
STATES = {"Qwen3-Next": 36 * (32 * 128 * 128 * 4 + 8192 * 3 * 2)}


@pytest.mark.parametrize("model", {pair.model.name: pair.model for pair in shapes.PAIRS}.values(), ids=str)
def test_models_have_the_sizes_of_their_configurations(model):
    layout = shapes.place(model, 1, 0, dict.fromkeys(model.components(), 1))
    nbytes = dict.fromkeys(model.components(), 0)
    for view in layout.views():
        nbytes[view.key.component] += view.rows_per_item * view.shards * view.shard_nbytes
    assert nbytes["kv"] == TOKEN[model.name] * model.page
    assert nbytes.get("mamba") == STATES.get(model.name)


@pytest.mark.parametrize("pair", shapes.PAIRS, ids=lambda pair: pair.name)
def test_writers_together_send_everything_once(pair):
    tokens = 3 * pair.model.page
    dst = shapes.place(pair.model, pair.dst_tp, 0, dict.fromkeys(pair.model.components(), 1))
    parts = shapes.sends(pair, tokens)
    got = [(key, shard) for part in parts for key, start, n in part.dst_select for shard in range(start, start + n)]
    assert sorted(got) == sorted((view.key, shard) for view in dst.views() for shard in range(view.shards))
    sizes = [Staging(dst, part.dst_select).nbytes(shapes.chunk(pair.model, tokens)) for part in parts]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("pair", [shapes.PAIRS[0], shapes.PAIRS[5], shapes.PAIRS[7]], ids=lambda pair: pair.name)
def test_what_a_pair_gathers_is_what_it_scatters(bed, pair):
    """Placed in memory, the bytes of a writer's shards arrive in the decode rank's."""
    tokens = 2 * pair.model.page
    part = shapes.sends(pair, tokens)[0]
    src = gpu_kernels.model_case(bed, pair, tokens, "gather")
    dst = gpu_kernels.model_case(bed, pair, tokens, "scatter", part=part)
    assert src.nbytes == dst.nbytes
    src.works("host")["gather"]()
    dst.staging.copy_(src.staging)
    dst.works("host")["scatter"]()
    back = dst.gathered("host")
    for at, n in _payload(dst):
        assert torch.equal(back[at : at + n], src.staging[at : at + n])


def _payload(case):
    """(offset, bytes) of each view's staged bytes, padding left out."""
    staging = Staging(case.layout, case.select)
    views = case.layout.by_key()
    for (key, _, count), at in zip(case.select, staging.offsets(case.tokens), strict=True):
        start, stop = case.tokens[key.component]
        yield at, (stop - start) * count * views[key].shard_nbytes


def test_runs_are_gathered_from_where_they_are(bed):
    case = gpu_kernels.runs_case(bed, 256, TINY)
    pools = case.memory.view(gpu_kernels.RUN_VIEWS, -1, 256)
    expected = pools[:, torch.from_numpy(case.items["kv"]).long()]
    assert torch.equal(case.gathered("host"), expected.reshape(-1))


def finite(rows):
    rows = list(rows)
    assert rows
    assert len({row.name for row in rows}) == len(rows), "a name twice"
    for row in rows:
        assert row.value > 0 and row.baseline > 0 and math.isfinite(row.ratio), row
        assert row.unit and row.detail and row.point["table"]
    json.dumps([row.to_dict() for row in rows], allow_nan=False)
    return rows


def test_sections_give_rows(bed):
    rows = finite(gpu_kernels.runs(bed, True, TINY))
    noise, *rows = rows
    assert noise.point["table"] == "noise"
    assert {row.point["run_nbytes"] for row in rows} == {64, 256, 4096}
    assert all((row.target == 0.9) == (row.point["run_nbytes"] >= 256) for row in rows)
    for row in (noise, *rows):
        assert row.quartiles[0] <= row.value <= row.quartiles[1]
        assert row.baseline_quartiles[0] <= row.baseline <= row.baseline_quartiles[1]
    rows = finite(gpu_kernels.models(bed, False, (shapes.PAIRS[5],), (128, 256)))
    assert {(row.point["way"], row.point["tokens"]) for row in rows} == {
        (way, n) for way in ("gather", "scatter") for n in (128, 256)
    }
    rows = finite(gpu_kernels.sms(bed, True, TINY))
    needed = {(row.point["way"], row.point["wanted"]): row for row in rows if row.point["table"] == "sms needed"}
    assert set(needed) == {(way, n) for way in ("gather", "scatter") for n in (50, 400)}
    assert {row.target for row in needed.values()} == {2, 16}
    rows = finite(gpu_ipc.rows(bed, True, TINY))
    assert {row.point["run_nbytes"] for row in rows} == set(gpu_ipc.RUN_NBYTES)
    rows = finite(gpu_kernels.launch(bed, True, 64))
    assert [row.target for row in rows] == [15, 15]


@pytest.mark.parametrize("n_sms", [1, 14, 132])
def test_sms_that_never_reach_it_miss_the_target(n_sms):
    row = gpu_kernels.needed(n_sms, ("gather", "triton", 256), {1: 5.0, n_sms: 300.0}, 400)
    assert row.value > n_sms
    assert row.met is False
    assert "300 GB/s" in row.detail


def test_a_wrong_kernel_is_not_timed(bed, monkeypatch):
    case = gpu_kernels.runs_case(bed, 256, TINY)
    bed.variants = ["host", "wrong"]
    good = case.gathered
    monkeypatch.setattr(case, "gathered", lambda v: good("host") if v == "host" else good("host").add_(1))
    with pytest.raises(RuntimeError, match="wrong and host gather different bytes"):
        case.check_agreement()


def test_a_section_runs_in_a_child(tmp_path):
    """With nothing installed but numpy and torch, and no extension: as on a bare machine."""
    record = Record([], machine={})
    with (tmp_path / "log").open("w") as log:
        running = Runner(record, log, stop_at=time.monotonic() + 600, device="cpu", quick=True)
        running.run([Section("launch", 600.0)])
    assert not record.report["failed"]
    assert [row.point["variant"] for row in record.rows] == ["host"] * len(record.rows)


@pytest.mark.parametrize("transport", ["local", pytest.param("nixl", marks=pytest.mark.full)])
def test_rooms_between_two_processes(bed, monkeypatch, transport):
    """In small, on the CPU: the bytes are compared in there."""
    assert set(gpu_rooms.TRANSPORTS) == {"local", "nixl"}
    monkeypatch.setattr(gpu_rooms, "TRANSPORTS", (transport,))
    pytest.importorskip("msgspec")
    pytest.importorskip("zmq")
    rows = finite(gpu_rooms.rows(bed, True))
    left_out = {said.partition(":")[0].removeprefix("rooms, ") for said in bed.left_out}
    assert {row.point["transport"] for row in rows} | left_out == {transport}
    assert {row.point["what"] for row in rows} == {"first", "a room", "8 rooms at once", "one page"}
    assert {row.point["progress"] for row in rows} == {"thread", "inline"}


def test_pieces_by_the_gpus_rate_stand_beside_those_by_the_hosts(bed, monkeypatch):
    pytest.importorskip("msgspec")
    pytest.importorskip("zmq")
    monkeypatch.setattr(gpu_rooms, "TRANSPORTS", ("local",))
    rows = finite(gpu_rooms.pieces(bed, True))
    assert {row.point["what"] for row in rows} | {"one page"} == {"first", "a room", "8 rooms at once", "one page"}
    assert {(row.point["table"], row.point["progress"]) for row in rows} == {("pieces", "thread")}
    assert all(row.baseline > 0 for row in rows)


def test_rooms_on_the_double_of_a_device(tmp_path):
    """Compared byte for byte, and then timed: no page is faster than the double's own copies of it."""
    cuda_double = pytest.importorskip("tests.cuda_double")
    if why := cuda_double.missing():
        pytest.skip(why)
    script = tmp_path / "rooms.py"
    script.write_text(
        "import json; from pdstage.bench import gpu_rooms\n"
        "if __name__ == '__main__':\n"
        "    gpu_rooms.TRANSPORTS, gpu_rooms.PROGRESS = ('local',), ('inline',)\n"
        "    gpu_rooms.ROOM_NBYTES = gpu_rooms._LARGE_NBYTES = 4 << 20\n"
        "    found = gpu_rooms.run(True, gpu_rooms.DOUBLE)\n"
        "    print(json.dumps([row.to_dict() for row in found.rows]))\n"
    )
    out = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=300).stdout
    rows = {row["point"]["what"]: row for row in json.loads(out.splitlines()[-1])}
    assert set(rows) == {"first", "a room", "8 rooms at once", "one page"}
    costs = gpu_rooms.COSTS
    least_us = 2 * (costs["us:cuLaunchKernel"] + costs["copy_us"]) + 2 * (2 << 20) / (1e3 * costs["copy_gbps"])
    assert rows["one page"]["value"] > least_us


@pytest.mark.full
def test_a_room_of_other_bytes_is_no_measurement(bed, monkeypatch):
    pytest.importorskip("msgspec")
    monkeypatch.setattr(gpu_rooms, "TRANSPORTS", ("local",))
    monkeypatch.setattr(gpu_rooms, "_run", lambda *_: (1.0, False))
    with pytest.raises(RuntimeError, match="a room arrived with other bytes than were sent"):
        list(gpu_rooms.rows(bed, True))


def test_conversions_are_measured_beside_plain_copies(bed):
    rows = finite(gpu_convert.rows(bed, True))
    assert {(row.point["format"], row.point["way"]) for row in rows} == {
        (format, way) for format in gpu_convert.FORMATS for way in ("gather", "scatter")
    }


def test_gathers_to_several_stand_beside_as_many_to_one(bed, monkeypatch):
    rows = list(gpu_kernels.several(bed, True, TINY))
    assert [row.point["max_sms"] for row in rows] == [8, None]
    assert {(row.point["n"], row.point["variant"]) for row in rows} == {(4, "host")}
    assert all(row.value > 0 and row.baseline > 0 for row in rows)
    monkeypatch.setattr(gpu_kernels.Case, "gathered", lambda *_: torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="other bytes to 4 destinations"):
        next(gpu_kernels.several(bed, True, TINY))


def test_every_kind_of_plan_is_compiled_and_one_that_fails_is_named(bed, monkeypatch):
    jobs = gpu_compile.jobs(["cuda plain", "triton"])
    assert len(set(jobs)) == len(jobs)
    assert {(job.order, job.checksum) for job in jobs if job.variant == "triton"} == {
        (order, checksum) for order in ("token", "head") for checksum in (False, True)
    }
    assert {job.pair for job in jobs if job.way} == set(range(len(shapes.PAIRS)))
    some = [job for job in gpu_compile.jobs(["host"]) if job.run_nbytes in {1, 12, 256}]
    assert gpu_compile.compile_all("cpu", some)[1] == []

    def broken(*args, **options):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(gpu_compile, "plan_of", broken)
    took, failed = gpu_compile.compile_all("cpu", some[:2])
    assert took >= 0
    assert len(failed) == 2
    assert "RuntimeError: no kernel image" in failed[0]
    assert "run_nbytes=1" in failed[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_is_refused():
    with pytest.raises(UsageError, match="no CUDA device"):
        gpu.run(True)


def test_bench_and_gpu_tests_need_nothing_but_numpy_torch_and_pytest():
    """No msgspec, zmq, hypothesis or compiled extension: the machine with the GPU may have none of them."""
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name in ('msgspec', 'zmq', 'hypothesis', 'pdstage._native', 'rich', 'transformers'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import pytest, pdstage.cli, pdstage.bench.gpu, pdstage.bench.gpu_beside, pdstage.bench.prove\n"
        "import pdstage.bench.peers.sglang\n"
        "pdstage.cli.parser().parse_args(['bench', 'gpu'])\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '--collect-only', 'tests/gpu', 'bench/micro']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**children.environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
