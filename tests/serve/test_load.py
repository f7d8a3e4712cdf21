"""Many requests at once through all of it: every answer is the single process's, and none is lost."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest
from serve.stack import Stack, exists, truth, wait_until

from pdstage import Keys
from pdstage.trace import load

NEW = 4


def prompts(n: int, seed: int) -> list[list[int]]:
    """No two alike; every third begins like another one, so that prefixes are found."""
    draw = random.Random(seed)
    shared = [draw.randrange(512) for _ in range(40)]
    return [
        (shared if i % 3 == 0 else []) + [draw.randrange(512) for _ in range(draw.randint(8, 90))] for i in range(n)
    ]


async def ask_all(url: str, bodies: list[dict]) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=110.0, trust_env=False) as client:
        return await asyncio.gather(*(client.post(f"{url}/v1/completions", json=body) for body in bodies))


def hold_to_truth(stack: Stack, model: str, asked: list[list[int]]) -> None:
    bodies = [
        {"model": f"pdstage-{model}", "prompt": prompt, "max_tokens": NEW, "ignore_eos": True} for prompt in asked
    ]
    answers = asyncio.run(ask_all(stack.url, bodies))
    assert [answer.status_code for answer in answers] == [200] * len(asked), {a.text for a in answers if a.is_error}
    for prompt, answer in zip(asked, answers, strict=True):
        told = answer.json()
        assert told["choices"][0] | {"text": truth(model, prompt, NEW)} == told["choices"][0]
        assert told["usage"] == {
            "prompt_tokens": len(prompt), "completion_tokens": NEW, "total_tokens": len(prompt) + NEW
        }  # fmt: skip
    for role in ("prefill", "decode"):
        stack.wait_free(role)
        told = stack.stats(role)
        assert (told["done"], told["failed"]) == (len(asked), 0)


@pytest.mark.slow
def test_200_at_once_at_tp_4_and_tp_2_over_nixl(tmp_path):
    """In pools for a fraction of them: requests wait for pages, kept prefixes are found, and evicted for others.

    The trace, one file of both servers, has every room of every rank.
    """
    trace = tmp_path / "serve.json"
    with Stack("--pool-tokens", "1536", "--max-model-len", "160", "--trace", str(trace)) as stack:
        hold_to_truth(stack, "llama", prompts(200, 0))
        told = stack.stats("prefill")
        assert told["cached_tokens"] > 0
        assert told["pages_evicted"]["kv"] > 0
        assert told["pdstage"]["sessions_over_nixl"] == 4 * 2
        assert told["pdstage"]["rooms_succeeded"] == 4 * 200
    traced = load([trace])
    assert len(traced.nodes) == 4 + 2
    assert [room.state for room in traced.rooms] == ["success"] * (4 + 2) * 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "prefill_tp", "decode_tp", "components"),
    [("qwen3-next", 2, 4, {"kv", "mamba"}), ("gemma3", 4, 2, {"kv", "swa"})],
)
def test_states_and_windows(tmp_path, model, prefill_tp, decode_tp, components):
    """A hybrid with linear attention, a model with sliding windows; prompts longer than a window among them.

    In the end whoever started the processes is killed: they end too.
    """
    Keys.make(key := tmp_path / "cluster.key")
    sizes = ("--prefill-tp", str(prefill_tp), "--decode-tp", str(decode_tp), "--max-running", "8")
    with Stack("--model", model, *sizes, "--pool-tokens", "2048", "--keys", str(key)) as stack:
        hold_to_truth(stack, model, prompts(12, 1))
        assert set(stack.stats("decode")["pages"]) == components
        pids = [pid for told in stack.children.values() for _, pid in told.values()]
        stack.process.kill()
        wait_until(lambda: not any(map(exists, pids)), "no process is left")
