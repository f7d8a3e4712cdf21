"""Lists on their way to a device: never overwritten while a kernel may read them, and nothing ever waits."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdstage import UsageError
from pdstage.kernels import driver
from pdstage.kernels.cuda_runtime import CudaRuntime
from pdstage.kernels.cuda_tables import divisor
from pdstage.kernels.index_ring import IndexRing

THREE = np.arange(3)


@pytest.fixture
def machine(gpu):
    return CudaRuntime(0)


def piece(items):
    """A list by address and bytes."""
    return items.ctypes.data, items.nbytes


def put_three(ring):
    """Of one call, in the default stream."""
    return ring.put([piece(THREE)], 0)


def finish():
    """What was put into the default stream is over."""
    driver.cuda().call("cuStreamSynchronize", None)


def check_there(address, items):
    """A list is on the device, once its stream is past it."""
    finish()
    found = np.frombuffer((ctypes.c_uint8 * items.nbytes).from_address(address), items.dtype)
    np.testing.assert_array_equal(found, items)


def test_a_full_ring_grows_and_touches_no_list_that_a_kernel_may_still_read(gpu, machine):
    ring = IndexRing(machine, n_slots=2, slot_nbytes=64)
    held, gpu["held"] = [], 1
    for number in range(7):
        items = np.full(9, number, np.int32)
        slot, (address,) = ring.put([piece(items)], stream=0)
        ring.give(slot, stream=0)
        held.append((address, items))
    gpu["held"] = 0
    for address, items in held:
        check_there(address, items)


def test_a_slot_is_used_again_once_its_kernel_has_run(gpu, machine):
    ring = IndexRing(machine, n_slots=1, slot_nbytes=64)
    n_made, found = gpu.calls("cuMemAlloc"), set()
    for _ in range(50):
        slot, (address,) = put_three(ring)
        ring.give(slot, 0)
        check_there(address, THREE)
        found.add(address)
    assert (len(found), gpu.calls("cuMemAlloc")) == (1, n_made)


def test_lists_of_one_call_lie_apart_and_aligned_and_a_long_one_gets_a_slot(machine):
    ring = IndexRing(machine, n_slots=1, slot_nbytes=64)
    lists = [np.arange(3, dtype=np.int32), np.arange(1000), np.array([7], np.int32)]
    slot, addresses = ring.put([piece(items) for items in lists], 0)
    for address, items in zip(addresses, lists, strict=True):
        assert address % 16 == 0
        check_there(address, items)
    ring.give(slot, 0)


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        ("captured", UsageError, "give lists that lie on the device"),
        ("fails", driver.DriverError, "cuMemcpyHtoDAsync"),
    ],
)
def test_lists_that_are_not_sent_give_their_slot_back(gpu, machine, monkeypatch, fault, error, words):
    ring = IndexRing(machine, n_slots=1)
    n_made = gpu.calls("cuMemAlloc")
    gpu.fail("cuMemcpyHtoDAsync", fault == "fails")
    with monkeypatch.context() as patch, pytest.raises(error, match=words):
        patch.setattr(machine, "capturing", lambda _: fault == "captured")
        put_three(ring)
    finish()
    ring.give(put_three(ring)[0], 0)
    assert gpu.calls("cuMemAlloc") == n_made


@given(by=st.integers(1, 2**31 - 1), n=st.integers(0, 2**31 - 1), near=st.integers(-2, 2))
def test_prepared_divisors_divide_as_the_kernel_does(by, n, near):
    _, multiplier, shift = divisor(by)
    assert multiplier < 2**32
    for one in (n, min(max(n // by * by + near, 0), 2**31 - 1)):
        assert ((2 * one) * multiplier >> 32) >> shift == one // by
