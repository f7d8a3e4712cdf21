"""Deliberate bugs of the manager and the transports: most are seen by the search of whole nodes."""

from __future__ import annotations

from tests.sim.mutants import NODES, Mutant

MUTANTS = [
    Mutant(
        "a failed handle has its error later",
        "11 handles",
        "        if status & 0x7F == State.FAILED:\n            handle.error = handle.room.error\n        handle.status = status\n",
        "        handle.status = status\n        if status & 0x7F == State.FAILED:\n            handle.error = handle.room.error\n",
        NODES,
    ),
    Mutant(
        "a row comes back after its room is told as released",
        "11 released",
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
        "            self._polled = polled = _Polled(changes, list(handles), statuses)\n",
        "            self._polled = _Polled(changes, list(handles), statuses)\n            polled = self._polled\n",
        "tests/manager/test_handle.py",
    ),
    Mutant(
        "who waits asks before he is known",
        "11 wait",
        "        with self.waiting(handle, done, lambda: bell.put(None)):\n            if not done():\n",
        "        was = done()\n        with self.waiting(handle, done, lambda: bell.put(None)):\n            if not was:\n",
        NODES,
    ),
    Mutant(
        "a turn rings nobody",
        "11 wait",
        "                node.roster.ring()  # last: who wakes earlier waits for the interpreter\n",
        "",
        NODES,
    ),
    Mutant(
        "an engine's call rings nobody",
        "11 wait",
        "            node.roster.ring()\n            self._moved_at",
        "            self._moved_at",
        NODES,
    ),
    Mutant(
        "rooms are rung for before their handles know",
        "11 wait",
        "            early |= self._carry_out(effects)\n            self._flush()\n            node.roster.ring()\n",
        "            node.roster.ring()\n            early |= self._carry_out(effects)\n            self._flush()\n",
        NODES,
    ),
    Mutant(
        "a change is not told to the roster",
        "11 handles",
        "                        node._on_changed(handle, room.status)\n",
        "                        if not room.released:\n"
        "                            node._on_changed(handle, room.status)\n",
        NODES,
    ),
    Mutant(
        "a kick forgets to wake",
        "11 driver",
        "        if wake:\n",
        "        if self.failure:\n",
        NODES,
    ),
    Mutant(
        "a kick forgets that a deadline is earlier now",
        "11 driver",
        "            early = bool(node._waiting) or (next_at is not None and next_at < self._until_at)\n",
        "            early = bool(node._waiting)\n",
        NODES,
    ),
    Mutant(
        "effects are taken without the lock",
        "11 driver",
        "        with self.lock:\n            effects = self._take_effects()\n",
        "        if True:\n            effects = self._take_effects()\n",
        NODES,
    ),
    Mutant(
        "what was said while posting is lost",
        "11 driver",
        "        events, self._early = self._early, []\n",
        "        events, self._early = list[Any](), []\n",
        NODES,
    ),
    Mutant(
        "a room begins while its node closes",
        "11 close",
        "        if self.ending:\n",
        "        if self.closed:\n",
        NODES,
    ),
    Mutant(
        "an answer of a directory wakes nobody",
        "11 look-ups",
        "                self.socket.wake()\n",
        "                pass\n",
        NODES,
    ),
    Mutant(
        "a new look-up wakes nobody",
        "11 look-ups",
        "        asker.changed.notify()\n",
        "",
        NODES,
    ),
    Mutant(
        "one bad look-up ends the thread that asks",
        "11 look-ups",
        "        except Exception as error:  # whatever it is, it is these lookups' alone\n",
        "        except KeyError as error:\n",
        NODES,
    ),
    Mutant(
        "a loop is told of an end from another thread",
        "11 wait_async",
        "                loop.call_soon_threadsafe(changed.set)\n",
        "                changed.set()\n",
        NODES,
    ),
    Mutant(
        "a room is opened before its pages are free",
        "11 after, I2",
        "            if after is None:\n",
        "            if True:\n",
        "tests/manager/test_transfer.py::test_nothing_is_opened_before_after",
    ),
    Mutant(
        "a chunk is gathered before its data exists",
        "11 ready, I5",
        "            if done:\n                then()\n",
        "            if True:\n                then()\n",
        "tests/manager/test_transfer.py::test_data_is_gathered_only_when_ready",
    ),
    Mutant(
        "poll_many says released at Success",
        "11 released, I2",
        "return (polled.statuses & 0x7F).view(np.int8), polled.statuses >> np.uint8(7)",
        "return (polled.statuses & 0x7F).view(np.int8), ((polled.statuses & 0x7F) == State.SUCCESS).view(np.uint8)",
        "tests/manager/test_handle.py",
    ),
    Mutant(
        "one dead way is taken for a dead peer",
        "9 proved_dead, I2",
        "all(way.proved_dead(peer) for way in met.values())",
        "any(way.proved_dead(peer) for way in met.values())",
        "tests/transport/test_auto.py",
    ),
    Mutant(
        "a failed write counts as settled",
        "9 settled, I2",
        "unknown, settled=False",
        "unknown, settled=True",
        "tests/transport/test_nixl.py::test_the_agent_of_a_dead_peer_goes_with_its_last_post",
    ),
]
