"""The bench of whole requests moves them by vLLM's own NIXL worker too, and would see that it moved another page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from pdstage.bench import kv_transfer
from pdstage.bench.kv_transfer import MODELS, Bed, Case, Kept
from pdstage.bench.peers.vllm import NAME, VllmWorker
from pdstage.bench.sides import fabrics
from pdstage.transport import available

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.bench.peers.libraries import Pages

TOKENS = 256

pytestmark = pytest.mark.skipif(bool(available()["nixl"]), reason="NIXL is not installed")


def tiny(model: str, page: int) -> Case:
    (found,) = (one for one in MODELS if one.name == model)
    return Case(kv_transfer._scaled(found, 40), TOKENS, Kept(1, page), Kept(1, page), (1, 3))


def over_tcp() -> kv_transfer.Fabric:
    (found,) = (fabric for fabric in fabrics() if fabric.name == "nixl, TCP")
    return found


class ReadsOthers(VllmWorker):
    """Names a request's pages at prefill in another order."""

    def burst(self, requests: Sequence[Pages]) -> float:
        return super().burst([one._replace(src_ids=np.roll(one.src_ids, 1)) for one in requests])


@pytest.fixture(autouse=True)
def beside_no_folder_of_ours(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # beside our folder "kernels" vLLM cannot look into its models


@pytest.mark.parametrize(("model", "page"), [("Llama-70B", 16), ("DeepSeek-V3.2", 64)])
def test_vllms_worker_moves_every_byte_of_bursts(model, page):
    case = tiny(model, page)
    with Bed(case, over_tcp()) as bed:
        assert NAME in bed.libraries
        for n in case.sizes:
            assert bed.seconds(NAME, n) > 0  # which compares every byte
        n_pages, n_caches = TOKENS // page, len(list(case.place(case.src, 0).views()))
        assert bed.n_descriptors(NAME) == sum(case.sizes) * n_pages * n_caches


def test_another_page_read_by_vllms_worker_is_seen(monkeypatch):
    monkeypatch.setattr(kv_transfer, "libraries", lambda case, transport, host: {NAME: ReadsOthers})
    with Bed(tiny("Llama-70B", 16), over_tcp()) as bed, pytest.raises(RuntimeError, match="other bytes than were sent"):
        bed.seconds(NAME, 1)


def test_a_hybrid_is_not_for_vllms_worker_here():
    """Its slots hold several arrays each."""
    assert NAME in kv_transfer.libraries(tiny("Qwen3-235B", 16), "nixl", kv_transfer.HERE)
    assert NAME not in kv_transfer.libraries(tiny("Qwen3-Next", 64), "nixl", kv_transfer.HERE)
