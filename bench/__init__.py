"""Microbenchmarks: each module's `run(quick)` gives rows; `harness` measures, prints and writes them.

Layer 7: may import anything. A number is a ratio whose two sides were measured in one run, in turn.
"""
