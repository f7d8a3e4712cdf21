"""Two of vLLM's engines on one machine, and the proxy between them: whole lives of requests, step by step.

Each engine is vLLM's real `EngineCore` with its scheduler, cache manager and output aggregator, in a process of its
own; its executor calls one process a rank (`engine`, `workers`). The test drives both engines' steps and hands
`kv_transfer_params` on as JSON, as the usual proxies do.
"""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.engines import calls
from tests.engines.calls import PATIENCE_S, result
from tests.engines.vllm import engine, oracle, workers
from tests.engines.vllm.models import CONSUMER, LLAMA, PRODUCER, config
from tests.processes import child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.engines.vllm.models import Side

    Tokens = list[int]


TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
TO_DECODE = {"do_remote_decode": False, "do_remote_prefill": True}


class Remote:
    """An engine and its ranks, seen from the test."""

    def __init__(self, side: Side, model, scratch, name):
        self.side = side
        made = config(side, model)
        made.kv_transfer_config.engine_id = name  # type: ignore[union-attr]
        self.processes = []

        def serve(make: Callable[[], object]):
            """The test's end of a pipe to a process of what that makes."""
            process, pipe = child(calls.serve, make)
            self.processes.append(process)
            return pipe

        meet = f"file://{scratch}/{name}"
        theirs = [serve(partial(workers.Worker, made, rank, meet)) for rank in range(made.parallel_config.world_size)]
        self.pipe = serve(partial(engine.Engine, made, theirs))
        for pipe in theirs:
            pipe.close()
        self.tokens: dict[str, Tokens] = {}
        self.ended: dict[str, str] = {}
        self.params: dict[str, dict[str, Any] | None] = {}

    def call(self, method, *args):
        self.pipe.send((method, args, {}))
        return result(self.pipe)

    def add(self, name, prompt: Tokens, max_tokens=1, params: dict[str, Any] | None = None):
        self.tokens[name] = []
        self.call("add", name, prompt, max_tokens, params)

    def step(self):
        """One step; whether it gave anything."""
        outputs = self.call("step")
        for name, tokens, reason, params in outputs:
            self.tokens[name] += tokens
            if reason:
                self.ended[name], self.params[name] = reason, params
        return bool(outputs)

    def kill(self):
        """The whole engine dies at once."""
        for process in self.processes:
            os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        for process in self.processes:
            process.join()

    def close(self):
        if all(process.is_alive() for process in self.processes):
            self.call("shutdown")
        self.pipe.close()
        for process in self.processes:
            process.kill()
            process.join()


