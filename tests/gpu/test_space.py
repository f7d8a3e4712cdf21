"""Every kernel against the reference, bit for bit, over layouts drawn from seeds, and over real models' shapes."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gpu import space  # noqa: E402  (needs torch)
from gpu.space import Case  # noqa: E402

from pdstage.bench import shapes  # noqa: E402
from pdstage.bench.bed import Bed  # noqa: E402
from pdstage.bench.gpu_kernels import model_case  # noqa: E402
from pdstage.kernels import Index, Pool  # noqa: E402
from pdstage.layout import Layout, Region  # noqa: E402
from pdstage.plan import TOKEN_MAJOR  # noqa: E402


@pytest.mark.also_on_host
@pytest.mark.seeds(24)
def test_gather_is_the_reference(variant, device, seed):
    space.check_gather(Case(seed, repeat=True), variant, device)


@pytest.mark.also_on_host
@pytest.mark.seeds(24)
def test_scatter_is_the_reference(variant, device, seed):
    space.check_scatter(Case(seed, repeat=False), variant, device)


@pytest.mark.also_on_host
@pytest.mark.seeds(12)
def test_copy_to_is_a_gather_and_a_scatter(variant, device, seed):
    space.check_copy_to(seed, variant, device)


@pytest.mark.also_on_host
@pytest.mark.seeds(12)
def test_checksum_is_the_defined_one(variant, device, seed):
    space.check_checksum(Case(seed, repeat=False), variant, device)


@pytest.mark.also_on_host
@pytest.mark.parametrize("pair", [shapes.PAIRS[i] for i in (0, 1, 5, 7)], ids=lambda pair: pair.name.replace(" ", "-"))
@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_models_are_the_reference(variant, device, pair, way):
    """A chunk of every layer: the tables of real selections, in one launch."""
    bed = Bed(device, (variant,))
    case = model_case(bed, pair, 2 * pair.model.page + 5, way)
    before = case.memory.cpu().clone()
    on_cpu = Layout((Region(before.data_ptr(), before.numel()),), case.layout.components)
    plan = Pool.of(on_cpu, keep=before).plan(case.select, TOKEN_MAJOR, "reference")
    indexes = {name: Index.of(items) for name, items in case.items.items()}
    if way == "gather":
        expected = np.full(case.nbytes, 0xA5, np.uint8)
        plan.gather(expected.ctypes.data, expected.size, indexes, case.tokens)
        space.equal(case.gathered(variant), expected, "staging")
    else:
        case.staging.random_(0, 256)
        staged = case.staging.cpu().clone()
        plan.scatter(staged.data_ptr(), staged.numel(), indexes, case.tokens)
        case.works(variant)["scatter"]()
        bed.wait()
        space.equal(case.memory, before.numpy(), "the pool")


def test_a_wrong_byte_is_found():
    with pytest.raises(AssertionError, match="byte 3 of 8 is 9, not 0; 1 differ"):
        space.equal(torch.tensor([0, 0, 0, 9, 0, 0, 0, 0], dtype=torch.uint8), np.zeros(8, np.uint8), "it")


def test_the_space_holds_what_it_promises():
    """Seeds are few: that they still hit every kind of layout is checked, not hoped."""
    cases = [Case(seed, repeat=True) for seed in range(24)]
    hows = [how for case in cases for how in case.held.hows]
    assert any(how.block for how in hows) and any(how.pads for how in hows) and any(how.skew % 16 for how in hows)
    assert {how.order for how in hows} > {space.NHD, space.HND}
    assert any(how.of.width % 16 for how in hows) and any(how.of.width >= 1024 for how in hows)
    assert any(how.of.segs > 1 for how in hows) and any(how.of.tokens_per_row > 1 for how in hows)
    assert {case.wire for case in cases} == {"token", "head"}
    assert any(len(case.lists) > 1 for case in cases)
    assert any(start == stop for case in cases for start, stop in case.tokens.values())
