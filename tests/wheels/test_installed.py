"""The program that `make wheels` runs in empty venvs, on this checkout."""

from __future__ import annotations

import pytest

from pdstage import native
from tests.wheels import installed

needs_native = pytest.mark.skipif(native.ext is None, reason="no C++ extension")


def test_every_byte_between_two_processes():
    assert installed.transfer() > 0


@needs_native
def test_the_extension_knows_the_processor():
    installed.check_processor()


@needs_native
def test_threads_in_the_extension_at_the_programs_end():
    installed.check_end()
