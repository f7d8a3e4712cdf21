"""What may be asked, and what is refused in one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdstage.demo.options import LONGEST_PROMPT, MAX_REQUESTS, SHORTEST_PROMPT, ModelShape, Options
from pdstage.errors import UsageError


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prefill_tp": 0}, "--prefill-tp is 0; give a number from 1 to 32"),
        ({"decode_tp": 33}, "--decode-tp is 33"),
        ({"kv_heads": -1}, "--kv-heads is -1"),
        ({"requests": 0}, "--requests is 0"),
        ({"seed": -4}, "--seed is -4"),
        ({"transport": "pigeon"}, "--transport is 'pigeon'; choose one of auto, nixl, local"),
        ({"path": "scenic"}, "--path is 'scenic'"),
        ({"json": Path("/no/such/folder/out.json")}, "its folder does not exist"),
    ],
)
def test_a_wrong_option_is_named(given, said):
    with pytest.raises(UsageError) as raised:
        Options(**given)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_prompts_differ_in_length_and_follow_the_seed():
    most = Options(requests=MAX_REQUESTS).prompts()
    assert len({len(prompt) for prompt in most}) == MAX_REQUESTS
    assert all(SHORTEST_PROMPT <= len(prompt) < LONGEST_PROMPT for prompt in most)
    assert Options(seed=1).prompts() == Options(seed=1).prompts() != Options(seed=2).prompts()


@pytest.mark.parametrize("kv_heads", range(1, 33))
def test_every_size_is_a_model_transformers_accepts(kv_heads):
    shape = ModelShape(kv_heads=kv_heads)
    assert shape.hidden % shape.heads == 0
    assert 128 <= shape.hidden < 256 or shape.hidden == shape.heads
