"""Memory that another process maps: what it is taken for, what is refused, and when it goes."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import resource
from pathlib import Path

import numpy as np
import pytest

from pdstage import shared
from pdstage.shared import Backing
from tests import descriptors

PAGE = mmap.PAGESIZE


def told_of(memory: np.ndarray, offset: int = 0, nbytes: int = 0) -> Backing:
    told = shared.backing(memory.ctypes.data + offset, nbytes or memory.nbytes - offset)
    assert told is not None
    return told


def test_what_one_writes_the_other_sees():
    memory = shared.allocate(4 * PAGE)
    assert not memory.any()
    part = shared.attach(os.getpid(), told_of(memory, 100, 5000))
    assert part.nbytes == 5000
    part[:] = 7
    assert memory[:100].sum() == 0
    assert (memory[100:5100] == 7).all()
    assert not memory[5100:].any()


def test_its_pages_may_be_mapped_at_once():
    memory = shared.allocate(1024 * PAGE)

    def n_faults(at_once: bool) -> int:
        mapped = shared.attach(os.getpid(), told_of(memory), at_once=at_once)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        mapped[::PAGE] = 1
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert n_faults(True) < 32
    assert n_faults(False) >= 1024 // 16, "a kernel maps at most 16 pages around a fault"


def test_only_what_was_allocated_here_can_be_told_of():
    memory = shared.allocate(PAGE)
    base = memory.ctypes.data
    for first, nbytes in ((base - 1, 2), (base + PAGE - 1, 2), (np.zeros(8).ctypes.data, 8)):
        assert shared.backing(first, nbytes) is None


def test_it_goes_with_its_last_reference_and_a_mapping_outlives_it():
    gc.collect()
    before, held = descriptors.count("memfd"), len(shared._held)
    memory = shared.allocate(PAGE)
    mapped = shared.attach(os.getpid(), told_of(memory))
    del memory
    gc.collect()
    assert len(shared._held) == held
    mapped[:] = 1  # nobody else has these pages
    del mapped
    gc.collect()
    assert descriptors.count("memfd") == before


def test_it_is_told_of_no_more_before_its_address_can_be_anothers(monkeypatch):
    """Else memory that the system puts there meanwhile would be told of as this file: peers would write elsewhere."""
    seen, let_go = [], shared._let_go

    def spy(base):
        ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        seen.append(any(int(start, 16) <= base < int(end, 16) for start, end in ranges))
        let_go(base)

    monkeypatch.setattr(shared, "_let_go", spy)
    memory = shared.allocate(64 * PAGE)
    part = memory[PAGE:]
    del memory
    assert not seen, "a part of it is left"
    del part
    gc.collect()
    assert seen == [True]


@pytest.mark.parametrize(
    "change",
    [
        {"fd": 1 << 20},
        {"fd": -1},
        {"inode": 1},
        {"offset": -1},
        {"offset": PAGE},
        {"nbytes": 0},
        {"nbytes": PAGE + 1},
        {"nbytes": 1 << 62, "offset": 1 << 62},
    ],
)
def test_what_is_not_there_is_not_mapped(change):
    memory = shared.allocate(PAGE)
    with pytest.raises(FileNotFoundError):
        shared.attach(os.getpid(), told_of(memory)._replace(**change))


def test_a_file_that_its_owner_could_shrink_is_not_mapped():
    """Touching what was cut off would end this process."""
    fd = os.memfd_create("soft", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, PAGE)
    told = Backing(fd, os.fstat(fd).st_ino, 0, PAGE)
    with pytest.raises(FileNotFoundError, match="not the memory"):
        shared.attach(os.getpid(), told)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    shared.attach(os.getpid(), told)
    os.close(fd)


def test_a_file_with_a_name_is_never_written(tmp_path):
    """A peer may hold a file that only we may write."""
    path = tmp_path / "passwords"
    path.write_bytes(bytes(PAGE))
    with path.open("rb") as file:
        told = Backing(file.fileno(), path.stat().st_ino, 0, PAGE)
        with pytest.raises(FileNotFoundError, match="not the memory"):
            shared.attach(os.getpid(), told)


def test_its_owner_cannot_shrink_it():
    memory = shared.allocate(PAGE)
    with pytest.raises(PermissionError):
        os.ftruncate(told_of(memory).fd, 0)


def test_without_such_files_the_system_says_so(monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    with pytest.raises(OSError, match="memfd_create"):
        shared.allocate(PAGE)
