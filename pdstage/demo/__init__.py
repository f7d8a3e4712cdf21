"""A real model's KV cache moved between two tensor-parallel sizes, by real processes: `pdstage demo`.

Layer 6. May use the public API only; nothing below may know it. Read `options.py` for what can be asked, `model.py` for
the tensor-parallel Llama, `paged.py` for where a rank keeps its KV, `transfer.py` for the calls an engine makes,
`ranks.py` for what one process does, `run.py` for the whole.
"""
