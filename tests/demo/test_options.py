"""What may be asked, and what is refused in one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdstage.errors import UsageError
from pdstage.tools.demo.families import FAMILIES
from pdstage.tools.demo.options import LONGEST_PROMPT, MAX_REQUESTS, MODELS, SHORTEST_PROMPT, Options


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
        ({"model": "gpt2"}, "--model is 'gpt2'; choose one of llama, gemma3"),
        ({"prefill_pp": 0}, "--prefill-pp is 0; give a number from 1 to 4"),
        ({"decode_pp": 5}, "--decode-pp is 5; give a number from 1 to 4"),
        ({"prefill_page": 0}, "--prefill-page is 0"),
        ({"decode_page": 4096}, "--decode-page is 4096; give a number from 1 to 1024"),
        ({"prefill_layout": "hdn"}, "--prefill-layout is 'hdn'; choose one of nhd, hnd"),
        ({"decode_layout": "NHD"}, "--decode-layout is 'NHD'"),
        ({"decode_tp": 16, "decode_pp": 4}, "--decode-tp 16 and --decode-pp 4 make 64 ranks; at most 32 a side"),
        ({"model": "mamba2", "kv_heads": 4}, "--kv-heads with mamba2, which has no KV heads; leave it out"),
        ({"model": "deepseek-v3", "kv_heads": 0}, "--kv-heads is 0"),
        ({"json": Path("/no/such/folder/out.json")}, "its folder does not exist"),
        ({"device": "gpu"}, "--device is 'gpu'; give cpu, cuda or cuda:N"),
        ({"device": "cuda:"}, "--device is 'cuda:'"),
        ({"kv_dtype": "fp8"}, "--kv-dtype is 'fp8'; choose one of float64, bfloat16"),
        ({"device": "cuda", "model": "mamba2"}, "mamba2 with --device cuda and --kv-dtype bfloat16"),
        ({"kv_dtype": "bfloat16", "model": "gpt-oss"}, "choose --model llama, or --device cpu and float64"),
    ],
)
def test_a_wrong_option_is_named(given, said):
    with pytest.raises(UsageError) as raised:
        Options(**given)
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("device", "wanted", "kept_as"),
    [
        ("cpu", None, "float64"),
        ("cuda", None, "bfloat16"),
        ("cuda:1", "float64", "float64"),
        ("cpu", "bfloat16", "bfloat16"),
    ],
)
def test_pools_are_bfloat16_on_a_gpu_unless_said_otherwise(device, wanted, kept_as):
    options = Options(device=device, kv_dtype=wanted)
    assert options.kept_as == kept_as
    assert options.described.endswith("KV cache in bfloat16" if kept_as == "bfloat16" else "float64")


def test_prompts_differ_in_length_and_follow_the_seed():
    most = Options(requests=MAX_REQUESTS).prompts()
    assert len({len(prompt) for prompt in most}) == MAX_REQUESTS
    assert all(SHORTEST_PROMPT <= len(prompt) < LONGEST_PROMPT for prompt in most)
    assert Options(seed=1).prompts() == Options(seed=1).prompts() != Options(seed=2).prompts()


@pytest.mark.parametrize("kv_heads", range(1, 33))
def test_every_size_is_a_model_transformers_accepts(kv_heads):
    settings = FAMILIES["llama"].settings(kv_heads)
    assert settings["hidden_size"] % settings["num_attention_heads"] == 0
    assert 128 <= settings["hidden_size"] < 256 or settings["hidden_size"] == settings["num_attention_heads"]


@pytest.mark.parametrize("model", MODELS)
def test_every_model_says_what_it_keeps(model):
    options = Options(model=model)
    assert options.components
    assert options.described.endswith("float64")
    assert [place.group_rank for place in options.prefill.places()] == [0, 1, 2, 3]
    family = FAMILIES[model]
    held = [layer for name in options.components for layer in family.layers_of(name, options.heads)]
    assert set(held) == set(family.layers), "every layer keeps something"


def test_stages_count_by_layers_first():
    places = Options(decode_tp=2, decode_pp=3).decode.places()
    assert [(place.pp_rank, place.tp_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert [place.group_rank for place in places] == list(range(6))
