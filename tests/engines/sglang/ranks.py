"""One rank of SGLang in a process of its own: its arguments, pools, KVArgs, manager, senders and receivers are its own.

What is missing is the model and the scheduler's queues: tests call what the queues call, in their order. The methods of
the queues that build KVArgs and the manager are run as they are, over a namespace that holds what they read.
"""

from __future__ import annotations

import contextlib
import os
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from sglang.srt import runtime_context
from sglang.srt.disaggregation import decode, prefill, utils
from sglang.srt.disaggregation.utils import KVClassType, MetadataBuffers
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args

from tests.engines.sglang.setups import Setup

MODEL = str(Path(__file__).parent / "model")
HEADS, DIM, LAYERS = 4, 32, 2
ROWS = 16


class Memory:
    """The pools of a kind, and what is in them: every byte of a token is a function of where in the model it is."""

    def __init__(self, setup: Setup) -> None:
        size, page = (setup.n_pages - 1) * setup.page_size, setup.page_size
        held = max(1, HEADS // setup.tp_size)
        self.first_head = setup.tp_rank * HEADS // setup.tp_size
        common = {"dtype": torch.bfloat16, "device": "cpu", "enable_memory_saver": False}
        self.page_size, self.kind = page, setup.pool
        self.full_layers, self.swa_layers = list(range(LAYERS)), []
        if setup.pool == "mha":
            self.pool = MHATokenToKVPool(
                size, page, head_num=held, head_dim=DIM, layer_num=LAYERS, enable_alt_stream=False, **common
            )
            self.buffers = {("k", i): self.pool.k_buffer[i] for i in range(LAYERS)}
            self.buffers |= {("v", i): self.pool.v_buffer[i] for i in range(LAYERS)}
        elif setup.pool == "mla":
            self.pool = MLATokenToKVPool(size, page, kv_lora_rank=64, qk_rope_head_dim=16, layer_num=LAYERS, **common)
            self.buffers = {("latent", i): self.pool.kv_buffer[i] for i in range(LAYERS)}
        else:
            self.pool = SWAKVPool(
                size, size, page, head_num=held, head_dim=DIM, swa_attention_layer_ids=[1],
                full_attention_layer_ids=[0], enable_alt_stream=False, **common,
            )  # fmt: skip
            full, swa = self.pool.full_kv_pool, self.pool.swa_kv_pool
            self.buffers = {("k", 0): full.k_buffer[0], ("v", 0): full.v_buffer[0]}
            self.swa = {("k", 1): swa.k_buffer[0], ("v", 1): swa.v_buffer[0]}

    def expected(self, room: int, role: str, layer: int, tokens: range, like: torch.Tensor) -> torch.Tensor:
        """`[tokens, heads, dim]` of this rank."""
        heads, dim = like.shape[1:]
        first = self.first_head if role in ("k", "v") else 0
        t = np.arange(tokens.start, tokens.stop, dtype=np.int64)[:, None, None]
        h = np.arange(first, first + heads)[None, :, None]
        d = np.arange(dim)[None, None, :]
        number = (((room * 31 + ord(role[0])) * 31 + layer) * 8191 + t * 131 + h * 17 + d * 7) % 30011
        return torch.from_numpy(number.astype(np.int16)).view(torch.bfloat16)

    def slots(self, pages: np.ndarray, first_page: int, tokens: range) -> torch.Tensor:
        t = np.arange(tokens.start, tokens.stop)
        return torch.from_numpy(
            pages[t // self.page_size - first_page].astype(np.int64) * self.page_size + t % self.page_size
        )


class Rank:
    """What tests ask of a rank; a method a call of the scheduler's."""

    def __init__(self, setup: Setup) -> None:
        load_plugins()
        self.setup = setup
        arguments = [
            "--model-path", MODEL, "--device", "cpu", "--host", "127.0.0.1", "--skip-tokenizer-init",
            "--disaggregation-mode", setup.mode, "--disaggregation-transfer-backend", "pdstage",
            "--disaggregation-bootstrap-port", str(setup.port), "--tp-size", str(setup.tp_size),
            "--page-size", str(setup.page_size),
        ]  # fmt: skip
        args = prepare_server_args(arguments)
        ranks = runtime_context.SpawnRanks(world_rank=setup.tp_rank, gpu_id=0)
        runtime_context.publish(args, role="scheduler", ranks=ranks)
        # No process groups are made: with one pipeline stage nothing is said over it.
        runtime_context.get_parallel().override_permanently(pp_group=SimpleNamespace(is_last_rank=True))
        self.backend = utils.TransferBackend(runtime_context.get_disagg().disaggregation_transfer_backend)
        self.memory = Memory(setup)
        self.metadata = MetadataBuffers(ROWS, 64, torch.bfloat16, 1)
        self.manager = self._manager(args)
        self.rooms: dict[int, object] = {}
        self.pages: dict[int, dict[str, tuple[np.ndarray, int]]] = {}

    def _manager(self, args):
        model = runtime_context.process_model_config()
        runner = SimpleNamespace(kv_cache_dtype_str="bfloat16")
        scheduler = SimpleNamespace(
            rust_server=None, tp_worker=SimpleNamespace(model_runner=runner), model_config=model, server_args=args,
            enable_hisparse=False, req_to_token_pool=None,
        )  # fmt: skip
        parallel = runtime_context.get_parallel()
        queue = SimpleNamespace(
            transfer_backend=self.backend, tp_rank=parallel.tp_rank, pp_rank=parallel.pp_rank, scheduler=scheduler,
            token_to_kv_pool=self.memory.pool, draft_token_to_kv_pool=None, metadata_buffers=self.metadata,
            is_mla_backend=utils.is_mla_backend(self.memory.pool), enable_staging=False,
        )  # fmt: skip
        which = prefill.PrefillBootstrapQueue if self.setup.mode == "prefill" else decode.DecodePreallocQueue
        return which._init_kv_manager(queue)

    # Both sides.

    def allocate(self, room: int, n_tokens: int, first: int = 0, window: int = 0) -> None:
        """Pages for tokens `[first, n_tokens)`, from a shuffled pool; and for the window's, if there is one."""
        page, rng = self.setup.page_size, np.random.default_rng([room, self.setup.tp_size])
        taken = rng.permutation(np.arange(1, self.setup.n_pages, dtype=np.int32))
        n = -(-n_tokens // page)
        held = {"kv": (taken[: n - first // page], first // page)}
        if self.setup.pool == "swa":
            start = max(first, n_tokens - window) // page
            held["swa"] = (rng.permutation(taken)[: n - start], start)
        self.pages[room] = held

    def _state_indices(self, room: int) -> list[np.ndarray] | None:
        return [self.pages[room]["swa"][0]] if self.setup.pool == "swa" else None

    def _tensors(self, component: str) -> dict[tuple[str, int], torch.Tensor]:
        return self.memory.buffers if component == "kv" else self.memory.swa

    def poll(self, room: int) -> int:
        return int(self.rooms[room].poll())

    def abort(self, room: int) -> None:
        self.rooms[room].abort()

    def failure(self, room: int) -> str:
        """What the scheduler does first with a room that failed."""
        try:
            self.rooms[room].failure_exception()
        except Exception as error:  # noqa: BLE001  (so does the scheduler)
            return str(error)
        raise AssertionError("a failure is raised")

    def clear(self, room: int) -> None:
        self.rooms.pop(room).clear()

    def leftovers(self) -> dict[str, int]:
        """What a manager keeps of rooms that are over: nothing."""
        kept = {name: len(getattr(self.manager, name)) for name in ("request_status", "failure_records", "_unsafe")}
        return kept | {"handles": len(self.manager.node.handles())}

    def released(self, room: int) -> bool:
        """Whether pdstage itself says that nothing touches the room's memory."""
        handle = self.rooms[room]._room
        return handle is None or handle.released

    # Prefill.

    def send_to(self, room: int) -> None:
        kind = utils.get_kv_class(self.backend, KVClassType.SENDER)
        self.rooms[room] = kind(self.manager, f"127.0.0.1:{self.setup.port}", room)

    def compute(self, room: int, start: int, stop: int) -> None:
        for component, (pages, first) in self.pages[room].items():
            tokens = range(max(start, first * self.setup.page_size), stop)
            for (role, layer), tensor in self._tensors(component).items():
                if tokens:
                    tensor[self.memory.slots(pages, first, tokens)] = self.memory.expected(
                        room, role, layer, tokens, tensor
                    )

    def begin(self, room: int, n_tokens: int) -> int:
        """`finalize_bootstrap`: the prefix that decode has, then `init`."""
        sender = self.rooms[room]
        prefix = sender.pop_decode_prefix_len()
        sender.init(prefill.kv_to_page_num(n_tokens - prefix, self.setup.page_size), room % ROWS)
        return prefix

    def send(self, room: int, start: int, stop: int, last: bool) -> None:
        """`_send_kv_chunk`: whole pages, but for the last chunk, which carries states and metadata."""
        page = self.setup.page_size
        pages, first = self.pages[room]["kv"]
        if last:
            row = room % ROWS
            self.metadata.output_ids[row, 0] = room + 1000
            self.metadata.output_hidden_states[row] = float(room)
            self.metadata.bootstrap_room[row, 0] = room
        stop_page = -(-stop // page) if last else stop // page
        chunk = pages[start // page - first : stop_page - first]
        self.rooms[room].send(chunk, self._state_indices(room) if last else None, num_kv_tokens=stop - start)

    # Decode.

    def ensure(self) -> bool:
        return self.manager.try_ensure_parallel_info(f"127.0.0.1:{self.setup.port}")

    def receive(self, room: int) -> None:
        kind = utils.get_kv_class(self.backend, KVClassType.RECEIVER)
        self.rooms[room] = kind(self.manager, f"127.0.0.1:{self.setup.port}", room)
        self.rooms[room].init(0)

    def bind(self, room: int, prefix: int = 0) -> None:
        pages = self.pages[room]["kv"][0]
        self.rooms[room].send_metadata(pages, room % ROWS, self._state_indices(room), decode_prefix_len=prefix)

    def wrong(self, room: int, n_tokens: int) -> list[str]:
        """Which tensors are not what prefill computed, and what of the metadata row is wrong."""
        found = []
        for component, (pages, first) in self.pages[room].items():
            tokens = range(first * self.setup.page_size, n_tokens)
            for (role, layer), tensor in self._tensors(component).items():
                expected = self.memory.expected(room, role, layer, tokens, tensor)
                got = tensor[self.memory.slots(pages, first, tokens)]
                if not torch.equal(got.view(torch.int16), expected.view(torch.int16)):
                    found.append(f"{component} {role} of layer {layer}")
        row = room % ROWS
        if int(self.metadata.output_ids[row, 0]) != room + 1000 or int(self.metadata.bootstrap_room[row, 0]) != room:
            found.append("metadata")
        if not bool((self.metadata.output_hidden_states[row] == float(room)).all()):
            found.append("hidden states")
        return found

    def touched(self, room: int) -> bool:
        """Whether anything but zeros is in the room's pages, or in its metadata row."""
        page = self.setup.page_size
        for component, (pages, _) in self.pages[room].items():
            slots = torch.from_numpy((pages[:, None].astype(np.int64) * page + np.arange(page)).ravel())
            if any(bool(tensor[slots].view(torch.int16).any()) for tensor in self._tensors(component).values()):
                return True
        return bool(self.metadata.output_ids[room % ROWS].any())

    def scribble(self, room: int) -> None:
        """The engine gives the pages to another request, which writes them."""
        for component, (pages, _) in self.pages[room].items():
            slots = torch.from_numpy((pages[:, None].astype(np.int64) * self.setup.page_size
                                      + np.arange(self.setup.page_size)).ravel())  # fmt: skip
            for tensor in self._tensors(component).values():
                tensor[slots] = 1.0

    def defer(self, room: int) -> None:
        """`pop_transferred` of a failed room: the abort is told if decode did not tell it, and memory is kept."""
        receiver = self.rooms[room]
        assert receiver.kv_mgr.enable_deferred_decode_kv_release
        if not receiver.abort_notified:
            receiver.ensure_abort_notified(force_arm=True)

    def safe(self, room: int) -> bool:
        """`resolve_deferred_releases`: whether the room's memory may go back to the pool."""
        receiver = self.rooms[room]
        return self.manager.is_abort_release_safe(room, len(receiver.bootstrap_infos))

    def release(self, room: int) -> None:
        """`_do_release`."""
        self.manager.clear_deferred_abort_state(room)
        self.rooms.pop(room).clear()

    def sleep(self) -> None:
        self.manager.deregister_buffer_to_engine()

    def wake(self) -> None:
        self.manager.register_buffer_to_engine()


class Server:
    """The process that has SGLang's bootstrap server: its launcher's."""

    def __init__(self, port: int) -> None:
        load_plugins()
        backend = utils.TransferBackend("pdstage")
        self.server = utils.get_kv_class(backend, KVClassType.BOOTSTRAP_SERVER)(host="127.0.0.1", port=port)

    def registered(self) -> int:
        return self.server._registered_count


def serve(pipe: Connection, kind: str, what: object) -> None:
    """A child's life: it answers calls until the pipe ends."""
    os.environ.setdefault("SGLANG_HOST_IP", "127.0.0.1")
    try:
        held = Rank(what) if kind == "rank" else Server(what)
    except BaseException as error:
        pipe.send(("raised", repr(error)))
        raise
    with contextlib.suppress(EOFError, ConnectionError):  # the test is over
        _answer(pipe, held)
    os._exit(0)


def _answer(pipe: Connection, held: Rank | Server) -> None:
    pipe.send(("returned", None))
    while True:
        name, args = pipe.recv()
        try:
            pipe.send(("returned", getattr(held, name)(*args)))
        except Exception as error:  # noqa: BLE001  (the test raises it)
            pipe.send(("raised", repr(error)))
