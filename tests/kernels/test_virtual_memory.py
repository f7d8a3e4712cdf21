"""Memory of cuMemCreate, on the double, which is declared by NVIDIA's own header and keeps it in files."""

from __future__ import annotations

import logging

import pytest

from pdstage import UsageError
from pdstage.kernels import driver, virtual_memory
from pdstage.kernels.virtual_memory import DESCRIPTOR, FABRIC, VirtualMemory
from tests.kernels.test_driver import Device

MIB = 1 << 20


@pytest.fixture
def library(gpu, monkeypatch):
    monkeypatch.setenv("PDSTAGE_DEVICE_MEMORY", "cuMemCreate")
    with gpu.on(1):
        yield gpu.driver


def counts(gpu):
    return gpu["n_handles"], gpu["n_mapped"], gpu["n_reserved"]


@pytest.mark.parametrize("has_attributes", [1, 0])
def test_each_allocation_is_found_by_any_of_its_addresses(gpu, library, has_attributes):
    """By the attributes of pointers, and where a driver does not know those by the call that cuda.h points to."""
    calls, sizes = VirtualMemory(library), [2 * MIB, 4 * MIB, 2 * MIB]
    gpu["has_ranges"] = has_attributes
    properties = calls.properties(1)
    base = virtual_memory.map_all(calls, 1, sizes, lambda place: calls.create(sizes[place], properties))
    assert library.mapping(base + 2 * MIB - 1) == (base, 2 * MIB)
    for at in (2 * MIB, 6 * MIB - 1):
        assert library.mapping(base + at) == (base + 2 * MIB, 4 * MIB)
    assert library.attribute(driver.HANDLE_TYPES, base) == (has_attributes and DESCRIPTOR | FABRIC)
    virtual_memory.unmap_all(calls, base, sizes)
    assert library.mapping(base) == (0, 0)
    gpu["has_ranges"] = 1


@pytest.mark.parametrize(
    ("setting", "value", "types", "said"),
    [
        ("has_fabric", 1, DESCRIPTOR | FABRIC, ""),
        ("has_fabric", 0, DESCRIPTOR, ""),
        *(
            ("fabric_status", status, DESCRIPTOR, f"for lack of an IMEX channel: cuMemCreate failed with {status}")
            for status in (800, 801)
        ),
    ],
)
def test_allocated_memory_may_leave_by_whatever_the_device_has(gpu, library, caplog, setting, value, types, said):
    gpu[setting] = value
    with caplog.at_level(logging.WARNING):
        Device(library).allocate(1)
    assert gpu["handle_types"] == types
    assert said in caplog.text and bool(caplog.text) is bool(said)


def test_what_fails_leaves_nothing_behind(gpu, library):
    before = counts(gpu)
    gpu["fabric_status"] = 2
    with pytest.raises(driver.DriverError, match="cuMemCreate failed with 2"):
        Device(library).allocate(MIB)
    assert counts(gpu) == before


def test_a_device_without_such_memory_is_refused_in_words(gpu, library):
    gpu["has_virtual"] = 0
    with pytest.raises(UsageError, match="device 1 has no memory of cuMemCreate.*PDSTAGE_DEVICE_MEMORY=cudaMalloc"):
        Device(library).allocate(MIB)


def test_it_is_cudas_alone(library):
    with pytest.raises(UsageError, match="CUDA's; unset PDSTAGE_DEVICE_MEMORY"):
        virtual_memory.allocate(object(), MIB)
