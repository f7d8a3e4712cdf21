"""Compilation at run time: the cache on disk under many processes and damage, and the compiler's words in errors."""

from __future__ import annotations

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from pdstage import UsageError
from pdstage.kernels import nvrtc

pytestmark = needs_nvrtc = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is None or nvrtc.missing() != "", reason="needs CuPy and NVRTC"
)
GOOD = '#include "held.cuh"\nextern "C" __global__ void pdstage_copy(int* p) { *p = VALUE + HELD; }\n'


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder of kernel sources, and an empty cache."""
    monkeypatch.setenv("PDSTAGE_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "one.cu").write_text(GOOD)
    (folder / "held.cuh").write_text("#define HELD 1\n")
    nvrtc._texts.cache_clear()
    yield folder
    nvrtc._texts.cache_clear()


@pytest.fixture
def compilations(monkeypatch):
    """What was really compiled."""
    done, real = [], nvrtc._compile
    monkeypatch.setattr(nvrtc, "_compile", lambda *args: done.append(args[1:]) or real(*args))
    return done


def compiled(sources, value=3, architecture="sm_90"):
    """The image of one.cu."""
    return nvrtc.compile_kernel("one.cu", {"VALUE": value}, architecture, sources)


def images(tmp_path):
    return sorted((tmp_path / "cache").glob("*"))


def test_a_kernel_is_compiled_once_and_read_from_disk_after(sources, tmp_path, compilations):
    first = compiled(sources)
    assert first[:4] == b"\x7fELF"
    assert compiled(sources) == first
    assert len(compilations) == 1
    assert len(images(tmp_path)) == 1


def test_source_header_options_and_architecture_each_make_another_image(sources, tmp_path, compilations):
    compiled(sources)
    compiled(sources, 4)
    compiled(sources, architecture="sm_80")
    (sources / "held.cuh").write_text("#define HELD 2\n")
    nvrtc._texts.cache_clear()
    compiled(sources)
    assert len(compilations) == len(images(tmp_path)) == 4


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:40], lambda b: b"", lambda b: b[:-3] + b"xyz"])
def test_a_damaged_image_is_made_again(sources, tmp_path, compilations, damage):
    good = compiled(sources)
    (path,) = images(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    assert compiled(sources) == good
    assert len(compilations) == 2
    assert compiled(sources) == good
    assert len(compilations) == 2


def test_writers_at_once_leave_one_whole_image(sources, tmp_path):
    with ThreadPoolExecutor(8) as pool:
        work = [pool.submit(compiled, sources) for _ in range(16)]
        found = {one.result() for one in work}
    (image,) = found
    (path,) = images(tmp_path)
    assert nvrtc._read(path) == image


def test_a_cache_that_cannot_be_written_costs_only_time(sources, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PDSTAGE_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert compiled(sources)[:4] == b"\x7fELF"


def test_an_error_of_the_compiler_brings_its_log(sources):
    (sources / "one.cu").write_text(GOOD.replace("VALUE +", "MISSING_NAME +"))
    with pytest.raises(nvrtc.CompileError, match="MISSING_NAME") as caught:
        nvrtc.compile_kernel("one.cu", {}, "sm_90", sources)
    assert "one.cu(2)" in caught.value.fields["log"]


def test_a_source_that_is_not_there_is_named(sources):
    with pytest.raises(UsageError, match=r"no two\.cu"):
        nvrtc.compile_kernel("two.cu", {}, "sm_90", sources)


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [
        *((capability, f"sm_{capability}") for capability in (80, 89, 90, 100)),
        *((103, "sm_100"), (101, "sm_101"), (121, "sm_120"), (110, "compute_101"), (87, "sm_80"), (130, "compute_120")),
    ],
)
def test_devices_get_machine_code_of_the_first_of_their_major_version(monkeypatch, capability, architecture):
    """What NVRTC 12.8 knows, with the embedded 101 between 100 and 103, whose code 103 cannot run."""
    known = type("nvrtc", (), {"getSupportedArchs": staticmethod(lambda: [75, 80, 86, 89, 90, 100, 101, 120])})
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: known)
    assert nvrtc.architecture_of(capability) == architecture


@pytest.mark.parametrize(
    ("version", "architecture", "nbytes"),
    [
        ((13, 0), "sm_90", 16),
        ((13, 0), "sm_100", 32),
        ((13, 0), "sm_120", 32),
        ((12, 9), "compute_121", 32),
        ((12, 8), "sm_100", 16),
        ((12, 4), "compute_90", 16),
    ],
)
def test_accesses_are_as_wide_as_device_and_compiler_allow(monkeypatch, version, architecture, nbytes):
    """PTX ISA 8.8 has 256 bits, which NVRTC 12.9 writes first; code for an older target has none on any device."""
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: SimpleNamespace(getVersion=lambda: version))
    assert nvrtc.widest_access(architecture) == nbytes


def test_a_device_of_the_future_gets_ptx_and_one_of_the_past_an_error(sources):
    architecture = nvrtc.architecture_of(990)
    assert architecture.startswith("compute_")
    assert b".entry pdstage_copy" in compiled(sources, 1, architecture)
    with pytest.raises(UsageError, match="no machine code"):
        nvrtc.architecture_of(30)


def test_the_cache_is_where_the_environment_says(monkeypatch):
    monkeypatch.setenv("PDSTAGE_CACHE_DIR", "/a")
    assert nvrtc.cache_folder() == Path("/a")
    monkeypatch.delenv("PDSTAGE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert nvrtc.cache_folder() == Path("/b/pdstage")
