"""The one command for a GPU: whatever fails is told, and stops nothing else."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from pdstage.bench import gpu, prove

ROOT = Path(prove.ROOT)


def report(**more):
    return {"machine": {"gpu": {"name": "NVIDIA X1"}}, "failed": [], "rows": [], **more}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine whose device, tests and benchmark are told what to say; results go to a folder of the test's."""
    told = {"device": True, "tests": "", "report": report(), "ran": []}

    def run_named(name, quick):
        told["ran"].append(name)
        return told["report"]

    def pytest_of(before, path, more, left_s, **env):
        told["ran"].append(path.name)
        return told["tests"]

    monkeypatch.setattr(gpu, "has_device", lambda: told["device"])
    monkeypatch.setattr(prove, "_pytest", pytest_of)
    monkeypatch.setattr(prove.harness, "run_named", run_named)
    monkeypatch.setattr(prove, "RESULTS", tmp_path / "results")
    (tmp_path / "results").mkdir()
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    return told


def test_all_good_writes_the_result_twice(machine, tmp_path):
    assert prove.main([]) == 0
    assert machine["ran"][-1] == "gpu"
    assert "test_space.py" in machine["ran"]
    for folder in ("results", "out"):
        assert json.loads((tmp_path / folder / "nvidia-x1.json").read_text()) == report()


def test_a_failed_test_does_not_keep_the_benchmark_from_running(machine, tmp_path, capsys):
    machine["tests"] = "exit code 1"
    assert prove.main([]) == 1
    assert machine["ran"][-1] == "gpu"
    assert (tmp_path / "results/nvidia-x1.json").exists()
    assert "FAILED tests/gpu/test_space.py: exit code 1" in capsys.readouterr().out


def test_a_failed_section_is_told(machine, tmp_path, capsys):
    machine["report"] = report(failed=["sms with triton: exit code -6"])
    assert prove.main([]) == 1
    assert "FAILED bench: sms with triton: exit code -6" in capsys.readouterr().out
    assert (tmp_path / "results/nvidia-x1.json").exists()


def test_a_look_is_no_result(machine, tmp_path):
    assert prove.main(["--quick"]) == 0
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["nvidia-x1-quick.json"]


def test_no_device_is_told(machine, capsys):
    machine["device"] = False
    assert prove.main([]) == 2
    assert prove.main(["--sanitize"]) == 0
    assert "sanitize: skipped: no CUDA device" in capsys.readouterr().err
    assert machine["ran"] == []


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
    assert machine["ran"] == []


@pytest.mark.parametrize(("said", "code"), [("", 0), ("exit code 97", 1)])
def test_each_tool_runs_the_kernel_tests(machine, monkeypatch, tmp_path, capsys, said, code):
    tool = sanitizer(tmp_path, "echo 6")
    monkeypatch.setattr(prove.shutil, "which", lambda name: tool)
    machine["tests"] = said
    assert prove.main(["--sanitize"]) == code
    assert machine["ran"] == ["test_space.py"] * 3
    printed = capsys.readouterr().out
    for check in ("memcheck", "racecheck", "synccheck"):
        assert f"sanitize: {check}: {said or 'good'}" in printed


def test_hanging_and_failing_tests_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    (tmp_path / "test_bad.py").write_text("import pytest\n@pytest.mark.gpu\ndef test_it():\n    assert False\n")
    assert prove._pytest([], tmp_path / "test_bad.py", ["-c", "/dev/null"], 60) == "exit code 1"
    (tmp_path / "test_none.py").write_text("def test_it():\n    assert False\n")
    assert prove._pytest([], tmp_path / "test_none.py", ["-c", "/dev/null"], 60) == ""
    (tmp_path / "test_hangs.py").write_text("import threading\nthreading.Event().wait()\n")
    assert prove._pytest([], tmp_path / "test_hangs.py", ["-c", "/dev/null"], 2) == "not done after 2 s"
    assert "assert False" in (tmp_path / "out/test_bad.txt").read_text()
    assert "assert False" in capsys.readouterr().out


def test_what_hangs_is_ended_with_all_it_started(tmp_path):
    """The grandchild holds a pipe's end; that end is closed with it."""
    reading, writing = os.pipe()
    program = (
        f"import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '600'], pass_fds=[{writing}])"
    )
    command = ["sh", "-c", f'exec {sys.executable} -c "{program}"']
    os.set_inheritable(writing, True)
    started = []
    popen = subprocess.Popen

    def passing(*args, **kwargs):
        started.append(popen(*args, **kwargs, close_fds=False))
        os.close(writing)
        return started[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu.subprocess, "Popen", passing)
        assert gpu.call(command, 3) == (None, "begun\n")
    assert started[0].returncode is not None
    assert select.select([reading], [], [], 30)[0], "something still holds the pipe"
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_it_runs_from_a_checkout():
    done = subprocess.run(
        [sys.executable, "-m", "pdstage.bench.prove", "--help"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--sanitize" in done.stdout
