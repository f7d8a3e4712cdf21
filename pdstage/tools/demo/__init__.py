"""`pdstage demo`: real processes transfer real models' caches between two layouts.

Every prefill rank computes the whole model, and stores and sends only its share. Decode has only what arrived.

It may use the public API only; the library must not know it. Read `options` (the arguments), `families` (what the
models keep), `pools` and `holding` (where a rank keeps its share), `cache`, `group` and `engine` (which computes),
`transfer` (an engine's calls), `ranks` (one process), `crew` (all of them), `reference` (the expected tokens), and
`run` with `report` (the whole).
"""
