"""`pdstage demo`: real processes transfer real models' caches between two layouts.

The ranks compute the Llama together, split over TP and PP. For the six other models, each with its kinds of state,
every prefill rank computes the whole model, and stores and sends only its share. Decode has only what arrived.

It may use the public API only; the library must not know it. Read `options` (the arguments), `families` (what the
models keep), `llama` over `group` (the sharded Llama), `pools` and `holding` (where a rank keeps its share), `cache`,
`whole` and `engine` (the engines), `transfer` (an engine's calls), `ranks` (one process), `crew` (all of them),
`reference` (the expected tokens), and `run` with `report` (the whole).
"""
