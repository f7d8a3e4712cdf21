"""A layout on the device is proved by a writer that runs there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from pdstage.errors import UsageError
from pdstage.layout import Key
from pdstage.probe import LayerProbe, prove_layout
from pdstage.tensors import build, paged_nhd

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pdstage.probe import Cell

pytestmark = pytest.mark.gpu
K, V = Key("kv", "k", 0), Key("kv", "v", 0)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_writer_on_the_device(swapped: bool) -> None:
    k, v = (torch.randn(6, 16, 4, 32, device="cuda").to(torch.bfloat16) for _ in range(2))
    before = k.clone(), v.clone()

    def write(cells: Sequence[Cell], rng: np.random.Generator) -> Mapping[Key, NDArray[np.uint8]]:
        stored = {}
        for key, cache in ((K, k), (V, v)):
            rows = torch.from_numpy(rng.standard_normal((len(cells), 4, 32))).to(torch.bfloat16)
            slots = torch.tensor([cell.item * 16 + cell.token for cell in cells], device="cuda")
            cache.view(-1, 4, 32)[slots] = rows.cuda()
            stored[key] = rows.view(torch.uint8).numpy()
        return stored

    layout = build(paged_nhd([v if swapped else k], [k if swapped else v], total_heads=4, tp=(1, 0)))
    probes = [LayerProbe("layers.0", "SOME_ATTN", (K, V), write)]
    if swapped:
        with pytest.raises(UsageError, match="that is what was written as v of page 0, token 0"):
            prove_layout(layout, probes)
    else:
        assert prove_layout(layout, probes).proved == ("layers.0",)
    assert torch.equal(k, before[0])
    assert torch.equal(v, before[1])
