"""Requests through SGLang's own sender and receiver life cycle, prefill and decode ranks in processes of their own."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.engines.sglang.fleet import Fleet

pytestmark = pytest.mark.skipif(not find_spec("sglang"), reason="SGLang is not installed: `make test-engines` has it")


@pytest.fixture(scope="module")
def fleet(metadata_dir, request):
    with Fleet(*request.param) as made:
        yield made


@pytest.mark.parametrize("fleet", [(4, 2, "mha")], indirect=True)
def test_a_request(fleet):
    fleet.run(1, 100)
