"""SGLang 0.5.23: pdstage as a disaggregation transfer backend, chosen with `--disaggregation-transfer-backend pdstage`.

SGLang's own loader calls the entry point `plugin`, which imports the rest only when the backend is used. Read
`manager`, then `sender` and `receiver` (a request at prefill and at decode), `memory` over `pools` (SGLang's KVArgs as
a pool), `writers` (the proof of that layout), `rows` (its metadata), `gauges` (its metrics) and `bootstrap` (the
directory). docs/engines-sglang.md is for operators.
"""
