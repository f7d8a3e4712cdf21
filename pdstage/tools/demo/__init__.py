"""`pdstage demo`: a real model's cache moves between processes of two layouts, and decoding goes on from what arrived.

One process computes the model. Each rank of either side is a process with a node over its own pools: a prefill rank
is handed its share of the cache chunk by chunk and sends it, a decode rank has only what arrived.

It may use the public API only; the library must not know it. Read `options` (the arguments), `families` (what the
models keep), `ranks` (one process, and an engine's calls), `engine` (the model, and how its cache is cut and put
together again) and `run` (the whole, and its report).
"""
