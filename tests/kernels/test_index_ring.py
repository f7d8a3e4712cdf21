"""Lists on their way to a device: never overwritten while a kernel may read them, and nothing ever waits."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from cuda_on_cpu import CpuMachine
from hypothesis import given
from hypothesis import strategies as st

from pdstage.errors import UsageError
from pdstage.kernels.cuda_tables import divisor
from pdstage.kernels.index_ring import IndexRing

THREE = np.arange(3)


def piece(items):
    """A list by address and bytes."""
    return items.ctypes.data, items.nbytes


def there(address, like):
    """A list as the device sees it."""
    return np.frombuffer((ctypes.c_uint8 * like.nbytes).from_address(address), like.dtype)


def test_a_full_ring_grows_and_touches_no_list_that_a_kernel_may_still_read():
    machine = CpuMachine(eager=False)
    ring = IndexRing(machine, n_slots=2, slot_nbytes=64)
    held = []
    for number in range(7):
        items = np.full(9, number, np.int32)
        slot, (address,) = ring.put([piece(items)], stream=0)
        ring.give(slot, stream=0)
        held.append((address, items))
    for address, items in held:
        np.testing.assert_array_equal(there(address, items), items)


def test_a_slot_is_used_again_once_its_kernel_has_run():
    machine = CpuMachine(eager=False)
    ring = IndexRing(machine, n_slots=1, slot_nbytes=64)
    items = np.arange(4)
    slot, first = ring.put([piece(items)], 0)
    ring.give(slot, 0)
    slot.event["pending"] = False
    for _ in range(50):
        again, address = ring.put([piece(items)], 0)
        ring.give(again, 0)
        again.event["pending"] = False
        assert address == first
    assert len(machine.held) == 1


def test_lists_of_one_call_lie_apart_and_aligned_and_a_long_one_gets_a_slot():
    ring = IndexRing(CpuMachine(), n_slots=1, slot_nbytes=64)
    lists = [np.arange(3, dtype=np.int32), np.arange(1000), np.array([7], np.int32)]
    slot, addresses = ring.put([piece(items) for items in lists], 0)
    for address, items in zip(addresses, lists, strict=True):
        assert address % 16 == 0
        np.testing.assert_array_equal(there(address, items), items)
    ring.give(slot, 0)


def test_a_captured_stream_is_refused_and_the_ring_goes_on():
    machine = CpuMachine()
    ring = IndexRing(machine, n_slots=1)
    machine.capture = True
    with pytest.raises(UsageError, match="give lists that lie on the device"):
        ring.put([piece(THREE)], 0)
    machine.capture = False
    ring.give(ring.put([piece(THREE)], 0)[0], 0)
    assert len(machine.held) == 1


def test_an_upload_that_fails_gives_its_slot_back(monkeypatch):
    machine = CpuMachine()
    ring = IndexRing(machine, n_slots=1)

    def fail(*_):
        raise RuntimeError("no such stream")

    with monkeypatch.context() as patch:
        patch.setattr(machine, "upload", fail)
        with pytest.raises(RuntimeError, match="no such stream"):
            ring.put([piece(THREE)], 0)
    ring.give(ring.put([piece(THREE)], 0)[0], 0)
    assert len(machine.held) == 1


@given(by=st.integers(1, 2**31 - 1), n=st.integers(0, 2**31 - 1), near=st.integers(-2, 2))
def test_prepared_divisors_divide_as_the_kernel_does(by, n, near):
    _, multiplier, shift = divisor(by)
    assert multiplier < 2**32
    for one in (n, min(max(n // by * by + near, 0), 2**31 - 1)):
        assert ((2 * one) * multiplier >> 32) >> shift == one // by
