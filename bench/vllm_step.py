"""What pdstage's connector adds to a step of vLLM's workers, with rooms that are loaded meanwhile.

Two processes, a prefill and a decode rank, each with vLLM's real connector on caches in host memory, and real nodes. A
step has the parts of vLLM's model runner: metadata bound, `start_load_kv`, a forward pass, transfer results and
statistics. The forward pass is matrix products for about a millisecond; like vLLM's, the call lets other threads run.
Steps with news alternate with steps without, which are the baseline. In some rows 64 more requests wait all the while:
decode has announced their rooms, and prefill sends them at the end.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pdstage.errors import UsageError

from .harness import Row
from .ranks import Actor, Rank

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 512,
    "max_position_embeddings": 4096, "dtype": "float16",
}  # fmt: skip
LAYERS, HEADS, DIM, BLOCK = 4, 8, 64, 16
N_BLOCKS, BLOCKS_A_ROOM = 1024, 8
N_STEPS, QUICK_STEPS = 2000, 200
FORWARD_S = 1e-3
WAIT_S = 60.0
MAX_US = 5000.0
IN_FLIGHT = 64
WORKER_US = 60.0


def run(quick: bool) -> list[Row]:
    """Raises `UsageError` where there is no vLLM."""
    if not find_spec("vllm"):
        raise UsageError(
            "bench vllm-step measures vLLM's connector, and vLLM is not installed",
            remedy="run it with vLLM's Python: python -m pdstage bench vllm-step",
            extra="vllm",
        )
    rows, n_steps = [], QUICK_STEPS if quick else N_STEPS
    for rooms_a_step, n_waiting in ((1, 0), (4, 0), (1, IN_FLIGHT)):
        rows += _steps(n_steps, rooms_a_step, n_waiting)
    return rows


def _steps(n_steps: int, rooms_a_step: int, n_waiting: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="pdstage-vllm-step-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        prefill, decode = (Rank(VllmRank, role, folder) for role in ("kv_producer", "kv_consumer"))
        try:
            for rank in (prefill, decode):
                rank.ready().begin("start")
            for rank in (prefill, decode):
                rank.result()
            address = prefill.call("serve")
            prefill.begin("steps", "sends", n_steps, rooms_a_step, n_waiting, address)
            busy, empty = decode.call("steps", "receives", n_steps, rooms_a_step, n_waiting, address)
            sent, idle = prefill.result()
        finally:
            decode.close()
            prefill.close()
    with_news = f"{rooms_a_step} room{'s' * (rooms_a_step > 1)} a step"
    with_news += f" and {n_waiting} waiting" if n_waiting else ""
    return [
        row
        for whose, news, none in (("decode's", busy, empty), ("prefill's", sent, idle))
        for row in _rows(f"{whose} worker, {with_news}", news, none)
    ]


def _rows(name: str, busy: list[float], empty: list[float]) -> list[Row]:
    detail = f"{len(busy)} steps; start_load_kv and results; baseline: a step without news between two of them"
    of: dict[str, Callable[[list[float]], Any]] = {
        "mean": np.mean, "p50": np.median, "p99": lambda times: np.quantile(times, 0.99), "max": np.max,
    }  # fmt: skip
    targets = {"mean": WORKER_US, "max": MAX_US}
    return [
        Row(
            name=f"{name}, {what}", value=float(take(busy)) * 1e6, baseline=float(take(empty)) * 1e6, unit="us",
            target=targets.get(what), on="value", better="lower", detail=detail,
        )
        for what, take in of.items()
    ]  # fmt: skip


class VllmRank(Actor):
    """One engine of one rank: its worker's connector and its scheduler's."""

    def __init__(self, role: str, folder: str) -> None:
        self.role, self.folder = role, folder

    def start(self) -> None:
        """By itself, since importing vLLM may take longer than other ranks have to start."""
        # transformers looks for Hugging Face's package of that name, and in a checkout would find its folder
        sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]
        from vllm.config import DeviceConfig  # noqa: PLC0415  (not everywhere)
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: PLC0415
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415
        from vllm.v1.kv_cache_interface import (  # noqa: PLC0415
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            KVCacheTensor,
        )  # fmt: skip

        from pdstage.integrations.vllm import PdStageConnector  # noqa: PLC0415

        extra = {"transport": "local", "staging_nbytes": 64 << 20, "trust_layout": True}
        config = EngineArgs(
            model=self.folder, skip_tokenizer_init=True, dtype="float16", max_model_len=1024, block_size=BLOCK,
            enforce_eager=True,
            kv_transfer_config={
                "kv_connector": "PdStageConnector", "kv_connector_module_path": "pdstage.integrations.vllm",
                "kv_role": self.role, "engine_id": self.role, "kv_connector_extra_config": extra,
            },
        ).create_engine_config()  # fmt: skip
        config.device_config = DeviceConfig("cpu")
        spec = FullAttentionSpec(block_size=BLOCK, head_size=DIM, dtype=torch.float16, num_kv_heads=HEADS)
        names = [f"model.layers.{i}.self_attn.attn" for i in range(LAYERS)]
        caches = torch.ones((LAYERS, N_BLOCKS, HEADS, BLOCK, 2 * DIM), dtype=torch.float16)
        layer_nbytes = caches[0].nbytes
        tensor = KVCacheTensor(caches.nbytes, names, layer_nbytes, layer_nbytes // N_BLOCKS)
        plan = KVCacheConfig(N_BLOCKS, [tensor], [KVCacheGroupSpec(names, spec)])
        self.scheduler = PdStageConnector(config, KVConnectorRole.SCHEDULER, plan)
        self.worker = PdStageConnector(config, KVConnectorRole.WORKER, plan)
        self.worker.register_kv_caches(dict(zip(names, caches, strict=True)))
        (self.group,) = self.scheduler.scheduler_side._groups
        self.square = torch.ones((384, 384))
        torch.set_num_threads(1)

    def serve(self) -> str:
        """Where decode finds this engine's ranks."""
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        server = self.scheduler.scheduler_side._server
        assert server is not None
        return server.address

    def news(self, what: str, number: int, rooms_a_step: int, address: str) -> Any:  # noqa: ANN401  (vLLM's)
        """A step's metadata: rooms of `BLOCKS_A_ROOM` blocks each."""
        from pdstage.integrations.vllm.metadata import PdStageMetadata, Receive, Remote, Send  # noqa: PLC0415

        metadata = PdStageMetadata()
        for room in range(number * rooms_a_step, (number + 1) * rooms_a_step):
            first = room * BLOCKS_A_ROOM % N_BLOCKS
            blocks = tuple(range(first, first + BLOCKS_A_ROOM))
            held = {self.group.component: self.group.held(blocks, BLOCKS_A_ROOM * BLOCK)}
            name = f"room-{room}"
            if what == "sends":
                metadata.sends[name] = Send(name, held)
            else:
                metadata.receives[name] = Receive(Remote(name, address, "kv_producer"), held)
        return metadata

    def steps(
        self, what: str, n_steps: int, rooms_a_step: int, n_waiting: int, address: str
    ) -> tuple[list[float], list[float]]:
        """Seconds of the calls of steps with news, and of those without between them; then goes on until every room is
        over.
        """
        from pdstage.integrations.vllm.metadata import PdStageMetadata  # noqa: PLC0415

        busy, empty, not_timed = list[float](), list[float](), list[float]()
        left = n_steps * rooms_a_step + n_waiting
        waiting = self.news(what, n_steps * rooms_a_step, n_waiting, address) if n_waiting else PdStageMetadata()
        if what == "receives":
            left -= self._step(waiting, not_timed)
        for number in range(n_steps):
            left -= self._step(self.news(what, number, rooms_a_step, address), busy)
            left -= self._step(PdStageMetadata(), empty)
        if what == "sends":
            left -= self._step(waiting, not_timed)
        end = time.monotonic() + WAIT_S
        while left:
            left -= self._step(PdStageMetadata(), not_timed)
            if time.monotonic() > end:
                raise TimeoutError(f"{left} rooms did not end in {WAIT_S} s")
        return busy, empty

    def _step(self, metadata: Any, times: list[float]) -> int:  # noqa: ANN401  (vLLM's)
        """How many rooms were over with it."""
        self.worker.bind_connector_metadata(metadata)
        began = time.perf_counter()
        self.worker.start_load_kv(None)
        loaded = time.perf_counter()
        while time.perf_counter() - loaded < FORWARD_S:
            torch.mm(self.square, self.square)
        computed = time.perf_counter()
        results = self.worker.get_transfer_results(set())
        self.worker.get_kv_connector_stats()
        times.append(time.perf_counter() - computed + loaded - began)
        self.worker.clear_connector_metadata()
        if results.failed_recving:
            raise RuntimeError(f"rooms failed: {sorted(results.failed_recving)}")
        return len(results.finished_sending) + len(results.finished_recving)

    def close(self) -> None:
        if hasattr(self, "worker"):
            self.worker.shutdown()
            self.scheduler.shutdown()
