"""Decode's tokens are those of one engine, whatever the two sides' sizes, blocks and transport are."""

from __future__ import annotations

import pytest
import torch

from tests.e2e import compare, load
from tests.e2e.vllm.engines import Pair, handed_over, pair

SIZES = [((1, 128), (1, 128)), ((2, 128), (1, 128)), ((1, 128), (2, 32)), ((1, 32), (1, 64))]
SHORT = pair(*SIZES[1])
DTYPES = ("float32", "bfloat16")
REFUSED_ELSEWHERE = [
    ("gemma3", ((1, 128), (4, 128))),
    ("granite", ((2, 128), (1, 128))),
    ("llama", ((2, 32), (1, 128))),
]
"""What users of vLLM's NixlConnector found refused (llm-d issue 2433): windows from TP 1 to 4, hybrids with more ranks
at prefill, unequal blocks beside unequal ranks.
"""
ROWS = [
    SHORT,
    *(pair(*sizes, transport=name, dtype=dtype) for dtype in DTYPES for name in ("nixl", "local") for sizes in SIZES),
    *(pair(*sizes, model="gemma3") for sizes in SIZES[:3]),
    pair(*SIZES[0], model="gemma3", dtype="bfloat16"),
    *(pair(*sizes, model=model) for model, sizes in REFUSED_ELSEWHERE),
    *(pair(*sizes, model="granite") for sizes in SIZES[:3]),
    pair(*SIZES[0], model="falcon-h1"),
    *(pair(*sizes, model="qwen3-next", dtype="bfloat16") for sizes in SIZES[:2]),
    *(pair(*sizes, model="deepseek-v2") for sizes in (((1, 16), (1, 16)), ((2, 16), (1, 16)))),
]


def rows() -> list[object]:
    return [
        pytest.param(row, id=row.name, marks=() if row == SHORT else pytest.mark.full) for row in dict.fromkeys(ROWS)
    ]


def prompts(row: Pair, n: int, seed: int) -> list[load.Prompt]:
    """Of 20 to 600 tokens, or of the lengths that the row's model asks for."""
    if not row.lengths:
        return load.prompts(n, seed)
    each = -(-n // len(row.lengths))
    return [one for length in row.lengths for one in load.prompts(each, seed + length, shortest=length, longest=length)]


@pytest.mark.parametrize("row", rows())
def test_answers_are_those_of_one_engine(fleet, request: pytest.FixtureRequest, row: Pair):
    """Prompts of 20 to 600 tokens, 8 and then 16 at a time; prefill computes the longer ones in chunks."""
    if row.prefill.model == "qwen3-next" and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("vLLM's gated delta nets run on CPUs with AVX512-BF16 only")
    n = 100 if request.config.getoption("--full") else 30
    asked = {at_a_time: prompts(row, n, at_a_time) for at_a_time in row.at_a_time}
    prefill, decode, _ = fleet.fresh(*row.engines)
    every = [prompt for some in asked.values() for prompt in some]
    right = fleet.right(row.reference, every, at_a_time=row.at_a_time[-1])
    answers = []
    for at_a_time, some in asked.items():
        with fleet.timed(f"{row.name}: {n} prompts, {at_a_time} at a time"):
            answers += load.ask_all(handed_over(prefill, decode), some, at_a_time)
    fleet.note(f"{row.name}: {compare.summary(answers, right)}")
    compare.check(answers, right)
