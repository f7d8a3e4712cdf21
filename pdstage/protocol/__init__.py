"""The protocol, without sockets, threads or a clock: bytes and events in, effects out.

Read in this order:

    messages, wire              what is said, and its bytes
    state, room                 the five state machines; a room's name, status and error
    session                     one end of all sessions: who talks, in what order, how long silent; timers, effects
    handshake, compat           how sessions begin and end, and what both sides must have in common
    prefill                     the prefill core, which has:
        destinations                chunks as the engine gave them, and as each destination gets them
        prefill_chunks              the chunks' way: lease, window, send buffer, gather, write
        prefill_rooms               the room table; `pending_opens` for rooms that are not submitted yet
    decode                      the decode core, which has:
        leases                      the ledger of staging memory, and what is said of it
        decode_rooms                the room table, and each writer's part of a room; `coverage` of what has arrived
        decode_chunks               the chunks' way: reserved, arrived, scattered, counted

`config` has every deadline, `timers` says what it is. (I5) cites an invariant of docs/reliability.md.

A control frame's way in: `Endpoint.receive` finds its session and decodes it (`wire`); the core's `on_frame` is one
`match` over all messages, and calls the part that it concerns; `settle` then begins what may begin now. What a part has
to say goes out by `Endpoint.send`. Deadlines and repeated questions are `timers`, served by the core's `on_timer`.

A new message is added in this order. Until all is done, mypy and the tests named (in tests/protocol) fail.

* `messages`: its class with the next tag, and its name in `AnyMessage` (test_messages.py).
* `prefill`, `decode`: a case in the `on_frame` of each core; who may not hear it refuses it (mypy).
* The part that says it: `Endpoint.send`, and if it is repeated a timer, with a case in `on_timer`.
* `state`: an event, if it moves a state.
* `messages.FEATURES`: a feature, unless every peer of `wire.OLDEST` knows it: it is said only where both offered that.
* `wire.VERSION`: the next one, and its goldens; docs/wire.md has the rules (test_golden.py).

docs/concepts.md explains the words, with pictures (room, destination, share, lane, lease, window,
epoch, tag). And these:

* *incarnation*: one life of one process, as a random number. A *session* is what two of them have agreed on.
* *fenced*: of a lost session: its peer's writes cannot land any more. `Detach` asks the driver to cut the
  transport; its answer is `fenced`.
* *quiet*: of a writer: it touches nothing of this room, or of this session, any more.
* *in flight*: begun, and not ended yet: a gather, a write or a scatter. Its *ticket* names it to the driver.
"""
