"""Two of vLLM's engines on one machine, and the proxy between them: whole lives of requests, step by step.

Each engine is vLLM's real `EngineCore` with its scheduler, cache manager and output aggregator, in a process of its own;
its executor calls one process a rank (`workers`). The test drives both engines' steps and hands `kv_transfer_params` on as
JSON, as the usual proxies do.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.model_executor.models.registry import ModelRegistry
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor

from tests.engines.vllm import first, oracle, workers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from pathlib import Path
    from types import TracebackType

    from vllm.v1.core.sched.output import SchedulerOutput

PATIENCE_S = 60.0  # how long anything may take on a loaded machine
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "sliding_window": 70,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "dtype": "bfloat16",
}
QWEN: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "dtype": "bfloat16",
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "dtype": "float16",
}


@dataclass
class Side:
    """What an operator chooses for one engine."""

    role: str
    tp: int
    block_size: int
    layout: str = "LBNHC"
    n_blocks: int = 64  # of the smallest kind there would be: see `config`
    max_num_batched_tokens: int = 64
    max_model_len: int = 512
    prefix_caching: bool = False
    load_failure_policy: str = "fail"
    limits: dict[str, Any] = field(default_factory=dict)


def config(side: Side, model: Path) -> VllmConfig:
    """vLLM's own, as its command line would make it."""
    shape = json.loads((model / "config.json").read_text())
    for architecture in shape["architectures"]:  # vLLM would look at the class in a process without our stubs
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
    heads = max(1, shape["num_key_value_heads"] // side.tp)
    page = side.block_size * heads * shape["head_dim"] * 2 * 2 * shape["num_hidden_layers"]
    made = VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True, seed=0, max_model_len=side.max_model_len),
        cache_config=CacheConfig(block_size=side.block_size, enable_prefix_caching=side.prefix_caching),
        parallel_config=ParallelConfig(tensor_parallel_size=side.tp, distributed_executor_backend="mp"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=side.max_num_batched_tokens,
            max_model_len=side.max_model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="PdStageConnector",
            kv_connector_module_path="pdstage.integrations.vllm",
            kv_role=side.role,  # type: ignore[arg-type]
            kv_connector_extra_config={"transport": "nixl", "staging_nbytes": 4 << 20, "config": side.limits},
            kv_load_failure_policy=side.load_failure_policy,  # type: ignore[arg-type]
        ),
        additional_config={"layout": side.layout, "nbytes": page * side.n_blocks},
    )
    made.scheduler_config.disable_hybrid_kv_cache_manager = False  # as on a GPU: vLLM has no hybrid caches on the CPU
    return made


class Ranks(Executor):
    """A process a rank, called in turn through pipes."""

    pipes: Sequence[Connection] = ()

    def _init_executor(self) -> None:
        pass

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        assert isinstance(method, str)
        assert not non_block
        for pipe in self.pipes:
            pipe.send((method, args, kwargs or {}))
        return [result(pipe) for pipe in self.pipes]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        self.collective_rpc("initialize_from_config", args=(kv_cache_configs,))

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        outputs = self.collective_rpc("execute_model", args=(scheduler_output,))
        assert self.kv_output_aggregator is not None
        done: Future[Any] = Future()
        done.set_result(self.kv_output_aggregator.aggregate(outputs))
        return done if non_block else done.result()

    def check_health(self) -> None:
        pass


def result(pipe: Connection) -> Any:
    """The answer to a call, or its failure."""
    if not pipe.poll(PATIENCE_S):
        raise TimeoutError("a process does not answer")
    good, answer = pipe.recv()
    if not good:
        raise AssertionError(answer)
    return answer


