"""The one command for a GPU: what fails or hangs is told and stops nothing else, and what was measured is on disk."""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest

from pdstage.bench import children, gpu, kit, prove, runner
from pdstage.bench.children import Command
from pdstage.bench.record import DROPPED, Lines, Record
from pdstage.bench.runner import OUT, Runner, Section
from pdstage.errors import UsageError

ROOT = Path(prove.ROOT)
AT_MOST_FILES = 8


def row(name, value=2.0):
    return {"row": {"name": name, "value": value, "baseline": 1.0, "unit": "x", "detail": "d", "point": {"table": "t"}}}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine whose device and sections are told what to say; results go to folders of the test's."""
    told = {"device": "NVIDIA X1", "lines": {}, "ran": []}

    def section(self, one, stop_at):
        told["ran"].append(one.name)
        self.record.take(told["lines"].get(one.name, []))
        return [line["problem"] for line in told["lines"].get(one.name, []) if "problem" in line]

    monkeypatch.setattr(gpu, "device_name", lambda: told["device"])
    monkeypatch.setattr(Runner, "_section", section)
    monkeypatch.setattr(kit, "install", lambda: None)
    monkeypatch.setattr(prove, "RESULTS", tmp_path / "results")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return told


def read(tmp_path, name="nvidia-x1", folder="out"):
    return json.loads((tmp_path / folder / f"{name}.json").read_text())


