"""One of vLLM's engines in a process: `EngineCore`, watched, whose executor calls a process a rank."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

from pydantic import TypeAdapter
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import EngineEntry
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from tests.engines.calls import PATIENCE_S, result

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput


class Ranks(Executor):
    """A process a rank, called in turn through pipes."""

    pipes: Sequence[Connection] = ()

    def _init_executor(self):
        for pipe in self.pipes:  # they are up
            result(pipe)

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block=False,
    ) -> list[Any]:
        assert isinstance(method, str)
        assert not non_block
        for pipe in self.pipes:
            pipe.send((method, args, kwargs or {}))
        return [result(pipe) for pipe in self.pipes]

    def initialize_from_config(self, kv_cache_configs: list[Any]):
        self.collective_rpc("initialize_from_config", args=(kv_cache_configs,))

    def execute_model(self, scheduler_output: SchedulerOutput, non_block=False):
        outputs = self.collective_rpc("execute_model", args=(scheduler_output,))
        assert self.kv_output_aggregator is not None
        stage = self.parallel_config.tensor_parallel_size * self.parallel_config.prefill_context_parallel_size
        last = self.parallel_config.world_size - stage  # as MultiprocExecutor's
        self.done: Future[Any] = Future()
        self.done.set_result(self.kv_output_aggregator.aggregate(outputs, output_rank=last))
        return self.done if non_block else self.done.result()

    def sample_tokens(self, grammar_output, non_block=False):
        """Called where several batches are in flight: what the model computed is sampled already."""
        return self.done if non_block else self.done.result()

    def check_health(self):
        pass


class Engine:
    """An engine in its process: `EngineCore`, watched."""

    def __init__(self, config: VllmConfig, pipes: Sequence[Connection]):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        Ranks.pipes = pipes
        self.core = EngineCore(config, Ranks, log_stats=True)
        self.scheduler = self.core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.freed: Counter[str] = Counter()
        self.cached: dict[str, int] = {}
        self.preempted = 0
        free, preempt = self.scheduler._free_blocks, self.scheduler._preempt_request
        matched = self.scheduler.connector.get_num_new_matched_tokens

        def counted(request):
            self.freed[request.request_id] += 1
            free(request)

        def asked(request, n_local):
            self.cached.setdefault(request.request_id, n_local)
            return matched(request, n_local)

        def seen(*args, **kwargs):
            self.preempted += 1
            return preempt(*args, **kwargs)

        self.scheduler._free_blocks, self.scheduler._preempt_request = counted, seen
        self.scheduler.connector.get_num_new_matched_tokens = asked
        self.free = self.free_blocks()
        self.seed = 0

    def free_blocks(self) -> set[int]:
        return {block.block_id for block in self.manager.block_pool.blocks if not block.ref_cnt and not block.is_null}

    def add(self, name, prompt: list[int], max_tokens, params: dict[str, Any] | None):
        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, extra_args=extra)
        request = EngineCoreRequest(name, prompt, None, sampling, None, time.time(), None, None, None)
        self.core.add_request(*self.core.preprocess_add_request(request))

    def step(self) -> list[tuple[str, list[int], str | None, dict[str, Any] | None]]:
        outputs, _ = self.core.step_fn()  # under pipeline parallelism several batches are in flight
        self.spoil()
        return [
            (one.request_id, one.new_token_ids, one.finish_reason and str(one.finish_reason), one.kv_transfer_params)
            for some in (outputs or {}).values()
            for one in some.outputs
        ]

    def ranks(self, method, *args) -> list[Any]:
        """Each rank's answer."""
        return self.core.model_executor.collective_rpc(method, args=args)

    def abort(self, name):
        self.core.abort_requests([name])
        self.spoil()

    def spoil(self):
        """What was freed and is no prefix any more may hold anything: it is given other bytes."""
        free = self.free_blocks()
        blocks = self.manager.block_pool.blocks
        given = sorted(at for at in free - self.free if blocks[at].block_hash is None)
        self.free = free
        self.seed += 1
        if given:
            self.ranks("spoil", given, self.seed)

    def busy(self):
        return bool(self.scheduler.has_requests())

    def status(self, name) -> str | None:
        request = self.scheduler.requests.get(name)
        return None if request is None else request.status.name

    def requests(self) -> list[str]:
        """Those that this engine knows, with their blocks."""
        return list(self.scheduler.requests)

    def watched(self) -> tuple[dict[str, int], int]:
        """The tokens of each request that were cached here when the connector was asked for more, and how many
        requests were preempted.
        """
        return self.cached, self.preempted

    def empty(self) -> dict[str, int]:
        """Nothing is left, every block is free; how often each request's blocks were freed."""
        scheduler, pool = self.scheduler, self.manager.block_pool
        assert not scheduler.requests, scheduler.requests
        assert not scheduler.running
        assert not scheduler.waiting
        assert not scheduler.kv_holding_waiting
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        assert all(not block.ref_cnt for block in pool.blocks if not block.is_null)
        return dict(self.freed)

    def preempt(self):
        """All that run begin anew, as when an operator resets the cache."""
        assert self.scheduler.running
        self.scheduler.reset_prefix_cache(
            reset_running_requests=True
        )  # spoiled by the next step, as it is vLLM's to write

    def reset(self):
        """As an operator does after new weights were loaded."""
        return self.core.reset_prefix_cache(reset_connector=True)

    def directory(self) -> tuple[str, str]:
        """Where a router finds this engine's directory, and the name that it says the engine has."""
        side = self.scheduler.connector.scheduler_side
        address = f"http://{side._address}"
        with urlopen(f"{address}/query", timeout=PATIENCE_S) as answer:
            (entry,) = TypeAdapter(dict[int, EngineEntry]).validate_json(answer.read()).values()
        return address, entry.engine_id

    def groups(self) -> list[str]:
        return sorted(type(group.kv_cache_spec).__name__ for group in self.manager.kv_cache_config.kv_cache_groups)

    def shutdown(self):
        self.scheduler.shutdown()
        self.core.model_executor.shutdown()
