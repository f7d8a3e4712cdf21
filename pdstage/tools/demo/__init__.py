"""Real models' caches moved between two layouts, by real processes: `pdstage demo`.

The Llama is computed by its ranks together, split over TP and PP. Of the six other models, each with kinds of state of
its own, every prefill rank computes the whole model; it stores and moves only its share, and decode has nothing but
what came.

May use the public API only; nothing below may know it. Read `options.py` for what can be asked, `families.py` for what
the models keep, `llama.py` for the sharded Llama, `pools.py` and `holding.py` for where a rank keeps its share,
`cache.py` and `whole.py` for the others' caches, `transfer.py` for the calls an engine makes, `ranks.py` for what one
process does, `run.py` for the whole.
"""
