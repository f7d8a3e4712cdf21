"""The protocol, without sockets, threads or a clock: bytes and events in, effects out.

Layer 2. Read in this order: `messages` (what is said), `wire` (its bytes), `room` (the states of a room), `effects`
(what a core asks of its driver). Then the floors that each core stands on, from below: `session` (who is talking and
in what order), `handshake` (with whom), and of decode `parting` (for how long), `lender` (the leases), `receiving` (the
room table), `arriving` (the chunks) and `decode` (the core); of prefill `windows` (how far lanes may be written),
`borrower` (the chunks and their leases), `sending` (the room table) and `prefill` (the core). Beside them lie `inbox`,
`outbox`, `holdings` with its `queue`, and `parked` for what each side holds, `coverage` for what has arrived, `told`
and `opening` for the limits of a peer's layout and of what it asks for, `fit` and `slots` for what both sides' state
must have in common, `versions` for who talks with whom, `timers` and `config`.
"""
