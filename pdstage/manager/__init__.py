"""The nodes an engine holds: a core, a transport, a stager and a control socket, driven together.

The only place with threads, the clock and the lock. Read on in this order:

    role                        what the driver and its parts ask of prefill and decode, and of each other
    driver                      the loop, on one screen: a turn, and who makes it
    carrier, sleep              how what the core asks for is carried out, and how long the driver sleeps in between
    sessions                    how sessions begin and end at the transport
    node                        what a rank owns, and what engines ask of it in either role
    settings, rows, copier      which of its settings go together, who has which aux row, who makes its large copies
    prefill, sender             a room where it is sent, and what an engine calls
    demand, paths, moves, posts what its destinations ask; which way a chunk goes, as which spans, in which posts
    decode, receiver            a room where it is received, and what an engine calls
    handle, items               what both kinds of room have in common, and what an engine passes
    awaiting, lookup            how an event loop waits, and who talks to the bootstrap
    status, observer, nvtx      for whoever watches
"""

from pdstage.items import Items
from pdstage.manager.decode import DecodeNode
from pdstage.manager.prefill import PrefillNode
from pdstage.manager.receiver import Receiver
from pdstage.manager.sender import Sender

__all__ = ["DecodeNode", "Items", "PrefillNode", "Receiver", "Sender"]
