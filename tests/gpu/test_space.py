"""Every kernel against the reference, bit for bit: layouts that are drawn, what is refused, and real models' shapes.

The same suite as on the CPU (tests/rigs.py), over a GPU's memory.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from gpu.conftest import FEW  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from pools import transfers, wide_transfers  # noqa: E402
from rigs import REFERENCE, Block, Rig, by_misuse, check, check_refused  # noqa: E402

from pdstage.bench import shapes  # noqa: E402  (needs torch)
from pdstage.bench.bed import Bed  # noqa: E402
from pdstage.bench.gpu_kernels import model_case  # noqa: E402
from pdstage.bench.variants import plan_of  # noqa: E402
from pdstage.kernels import Index, Pool  # noqa: E402
from pdstage.layout import Layout, Region  # noqa: E402
from pdstage.plan import TOKEN_MAJOR  # noqa: E402


class DeviceRig(Rig):
    """One kernel of a GPU, and the GPU's memory."""

    skews = False

    def __init__(self, variant, device, max_sms=None):
        super().__init__(variant)
        self.device, self.max_sms = device, max_sms

    def put(self, array):
        held = torch.from_numpy(np.array(array)).to(self.device)
        return Block(held.data_ptr(), held)

    def get(self, block):
        return block.owner.cpu().numpy()

    def plan(self, layout, select, wire, checksum):
        return plan_of(Pool.of(layout, self.device), select, wire, self.backend, checksum=checksum)

    def place(self, held):
        blocks, layout = super().place(held)
        return blocks, replace(layout, regions=tuple(replace(region, kind="cuda") for region in layout.regions))


def on_device(indexes):
    """The same lists on the device, where the host does not look at them."""
    found = {}
    for name, index in indexes.items():
        held = torch.from_numpy(index.keep).to("cuda:0")
        found[name] = index._replace(ptr=held.data_ptr(), keep=held, device="cuda:0")
    return found


@pytest.mark.gpu
@settings(
    max_examples=4 if FEW else 40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    transfer=transfers() | wide_transfers() | wide_transfers(32), lists_there=st.booleans(),
    max_sms=st.sampled_from([None, 1, 3]),
)  # fmt: skip
def test_every_transfer_is_the_references(variant, device, transfer, lists_there, max_sms):
    rig, expected = DeviceRig(variant, device, max_sms), None
    if lists_there:
        expected = transfer
        transfer = replace(transfer, src_index=on_device(transfer.src_index), dst_index=on_device(transfer.dst_index))
    check(rig, transfer, expected)


@pytest.mark.gpu
@by_misuse(askew=({"skew": 8}, "not aligned"), elsewhere=({"device": "cuda:1"}, "are on 'cuda:1'"))
def test_misuse_names_the_culprit_and_writes_nothing(variant, device, way, case, words):
    check_refused(DeviceRig(variant, device), way, case, words)


@pytest.mark.also_on_host
@pytest.mark.parametrize("pair", [shapes.PAIRS[i] for i in (0, 1, 5, 7)], ids=lambda pair: pair.name.replace(" ", "-"))
@pytest.mark.parametrize("way", ["gather", "scatter"])
def test_models_are_the_reference(variant, device, pair, way):
    """A chunk of every layer: the tables of real selections, in one launch."""
    bed = Bed(device, (variant,))
    case = model_case(bed, pair, 2 * pair.model.page + 5, way)
    before = case.memory.cpu().clone()
    on_cpu = Layout((Region(before.data_ptr(), before.numel()),), case.layout.components)
    plan = REFERENCE.plan(on_cpu, case.select, TOKEN_MAJOR, False)
    indexes = {name: Index.of(items) for name, items in case.items.items()}
    if way == "gather":
        expected = np.full(case.nbytes, 0xA5, np.uint8)
        plan.gather(expected.ctypes.data, expected.size, indexes, case.tokens)
        np.testing.assert_array_equal(case.gathered(variant).cpu().numpy(), expected)
    else:
        case.staging.random_(0, 256)
        staged = case.staging.cpu().clone()
        plan.scatter(staged.data_ptr(), staged.numel(), indexes, case.tokens)
        case.works(variant)["scatter"]()
        bed.wait()
        np.testing.assert_array_equal(case.memory.cpu().numpy(), before.numpy())
