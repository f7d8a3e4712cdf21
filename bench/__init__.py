"""Microbenchmarks: each module's `run(quick)` gives rows; `harness` measures, prints and writes them.

May import anything. A number is a ratio whose two sides were measured in one run, in turn.
"""
