"""The protocol, without sockets, threads or a clock: bytes and events in, effects out.

Read in this order; all are modules of this folder:

    messages, wire              the messages, and their bytes
    state, room                 the five state machines; a room's name, status and error
    session                     one end of all sessions: who talks, in what order, how long silent; timers, effects
    handshake, compat           how sessions begin and end, and what both sides must have in common
    prefill                     the prefill core: how rooms begin, wait, close, fail and drain; it has
        destinations                chunks as the engine gave them, and as each destination gets them
        prefill_chunks              the chunks' way: lease, window, send buffer, gather, write
    decode                      the decode core: how rooms open, complete, fail and are released; it has
        lane                        one lane of staging memory as a ring: leases in order, and the watermark
        leases                      which staging memory is lent to which chunk, and what writers are told of it
        decode_rooms                rooms and their writers, and what of them has arrived
        decode_chunks               the chunks' way: reserved, arrived, scattered, counted

`config` holds every deadline. (I5) cites an invariant of docs/reliability.md.

Whoever feeds a core sets `Endpoint.now` first, once for all that it says at that time.

A control frame comes in by `Endpoint.receive`. It finds the session, decodes the message (`wire`), and calls the
handler that the core has for it: a method of the part that the message concerns, with what its epoch claims. A
`PeerError` raised there ends the session. After every input the core's `settle` begins what may begin now. A part sends
by `Endpoint.send`. Deadlines and repeated questions are calls that `Endpoint.after` and `Endpoint.repeat` keep for
later.

What happens when

* a staged chunk arrives: `ChunkReceiver._on_tag` has it scattered; then `scattered` releases its lease. A direct chunk
  is where it belongs.
* a room fails at decode: `DecodeCore.fail_room` quarantines the leases that may still be written. Abort is repeated
  until Drained or CloseOk; after `drain_s` the session is lost.
* a room fails at prefill: `PrefillCore.fail` repeats CloseFailed until Abort; then it drains.
* a session is lost: `DecodeCore.lose` and `PrefillCore.lose` end its rooms and, by `Leases.session_lost`, its leases;
  the effect `Detach` cuts the transport.
* the driver answers `fenced`. At decode nothing of the session can land any more, and quarantined leases are free. At
  prefill its posts no longer read our memory, and their send buffers are free.
* that cannot be proved: the memory stays out of use until the peer's process is proved dead or an operator says so
  (`Node.fence`).

A new message is added in this order. mypy or the test named (in tests/protocol) fails until a step is done; nothing
checks the steps that name neither.

* `messages`: its class with the next type number, and its name in `AnyMessage` (test_messages.py). Its bytes follow
  from the class.
* `prefill`, `decode`: a line in the `handlers` of the core that may receive it; the other refuses it. The part that
  receives it has an `on_...` method.
* The part that sends it: `Endpoint.send`; if it is repeated `Endpoint.repeat` too.
* If it may come outside a session: `wire.OUTSIDE_A_SESSION`, `accepts` and `on_stray` of the core that receives it,
  and `Endpoint.send_loose`.
* `state`: an event, if it moves a state.
* `messages.FEATURES` and `handshake.features`: a feature of its own. A side sends the message only if both sides
  offered that feature: versions down to `wire.OLDEST` work together, and an earlier one does not know the message.
* `wire.VERSION`: the next one, and its goldens; docs/wire.md has the rules (test_golden.py).

Words; docs/concepts.md has pictures of the first of them:

* *room*: one request's transfer. *Epoch*: the number of one try of it, from decode, never used twice.
* *lane*: a ring of decode's staging memory. *Lease*: a span of it, lent to one chunk. *Cursor*: where in its lane, a
  position that only grows; the address is the cursor modulo the lane's size. Its *window* ends one size past the lane's
  *watermark*, the cursor before which nothing is lent any more.
* *advance*: a lease that comes with Open, so that the writer need not ask.
* *tag*: the data plane's word that a write has landed.
* *driver*: who feeds a core and carries out its effects: `pdstage.manager.driver`, or a test.
* *incarnation*: one life of one process, as a random number. A *session* is what two processes have agreed on after
  one Hello; its id is that Hello's own number and prefill's incarnation.
* *fenced*: of a lost session: proved that nothing of it can land any more, since its peer's process has ended, or has
  answered that nothing is in flight, or the transport or an operator says so (`manager.sessions`).
* *shares*: the shards and layers that one writer sends to one destination. Decode *deals* them when a room connects.
* *claim*: a room's entry in `Session.claims`, by its epoch: at decode a `Writer`, at prefill a `Destination`.
* *post*: one write that the transport carries out. *In flight*: a gather, write or scatter that began and has not
  ended. Its *ticket* names it to the driver.
* *quiet*: of a writer: it can no longer write the room's pages or aux row in place. That says nothing of its leases,
  which `leases` follows until they are returned, scattered or fenced. Of a session: it is fenced.
* *quarantined*: of a lease: it may still be written, and nobody wants the bytes. They are *carved out* of their lane.
"""
