"""Everything of the GPU benchmark but its numbers: the shapes, the rows, and the sections run in small on the CPU."""

from __future__ import annotations

import json
import math
import os
import signal
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from pdstage.bench import curves, gpu_compile, gpu_kernels, gpu_rooms, runner, shapes
from tests import processes

torch = pytest.importorskip("torch")

from pdstage.bench import convert  # noqa: E402  (needs torch)
from pdstage.bench.bed import Bed  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = 1 << 20


@pytest.fixture
def bed():
    return Bed("cpu")


@pytest.mark.parametrize(
    ("curve", "wanted", "least"),
    [
        ({1: 30.0, 2: 60.0, 4: 100.0}, 60, 2),
        ({1: 30.0, 2: 60.0, 4: 100.0}, 80, 3),
        ({8: 120.0, 2: 60.0}, 61, 3),
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
    assert {key: row.target for key, row in needed.items()} == {
        (way, n): target for way in ("gather", "scatter") for n, target in ((50, 2), (400, 16))
    }
    rows = finite(convert.rows(bed, True))
    assert {(row.point["format"], row.point["way"]) for row in rows} == {
        (format, way) for format in convert.FORMATS for way in ("gather", "scatter")
    }
    rows = finite(gpu_kernels.fused(bed, True, TINY))
    assert {row.point["table"] for row in rows} == {"checksum", "copy_to"}
    rows = finite(gpu_kernels.launch(bed, True, 64))
    assert [row.target for row in rows] == [15, 15]


def test_a_wrong_kernel_is_not_timed(bed, monkeypatch):
    case = gpu_kernels.runs_case(bed, 256, TINY)
    bed.variants = ["host", "wrong"]
    good = case.gathered
    monkeypatch.setattr(case, "gathered", lambda v: good("host") if v == "host" else good("host").add_(1))
    with pytest.raises(RuntimeError, match="wrong and host gather different bytes"):
        case.check_agreement()


@pytest.mark.parametrize("transport", ["local", pytest.param("nixl", marks=pytest.mark.full)])
def test_rooms_between_two_processes(bed, monkeypatch, transport):
    """In small, on the CPU: the bytes are compared in there."""
    monkeypatch.setattr(gpu_rooms, "TRANSPORTS", (transport,))
    pytest.importorskip("msgspec")
    pytest.importorskip("zmq")
    rows = finite(gpu_rooms.rows(bed, True))
    left_out = {said.partition(":")[0].removeprefix("rooms, ") for said in bed.left_out}
    assert {row.point["transport"] for row in rows} | left_out == {transport}
    assert {row.point["what"] for row in rows} == {"first", "a room", "8 rooms at once", "one page"}
    assert {row.point["progress"] for row in rows} == {"thread", "inline"}


def test_rooms_on_the_double_of_a_device(tmp_path):
    """Compared byte for byte, and then timed."""
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
    out = processes.python(str(script), check=True, timeout=300).stdout
    rows = json.loads(out.splitlines()[-1])
    assert {row["point"]["what"] for row in rows} == {"first", "a room", "8 rooms at once", "one page"}


def test_a_killed_process_ends_the_compiling(bed, monkeypatch):
    monkeypatch.setattr(gpu_compile, "compile_all", _killed)
    with pytest.raises(BrokenProcessPool):
        list(gpu_compile.rows(bed, True))


def _killed(device, jobs):
    os.kill(os.getpid(), signal.SIGKILL)


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
        "pdstage.cli.parser().parse_args(['bench', 'gpu'])\n"
        "sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', '--collect-only', 'tests/gpu']))"
    )
    env = {**runner.environment(), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    processes.python("-c", code, check=True, cwd=ROOT, env=env)
