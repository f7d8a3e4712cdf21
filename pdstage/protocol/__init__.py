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

`config` has every deadline, `timers` says what it is. docs/concepts.md explains the words (room, destination, share,
lane, lease, window, epoch, tag). (I5) cites an invariant of docs/reliability.md.
"""
