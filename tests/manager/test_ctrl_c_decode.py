"""A Ctrl-C at any place of a decode node's life."""

from __future__ import annotations

import pytest

from tests.manager.interrupts import interrupt_anywhere


@pytest.mark.parametrize("n", [20, pytest.param(700, marks=pytest.mark.full)])
@pytest.mark.parametrize("progress", ["inline", "thread"])
def test_a_ctrl_c_at_any_place(progress, n):
    """The node closes in time, with no lock held, its rooms end, its process does, and its peer serves others (I10)."""
    interrupt_anywhere("decode", progress, n)
