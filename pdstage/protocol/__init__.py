"""The protocol, without sockets, threads or a clock: bytes and events in, effects out.

Layer 2. Read in this order: `messages` (what is said), `room` (the states of a room), `effects` (what a core asks of its
driver), `session` (who is talking and in what order), `prefill` and `decode` (the two cores), with `outbox` and `holdings`
for what each side holds and `coverage` for what has arrived.
"""
