"""Microbenchmarks: each module's `run(quick)` returns rows; `harness` measures, prints and writes them.

They may import anything. A number is a ratio whose two sides were measured in one run, in turn.
"""

BENCHES = (
    "plan", "wire", "launch", "host-kernels", "rooms", "transfer", "kv-transfer", "vllm-step", "gpu",
)  # fmt: skip
