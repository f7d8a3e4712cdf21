"""The GPU lines over a stand-in for CUDA's driver, a real library in real processes: no GPU is needed or used."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.doctor.conftest import doctor

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    folder = tmp_path_factory.mktemp("driver")
    source, library = Path(__file__).with_name("fake_cuda.c"), folder / "libcuda.so.1"
    subprocess.run([COMPILER, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", source, "-o", library], check=True)
    return folder


def asked(driver, fails="", *args):
    return doctor("--only", "gpu", *args, LD_LIBRARY_PATH=str(driver), FAKE_CUDA_FAILS=fails)


def test_two_devices(driver):
    run = asked(driver, "", "--device", "cuda:1")
    assert [(line.name, line.level) for line in run.report.checks] == [
        ("driver", "ok"), ("devices", "ok"), ("peer access", "ok"), ("ipc", "ok"),
    ]  # fmt: skip
    assert run.line("driver").says == "CUDA driver for 13.1, 2 devices"
    assert "1: Fake 1, 80 GiB, sm_90" in run.line("devices").says
    assert run.code == 0


@pytest.mark.parametrize(
    ("fails", "name", "level", "said"),
    [
        ("init", "driver", "fail", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)"),
        ("abort", "driver", "fail", "SIGABRT at cuInit"),
        ("peer", "peer access", "warn", "not 0 to 1"),
        ("ipc", "ipc", "warn", "cuIpcOpenMemHandle_v2: CUDA_ERROR_OTHER (999)"),
        ("bytes", "ipc", "warn", "other bytes were read"),
    ],
)
def test_what_fails_is_named(driver, fails, name, level, said):
    line = asked(driver, fails).line(name)
    assert (line.level, bool(line.remedy)) == (level, True) and said in line.says


def test_a_device_beyond_those_here(driver):
    run = asked(driver, "", "--device", "cuda:2")
    assert (run.line("driver").level, run.code) == ("fail", 1) and "no cuda:2" in run.line("driver").says
