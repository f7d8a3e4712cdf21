"""200 requests at once through all of it: every answer is the single process's, and none is lost."""

from __future__ import annotations

import asyncio
import random

import httpx
import pytest
from serve.stack import Stack, truth

N = 200
NEW = 6


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


def hold_to_truth(stack: Stack, model: str, asked: list[list[int]], n_tokens: int) -> None:
    bodies = [
        {"model": f"pdstage-{model}", "prompt": prompt, "max_tokens": n_tokens, "ignore_eos": True} for prompt in asked
    ]
    answers = asyncio.run(ask_all(stack.url, bodies))
    assert [answer.status_code for answer in answers] == [200] * len(asked), {a.text for a in answers if a.is_error}
    for prompt, answer in zip(asked, answers, strict=True):
        assert answer.json()["choices"][0]["text"] == truth(model, prompt, n_tokens)
        assert answer.json()["usage"]["prompt_tokens"] == len(prompt)
        assert answer.json()["usage"]["completion_tokens"] == n_tokens


@pytest.mark.slow
def test_200_at_once():
    # Pools for a fraction of them, so that requests wait, and kept prefixes are evicted.
    with Stack("--pool-tokens", "1536", "--max-model-len", "160") as stack:
        hold_to_truth(stack, "llama", prompts(N, 0), NEW)
        print(stack.stats("prefill"), stack.stats("decode"))
