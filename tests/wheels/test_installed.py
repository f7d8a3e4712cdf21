"""The program that `make wheels` runs in empty venvs, on this checkout; and that its checks can fail."""

from __future__ import annotations

import pytest

from pdstage import native
from tests.wheels import installed

needs_native = pytest.mark.skipif(native.ext is None, reason="no C++ extension")


def test_every_byte_between_two_processes():
    assert installed.transfer("local") > 0


def test_another_byte_is_seen(monkeypatch):
    drawn = installed.drawn

    def other():
        k, v = drawn()
        v[-1, installed.pages(installed.SRC_PAGES)[0], 3, 2, 1] += 1
        return k, v

    monkeypatch.setattr(installed, "drawn", other)  # here, not in the process that sends
    with pytest.raises(AssertionError, match="other bytes arrived"):
        installed.transfer("local")


@needs_native
def test_the_extension_knows_the_processor(monkeypatch):
    installed.check_processor()
    monkeypatch.setitem(installed.FLAGS, "amd", {"no such word"})
    monkeypatch.setitem(installed.FLAGS, "avx", {"no such word"})
    if native.ext.processor["amd"] or native.ext.processor["avx"]:
        with pytest.raises(AssertionError):
            installed.check_processor()


@needs_native
def test_threads_in_the_extension_at_the_programs_end():
    installed.check_end()
