"""The nodes an engine holds: a core, a transport, a stager and a control socket, driven together.

Layer 5: the only place with threads, the clock and the lock. Read `driver` (the loop, on one screen), `node`, then
`prefill` and `decode`, `sender` and `receiver` (what an engine calls), `items` (what it passes), `awaiting` (how an
event loop waits) and `lookup` (who talks to the bootstrap).
"""

from pdstage.items import Items
from pdstage.manager.decode import DecodeNode
from pdstage.manager.prefill import PrefillNode
from pdstage.manager.receiver import Receiver
from pdstage.manager.sender import Sender

__all__ = ["DecodeNode", "Items", "PrefillNode", "Receiver", "Sender"]
