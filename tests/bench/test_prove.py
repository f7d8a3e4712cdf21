"""The one command for a GPU: what fails or hangs is told and stops nothing else, and what was measured is on disk."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdstage import UsageError
from pdstage.bench import gpu, kit, prove, runner
from pdstage.bench.runner import DROPPED, OUT, Command, Record, Runner, Section
from tests import processes

ROOT = Path(prove.ROOT)
AT_MOST_FILES = 8


def row(name, value=2.0):
    return {"row": {"name": name, "value": value, "baseline": 1.0, "unit": "x", "detail": "d", "point": {"table": "t"}}}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine whose device and sections are told what to say; results go to folders of the test's."""
    told = {"device": "NVIDIA X1", "lines": {}, "ran": [], "not_run": 0}

    def section(self, one, stop_at):
        told["ran"].append(one.name)
        self.record.take(told["lines"].get(one.name, []))
        self.record.report["tests"]["not_run"] += told["not_run"]
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
    first = ["compile", "smoke", "runs", "launch", "rooms", "sms", "narrow", "models", "tests", "streams", "vllm"]
    assert machine["ran"] == [*first, "fused", "convert", "decode"]
    for folder in ("results", "out"):
        report = read(tmp_path, folder=folder)
        assert report["finished"] is True
        assert [one["state"] for one in report["sections"]] == ["done"] * len(machine["ran"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["nvidia-x1.json", "nvidia-x1.log"]
    files = [path for section in prove.sections() if section.name != "smoke" for path in section.tests]
    folders = "tests/gpu", "tests/engines/vllm"
    assert sorted(files) == sorted(
        str(path.relative_to(ROOT)) for one in folders for path in (ROOT / one).glob("test_*.py")
    )


def test_a_section_that_fails_is_told_and_stops_nothing(machine, tmp_path, capsys):
    """Tests are counted, and skips have reasons."""

    def of(name, outcome, why=""):
        return {"test": f"tests/gpu/test_a.py::{name}", "outcome": outcome, "why": why}

    machine["lines"] = {"runs": [row("kept"), {"problem": "exit code -6: illegal address"}]}
    machine["lines"]["tests"] = [
        of("one", "passed"), of("two", "skipped", "no such thing"), of("three", "skipped", "no such thing"),
        of("four", "failed", "E assert 1 == 2"),
    ]  # fmt: skip
    assert prove.main([]) == 1
    assert machine["ran"][-1] == "decode"
    report = read(tmp_path)
    assert [one["name"] for one in report["rows"]] == ["kept"]
    assert report["failed"] == ["runs: exit code -6: illegal address"]
    assert "FAILED runs: exit code -6: illegal address" in capsys.readouterr().out
    told = report["tests"]
    assert {name: told[name] for name in ("passed", "failed", "skipped")} == {"passed": 1, "failed": 1, "skipped": 2}
    assert told["skips"] == [{"file": "tests/gpu/test_a.py", "why": "no such thing", "n": 2}]
    assert told["failures"] == [{"test": "tests/gpu/test_a.py::four", "why": "E assert 1 == 2"}]


def skipped(test, why="torch finds no GPU"):
    return {"test": f"tests/gpu/{test}", "outcome": "skipped", "why": why}


@pytest.mark.parametrize(
    ("require", "section", "lines", "missed"),
    [
        (
            "triton", "tests", [skipped("test_space.py::test_it[triton-3]")] * 2,
            "triton: tests/gpu/test_space.py: torch finds no GPU (2 times)",
        ),
        ("cuda", "tests", [skipped("test_space.py::test_it[triton-3]")], ""),
        ("cuda", "tests", [skipped("test_space.py::test_it[cuda-bulk-3]")], "cuda: tests/gpu"),
        ("cuda", "runs", [{"left_out": ["cuda plain: install CuPy"]}], "cuda plain"),
        ("ipc", "rooms", [{"left_out": ["rooms: zmq is not installed"]}], "rooms: zmq"),
        ("ipc", "tests", [skipped("test_local_ipc.py")], "test_local_ipc.py"),
        ("ipc", "rooms", [{"left_out": ["rooms, nixl: not here"]}], ""),
        ("nixl,triton", "rooms", [{"left_out": ["rooms, nixl: not here"]}], "rooms, nixl"),
        ("ipc", "tests", [skipped("test_local_ipc.py::t", "needs 2 CUDA devices, this machine has 1")], ""),
        ("", "rooms", [{"left_out": ["cuda plain: not here"]}], ""),
    ],
)  # fmt: skip
def test_a_skip_of_what_is_required_is_a_failure(machine, tmp_path, require, section, lines, missed):
    machine["lines"] = {section: lines}
    assert prove.main(["--require", require]) == (1 if missed else 0)
    failed = read(tmp_path)["failed"]
    assert len(failed) == bool(missed)
    assert not missed or (failed[0].startswith("required: ") and missed in failed[0])


def test_a_section_without_time_is_dropped_by_name_and_others_keep_theirs(machine, tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(prove.time, "monotonic", lambda: now[0])
    section = Runner._section

    def slow(self, one, stop_at):
        now[0] = stop_at if one.name != "tests" else now[0] + 1  # all of the time that it is given
        return section(self, one, stop_at)

    monkeypatch.setattr(Runner, "_section", slow)
    assert prove.main(["--quick", "--budget-s", "400", "--require", "ipc"]) == 1
    report = read(tmp_path, "nvidia-x1-quick")
    assert report["failed"] == ["required: ipc: rooms: no time was left"]
    states = {one["name"]: one["state"] for one in report["sections"]}
    assert states["runs"] == states["tests"] == states["streams"] == "done"
    assert states["models"] == DROPPED
    assert next(one for one in report["sections"] if one["name"] == "models")["why"] == "no time was left"


def test_no_device_is_told(machine, capsys):
    machine["device"] = ""
    assert prove.main([]) == 2
    assert prove.main(["--sanitize"]) == 0
    assert "sanitize: skipped: no CUDA device" in capsys.readouterr().err
    assert machine["ran"] == []


def test_a_bare_python_is_told_what_it_lacks(tmp_path):
    bare = {**os.environ, "OUT": str(tmp_path)}
    done = processes.python("-S", "-m", "pdstage.bench.prove", cwd=ROOT, env=bare)
    assert done.returncode == 1
    assert "No module named 'numpy'; install numpy and torch for " in done.stderr
    assert "Traceback" not in done.stderr
    (said,) = json.loads((tmp_path / "gpu.json").read_text())["failed"]
    assert said in done.stderr


def test_what_was_not_run_is_no_success(machine, tmp_path, capsys):
    machine["not_run"] = 2
    assert prove.main(["--only", "tests"]) == 1
    assert "NOT RUN 2 tests" in capsys.readouterr().out
    assert prove.main(["--only", "tests", "--budget-s", "1"]) == 1
    said = capsys.readouterr().out
    assert said.index("NOT RUN tests: no time was left") < said.index("tests: 0 passed")
    assert "all good" not in said


@pytest.mark.parametrize("option", ["--require", "--only"])
def test_an_unknown_name_is_refused(machine, capsys, option):
    with pytest.raises(SystemExit):
        prove.main([option, "everything"])
    assert f"{option} names 'everything'; choose of " in capsys.readouterr().err


WATCHING = 'case "$*" in *pytest*) echo "$*" >> {}; exit {};; esac; echo 6'
REFUSED = "echo 'Not supported' >&2; exit 97"


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 0, "skipped: compute-sanitizer is not"),
        (REFUSED, 0, "skipped: compute-sanitizer cannot watch this device: Not supported"),
        (WATCHING, 0, "racecheck: good"),
        (WATCHING, 97, "racecheck: exit code 97"),
    ],
)
def test_each_tool_of_a_sanitizer_that_can_be_used_runs_the_kernel_tests(
    machine, monkeypatch, tmp_path, capsys, text, code, said
):
    asked, tool = tmp_path / "asked", tmp_path / "compute-sanitizer"
    asked.touch()
    tool.write_text(f"#!/bin/sh\n{text.format(asked, code)}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(prove.shutil, "which", lambda name: str(tool) if text else None)
    assert prove.main(["--sanitize"]) == bool(code)
    assert f"sanitize: {said}" in capsys.readouterr().out
    told = [line.split() for line in asked.read_text().splitlines()]
    assert [line[1] for line in told] == (["memcheck", "racecheck", "synccheck"] if text == WATCHING else [])
    assert all("tests/gpu/test_space.py" in line for line in told)


@contextlib.contextmanager
def runner_of(folder, most_s=600.0, device="cuda:0"):
    """One that writes x.json and x.log there."""
    with (folder / "x.log").open("w") as log:
        record = Record([folder / "x.json"], machine={})
        yield Runner(record, log, stop_at=time.monotonic() + most_s, device=device, quick=True)


def run_tests(tmp_path, text, most_s=600.0, device="cuda:0"):
    """The record, and the log, of one section whose one file of tests is `text`."""
    (tmp_path / "test_it.py").write_text(text)
    with runner_of(tmp_path, most_s, device) as running:
        running.run([Section("tests", most_s, tests=(str(tmp_path / "test_it.py"),))])
    return json.loads((tmp_path / "x.json").read_text()), (tmp_path / "x.log").read_text()


def test_a_test_that_fails_is_told_with_its_last_line(tmp_path):
    good, bad = (f"@pytest.mark.gpu\ndef test_{name}\n" for name in ("good(): pass", "bad(): assert 1 == 2"))
    report, log = run_tests(tmp_path, f"import pytest\n{good}{bad}def test_other(): assert False\n")
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
    tests = "def test_first(): pass\ndef test_hangs(): threading.Event().wait()\ndef test_last(): pass\n"
    for most_s in (6.0, 15.0, 60.0):  # the first that is long enough for it to begin
        report, _ = run_tests(tmp_path, f"import threading\n{tests}", most_s, "cpu")
        assert report["failed"] == [f"tests: {tmp_path}/test_it.py: not done in the time it had"]
        if report["tests"]["passed"]:
            break
    assert (report["tests"]["passed"], report["tests"]["not_run"]) == (1, 2)


def test_a_section_that_dies_is_run_a_kernel_at_a_time(tmp_path, monkeypatch):
    asked = []

    def bench(self, section, only, stop_at):
        asked.append(only)
        return ("" if only and only != ("cuda bulk",) else f"with {only}: illegal address"), True

    monkeypatch.setattr(Runner, "_bench", bench)
    with runner_of(tmp_path, 60.0) as running:
        running.run([Section("runs", 30.0), Section("rooms", 30.0, by_kernel=False)])
    assert asked == [(), *((v,) for v in runner.variants.ON_GPU), ()]
    assert running.record.report["failed"] == [
        "runs: with ('cuda bulk',): illegal address",
        "rooms: with (): illegal address",
    ]


def test_rows_of_a_process_that_died_are_kept(tmp_path):
    code = "import sys; open(sys.argv[1], 'w').write(sys.argv[2]); sys.exit('illegal address')"
    with runner_of(tmp_path, 60.0, "cpu") as running:
        running.record.take([row("kept", float("nan")), {"machine": {"gpu": {"least": float("-inf")}}}])
        body = json.dumps(row("kept later")) + '\n{"ro'
        (ended,) = running._children([Command("it", ["-c", code, OUT, body])], time.monotonic() + 600)
    assert (ended.code, ended.printed.strip()) == (1, "illegal address")
    held = json.loads((tmp_path / "x.json").read_text(), parse_constant=pytest.fail)
    assert [(one["name"], one["value"]) for one in held["rows"]] == [("kept", None), ("kept later", 2.0)]
    assert held["machine"]["gpu"]["least"] is None


def test_what_hangs_is_ended_with_all_it_started(tmp_path):
    """The grandchild holds a pipe's end; that end is closed with it."""
    held, begun = tmp_path / "held", tmp_path / "begun"
    os.mkfifo(held)
    reading = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    program = f"import subprocess; subprocess.run(['sh', '-c', 'exec 3>{held}; touch {begun}; exec sleep 6000'])"
    for most_s in (2, 10, 60, 300):  # the first that is long enough for it to begin
        with (tmp_path / "log").open("w") as log:
            (ended,) = runner.call([Command("it", [sys.executable, "-c", program])], most_s, log)
        assert ended.code is None
        if begun.exists():
            break
    poll = select.poll()
    poll.register(reading)
    assert poll.poll(30_000), "something still holds the pipe"
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_a_child_ends_with_whoever_started_it(tmp_path):
    """Even with one that is killed, and can end nothing any more."""
    held = tmp_path / "held"
    os.mkfifo(held)
    child = f"exec 3>{held}; echo up >&3; exec sleep 600"
    program = (
        "import sys\nfrom pdstage.bench.runner import Command, call\n"
        f"call([Command('it', ['sh', '-c', {child!r}])], 600, sys.stderr)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=runner.environment())
    with held.open("rb") as reading:
        assert reading.readline() == b"up\n"
        parent.kill()
        parent.wait()
        assert reading.read() == b"", "the end of the file: nobody holds it any more"


def test_sections_are_rehearsed_on_the_cpu(tmp_path, monkeypatch):
    """The same runner, children, log and JSON as on a GPU; what cannot be tried without one says so."""
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(prove, "SCRATCH", tmp_path)
    assert prove.main(["--rehearse", "--only", "launch,decode", "--budget-s", "600"]) == 0
    report = read(tmp_path, "rehearsal", "")
    assert [(one["name"], one["state"]) for one in report["sections"]] == [("launch", "done"), ("decode", "done")]
    assert report["device"] == "cpu"
    assert report["left_out"] == ["decode: needs a GPU"]
    assert all(one["quartiles"] and one["point"]["variant"] == "host" for one in report["rows"])
    assert len([path for path in tmp_path.iterdir() if path.is_file()]) <= AT_MOST_FILES


def test_a_kit_brings_only_what_is_lacking(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "FOLDER", tmp_path)
    monkeypatch.setattr(kit, "UNPACKED", tmp_path / "unpacked")
    monkeypatch.setattr(kit.importlib.util, "find_spec", lambda name: None if name == "zmq" else object())
    assert kit.used.__wrapped__() == {}
    (tmp_path / "kit.json").touch()
    for name in ("msgspec", "zmq"):
        (tmp_path / f"packed/{name}").mkdir(parents=True)
        (tmp_path / f"packed/{name}/module.py").touch()
        shutil.make_archive(str(tmp_path / name), "zip", tmp_path / f"packed/{name}")
    supported = f"{sys.version_info.major}.{sys.version_info.minor}" in kit.PYTHONS
    assert kit.used.__wrapped__() == ({"zmq": tmp_path / "unpacked/zmq"} if supported else {})
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.glob("unpacked/*/*")] == (
        ["unpacked/zmq/module.py"] * supported
    )


def test_a_kit_is_not_made_over_something_else(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="something else in it"):
        kit.prepare(tmp_path)
    assert (tmp_path / "thesis.tex").exists()
