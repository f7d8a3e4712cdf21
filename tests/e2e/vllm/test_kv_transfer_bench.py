"""The bench of whole requests moves them by vLLM's own NIXL worker too."""

from __future__ import annotations

import pytest

from pdstage.bench import kv_transfer
from pdstage.bench.kv_transfer import MODELS, Bed, Case, Kept
from pdstage.bench.peers.vllm import NAME
from pdstage.bench.sides import fabrics
from pdstage.transport import available

TOKENS = 256

pytestmark = pytest.mark.skipif(bool(available()["nixl"]), reason="NIXL is not installed")


def tiny(model: str, page: int) -> Case:
    (found,) = (one for one in MODELS if one.name == model)
    return Case(kv_transfer._scaled(found, 40), TOKENS, Kept(1, page), Kept(1, page), (1, 3))


def over_tcp() -> kv_transfer.Fabric:
    (found,) = (fabric for fabric in fabrics() if fabric.name == "nixl, TCP")
    return found


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


def test_a_hybrid_is_not_for_vllms_worker_here():
    """Its slots hold several arrays each."""
    assert NAME in kv_transfer.libraries(tiny("Qwen3-235B", 16), "nixl", kv_transfer.HERE)
    assert NAME not in kv_transfer.libraries(tiny("Qwen3-Next", 64), "nixl", kv_transfer.HERE)
