"""vLLM's own NIXL connector as a library: its pull worker, on caches that are views of a pool in host memory.

Both ends have vLLM's `NixlConnector` twice, as an engine has: the scheduler's half serves the handshake, the worker's
half moves. Nothing of vLLM is replaced: the calls are those of a model runner's step. Decode's worker reads prefill's
blocks, so the destination makes a burst's calls. Prefill's worker is given the requests first, as by its scheduler, and
hears from each read. What a scheduler does for a request (matching, allocating) is left out.

vLLM 0.32 keeps K and V of a layer side by side in one block, and the pool of a case keeps them apart. So K and V of a
layer are two caches here, and a burst has as many descriptors as with NIXL's own lists.

Read in vLLM 0.32: vllm/distributed/kv_transfer/kv_connector/v1/nixl/.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .libraries import Library, Pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from pdstage.layout import Layout, View

NAME = "vLLM's NIXL worker"
_MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 512,
    "max_position_embeddings": 4096, "dtype": "bfloat16",
}  # fmt: skip
"""A Llama-70B without a vocabulary. The worker compares it with its peer's, and counts no byte by it."""
_IDLE_S = 5e-4
_LEASE_S = 300.0
_WAIT_S = 120.0


class Peer(NamedTuple):
    """Where a worker's scheduler answers handshakes."""

    engine: str
    host: str
    port: int


def takes(layout: Layout) -> bool:
    """Whether vLLM's worker can be here, and takes this pool: all its caches have the same pages, each contiguous.

    A hybrid's states are not such: several arrays lie in one slot, and slots are not pages. On every platform but the
    CPU's, vLLM's worker refuses caches in host memory.
    """
    views = list(layout.views())
    if len({(view.n_items, view.tokens_per_item) for view in views}) > 1 or not all(map(_is_dense, views)):
        return False
    if not find_spec("vllm") or not find_spec("nixl"):
        return False
    _prepare()
    from vllm.platforms import current_platform  # noqa: PLC0415  (not everywhere)

    is_cpu: bool = current_platform.is_cpu()
    return is_cpu


def _is_dense(view: View) -> bool:
    return view.item_stride == view.tokens_per_item * view.shards * view.width


def _prepare() -> None:
    """Before vLLM is imported."""
    # transformers looks for Hugging Face's package of that name, and in a checkout would find its folder
    sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
    for name, value in (("VLLM_LOGGING_LEVEL", "ERROR"), ("VLLM_NO_USAGE_STATS", "1"), ("HF_HUB_OFFLINE", "1")):
        os.environ.setdefault(name, value)


class VllmWorker(Library):
    """One end of vLLM's NIXL connector, at TP 1. `host`: this host's address for the peer."""

    pulls = True

    def __init__(self, layout: Layout, host: str = "127.0.0.1") -> None:
        _prepare()
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: PLC0415
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector  # noqa: PLC0415
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata  # noqa: PLC0415

        self._news = NixlConnectorMetadata
        port = _free_port(host)
        os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"], os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = host, str(port)
        views = {f"model.layers.{view.key.layer}.{view.key.role}": view for view in layout.views()}
        config, plan = _config(views)
        cores = os.sched_getaffinity(0)
        self._scheduler: Any = NixlConnector(config, KVConnectorRole.SCHEDULER, plan)
        self._worker: Any = NixlConnector(config, KVConnectorRole.WORKER, plan)
        # On the CPU the worker moves the thread that makes it to the machine's last core. Both ends, and every other
        # way of the bench, would share that core.
        os.sched_setaffinity(0, cores)
        self._worker.register_kv_caches(_caches(layout, views))
        self._scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self._worker.get_handshake_metadata()})
        self._own = Peer(config.kv_transfer_config.engine_id, host, port)
        self._n_requests = 0

    def describe(self) -> Peer:
        return self._own

    def connect(self, described: Sequence[Any]) -> None:
        """The workers shake hands at the first burst."""
        self._peer = Peer(*described)

    def offer(self, n: int) -> None:
        """Prefill's scheduler says that `n` requests are computed, and how long they are kept."""
        news = self._news()
        names = self._names(n)
        news.reqs_in_batch.update(names)
        news.reqs_to_send.update(dict.fromkeys(names, time.perf_counter() + _LEASE_S))
        self._step(news)

    def burst(self, requests: Sequence[Pages]) -> float:
        """Seconds until all of `requests` are read from the peer. Metadata come from an engine's scheduler, which is
        another process, so that the clock starts when the worker has them.
        """
        names = self._names(len(requests))
        news = self._news()
        for name, one in zip(names, requests, strict=True):
            params = {
                "remote_block_ids": (one.src_ids.tolist(),), "remote_engine_id": self._peer.engine,
                "remote_request_id": name, "remote_host": self._peer.host, "remote_port": self._peer.port, "tp_size": 1,
            }  # fmt: skip
            news.add_new_req_to_recv(name, (one.dst_ids.tolist(),), params, awaiting_kvs=True)
        left, none = set(names), self._news()
        start = time.perf_counter()
        left -= self._step(news)
        while left:
            left -= self._step(none)
            if time.perf_counter() - start > _WAIT_S:
                raise TimeoutError(f"{NAME} did not read {len(left)} requests in {_WAIT_S} s")
        return time.perf_counter() - start

    def _names(self, n: int) -> list[str]:
        """Of the next `n` requests, which both ends count alike."""
        first = self._n_requests
        self._n_requests += n
        return [f"request-{number}" for number in range(first, first + n)]

    def _step(self, news: Any) -> set[str]:  # noqa: ANN401  (vLLM's)
        """What a model runner calls in a step; returns what has arrived."""
        self._worker.bind_connector_metadata(news)
        self._worker.start_load_kv(None)
        results = self._worker.get_transfer_results(set())
        self._worker.clear_connector_metadata()
        if results.failed_recving:
            raise RuntimeError(f"{NAME} failed to read {sorted(results.failed_recving)}")
        arrived: set[str] = results.finished_recving
        return arrived

    def idle(self) -> None:
        """A step, as of a model whose forward pass leaves the cores to the worker's threads."""
        self._step(self._news())
        time.sleep(_IDLE_S)

    def close(self) -> None:
        from vllm.distributed.parallel_state import (  # noqa: PLC0415
            destroy_distributed_environment,
            destroy_model_parallel,
        )

        self._worker.shutdown()
        self._scheduler.shutdown()
        destroy_model_parallel()
        destroy_distributed_environment()