class Engine:
    """An engine in its process: `EngineCore`, watched."""

    def __init__(self, config: VllmConfig, pipes: Sequence[Connection]) -> None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
        Ranks.pipes = pipes
        self.core = EngineCore(config, Ranks, log_stats=True)
        self.scheduler = self.core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.freed: Counter[str] = Counter()
        free = self.scheduler._free_blocks

        def counted(request: Any) -> None:
            self.freed[request.request_id] += 1
            free(request)

        self.scheduler._free_blocks = counted
        self.cached: dict[str, int] = {}
        matched = self.scheduler.connector.get_num_new_matched_tokens

        def asked(request: Any, n_local: int) -> Any:
            self.cached.setdefault(request.request_id, n_local)
            return matched(request, n_local)

        self.scheduler.connector.get_num_new_matched_tokens = asked
        self.preempted = 0
        preempt = self.scheduler._preempt_request

        def seen(*args: Any, **kwargs: Any) -> Any:
            self.preempted += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = seen
        self.free = self.free_blocks()
        self.seed = 0

    def free_blocks(self) -> set[int]:
        return {block.block_id for block in self.manager.block_pool.blocks if not block.ref_cnt and not block.is_null}

    def add(self, name: str, prompt: list[int], max_tokens: int, params: dict[str, Any] | None) -> None:
        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, extra_args=extra)
        request = EngineCoreRequest(name, prompt, None, sampling, None, time.time(), None, None, None)
        self.core.add_request(*self.core.preprocess_add_request(request))

    def step(self) -> list[tuple[str, list[int], str | None, dict[str, Any] | None]]:
        outputs, _ = self.core.step()
        self.spoil()
        return [
            (one.request_id, one.new_token_ids, one.finish_reason and str(one.finish_reason), one.kv_transfer_params)
            for some in outputs.values()
            for one in some.outputs
        ]

    def abort(self, name: str) -> None:
        self.core.abort_requests([name])
        self.spoil()

    def spoil(self) -> None:
        """What was freed and is no prefix any more may hold anything: it is given other bytes."""
        free = self.free_blocks()
        blocks = self.manager.block_pool.blocks
        given = sorted(at for at in free - self.free if blocks[at].block_hash is None)
        self.free = free
        self.seed += 1
        if given:
            self.core.model_executor.collective_rpc("spoil", args=(given, self.seed))

    def busy(self) -> bool:
        return bool(self.scheduler.has_requests())

    def status(self, name: str) -> str | None:
        request = self.scheduler.requests.get(name)
        return None if request is None else request.status.name

    def blocks(self, name: str) -> tuple[list[int], ...]:
        return self.manager.get_block_ids(name)

    def compare(self) -> int:
        return sum(self.core.model_executor.collective_rpc("compare"))

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

    def preempt(self) -> None:
        """All that run begin anew, as when an operator resets the cache."""
        assert self.scheduler.running
        self.scheduler.reset_prefix_cache(reset_running_requests=True)
        self.spoil()

    def groups(self) -> list[str]:
        return sorted(type(group.kv_cache_spec).__name__ for group in self.manager.kv_cache_config.kv_cache_groups)

    def preemptions(self) -> int:
        return self.preempted

    def hits(self) -> dict[str, int]:
        """The tokens that were cached here when the connector was asked for more."""
        return self.cached

    def admissions(self) -> dict[str, int]:
        return dict(self.core.model_executor.collective_rpc("admissions")[0])

    def shutdown(self) -> None:
        self.scheduler.shutdown()
        self.core.model_executor.shutdown()


def serve(pipe: Connection, config: VllmConfig, pipes: Sequence[Connection]) -> None:
    """The engine's process."""
    engine: Any = None
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            return
        try:
            if engine is None:
                engine = Engine(config, pipes)
            pipe.send((True, getattr(engine, method)(*args)))
        except Exception:  # noqa: BLE001  (carried to the test, which fails with it)
            pipe.send((False, traceback.format_exc()))


