"""The nodes an engine holds: a core, a transport, a stager and a control socket, driven together.

The only place with threads, the clock and the lock. Read on in this order:

    driver               the loop: receive, feed the core, take its effects, carry them out, sleep
    sessions             how sessions begin and end at the transport, and how chunks of each travel
    options              what a node is made with
    node                 what a rank owns, and what engines ask of it in either role
    items, handle        what an engine passes, and what it holds of a room
    data_path            a chunk's path, its gather and its writes
    prefill, decode      a room where it is sent, and where it is received
    lookup               who talks to the bootstrap directory
    calibration          what paths cost, from a file
    status, observer     for those who watch
"""

from pdstage.manager.decode import DecodeNode, Receiver
from pdstage.manager.items import Items
from pdstage.manager.prefill import PrefillNode, Sender

__all__ = ["DecodeNode", "Items", "PrefillNode", "Receiver", "Sender"]
