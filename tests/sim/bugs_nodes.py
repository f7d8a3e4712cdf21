"""Deliberate bugs of the manager: its driver, handles, look-ups and event loops, seen by the search of whole nodes."""

from __future__ import annotations

from tests.sim.mutants import NODES, Mutant

MUTANTS = [
    Mutant(
        "a failed handle has its error later",
        "11 handles",
        "Roster.changed",
        "        if status & 0x7F == State.FAILED:\n            handle.error = handle.room.error\n        handle.status = status\n",
        "        handle.status = status\n        if status & 0x7F == State.FAILED:\n            handle.error = handle.room.error\n",
        NODES,
    ),
    Mutant(
        "a row comes back after its room is told as released",
        "11 released",
        "Node._on_changed",
        "        if status >= 0x80:  # first: who sees `released` may free the row at once\n"
        "            self._give_row_back(handle)\n"
        "        self.roster.changed(handle, status)\n",
        "        self.roster.changed(handle, status)\n"
        "        if status >= 0x80:\n"
        "            self._give_row_back(handle)\n",
        NODES,
    ),
    Mutant(
        "two threads that poll share half an answer",
        "11 poll_many",
        "Roster.statuses",
        "            self._polled = polled = _Polled(changes, list(handles), statuses)\n",
        "            self._polled = _Polled(changes, list(handles), statuses)\n            polled = self._polled\n",
        NODES,
    ),
    Mutant(
        "who waits asks before he is known",
        "11 wait",
        "Roster.wait",
        "        with self.waiting(handle, done, lambda: bell.put(None)):\n            if not done():\n",
        "        was = done()\n        with self.waiting(handle, done, lambda: bell.put(None)):\n            if not was:\n",
        NODES,
    ),
    Mutant(
        "a turn rings nobody",
        "11 wait",
        "Driver._turn",
        "                node.roster.ring()  # last: who wakes earlier waits for the interpreter\n",
        "",
        NODES,
    ),
    Mutant(
        "an engine's call rings nobody",
        "11 wait",
        "Driver._push",
        "            node.roster.ring()\n",
        "",
        NODES,
    ),
    Mutant(
        "rooms are rung for before their handles know",
        "11 wait",
        "Driver._push",
        "            early |= self._carry_out(effects)\n            self._flush()\n            node.roster.ring()\n",
        "            node.roster.ring()\n            early |= self._carry_out(effects)\n            self._flush()\n",
        NODES,
    ),
    Mutant(
        "a change is not told to the roster",
        "11 handles",
        "Driver._carry",
        "                        node._on_changed(handle, room.status)\n",
        "                        if not room.released:\n"
        "                            node._on_changed(handle, room.status)\n",
        NODES,
    ),
    Mutant(
        "a kick forgets to wake",
        "11 driver",
        "Driver.kick",
        "        if wake:\n",
        "        if self.failure:\n",
        NODES,
    ),
    Mutant(
        "a kick forgets that a deadline is earlier now",
        "11 driver",
        "Driver._push",
        "            early = node._expects() or (next_at is not None and next_at < self._until_at)\n",
        "            early = node._expects()\n",
        NODES,
    ),
    Mutant(
        "effects are taken without the lock",
        "11 driver",
        "Driver._push",
        "        with self.lock:\n            effects = self._take_effects()\n",
        "        if True:\n            effects = self._take_effects()\n",
        NODES,
    ),
    Mutant(
        "what was said while posting is lost",
        "11 driver",
        "Driver._feed",
        "        events, self._early = self._early, []\n",
        "        events, self._early = list[Any](), []\n",
        NODES,
    ),
    Mutant(
        "a room begins while its node closes",
        "11 close",
        "Driver.check_begins",
        "        if self.ending:\n",
        "        if self.closed:\n",
        NODES,
    ),
    Mutant(
        "an answer of a directory wakes nobody",
        "11 look-ups",
        "DecodeNode.receive",
        "                self.socket.wake()\n",
        "                pass\n",
        NODES,
    ),
    Mutant(
        "a new look-up wakes nobody",
        "11 look-ups",
        "Directory._put",
        "        asker.changed.notify()\n",
        "",
        NODES,
    ),
    Mutant(
        "one bad look-up ends the thread that asks",
        "11 look-ups",
        "Directory._ask",
        "        except Exception as error:  # whatever it is, it is this lookup's alone\n",
        "        except KeyError as error:\n",
        NODES,
    ),
    Mutant(
        "a loop is told of an end from another thread",
        "11 wait_async",
        "Roster.wait_async",
        "                loop.call_soon_threadsafe(changed.set)\n",
        "                changed.set()\n",
        NODES,
    ),
]
