"""A worker's layout is proved by vLLM's own CPU operators at start, and a wrong belief is refused by name.

No server: real layers with their real backend, real configs, real allocation, the real connector, in this process.
"""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm import _custom_ops as ops
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.worker.utils import allocate_kv_cache, bind_kv_cache

from pdstage.errors import UsageError
from pdstage.integrations.vllm import caches as believed
from pdstage.tensors import vllm_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pdstage.tensors import Part

HEADS, DIM, LAYERS = 4, 64, 2


class Worker:
    """One rank of an engine of tiny Llamas, up to the moment where vLLM registers its caches."""

    def __init__(self, folder: Path, *, dtype: str = "float32", cache_dtype: str = "auto") -> None:
        model = {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 64,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": DIM,
            "vocab_size": 64, "max_position_embeddings": 1024,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(model))
        arguments = EngineArgs(
            model=str(folder), skip_tokenizer_init=True, dtype=dtype, max_model_len=512, block_size=64,
            kv_cache_dtype=cache_dtype, enforce_eager=True,
            kv_transfer_config={
                "kv_connector": "PdStageConnector", "kv_role": "kv_both",
                "kv_connector_extra_config": {"transport": "local", "staging_nbytes": 1 << 20},
            },
        )  # fmt: skip
        self.config = arguments.create_engine_config()
        self.config.cache_config.kv_cache_layout = "LBHNC"  # the only one that CPU_ATTN takes
        with set_current_vllm_config(self.config):
            self.layers = [
                Attention(HEADS, DIM, 1.0, num_kv_heads=HEADS, prefix=f"model.layers.{i}.self_attn.attn",
                          cache_config=self.config.cache_config)
                for i in range(LAYERS)
            ]  # fmt: skip
            specs = {layer.layer_name: layer.get_kv_cache_spec(self.config) for layer in self.layers}
            (self.plan,) = get_kv_cache_configs(self.config, [specs], [8 << 20])
            names = list(specs)
            builder = self.layers[0].get_attn_backend().get_builder_cls()
            builder(specs[names[0]], names, self.config, torch.device("cpu"))  # tells the layers their instruction set
            layout = self.config.cache_config.get_resolved_kv_cache_layout()
            self.caches = allocate_kv_cache(self.plan, torch.device("cpu"), layout, [64])
            bind_kv_cache(self.caches, self.config.compilation_config.static_forward_context, [])
            for layer in self.layers:
                noise = layer.kv_cache.view(torch.uint8)
                noise.copy_(torch.randint(0, 256, noise.shape, dtype=torch.uint8))

    def register(self, **extra: Any) -> None:
        """What vLLM's worker does, up to a node that is up."""
        self.config.kv_transfer_config.kv_connector_extra_config |= extra
        connector = KVConnectorFactory.create_connector(self.config, KVConnectorRole.WORKER, self.plan)
        try:
            connector.register_kv_caches(self.caches)
        finally:
            connector.shutdown()


def force(isa: str, worker: Worker) -> None:
    """Has the operator store for an instruction set that the machine may lack: it moves bytes, and computes nothing."""
    if isa == "amx" and not _stores(isa):
        pytest.skip("this build of vLLM's operators packs nothing for AMX")
    for layer in worker.layers:
        layer.isa = isa


def _stores(isa: str) -> bool:
    cache = torch.zeros(1, 1, 128, 64, dtype=torch.bfloat16)
    token = torch.ones(1, 1, 64, dtype=torch.bfloat16)
    try:
        ops.cpu_attn_reshape_and_cache(
            token, token, *cache.chunk(2, dim=2), torch.zeros(1, dtype=torch.int64), isa,
            k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto",
        )  # fmt: skip
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def left_alone(worker: Worker) -> Iterator[None]:
    """In the end the caches hold what they did."""
    before = [layer.kv_cache.view(torch.uint8).clone() for layer in worker.layers]
    yield
    for layer, was in zip(worker.layers, before, strict=True):
        assert torch.equal(layer.kv_cache.view(torch.uint8), was)


KINDS = [
    ("float32", "auto", "vec"), ("float32", "auto", "vec16"), ("float16", "auto", "vec"),
    ("bfloat16", "auto", "vec"), ("bfloat16", "auto", "vec16"), ("bfloat16", "auto", "amx"),
    ("bfloat16", "fp8_e4m3", "vec"), ("bfloat16", "fp8_e5m2", "vec"), ("bfloat16", "fp8_e4m3", "amx"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "cache_dtype", "isa"), KINDS)
def test_each_order_of_cpu_attn_is_proved(tmp_path: Path, dtype: str, cache_dtype: str, isa: str) -> None:
    try:
        worker = Worker(tmp_path, dtype=dtype, cache_dtype=cache_dtype)
    except NotImplementedError as why:  # this processor
        pytest.skip(str(why))
    force(isa, worker)
    for layer in worker.layers:
        layer._k_scale_float = layer._v_scale_float = 0.37 if cache_dtype != "auto" else 1.0
    with left_alone(worker):
        worker.register()


def test_a_wrong_belief_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the shape says: of a token and head K, then V."""

    def wrong(name: str, cache: torch.Tensor, *_: object, naming: Any, **heads: Any) -> Part:
        return vllm_blocks([cache], key_nbytes=DIM * 4, **heads, **naming)

    worker = Worker(tmp_path)
    monkeypatch.setattr(believed, "_attention", wrong)
    with left_alone(worker):
        with pytest.raises(UsageError, match="attention backend CPU_ATTN was given") as refused:
            worker.register()
        assert "'model.layers.0.self_attn.attn' is not laid out as pdstage believes" in str(refused.value)
    with pytest.raises(UsageError, match="is not laid out"):  # the operator's word does not outweigh the writer
        worker.register(trust_layout=True)


def test_a_backend_without_a_writer_is_refused_unless_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(tmp_path)
    monkeypatch.delattr(type(worker.layers[0].impl), "do_kv_cache_update")
    with pytest.raises(UsageError, match="nothing proves how attention backend CPU_ATTN keeps layer") as refused:
        worker.register()
    assert "trust_layout" in str(refused.value)
    worker.register(trust_layout=True)
    with pytest.raises(UsageError, match="trust_layout of kv_connector_extra_config is 'yes'"):
        worker.register(trust_layout="yes")
