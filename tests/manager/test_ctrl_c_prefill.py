"""A Ctrl-C at any place of a prefill node's life."""

from __future__ import annotations

import pytest

from tests.manager.anywhere import FEW, MANY, interrupt_anywhere
from tests.rows import rows, usable


@pytest.mark.parametrize("n", ["few", pytest.param("many", marks=pytest.mark.full)])
@pytest.mark.parametrize("transport", rows(usable(*MANY), full={"nixl", "mooncake"}))
@pytest.mark.parametrize("progress", ["inline", "thread"])
def test_a_ctrl_c_at_any_place(progress, transport, n):
    """The node closes in time, with no lock held, its rooms end, its process does, and its peer serves others (I10)."""
    interrupt_anywhere("prefill", transport, progress, FEW if n == "few" else MANY[transport])