def _free_port(host: str) -> int:
    with socket.socket() as one:
        one.bind((host, 0))
        port: int = one.getsockname()[1]
    return port


def _config(views: dict[str, View]) -> tuple[Any, Any]:
    """vLLM's configuration of an engine with a cache for each of `views`, and how it lays them out; and its groups of
    one rank.
    """
    from vllm.config import set_current_vllm_config  # noqa: PLC0415
    from vllm.distributed.parallel_state import (  # noqa: PLC0415
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import (  # noqa: PLC0415
        KVCacheConfig,
        KVCacheGroupSpec,
        UniformTypeKVCacheSpecs,
    )

    page, n_pages = next((view.tokens_per_item, view.n_items) for view in views.values())
    with tempfile.TemporaryDirectory(prefix="pdstage-vllm-worker-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_MODEL))
        config = EngineArgs(
            model=folder, skip_tokenizer_init=True, max_model_len=1024, block_size=page, enforce_eager=True,
            kv_transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"},
        ).create_engine_config()  # fmt: skip
        config.model_config.model = "bench"  # compared with the peer's, whose folder is another
        config.cache_config.kv_cache_layout = "LBNHC"
        with set_current_vllm_config(config):
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
    layers = _layers(views)
    config.compilation_config.static_forward_context.update(layers)
    specs = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    group = KVCacheGroupSpec(list(specs), UniformTypeKVCacheSpecs(block_size=page, kv_cache_specs=specs))
    return config, KVCacheConfig(n_pages, [], [group])


def _layers(views: dict[str, View]) -> dict[str, Any]:
    """What a model's attention layers tell vLLM of their caches.

    The backend is the one of GPUs: that of the CPU takes only pages of a multiple of 32 tokens, for its own kernels. A
    cache counts in bytes, all of which are the K of vLLM's K and V.
    """
    import torch  # noqa: PLC0415
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase  # noqa: PLC0415
    from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend  # noqa: PLC0415
    from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: PLC0415

    class Layer(AttentionLayerBase):  # type: ignore[misc]
        def __init__(self, view: View) -> None:
            self.spec = FullAttentionSpec(
                block_size=view.tokens_per_item, num_kv_heads=view.shards, head_size=view.width, head_size_v=0,
                dtype=torch.uint8,
            )  # fmt: skip

        def get_attn_backend(self) -> Any:  # noqa: ANN401  (vLLM's)
            return FlashAttentionBackend

        def get_kv_cache_spec(self, vllm_config: Any) -> Any:  # noqa: ANN401  (vLLM's)
            return self.spec

    return {name: Layer(view) for name, view in views.items()}


def _caches(layout: Layout, views: dict[str, View]) -> dict[str, torch.Tensor]:
    """uint8 `[page, token, shard, byte]` of each view, all in one storage, as vLLM allocates them."""
    import torch  # noqa: PLC0415

    (region,) = layout.regions
    whole = torch.from_numpy(np.ctypeslib.as_array((ctypes.c_uint8 * region.nbytes).from_address(region.base)))
    return {
        name: whole[view.offset :][: view.n_items * view.item_stride].view(
            view.n_items, view.tokens_per_item, view.shards, view.width
        )
        for name, view in views.items()
    }
