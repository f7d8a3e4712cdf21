"""Whole engines, as processes that serve HTTP, on the CPU: `make test-e2e`, with `FULL=1` for everything.

What judges what:

* The right tokens of a prompt are those of one server of the engine as released, which transfers nothing, greedy, of
  the same model and dtype (`fleet.Fleet.right`). pdstage takes no part in them.
* The models (`models`) are random and sharp, so that a wrong byte of KV changes the tokens. Controls prove it in every
  run: a prompt with one token changed, and a prompt decoded with another request's cache, have other tokens.
* The engine's own counters say that nothing was computed twice (decode computes one token of a prompt) and that its
  blocks are free again after every fault; what an engine says of a transfer is not believed by itself.
* An answer is right, or it is an error that came in time. One that came with status 200 and other tokens, or that never
  came, fails the test, whatever was killed meanwhile.

To read: `models`, `load` (prompts and clients), `compare`; `servers` (processes), `fleet` (which run), `faults`; then
an engine's folder: what is launched, and the tests.
"""
