"""SGLang 0.5.23: pdstage as a disaggregation transfer backend, chosen with `--disaggregation-transfer-backend pdstage`.

`plugin` is the entry point that SGLang's own loader calls; it imports the rest only when the backend is used. Read
`manager`, then `sender` and `receiver` (a request's life at prefill and at decode), `memory` (SGLang's KVArgs as a
pool), `rows` (its metadata), `adapters` (LoRA), `gauges` (its metrics) and `bootstrap` (who is there). `staging`
is apart from all that: pdstage's kernels under SGLang's own backends. docs/engines-sglang.md is for operators.
"""