def test_what_would_be_missed_most_comes_first(machine, tmp_path):
    assert prove.main([]) == 0
    first = ["compile", "smoke", "runs", "launch", "rooms", "sms", "sglang", "models", "tests", "streams", "vllm"]
    assert machine["ran"] == [*first, "demo", "fused", "convert", "ipc", "decode", "gemm", "pieces"]
    for folder in ("results", "out"):
        report = read(tmp_path, folder=folder)
        assert report["finished"] is True
        assert [one["state"] for one in report["sections"]] == ["done"] * len(machine["ran"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["nvidia-x1.json", "nvidia-x1.log"]


def test_every_file_of_gpu_tests_is_run_once():
    files = [path for section in prove.sections() if section.name != "smoke" for path in section.tests]
    folders = "tests/gpu", "tests/engines/vllm"
    assert sorted(files) == sorted(
        str(path.relative_to(ROOT)) for one in folders for path in (ROOT / one).glob("test_*.py")
    )
    assert {section.name for section in prove.sections() if not section.tests} == gpu.SECTIONS.keys()


def test_the_tests_keep_their_time_and_all_ends_before_a_command_may_last():
    kept = {section.name: section.keeps_s for section in prove.sections()}
    assert kept["streams"] == 60
    assert kept["tests"] >= 90
    assert prove.BUDGET_S <= 560, "a borrowed machine's command ends after 600 s, its start included"


def test_a_section_that_fails_is_told_and_stops_nothing(machine, tmp_path, capsys):
    machine["lines"] = {"runs": [row("kept"), {"problem": "exit code -6: illegal address"}]}
    assert prove.main([]) == 1
    assert machine["ran"][-1] == "pieces"
    report = read(tmp_path)
    assert [one["name"] for one in report["rows"]] == ["kept"]
    assert report["failed"] == ["runs: exit code -6: illegal address"]
    assert "FAILED runs: exit code -6: illegal address" in capsys.readouterr().out


def test_tests_are_counted_and_skips_have_reasons(machine, tmp_path):
    def of(name, outcome, why=""):
        return {"test": f"tests/gpu/test_a.py::{name}", "outcome": outcome, "why": why}

    machine["lines"]["tests"] = [
        of("one", "passed"), of("two", "skipped", "no such thing"), of("three", "skipped", "no such thing"),
        of("four", "failed", "E assert 1 == 2"), of("five", "skipped", "needs 2 CUDA devices, this machine has 1"),
    ]  # fmt: skip
    prove.main([])
    told = read(tmp_path)["tests"]
    assert {name: told[name] for name in ("passed", "failed", "skipped")} == {"passed": 1, "failed": 1, "skipped": 3}
    assert told["skips"] == [
        {"file": "tests/gpu/test_a.py", "why": "no such thing", "n": 2},
        {"file": "tests/gpu/test_a.py", "why": "needs 2 CUDA devices, this machine has 1", "n": 1},
    ]
    assert told["failures"] == [{"test": "tests/gpu/test_a.py::four", "why": "E assert 1 == 2"}]


SPACE_TRITON = {
    "test": "tests/gpu/test_space.py::test_it[triton-3]", "outcome": "skipped", "why": "torch finds no GPU"
}  # fmt: skip


@pytest.mark.parametrize(
    ("require", "lines", "missed"),
    [
        (
            "triton",
            {"tests": [SPACE_TRITON, SPACE_TRITON]},
            "triton: tests/gpu/test_space.py: torch finds no GPU (2 times)",
        ),
        ("cuda", {"tests": [SPACE_TRITON]}, ""),
        (
            "cuda",
            {"tests": [{**SPACE_TRITON, "test": "tests/gpu/test_space.py::test_it[cuda-bulk-3]"}]},
            "cuda: tests/gpu",
        ),
        ("cuda", {"runs": [{"left_out": ["cuda plain: install CuPy"]}]}, "cuda plain"),
        ("ipc", {"ipc": [{"left_out": ["ipc: msgspec is not installed"]}]}, "ipc: msgspec"),
        ("ipc", {"rooms": [{"left_out": ["rooms: zmq is not installed"]}]}, "rooms: zmq"),
        ("ipc", {"tests": [{**SPACE_TRITON, "test": "tests/gpu/test_local_ipc.py"}]}, "test_local_ipc.py"),
        ("ipc", {"rooms": [{"left_out": ["rooms, nixl: not here"]}]}, ""),
        ("nixl,demo", {"rooms": [{"left_out": ["rooms, nixl: not here"]}]}, "rooms, nixl"),
        ("", {"rooms": [{"left_out": ["cuda plain: not here", "triton: not here", "ipc: not here"]}]}, ""),
    ],
)
def test_a_skip_of_what_is_required_is_a_failure(machine, tmp_path, require, lines, missed):
    machine["lines"] = lines
    assert prove.main(["--require", require]) == (1 if missed else 0)
    failed = read(tmp_path)["failed"]
    assert len(failed) == bool(missed)
    assert not missed or (failed[0].startswith("required: ") and missed in failed[0])


def test_what_needs_two_gpus_is_no_skip_of_what_is_required(machine):
    why = "needs 2 CUDA devices, this machine has 1"
    machine["lines"]["tests"] = [{"test": "tests/gpu/test_local_ipc.py::t[peer-gpu]", "outcome": "skipped", "why": why}]
    assert prove.main(["--require", "cuda,triton,ipc"]) == 0


def test_a_section_without_time_is_dropped_by_name_and_others_keep_theirs(machine, tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(prove.time, "monotonic", lambda: now[0])
    section = Runner._section

    def slow(self, one, stop_at):
        now[0] = stop_at if one.name != "tests" else now[0] + 1  # all of the time that it is given
        return section(self, one, stop_at)

    monkeypatch.setattr(Runner, "_section", slow)
    assert prove.main(["--budget-s", "400", "--require", "demo"]) == 0
    report = read(tmp_path)
    states = {one["name"]: one["state"] for one in report["sections"]}
    assert states["runs"] == states["tests"] == states["streams"] == states["demo"] == "done"
    assert states["models"] == DROPPED
    assert next(one for one in report["sections"] if one["name"] == "models")["why"] == "no time was left"


def test_what_is_required_and_dropped_is_a_failure(machine):
    assert prove.main(["--budget-s", "1", "--require", "sglang"]) == 1
    assert machine["ran"] == []


def test_a_look_is_no_result(machine, tmp_path):
    assert prove.main(["--quick"]) == 0
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["nvidia-x1-quick.json"]


def test_no_device_is_told(machine, capsys):
    machine["device"] = ""
    assert prove.main([]) == 2
    assert prove.main(["--sanitize"]) == 0
    assert "sanitize: skipped: no CUDA device" in capsys.readouterr().err
    assert machine["ran"] == []


@pytest.mark.parametrize("option", ["--require", "--only"])
def test_an_unknown_name_is_refused(machine, capsys, option):
    with pytest.raises(SystemExit):
        prove.main([option, "everything"])
    assert f"{option} names 'everything'; choose of " in capsys.readouterr().err


def test_a_missing_sanitizer_is_skipped(machine, monkeypatch, capsys):
    monkeypatch.setattr(prove.shutil, "which", lambda name: None)
    assert prove.main(["--sanitize"]) == 0
    assert "sanitize: skipped: compute-sanitizer is not" in capsys.readouterr().out


def sanitizer(tmp_path, text):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\n{text}\n")
    tool.chmod(0o755)
    return str(tool)


def test_a_driver_that_refuses_the_sanitizer_is_told(machine, monkeypatch, tmp_path, capsys):
    tool = sanitizer(tmp_path, "echo 'Device not supported' >&2; exit 97")
    monkeypatch.setattr(prove.shutil, "which", lambda name: tool)
    assert prove.main(["--sanitize"]) == 0
    assert "cannot watch this device: Device not supported" in capsys.readouterr().out


@pytest.mark.parametrize(("code", "said"), [(0, "good"), (97, "exit code 97")])
def test_each_tool_runs_the_kernel_tests(machine, monkeypatch, tmp_path, capsys, code, said):
    asked = tmp_path / "asked"
    text = f'case "$*" in *pytest*) echo "$*" >> {asked}; exit {code};; esac; echo 6'
    monkeypatch.setattr(prove.shutil, "which", lambda name: sanitizer(tmp_path, text))
    assert prove.main(["--sanitize"]) == (1 if code else 0)
    assert [line.split()[1] for line in asked.read_text().splitlines()] == ["memcheck", "racecheck", "synccheck"]
    assert asked.read_text().count("tests/gpu/test_space.py") == 3
    printed = capsys.readouterr().out
    for check in ("memcheck", "racecheck", "synccheck"):
        assert f"sanitize: {check}: {said}" in printed


def run_tests(tmp_path, text, most_s=600.0):
    """The record, and the log, of one section whose one file of tests is `text`."""
    (tmp_path / "test_it.py").write_text(text)
    record = Record([tmp_path / "x.json"], machine={})
    with (tmp_path / "x.log").open("w") as log:
        running = Runner(record, log, stop_at=time.monotonic() + most_s, device="cuda:0", quick=True)
        running.run([Section("tests", most_s, (str(tmp_path / "test_it.py"),))])
    return json.loads((tmp_path / "x.json").read_text()), (tmp_path / "x.log").read_text()


GOOD = "import pytest\n@pytest.mark.gpu\ndef test_good(): pass\n"


def test_a_test_that_fails_is_told_with_its_last_line(tmp_path):
    report, log = run_tests(
        tmp_path, GOOD + "@pytest.mark.gpu\ndef test_bad(): assert 1 == 2\ndef test_other(): assert False\n"
    )
    assert report["sections"][0]["state"] == "failed"
    assert report["failed"][0].startswith(f"tests: {tmp_path}/test_it.py: exit code 1")
    assert "assert 1 == 2" in log
    assert "test_other" not in log, "it needs no GPU"
    skipped = report["tests"]["skipped"]  # where there is no GPU both of them are
    assert skipped == 2 or (report["tests"]["passed"], report["tests"]["failed"]) == (1, 1)


def test_a_file_that_cannot_be_imported_is_skipped_by_name_or_failed(tmp_path):
    report, _ = run_tests(tmp_path, "import pytest\npytest.importorskip('no_such_module')\n")
    assert report["sections"][0]["state"] == "done"
    assert "no_such_module" in report["tests"]["skips"][0]["why"]
    report, _ = run_tests(tmp_path, "import no_such_module\n")
    assert report["sections"][0]["state"] == "failed"
    assert report["tests"]["failed"] == 1


def test_a_test_that_hangs_is_ended_and_those_after_it_are_counted(tmp_path):
    """What ended before it counts: the plugin writes as tests end, not at the end of all."""
    text = (
        "import threading\ndef test_first(): pass\ndef test_hangs(): threading.Event().wait()\ndef test_last(): pass\n"
    )
    (tmp_path / "test_it.py").write_text(text)
    record = Record([tmp_path / "x.json"], machine={})
    with (tmp_path / "x.log").open("w") as log:
        running = Runner(record, log, stop_at=time.monotonic() + 60, device="cpu", quick=True)
        running.run([Section("tests", 15.0, (str(tmp_path / "test_it.py"),))])
    report = json.loads((tmp_path / "x.json").read_text())
    assert report["failed"] == [f"tests: {tmp_path}/test_it.py: not done in the time it had"]
    assert report["tests"]["passed"] in (0, 1)  # 0 where the machine was too busy to begin
    assert report["tests"]["not_run"] in (0, 2)


def test_a_section_that_dies_is_run_a_kernel_at_a_time(tmp_path, monkeypatch):
    asked = []

    def bench(self, section, only, stop_at):
        asked.append(only)
        return ("" if only and only != ("cuda bulk",) else f"with {only}: illegal address"), True

    monkeypatch.setattr(Runner, "_bench", bench)
    record = Record([], machine={})
    with (tmp_path / "x.log").open("w") as log:
        running = Runner(record, log, stop_at=time.monotonic() + 60, device="cuda:0", quick=True)
        running.run([Section("runs", 30.0), Section("rooms", 30.0, by_kernel=False)])
    assert asked == [(), *((v,) for v in runner.variants.ON_GPU), ()]
    assert record.report["failed"] == ["runs: with ('cuda bulk',): illegal address", "rooms: with (): illegal address"]


def test_rows_of_a_process_that_died_are_kept(tmp_path):
    code = "import sys; open(sys.argv[1], 'w').write(sys.argv[2]); sys.exit('illegal address')"
    record = Record([tmp_path / "x.json"], machine={})
    with (tmp_path / "x.log").open("w") as log:
        running = Runner(record, log, stop_at=time.monotonic() + 60, device="cpu", quick=True)
        body = json.dumps(row("kept")) + '\n{"ro'
        (ended,) = running._children([Command("it", ["-c", code, OUT, body])], time.monotonic() + 600)
    assert (ended.code, ended.printed.strip()) == (1, "illegal address")
    assert [one["name"] for one in json.loads((tmp_path / "x.json").read_text())["rows"]] == ["kept"]


def test_what_has_no_number_is_null(tmp_path):
    record = Record([tmp_path / "x.json"], machine={})
    record.take([row("a", float("nan")), {"machine": {"gpu": {"least": float("-inf")}}}])
    record.write()
    held = json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)
    assert held["rows"][0]["value"] is None
    assert held["machine"]["gpu"]["least"] is None


def test_half_a_line_waits_for_the_other_half(tmp_path):
    lines, path = Lines(tmp_path / "x"), tmp_path / "x"
    assert lines.new() == []
    path.write_text('{"a": 1}\n{"b"')
    assert lines.new() == [{"a": 1}]
    with path.open("a") as file:
        file.write(": 2}\n")
    assert lines.new() == [{"b": 2}]
    assert lines.new() == []


# A run that is killed. A driver runs real sections of its own by the real Runner and Record, and is killed at drawn
# moments: whatever the moment, all that is asserted holds.

DRIVER = """
import json, sys, time
from pathlib import Path
from pdstage.bench import runner
from pdstage.bench.children import Command
from pdstage.bench.record import Record
from pdstage.bench.runner import OUT, Runner, Section

out = Path(sys.argv[1])
code = '''
import json, sys
for n in range(40):
    row = {"name": f"{sys.argv[2]} {n}", "value": 1.0, "baseline": 1.0, "unit": "x"}
    print(json.dumps({"row": row}), file=open(sys.argv[1], "a"), flush=True)
    print("line", n, flush=True)
'''

def bench(self, section, only, stop_at):
    self._children([Command(section.name, ["-c", code, OUT, section.name])], stop_at)
    return "", True

Runner._bench = bench
record = Record([out / "r.json"], name="gpu", machine={})
with (out / "r.log").open("w") as log:
    Runner(record, log, stop_at=time.monotonic() + 600, device="cpu", quick=True).run(
        [Section(f"section {n}", 600.0) for n in range(100)]
    )
"""


@pytest.mark.parametrize("seed", range(6))
def test_a_run_killed_at_any_moment_leaves_whole_json_with_all_sections_before(tmp_path, seed):
    """The moment is so many lines of the log after the start, and a drawn part of a second: no time is judged."""
    rng, out = random.Random(seed), tmp_path / "out"
    out.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(out)], cwd=ROOT, env=children.environment(), stdout=subprocess.PIPE,
        text=True, start_new_session=True,
    )  # fmt: skip
    with driver:
        said = [driver.stdout.readline() for _ in range(rng.randrange(4))]  # a line for each section that ended
        select.select([], [], [], rng.random() * 0.3)
        driver.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
        said += driver.stdout.read().splitlines()
    done = [line.partition(":")[0] for line in said if ": done in" in line]
    files = sorted(path.name for path in out.iterdir())
    assert set(files) <= {"r.json", "r.json.partial", "r.log"}
    if not (out / "r.json").exists():  # killed before anything began
        assert not done
        return
    report = json.loads((out / "r.json").read_text())
    states = {one["name"]: one["state"] for one in report["sections"]}
    assert all(states[name] == "done" for name in done)
    for name in done:
        assert sum(one["name"].startswith(f"{name} ") for one in report["rows"]) == 40
    assert [state for state in states.values() if state != "done"] in ([], ["running"])
    assert report["finished"] is False