class Remote:
    """An engine and its ranks, seen from the test."""

    def __init__(self, side: Side, model: Path, scratch: Path) -> None:
        self.side = side
        made = config(side, model)
        made.kv_transfer_config.engine_id = side.role  # type: ignore[union-attr]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([first.__name__, __name__])
        self.processes, theirs = [], []
        for rank in range(side.tp):
            near, far = context.Pipe()
            meet = f"file://{scratch}/{side.role}"
            self.processes.append(context.Process(target=workers.serve, args=(far, made, rank, meet), daemon=True))
            self.processes[-1].start()
            far.close()
            theirs.append(near)
        self.pipe, far = context.Pipe()
        self.processes.append(context.Process(target=serve, args=(far, made, theirs), daemon=True))
        self.processes[-1].start()
        for pipe in (far, *theirs):
            pipe.close()
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.params: dict[str, dict[str, Any] | None] = {}

    def call(self, method: str, *args: Any) -> Any:
        self.pipe.send((method, args))
        return result(self.pipe)

    def add(self, name: str, prompt: list[int], max_tokens: int = 1, params: dict[str, Any] | None = None) -> None:
        self.tokens[name] = []
        self.call("add", name, prompt, max_tokens, params)

    def step(self) -> bool:
        """One step; whether it gave anything."""
        outputs = self.call("step")
        for name, tokens, reason, params in outputs:
            self.tokens[name] += tokens
            if reason:
                self.ended[name], self.params[name] = reason, params
        return bool(outputs)

    def kill(self) -> None:
        """The whole engine dies at once."""
        for process in self.processes:
            os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        for process in self.processes:
            process.join()

    def close(self) -> None:
        if all(process.is_alive() for process in self.processes):
            self.call("shutdown")
        self.pipe.close()
        for process in self.processes:
            process.kill()
            process.join()


class Pair:
    """A producer and a consumer."""

    def __init__(self, producer: Side, consumer: Side, model: Path, scratch: Path) -> None:
        self.p, self.d = Remote(producer, model, scratch), Remote(consumer, model, scratch)

    def __enter__(self) -> Pair:
        for side in (self.d, self.p):
            side.call("busy")  # both engines are up
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.p.close()
        self.d.close()

    def prefill(self, name: str, prompt: list[int]) -> None:
        """The proxy's first half."""
        self.p.add(name, prompt, 1, {"do_remote_decode": True, "do_remote_prefill": False})

    def decode(self, name: str, prompt: list[int], max_tokens: int = 4) -> None:
        """The proxy's second half, with what the producer answered."""
        self.d.add(name, prompt, max_tokens, json.loads(json.dumps(self.p.params[name])))

    def until(self, done: Callable[[], bool], *sides: Remote, what: str = "") -> None:
        """Steps the sides in turn until something is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            gave = [side.step() for side in sides or (self.p, self.d)]
            if not any(gave):
                time.sleep(0.002)  # an engine with nothing to compute
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: {[(one.side.role, one.ended, one.tokens) for one in (self.p, self.d)]}")

    def whole(self, prompts: dict[str, list[int]], max_tokens: int = 4) -> None:
        """Requests from the proxy's first call to their last token."""
        for name, prompt in prompts.items():
            self.prefill(name, prompt)
        handed: set[str] = set()

        def done() -> bool:
            for name in [name for name in prompts if name in self.p.ended and name not in handed]:
                handed.add(name)
                self.decode(name, prompts[name], max_tokens)
            return all(name in self.d.ended for name in prompts)

        self.until(done, what="requests")
        for name, prompt in prompts.items():
            assert self.d.ended[name] == "length", self.d.ended
            assert self.d.tokens[name] == continuation(prompt, max_tokens)
            assert self.loaded(name) >= len(prompt) - 1, "it was computed again, not loaded"

    def loaded(self, name: str) -> int:
        """The tokens that decode did not compute."""
        return int(self.d.call("admissions")[name])

    def settle(self) -> None:
        """Both engines come to rest, hold nothing, and every byte of their pools is right."""
        sides = [side for side in (self.p, self.d) if side.processes[-1].is_alive()]
        self.until(lambda: not any(side.call("busy") for side in sides), *sides, what="rest")
        for side in sides:
            freed = side.call("empty")
            assert all(times == 1 for times in freed.values()), freed
            assert side.call("compare") > 0


def continuation(prompt: list[int], n: int) -> list[int]:
    """What one engine alone would answer."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(oracle.next_token(tokens))
    return tokens[len(prompt) :]


def prompts(*lengths: int, seed: int = 0) -> Iterator[list[int]]:
    """Prompts that share no prefix."""
    for number, length in enumerate(lengths):
        yield [(seed * 131 + number * 17 + at * 7 + at * at) % oracle.VOCABULARY for at in range(length)]