class Pair:
    """A producer and a consumer."""

    def __init__(self, producer: Side, consumer: Side, model, scratch):
        self.p, self.d = (Remote(side, model, scratch, name) for side, name in ((producer, "p"), (consumer, "d")))

    def __enter__(self) -> Pair:
        for side in (self.d, self.p):
            result(side.pipe)  # both engines are up
        return self

    def __exit__(self, *_):
        self.p.close()
        self.d.close()

    def prefill(self, name, prompt: Tokens):
        """The proxy's first half."""
        self.p.add(name, prompt, 1, TO_PREFILL)

    def decode(self, name, prompt: Tokens, max_tokens=4):
        """The proxy's second half, with what the producer answered."""
        self.d.add(name, prompt, max_tokens, json.loads(json.dumps(self.p.params[name])))

    def both(self, name, prompt: Tokens, max_tokens=4, *, decode=True, room=""):
        """The two halves at once, as a proxy of Mooncake's connector asks for them; `room` if it is another's again."""
        self.p.add(name, prompt, 1, TO_PREFILL | {"transfer_id": f"xfer-{room or name}"})
        if decode:
            self.decode_early(name, prompt, max_tokens, room)

    def decode_early(self, name, prompt: Tokens, max_tokens=4, room=""):
        """The second half, which knows the prefill engine only."""
        address, engine = self.p.call("directory")
        where = {"remote_bootstrap_addr": address, "remote_engine_id": engine, "transfer_id": f"xfer-{room or name}"}
        self.d.add(name, prompt, max_tokens, TO_DECODE | where)

    def until(self, done: Callable[[], bool], *sides: Remote):
        """Steps the sides in turn until something is so."""
        deadline, idle_s = time.monotonic() + PATIENCE_S, 0.001
        while not done():
            gave = [side.step() for side in sides or (self.p, self.d)]
            idle_s = 0.001 if any(gave) else min(2 * idle_s, 0.03)
            if not any(gave):
                time.sleep(idle_s)  # an engine with nothing to compute
            if time.monotonic() > deadline:
                raise TimeoutError(f"{[(one.side.role, one.ended, one.tokens) for one in (self.p, self.d)]}")

    def whole(self, prompts: dict[str, Tokens], max_tokens=4, *, early=False):
        """Requests from the proxy's first call to their last token; `early`: it asks both engines at once."""
        for name, prompt in prompts.items():
            self.both(name, prompt, max_tokens) if early else self.prefill(name, prompt)
        handed = set(prompts) if early else set()

        def done():
            for name in [name for name in prompts if name in self.p.ended and name not in handed]:
                handed.add(name)
                self.decode(name, prompts[name], max_tokens)
            return all(name in self.d.ended for name in prompts)

        self.until(done)
        for name, prompt in prompts.items():
            self.went_well(name, prompt, max_tokens)

    def lengths(self, *lengths, seed, early=False):
        """`whole` for prompts of so many tokens."""
        asked = {f"{seed}-{len(one)}": one for one in prompts(*lengths, seed=seed)}
        self.whole(asked, 12, early=early)

    def answered(self, name):
        """Steps prefill until it has answered."""
        self.until(lambda: name in self.p.ended, self.p)

    def prefilled(self, name, n, seed) -> Tokens:
        """Prefill has answered; the prompt."""
        (prompt,) = prompts(n, seed=seed)
        self.prefill(name, prompt)
        self.answered(name)
        return prompt

    def loading(self, name, n, seed) -> Tokens:
        """Decode has allocated blocks, and told its workers to load."""
        prompt = self.prefilled(name, n, seed)
        self.load(name, prompt)
        return prompt

    def load(self, name, prompt: Tokens):
        self.decode(name, prompt)
        self.d.step()
        assert self.d.call("status", name) == "WAITING_FOR_REMOTE_KVS"

    def half_way(self, name, n, seed) -> Tokens:
        """Prefill has computed two steps of a prompt, and handed over a part of it; decode waits for the rest."""
        (prompt,) = prompts(n, seed=seed)
        before = self.written()
        self.both(name, prompt)
        self.d.step()
        assert self.d.call("status", name) == "WAITING_FOR_REMOTE_KVS"
        self.p.step()
        self.until(lambda: self.written() > before or self.p.step(), self.d)
        assert self.p.call("status", name) == "RUNNING"
        return prompt

    def ends(self, name):
        """Steps both until decode has ended it."""
        self.until(lambda: name in self.d.ended)

    def served(self, name, prompt: Tokens):
        """Steps both until the request has ended well."""
        self.ends(name)
        self.went_well(name, prompt)

    def fails(self, name):
        """Steps both until the request has failed at decode, and no token of it came."""
        self.ends(name)
        assert (self.d.ended[name], self.d.tokens[name]) == ("error", [])

    def went_well(self, name, prompt: Tokens, max_tokens=4):
        """The request has ended at decode, which loaded all it could and went on from there."""
        assert self.d.ended[name] == "length", self.d.ended
        assert self.d.tokens[name] == continuation(prompt, max_tokens)
        assert self.loaded(name) >= len(prompt) - 1, "it was computed again, not loaded"

    def loaded(self, name):
        """The tokens that decode did not compute."""
        return int(self.d.call("ranks", "admissions")[0][name])

    def written(self):
        """Bytes that prefill's ranks have written to others."""
        return sum(self.p.call("ranks", "written"))

    def settle(self):
        """Both engines come to rest, hold nothing, and every byte of their pools is right."""
        sides = [side for side in (self.p, self.d) if side.processes[-1].is_alive()]
        self.until(lambda: not any(side.call("busy") for side in sides), *sides)
        for side in sides:
            freed = side.call("empty")
            assert all(times == 1 for times in freed.values()), freed
            assert sum(side.call("ranks", "compare")) > 0


def start(
    folder, producer: Side = PRODUCER, consumer: Side = CONSUMER, model: dict[str, Any] = LLAMA,
    kind: type[Pair] = Pair,
):  # fmt: skip
    """Engines of that model."""
    (folder / "config.json").write_text(json.dumps(model))
    return kind(producer, consumer, folder, folder)


def continuation(prompt: Tokens, n) -> Tokens:
    """What one engine alone would answer."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(oracle.next_token(tokens))
    return tokens[len(prompt) :]


def prompts(*lengths, seed=0) -> Iterator[Tokens]:
    """Prompts that share no prefix."""
    for number, length in enumerate(lengths):
        yield [(seed * 131 + number * 17 + at * 7 + at * at) % oracle.VOCABULARY for at in range(length)]
