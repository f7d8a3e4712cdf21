"""vLLM's own tests of KV connectors, with ours in place of its NIXL connector: those that ask what any must do.

Their text is not here: `fetch` brings it with the source archive of the installed version. docs/engines-vllm-tests.md
says which are left out, and why.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.engines.vllm.fetch import PLACE

HERE = Path(__file__).parent
UNIT = PLACE / "tests/v1/kv_connector/unit"
PAGE = Path(__file__).parents[3] / "docs/engines-vllm-tests.md"
STEPS = "steps of a pdstage connector"  # swap.N_STEPS, which cannot be imported here
RUN = {
    "test_remote_decode_lifecycle": ("test_basic_lifecycle", "test_abort_during_kv_transfer"),
    "test_remote_prefill_lifecycle": ("",),  # all
    "test_nixl_connector": ("test_prefill_exports_cached_tokens_in_kv_transfer_params",),
    "test_nixl_simple_cpu_offload": (
        "test_cpu_offload_wins_when_nixl_has_no_match",
        "test_request_finished_no_async_save",
    ),
}
N_TESTS = 22
OPT = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072,
    "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 50272, "max_position_embeddings": 10000,
    "word_embed_proj_dim": 768, "dtype": "float16", "eos_token_id": 2,
}  # fmt: skip

pytestmark = pytest.mark.skipif(
    not UNIT.is_dir(), reason="vLLM's tests are not here: python -m tests.engines.vllm.fetch"
)


def test_vllms_own_tests_of_any_connector(tmp_path):
    """They name a model of a hub: here a folder of that name has its config."""
    model = tmp_path / "facebook/opt-125m"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(OPT))
    report = tmp_path / "report.xml"
    names = [f"{UNIT}/{file}.py" + (f"::{name}" if name else "") for file, names in RUN.items() for name in names]
    options = [
        "-c",
        os.devnull,
        "-p",
        "swap",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(PLACE),
        "--junitxml",
        str(report),
        "-q",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *names],
        env=os.environ
        | {"ENGINES_DEVICE": "cpu", "PYTHONPATH": f"{HERE}:{HERE.parents[2]}", "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    cases = list(ElementTree.parse(report).iter("testcase"))
    assert len(cases) == N_TESTS
    for case in cases:
        assert case.find("skipped") is None, case.get("name")
        (steps,) = (one.get("value") for one in case.iter("property") if one.get("name") == STEPS)
        assert int(steps or 0) > 0, f"{case.get('name')} did without our connector"


def test_the_page_speaks_of_every_file_of_theirs():
    page = PAGE.read_text()
    files = sorted(file.stem for file in UNIT.glob("test_*.py"))
    assert len(files) > 50
    assert not [name for name in files if f"`{name}`" not in page]
