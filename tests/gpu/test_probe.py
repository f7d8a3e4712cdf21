"""A layout on the device is proved by a writer that runs there."""

from __future__ import annotations

import pytest
import torch

from pdstage.errors import UsageError
from tests.test_probe import caches, nhd, prove, writer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("swapped", [False, True])
def test_a_writer_on_the_device(swapped: bool) -> None:
    k, v = (cache.cuda().to(torch.bfloat16) for cache in caches())
    before = k.clone(), v.clone()
    if swapped:
        with pytest.raises(UsageError, match="that is what was written as v of page 0, token 0"):
            prove(nhd(v, k), writer(k, v))
    else:
        assert prove(nhd(k, v), writer(k, v)) == (("layers.0",), ())
    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])