def test_what_hangs_is_ended_with_all_it_started(tmp_path):
    """The grandchild holds a pipe's end; that end is closed with it."""
    held, begun = tmp_path / "held", tmp_path / "begun"
    os.mkfifo(held)
    reading = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    program = f"import subprocess; subprocess.run(['sh', '-c', 'exec 3>{held}; touch {begun}; exec sleep 6000'])"
    for most_s in (2, 10, 60, 300):  # the first that is long enough for it to begin
        with (tmp_path / "log").open("w") as log:
            (ended,) = children.call([Command("it", [sys.executable, "-c", program])], most_s, log)
        assert ended.code is None
        if begun.exists():
            break
    assert select.select([reading], [], [], 30)[0], "something still holds the pipe"
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_a_child_ends_with_whoever_started_it(tmp_path):
    """Even with one that is killed, and can end nothing any more."""
    held = tmp_path / "held"
    os.mkfifo(held)
    child = f"exec 3>{held}; echo up >&3; exec sleep 600"
    program = (
        "import sys\nfrom pdstage.bench.children import Command, call\n"
        f"call([Command('it', ['sh', '-c', {child!r}])], 600, sys.stderr)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=children.environment())
    with held.open("rb") as reading:
        assert reading.readline() == b"up\n"
        parent.kill()
        parent.wait()
        assert reading.read() == b"", "the end of the file: nobody holds it any more"


def test_it_runs_from_a_checkout():
    done = subprocess.run(
        [sys.executable, "-m", "pdstage.bench.prove", "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--require" in done.stdout


def test_sections_are_rehearsed_on_the_cpu(tmp_path, monkeypatch):
    """The same runner, children, log and JSON as on a GPU; what cannot be tried without one says so."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(prove, "SCRATCH", tmp_path)
    assert prove.main(["--rehearse", "--only", "launch,gemm", "--budget-s", "600"]) == 0
    report = read(tmp_path, "rehearsal", "")
    assert [(one["name"], one["state"]) for one in report["sections"]] == [("launch", "done"), ("gemm", "done")]
    assert report["device"] == "cpu"
    assert report["left_out"] == ["gemm: needs a GPU"]
    assert all(one["quartiles"] for one in report["rows"])
    assert "clocks" in report["sections"][0]
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) <= AT_MOST_FILES


def test_a_kit_brings_only_what_is_lacking(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "FOLDER", tmp_path)
    monkeypatch.setattr(kit, "UNPACKED", tmp_path / "unpacked")
    found = {"msgspec", "pytest", "rich"}
    monkeypatch.setattr(kit.importlib.util, "find_spec", lambda name: object() if name in found else None)
    kit.used.cache_clear()
    try:
        assert kit.paths() == []
        (tmp_path / "kit.json").write_text("{}")
        for name in ("msgspec", "zmq"):
            (tmp_path / f"packed/{name}").mkdir(parents=True)
            (tmp_path / f"packed/{name}/module.py").touch()
            shutil.make_archive(str(tmp_path / name), "zip", tmp_path / f"packed/{name}")
        (tmp_path / "sglang").mkdir()
        (tmp_path / "sglang/staging_buffer.py").write_text("")
        kit.used.cache_clear()
        supported = f"{sys.version_info.major}.{sys.version_info.minor}" in kit.PYTHONS
        assert kit.paths() == [str(tmp_path / "unpacked/zmq")] * supported
        assert (tmp_path / "unpacked/zmq/module.py").exists() == supported
        assert not (tmp_path / "unpacked/msgspec").exists()
        monkeypatch.delenv("PDSTAGE_SGLANG", raising=False)
        assert kit.variables() == {"PDSTAGE_SGLANG": str(tmp_path / "sglang/staging_buffer.py")}
        monkeypatch.setenv("PDSTAGE_SGLANG", "elsewhere")
        assert kit.variables() == {}
    finally:
        kit.used.cache_clear()


def test_a_kits_extension_is_put_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "FOLDER", tmp_path / "kit")
    monkeypatch.setattr(kit, "ROOT", tmp_path)
    name = f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    (tmp_path / "pdstage").mkdir()
    kit.install()
    assert not list((tmp_path / "pdstage").iterdir())
    (tmp_path / "kit/extension").mkdir(parents=True)
    (tmp_path / "kit/extension" / name).write_text("of the kit")
    kit.install()
    assert (tmp_path / "pdstage" / name).read_text() == "of the kit"
    (tmp_path / "pdstage" / name).write_text("built here")
    kit.install()
    assert (tmp_path / "pdstage" / name).read_text() == "built here"


def test_a_kit_is_not_made_over_something_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="something else in it"):
        kit.prepare(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_of_nixl_what_one_gpu_needs_is_kept(tmp_path, monkeypatch):
    names = [
        "nixl/_api.py", "nixl_cu13/_bindings.cpython-311-x86_64-linux-gnu.so", "nixl_meta_utils.py",
        ".nixl_cu13.mesonpy.libs/libnixl.so", ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so",
        "nixl_cu13.libs/nixl/libplugin_UCX.so", "nixl_cu13.libs/nixl/libplugin_GUSLI.so", "nixl_cu13.libs/libgusli.so",
        "nixl_cu13.libs/ucx/libuct_cuda.so.0.0.0", "nixl_cu13.libs/ucx/libuct_ib.so.0.0.0",
        "nixl_cu13.libs/libucp-1.so.0.0.0", "nixl_cu13.libs/libgrpc-2.so", "nixl_ep_cu13/nixl_ep_cpp.so",
    ]  # fmt: skip
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    needs = {
        "_bindings.cpython-311-x86_64-linux-gnu.so": ["libnixl.so", "libc.so.6"], "libnixl.so": ["libgrpc-2.so"],
        "libplugin_UCX.so": ["libucp-1.so.0.0.0"], "libplugin_GUSLI.so": ["libgusli.so"],
    }  # fmt: skip
    monkeypatch.setattr(kit, "_needed", lambda path: needs.get(path.name, []))
    kept = {str(path.relative_to(tmp_path)) for path in kit.of_nixl(tmp_path)}
    assert set(names) - kept == {
        "nixl_cu13.libs/nixl/libplugin_GUSLI.so", "nixl_cu13.libs/libgusli.so", "nixl_ep_cu13/nixl_ep_cpp.so",
        "nixl_cu13.libs/ucx/libuct_ib.so.0.0.0",
    }  # fmt: skip
