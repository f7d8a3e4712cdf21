"""The bench of a step's cost runs to its end, in small, and its rooms arrive."""

from __future__ import annotations

import pytest

from pdstage.bench import vllm_step
from pdstage.bench.harness import run_named


@pytest.mark.full
def test_every_row_of_a_step(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # beside our folder "kernels" vLLM cannot look into its models
    monkeypatch.setattr(vllm_step, "QUICK_STEPS", 8)
    names = [row["name"] for row in run_named("vllm-step", quick=True)["rows"]]
    for part in (
        "decode's worker, 4 rooms a step, p99", "prefill's worker, 1 room a step, max",
        "decode's worker, 1 room a step and 64 waiting", "prefill's worker, 1 room a step and 64 waiting",
    ):  # fmt: skip
        assert any(part in name for name in names), (part, names)
