"""vLLM's own cache writes prove the views: those that run without a GPU, Triton's in its interpreter.

Layers are not vLLM's: they have what a writer reads of one. The writers, the states' binding and all else are vLLM's.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
import vllm
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend, DeepseekV32IndexerBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, MambaAttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl

from pdstage.errors import UsageError
from pdstage.integrations.vllm.caches import PAGES, Backend, Pages
from tests.engines import stubs
from tests.engines.vllm.caches import HEAD_SIZE
from tests.engines.vllm.test_caches import LAYOUTS, STATES, conv_order, mla, recurrent  # noqa: F401  (a fixture)
from tests.processes import python

if TYPE_CHECKING:
    Tensors = dict[str, torch.Tensor]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
COMPILED = stubs.on_gpu()
runs_triton = pytest.mark.skipif(not (INTERPRETED or COMPILED), reason="test_tritons_writer_in_its_interpreter runs it")
PROVED = {"extra": {"trust_layout": False}}


def layer(backend, impl, cache, **more):
    """What a writer reads of an attention layer."""
    one = torch.ones(1, device=cache.device)
    return SimpleNamespace(
        get_attn_backend=lambda: backend, impl=impl, kv_cache=cache, kv_cache_dtype="auto", head_size=HEAD_SIZE,
        num_kv_heads=cache.shape[1], _k_scale=one, _v_scale=one, _k_scale_float=1.0, _v_scale_float=1.0, **more,
    )  # fmt: skip


def triton_layers(config, caches):
    for name, cache in caches.items():
        with set_current_vllm_config(config):
            impl = TritonAttentionImpl(cache.shape[1], HEAD_SIZE, 1.0, cache.shape[1], None, None, "auto")
        held = cache.view(torch.float16)
        config.compilation_config.static_forward_context[name] = layer(TritonAttentionBackend, impl, held)


def latent_layers(config, caches):
    for name, cache in caches.items():
        held = cache.view(torch.float16).squeeze(1)
        impl = object.__new__(CPUMLAImpl)  # its writer reads nothing of it
        config.compilation_config.static_forward_context[name] = layer(
            CPUMLABackend, impl, held, kv_lora_rank=64, qk_rope_head_dim=8
        )


def state_layers(kind, n_speculative=0):
    """Recurrent layers that bind their caches as vLLM's do."""

    def bind(config, caches):
        for name in [name for name in caches if "mixer" in name]:
            made = SimpleNamespace(
                get_state_shape=lambda: STATES[kind][1](config.parallel_config.tensor_parallel_size, n_speculative),
                get_state_dtype=lambda: (torch.float16, torch.float32),
            )
            MambaBase.bind_kv_cache(made, caches[name])
            config.compilation_config.static_forward_context[name] = made

    return bind


@pytest.mark.skipif(INTERPRETED or COMPILED, reason="Triton runs in this process")
def test_tritons_writer_in_its_interpreter():
    """Read at import, so in a process of its own; vLLM keeps Triton where no device is to be seen."""
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = python("-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "interpreted", check=True, env=env)
    assert f"{len(LAYOUTS)} passed" in ran.stdout


@runs_triton
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_is_proved_interpreted(sides, layout, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    sides("kv_producer", tp=2, layout=layout, bind=triton_layers, **PROVED)


def test_latents_are_proved(sides):
    sides("kv_producer", mla, bind=latent_layers, **PROVED)


@pytest.mark.usefixtures("conv_order")
@pytest.mark.parametrize(("kind", "n"), [*((kind, 0) for kind in STATES), ("GDN_ATTN", 2)])
def test_states_are_proved(sides, kind, n):
    sides("kv_producer", recurrent(kind, n), tp=2, bind=state_layers(kind, n))


def test_states_elsewhere_are_refused(sides):
    def later(config, caches):
        state_layers("MAMBA2")(config, {name: cache.clone() for name, cache in caches.items()})

    with pytest.raises(UsageError, match="'model.layers.2.mixer' is not laid out as pdstage believes"):
        sides("kv_producer", recurrent("MAMBA2"), bind=later)


def test_a_backend_is_known_by_its_class_alone():
    """DeepSeek-V4's indexer inherits from V3.2's, and stores otherwise."""

    def of(backend):
        return Backend.of(SimpleNamespace(get_attn_backend=lambda: backend))

    assert of(DeepseekV4IndexerBackend).pages is Pages.ROWS
    assert of(DeepseekV32IndexerBackend).pages is Pages.INDEX
    assert of(TritonAttentionBackend) == ("TRITON_ATTN", Pages.ROWS)


@pytest.mark.parametrize("path", PAGES)
def test_what_is_known_is_a_class_of_vllm(path):
    """Read, not imported: most import what only a GPU's installation has."""
    module, _, name = path.rpartition(".")
    source = Path(vllm.__file__).parent.parent / module.replace(".", "/")
    assert f"class {name}(" in source.with_suffix(".py").read_text()


def test_the_page_has_every_backend_of_vllm():
    page = (Path(__file__).resolve().parents[3] / "docs" / "attention-backends.md").read_text()
    table = page.partition("## vLLM")[2].partition("\n## ")[0]
    names = [*AttentionBackendEnum.__members__, *MambaAttentionBackendEnum.__members__]
    assert not [name for name in names if f"`{name}`" not in table]
