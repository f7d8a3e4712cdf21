"""`pdstage demo --model` for each model: real processes, other sizes, stages, pages and orders on either side."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pdstage.tools.demo.families import FAMILIES, HEAD_DIM, N_LAYERS
from pdstage.tools.demo.options import MODELS
from pdstage.transport import available
from tests.rows import rows

pytest.importorskip("torch")
pytest.importorskip("rich")
if find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

SIDES = ("prefill", "decode")
COMMON = {"prefill_page": 16, "decode_page": 64, "requests": 2, "new_tokens": 16}
RUNS = {
    "gemma3": {"prefill_tp": 4, "decode_tp": 2},
    "qwen3-next": {"prefill_tp": 2, "prefill_pp": 2, "decode_tp": 1},
    "mamba2": {"prefill_tp": 2, "decode_tp": 4},
    "deepseek-v3": {"prefill_tp": 4, "decode_tp": 2, "path": "staged"},
    "deepseek-v32": {"prefill_tp": 2, "decode_tp": 4},
    "gpt-oss": {"prefill_tp": 1, "decode_tp": 2, "decode_pp": 2, "prefill_layout": "hnd", "decode_layout": "nhd"},
    # Half of the prefill ranks have nothing for a decode rank: each side has two stages.
    "llama": {"prefill_tp": 2, "prefill_pp": 2, "decode_tp": 1, "decode_pp": 2},
}
IN_BFLOAT16 = {"kv_dtype": "bfloat16", "path": "staged", "prefill_tp": 1, "decode_tp": 1}


QUICK = {"gemma3", "mamba2"}  # a window and a state


@pytest.fixture(scope="module")
def told(tmp_path_factory, request):
    """What each model's run told. All in one process: half of a run's time is importing."""
    transport = "local" if available()["nixl"] else "nixl"
    chosen = {model: RUNS[model] for model in RUNS if model in QUICK or request.config.getoption("--full")}
    runs = [{"model": model, "transport": transport, **COMMON, **sizes} for model, sizes in chosen.items()]
    runs.append({"model": "llama", "transport": "local", **COMMON, **IN_BFLOAT16})
    file = tmp_path_factory.mktemp("runs") / "runs.json"
    file.write_text(json.dumps(runs))
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-m", "demo.many", str(file)], capture_output=True, text=True, timeout=900, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(zip([*chosen, "in bfloat16"], map(json.loads, done.stdout.splitlines()), strict=True))


def test_every_model_is_run():
    assert RUNS.keys() == set(MODELS)


@pytest.mark.parametrize("model", rows(RUNS, full=RUNS.keys() - QUICK))
def test_decoding_goes_on_token_for_token(told, model):
    assert "error" not in told[model], told[model]["error"]
    report = told[model]["report"]
    assert report["tokens_identical"] is True
    assert report["negative_control_caught"] is True, "in every component"
    assert report["new_tokens"] == COMMON["requests"] * (COMMON["new_tokens"] + 1)
    assert report["bytes_moved"] > 0
    assert (report["prefill_pp"], report["decode_pp"]) == tuple(RUNS[model].get(f"{s}_pp", 1) for s in SIDES)


def test_a_cache_in_bfloat16_is_the_single_processs_token_for_token(told):
    """The dtype of pools on a GPU, on the CPU: the model computes in float64, its cache is rounded on both sides."""
    assert "error" not in told["in bfloat16"], told["in bfloat16"]["error"]
    report, said = told["in bfloat16"]["report"], told["in bfloat16"]["said"]
    assert report["tokens_identical"] is True
    assert report["negative_control_caught"] is True
    assert report["model"].endswith("KV cache in bfloat16")
    assert report["device"] == "cpu"
    n_tokens = int(next(line for line in said.splitlines() if line.split()[:1] == ["all"]).split()[1])
    payload = n_tokens * FAMILIES["llama"].kv_heads * N_LAYERS * 2 * HEAD_DIM * 2
    assert payload <= report["bytes_moved"] <= payload * 1.02, "two bytes an element"
