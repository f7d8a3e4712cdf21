"""Deliberate bugs in staging lanes, leases, watermarks and send buffers (DESIGN 6)."""

from __future__ import annotations

from tests.sim.mutants import Mutant

MUTANTS = [
    Mutant(
        "an idle lane begins again at 0",
        "6 cursors, I4",
        """        self.watermark = next(iter(self._ahead), self.head)
""",
        """        if not self._ahead and not self._passed:
            self.head = 0
        self.watermark = next(iter(self._ahead), self.head)
""",
    ),
    Mutant(
        "a lease straddles the end of its lane",
        "6 contiguous, I3",
        "                if cursor + size <= base + stop:",
        "                if cursor + size <= base + stop or (cursor < base + stop == base + self.capacity):",
    ),
    Mutant(
        "padding waits for a release of its own",
        "6 padding, I13",
        """        self._ahead[cursor] = lease
""",
        """        if cursor > self.head:
            old = Lease(lease.session, 0, 0, 0, cursor - self.head, (), 0, 0, self.head, cursor, phase=LeasePhase.LANDED)
            self._ahead[self.head] = old
        self._ahead[cursor] = lease
""",
    ),
    Mutant(
        "an idle lane's watermark stays behind its head",
        "6 watermark, I13",
        """        self.watermark = next(iter(self._ahead), self.head)
""",
        """        self.watermark = next(iter(self._ahead), self.watermark)
""",
    ),
    Mutant(
        "leases are granted two laps ahead",
        "6 window, I2",
        "return cursor if cursor + size <= self.watermark + 2 * self.capacity else None",
        "return cursor if cursor + size <= self.watermark + 3 * self.capacity else None",
    ),
    Mutant(
        "the window is not checked before a write",
        "6 window, I2",
        "        return chunk.cursor + chunk.nbytes <= session.marks.get(chunk.lane, 0) + session.lanes[chunk.lane].nbytes",
        "        return chunk.cursor + chunk.nbytes <= session.marks.get(chunk.lane, 0) + 2 * session.lanes[chunk.lane].nbytes",
    ),
    Mutant(
        "a failed post is tried again",
        "6 written once, I15",
        """            CHUNK.move(chunk, ChunkEvent.BROKEN)
            if not chunk.row:
                self.core.fail_destination(destination, error)
                return
""",
        """            if not chunk.row:
                chunk.phase = ChunkPhase.READY
                self.staged.queue(chunk)
                return
""",
    ),
    Mutant(
        "a failed post's lease is given back as unused",
        "6 unknown outcome, I2",
        """            CHUNK.move(chunk, ChunkEvent.BROKEN)
            if not chunk.row:
                self.core.fail_destination(destination, error)
                return
""",
        """            chunk.phase = ChunkPhase.DROPPED
            if not chunk.row:
                self.core.fail_destination(destination, error)
                return
""",
        "tests/protocol/test_rooms.py::test_a_failed_write_is_not_given_back_as_if_it_was_never_begun",
    ),
    Mutant(
        "the lease of a chunk that is dropped while it is gathered is given back",
        "6 used lease, I2",
        "e.UNUSED: p.DROPPED, e.DROP: None},",
        "e.UNUSED: p.DROPPED, e.DROP: p.DROPPED},",
        "tests/protocol/test_rules.py::test_a_lease_that_is_gathered_into_is_given_back_only_once_that_ended",
    ),
    Mutant(
        "Reserve is not repeated",
        "6 who asks again, I4",
        "        self.endpoint.repeat(self.reserve_again, chunk)\n\n",
        "",
    ),
    Mutant(
        "Lease does not carry the watermark",
        "6 who asks again, I11",
        """        mark = self._mark_to_send(lease.session, lease.lane)
        answer""",
        """        mark = lease.session.marks.get(lease.lane, 0)
        answer""",
    ),
    Mutant(
        "a watermark from Lease is not taken",
        "6 who asks again, I11",
        "        self.on_watermark(session, lease)\n",
        "",
    ),
    Mutant(
        "nothing is recalled",
        "6 recall (a), I12",
        "        for lease in self.to_recall():",
        "        for lease in ():",
    ),
    Mutant(
        "recall forgets leases shut in behind a stuck head",
        "6 recall (b), I12",
        "shut_in = stuck and not self.is_open(lease) and self.elsewhere(lease)",
        "shut_in = False",
        "tests/protocol/test_leases.py",
    ),
    Mutant(
        "recall forgets leases on quarantined bytes",
        "6 recall (c), I12",
        "if early or lease in in_the_way or shut_in or",
        "if early or shut_in or",
        "tests/protocol/test_leases.py",
    ),
    Mutant(
        "a lease in advance is offered again after its Recall",
        "6 recall, I2",
        "if lease in self.advances and not lease.recalled",
        "if lease in self.advances",
    ),
    Mutant(
        "a lease in advance is given back and taken all the same",
        "6 recall, I2",
        "            destination.advances[recall.chunk] = None",
        "            pass",
    ),
    Mutant(
        "leases in advance stay when something waits",
        "6 recall, I12",
        "early = lease in self.advances and now - lease.granted_at >= _ADVANCE_S",
        "early = False",
        "tests/protocol/test_advance.py",
    ),
    Mutant(
        "a tag of more than was lent in advance counts",
        "7 tags, I3",
        "return nbytes if nbytes <= lease.nbytes else 0",
        "return nbytes",
        "tests/protocol/test_advance.py",
    ),
    Mutant(
        "decode frees on sending Recall",
        "6 recall, I2",
        """                self.endpoint.send(lease.session, recall)
""",
        """                self.endpoint.send(lease.session, recall)
                self.release(lease)
""",
    ),
    Mutant(
        "no attempts: Returned is not final",
        "6 recall, I15",
        """                chunk.attempt += 1
                self.endpoint.cancel(self.reserve_again, chunk)
""",
        """                self.endpoint.cancel(self.reserve_again, chunk)
""",
    ),
    Mutant(
        "a lease of any attempt is taken",
        "6 recall, I15",
        "if chunk is not None and chunk.attempt == lease.attempt and not chunk.direct:",
        "if chunk is not None and not chunk.direct:",
    ),
    Mutant(
        "a lease is given back after its write began",
        "6 recall, I2",
        "elif chunk.phase not in _UNLEASED:",
        "elif chunk.phase is ChunkPhase.READY:",
    ),
    Mutant(
        "a recalled chunk asks again before its data exists",
        "6 recall, I16",
        """                if chunk.source.ready:
                    self.reserve(chunk)
                else:
                    CHUNK.move(chunk, ChunkEvent.RECALLED)
""",
        """                self.reserve(chunk)
""",
    ),
    Mutant(
        "leases nobody wants are not given back",
        "6 recall, I13",
        "        self.endpoint.send(session, m.Returned(lease.epoch, lease.chunk, lease.attempt, lease.lane, lease.cursor))",
        "        _ = session",
        "tests/protocol/test_table.py",
    ),
    Mutant(
        "a higher attempt does not free the old lease",
        "6 life, I14",
        """            self._leases.release(held)
            held = None
""",
        """            held = None
""",
        "tests/protocol/test_table.py",
    ),
    Mutant(
        "a failed room's leases are free at once",
        "6 quarantine, I2",
        """            if lease.phase is LeasePhase.GRANTED:
                self.quarantine(lease)
""",
        """            if lease.phase is LeasePhase.GRANTED:
                self.release(lease)
""",
    ),
    Mutant(
        "a failed room's leases stay granted",
        "6 quarantine, I12",
        """            if lease.phase is LeasePhase.GRANTED:
                self.quarantine(lease)
""",
        """            pass
""",
        "tests/protocol/test_rules.py",
    ),
    Mutant(
        "what landed is free before its scatter is done",
        "6 life, I2",
        """            LEASE.move(lease, LeaseEvent.LAND)
            span""",
        """            LEASE.move(lease, LeaseEvent.LAND)
            self._leases.release(lease)
            span""",
    ),
    Mutant(
        "quarantined bytes are not carved out",
        "6 carve-out, I3",
        """        LEASE.move(lease, LeaseEvent.QUARANTINE)
        self._gaps = None
""",
        """        LEASE.move(lease, LeaseEvent.QUARANTINE)
""",
    ),
    Mutant(
        "the watermark waits for a quarantined span",
        "6 carve-out, I12",
        "            if first.phase is not LeasePhase.QUARANTINED or any(self._one_lap_on(first)):",
        "            if True:",
        "tests/protocol/test_leases.py",
    ),
    Mutant(
        "the watermark passes quarantine under a live lease",
        "6 carve-out, I2",
        "            if first.phase is not LeasePhase.QUARANTINED or any(self._one_lap_on(first)):",
        "            if first.phase is not LeasePhase.QUARANTINED:",
    ),
    Mutant(
        "a quiet span does not return to its lane",
        "6 carve-out, I14",
        """        if lease.phase is LeasePhase.QUARANTINED:
            self._gaps = None
""",
        "",
    ),
    Mutant(
        "too_big waits instead of being refused",
        "6 too_big, I12",
        "            if request.nbytes > self.largest():",
        "            if False:",
        "tests/protocol/test_leases.py",
    ),
    Mutant(
        "one session may take the whole lane",
        "6 half of a lane",
        "if others and lent_nbytes and not lane.idle and lent_nbytes + request.nbytes > lane.capacity // 2:",
        "if False:",
        "tests/protocol/test_leases.py",
    ),
    Mutant(
        "the last come is served first",
        "6 order, I12",
        "from bisect import insort\n",
        "from bisect import insort_left as insort\n",
        "tests/protocol/test_leases.py",
    ),
    Mutant(
        "a send buffer waits for a closed window",
        "6 send buffers, I11",
        "chunk.source.ready and (chunk.direct or self.is_open(chunk)):",
        "chunk.source.ready:",
    ),
    Mutant(
        "one destination may have every send buffer",
        "6 send buffers, I12",
        "_Turns(max(1, n_buffers - 1))",
        "_Turns(n_buffers)",
        "tests/protocol/test_rules.py",
    ),
    Mutant(
        "a send buffer is free once its write began",
        "6 send buffers, I8",
        """        self.endpoint.effects.append(Write(ticket, buffer, chunk, self._address(chunk), self._tag(chunk)))
""",
        """        self.endpoint.effects.append(Write(ticket, buffer, chunk, self._address(chunk), self._tag(chunk)))
        self.free.append(buffer)
""",
    ),
    Mutant(
        "a write may take for ever",
        "6 write_s, I10",
        """        self.core.lose(chunk.destination.session, late)
""",
        "",
        "tests/protocol/test_rooms.py::test_a_write_older_than_write_s_tears_its_session_down",
    ),
    Mutant(
        "source memory is given back before the last completion",
        "6 send buffers, I8",
        "        if room.ended and room.in_flight == 0 and not room.released:",
        "        if room.ended and not room.released:",
    ),
    Mutant(
        "a writer's window is one view too wide",
        "6 window, I2",
        "<= session.marks.get(chunk.lane, 0) + session.lanes[chunk.lane].nbytes",
        "<= session.marks.get(chunk.lane, 0) + session.lanes[chunk.lane].nbytes + 128",
    ),
    Mutant(
        "a rising watermark opens what it does not reach",
        "6 window, I2",
        "        if self.is_open(chunk):\n            self",
        "        if True:\n            self",
    ),
]
