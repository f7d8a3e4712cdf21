"""The nodes an engine holds: a core, a transport, a stager and a control socket, driven together.

The only place with threads, the clock and the lock. Read on in this order:

    role                        what the driver asks of prefill and decode
    driver                      the loop: receive, feed the core, take its effects, carry them out, sleep
    carrier, sleep              how effects are carried out, and how long the driver sleeps in between
    sessions                    how sessions begin and end at the transport
    node                        what a rank owns, and what engines ask of it in either role
    settings, rows, copy_thread which of its settings go together, who has which aux row, who makes its large copies
    prefill, sender             a room where it is sent, and what an engine calls
    demand, data_path           what its destinations ask for; a chunk's path, its gather and its writes
    decode, receiver            a room where it is received, and what an engine calls
    handle, items               what both kinds of room have in common, and what an engine passes
    aio, lookup                 how an event loop waits, and who talks to the bootstrap directory
    calibration                 what paths cost, from a file
    status, observer, nvtx      for those who watch
"""

from pdstage.items import Items
from pdstage.manager.decode import DecodeNode
from pdstage.manager.prefill import PrefillNode
from pdstage.manager.receiver import Receiver
from pdstage.manager.sender import Sender

__all__ = ["DecodeNode", "Items", "PrefillNode", "Receiver", "Sender"]
