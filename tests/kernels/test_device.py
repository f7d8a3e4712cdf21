"""What the host refuses before a launch that the device could only answer with a fault."""

from __future__ import annotations

import numpy as np
import pytest
from pools import Logical, Stored, hold, kv_index

from pdstage import Pool, UsageError
from pdstage.kernels import Index
from pdstage.kernels.backend import Recipe
from pdstage.kernels.device import DeviceTable
from pdstage.plan import TOKEN_MAJOR, Staging

OF = Logical(width=32)
HELD = hold([Stored(OF, n_items=6, rows_per_item=4)])


def check(at, tokens):
    """A call on a list there."""
    select = Staging(HELD.layout, OF.whole()).select
    table = DeviceTable(Recipe(HELD.layout, select, TOKEN_MAJOR, "cuda:0", checksum=False), merged=True)
    table.checked({"kv": at}, {"kv": tokens}, "cuda:0", unique=False)


@pytest.mark.parametrize("bits", [32, 64])
def test_a_list_on_the_device_lies_at_a_multiple_of_its_items(bits):
    nbytes = bits // 8
    at = Index(0x7000_0000, bits, 3, 0, None, "cuda:0")
    check(at, (0, 12))
    askew = at._replace(ptr=at.ptr + nbytes // 2)
    with pytest.raises(UsageError, match=f"the list of component 'kv' at {askew.ptr:#x} is not aligned"):
        check(askew, (0, 12))
    check(askew, (4, 4))  # is not read


def test_a_checksums_word_lies_at_a_multiple_of_8():
    plan = Pool.of(HELD.layout).plan(OF.whole(), checksum=True, backend="reference")
    staged, total = np.zeros(1024, np.uint8), np.zeros(2, np.uint64)
    index = kv_index([1, 2, 3])
    with pytest.raises(UsageError, match="the checksum's word"):
        plan.gather(staged.ctypes.data, 384, index, {"kv": (0, 12)}, sum_ptr=total.ctypes.data + 4)
