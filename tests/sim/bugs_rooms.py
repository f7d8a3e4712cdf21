"""Deliberate bugs in the life of a room: opened, delivered, closed, aborted, released (DESIGN 7)."""

from __future__ import annotations

from tests.sim.mutants import Mutant

MUTANTS = [
    Mutant(
        "one chunk of each writer counts as all",
        "7 fan-in, I5",
        "            if writer.coverage.missing() or (writer.has_aux",
        "            if not writer.arrived or (writer.has_aux",
    ),
    Mutant(
        "chunks are counted, not what they cover",
        "7 fan-in, I5",
        "            if writer.coverage.missing() or (writer.has_aux",
        "            if len(writer.arrived) < 4 or (writer.has_aux",
    ),
    Mutant(
        "the first layer stands for all",
        "7 fan-in, I5",
        "            token = tokens.first_gap(start, stop) if begin < high and low < end else None",
        "            token = tokens.first_gap(start, stop) if begin < 1 and low < end else None",
    ),
    Mutant(
        "Success before the scatters are done",
        "7 fan-in, I5",
        "        if room.ended or not room.bound or room.pending:",
        "        if room.ended or not room.bound:",
    ),
    Mutant(
        "Success before aux is here",
        "7 fan-in, I5",
        "writer.coverage.missing() or (writer.has_aux and writer.phase is not WriterPhase.QUIET):",
        "writer.coverage.missing():",
    ),
    Mutant(
        "Success without a writer that is still to deliver",
        "7 fan-in, I5",
        "            if writer.coverage.missing() or",
        "            if (writer.coverage.missing() and writer.phase is not WriterPhase.OPENING) or",
    ),
    Mutant(
        "Failed is overwritten by Success",
        "7 states, I1",
        "        s.FAILED: over,\n",
        "        s.FAILED: over | {e.COMPLETED: s.SUCCESS},\n",
        "tests/protocol/test_room.py",
    ),
    Mutant(
        "released when one writer is quiet",
        "7 released, I2",
        "        if all(writer.phase is WriterPhase.QUIET for writer in room.writers.values()):",
        "        if not room.writers or any(writer.phase is WriterPhase.QUIET for writer in room.writers.values()):",
    ),
    Mutant(
        "released before its own scatters are done",
        "7 released, I2",
        "        if not room.ended or room.pending or room.released:",
        "        if not room.ended or room.released:",
    ),
    Mutant(
        "a failed room is released at once",
        "7 released, I2",
        "            self.cancel_timers(writer)\n            if lives and",
        "            self.cancel_timers(writer)\n            writer.phase = WriterPhase.QUIET\n            if lives and",
    ),
    Mutant(
        "an epoch is used again",
        "7 epoch, I6",
        "        self._last_epoch += 1\n",
        "        self._last_epoch = 1 + max(self.by_epoch, default=0)\n",
    ),
    Mutant(
        "a writer is found by its epoch alone",
        "7 keyed by session",
        "session.claims.get(tag.epoch)",
        """next(
            iter(self._core.by_epoch[tag.epoch].writers.values() if tag.epoch in self._core.by_epoch else ()), None
        )""",
    ),
    Mutant(
        "a tag counts whatever its lease's state",
        "7 tags, I7",
        "            if lease is None or lease.phase is not LeasePhase.GRANTED or lease.session is not session:",
        "            if lease is None or lease.session is not session:",
    ),
    Mutant(
        "a tag counts after its room ended",
        "7 tags, I6",
        "        if writer is None or writer.room.ended or not writer.room.bound:\n            return False",
        "        if writer is None or not writer.room.bound:\n            return False",
    ),
    Mutant(
        "Open is not repeated",
        "7 Open, I4",
        """        self.endpoint.repeat(self.send_open, writer)
""",
        "",
    ),
    Mutant(
        "Open of a room not submitted yet is dropped",
        "7 Open, I11",
        """        self.pending.setdefault(opened.room, {})[destination] = None
""",
        "",
    ),
    Mutant(
        "Opened is not heard",
        "7 Opened, I4",
        """            return
        self.open_answered(writer)
        if not writer.shares""",
        "            return\n        if not writer.shares",
        "tests/protocol/test_table.py",
    ),
    Mutant(
        "a repeated Open makes another destination",
        "7 Open, I7",
        "        if destination is None:\n            for problem",
        "        if destination is None or destination.room is not None:\n            for problem",
    ),
    Mutant(
        "Reserve of what is granted is not answered",
        "7 Reserve, I4",
        """                self._leases.send_lease(held)
                return""",
        "                return",
    ),
    Mutant(
        "Reserve is granted after its room ended",
        "7 Reserve, I14",
        "if writer is None or writer.room.ended or not writer.room.bound or writer.phase is WriterPhase.QUIET:",
        "if writer is None or not writer.room.bound:",
        "tests/protocol/test_rules.py",
    ),
    Mutant(
        "Close is sent before the last completion",
        "7 Close, I5",
        "if destination.phase is not DestinationPhase.LIVE or room is None or destination.unwritten:",
        "if destination.phase is not DestinationPhase.LIVE or room is None:",
    ),
    Mutant(
        "fewer slots at prefill are waited for",
        "8 I9",
        "                writer.coverage.count(name, given[name])\n",
        "                writer.coverage.count(name, stop)\n",
        "tests/protocol/test_slots.py",
    ),
    Mutant(
        "Success before the number of slots was told",
        "8 I5, I9",
        "        self._complete = not self._uncounted\n",
        "        self._complete = True\n",
        "tests/protocol/test_slots.py",
    ),
    Mutant(
        "a writer that holds nothing is waited for",
        "7 released, I14",
        """        if not writer.shares and not writer.has_aux:  # it never writes, so no CloseOk of it is waited for
            self.mark_quiet(writer)
""",
        "",
        "tests/protocol/test_places.py",
    ),
    Mutant(
        "a writer that holds nothing fails the room it gives up",
        "7 fan-in, I10",
        """        if writer is None or writer.phase is WriterPhase.QUIET:
            self.endpoint.send(session, m.Abort(""",
        """        if writer is None:
            self.endpoint.send(session, m.Abort(""",
        "tests/protocol/test_places.py",
    ),
    Mutant(
        "Close is not repeated",
        "7 Close, I4",
        """        self.endpoint.send(destination.session, close)
        self.endpoint.repeat(self.close_again, destination)
""",
        """        self.endpoint.send(destination.session, close)
""",
    ),
    Mutant(
        "the writer forgets before Closed",
        "7 Close, I2",
        """        self._close(destination)
        self.maybe_complete(room)""",
        """        self._close(destination)
        self.maybe_complete(room)
        self.forget(destination)""",
    ),
    Mutant(
        "Close without its list: unlisted leases stay",
        "7 Close, I14",
        """        self._leases.release_of(session, close.epoch)
        self.endpoint.send(session, m.Closed(close.epoch))
""",
        """        self.endpoint.send(session, m.Closed(close.epoch))
""",
    ),
    Mutant(
        "Close that overtakes a tag frees delivered data",
        "7 Close, I5",
        "            if not writer.arrived.issuperset([w.chunk for w in close.written]):\n                self._begun(room)\n                return\n",
        "",
    ),
    Mutant(
        "Close of an unknown epoch is not answered",
        "7 Close, I14",
        """            self.endpoint.send(session, m.Closed(close.epoch))
            return
""",
        "            return\n",
    ),
    Mutant(
        "the destination stays after Closed",
        "7 Closed, I14",
        """        if destination is not None and destination.phase is DestinationPhase.CLOSING:
            self.forget(destination)""",
        "        if destination is not None and destination.phase is DestinationPhase.CLOSING:\n            pass",
    ),
    Mutant(
        "Close(failed) is taken as proof of quiet",
        "7 Close, I2",
        "self.fail_room(writer.room, error, told=session.route)\n",
        "self.fail_room(writer.room, error, told=session.route)\n"
        "            self.leases.release_of(session, close.epoch)\n            self.mark_quiet(writer)\n",
    ),
    Mutant(
        "chunks are sent anew from pages that were taken back",
        "11 wait_carried, I5",
        "        if room.carried:\n",
        "        if False:\n",
        "tests/protocol/test_rooms.py",
    ),
    Mutant(
        "Abort is not repeated",
        "7 Abort, I4",
        """        self.endpoint.repeat(self.send_abort, writer)
""",
        "",
        "tests/protocol/test_table.py",
    ),
    Mutant(
        "a writer that has not answered is never told that its room was given up",
        "7 Abort, I10",
        "                peer.given_up[room.key] = abort\n",
        "                pass\n",
        "tests/protocol/test_given_up.py",
    ),
    Mutant(
        "an Abort of an earlier epoch gives up the room that is wanted again",
        "7 Abort, I6",
        "session.asking.get(key, -1)]) > abort.epoch:\n",
        "session.asking.get(key, -1)]) > abort.epoch and False:\n",
        "tests/protocol/test_given_up.py",
    ),
    Mutant(
        "a room given up is never forgotten",
        "7 Abort, I14",
        """begun=False, until=self.endpoint.now + self.endpoint.config.open_wait_s)
""",
        "begun=False)\n",
        "tests/protocol/test_given_up.py",
    ),
    Mutant(
        "what has not begun is not cancelled",
        "7 Abort, I8",
        "                CHUNK.move(chunk, ChunkEvent.DROP)\n",
        "",
    ),
    Mutant(
        "Drained before the last completion",
        "7 Drained, I2",
        "        if destination.phase is DestinationPhase.DRAINING and destination.in_flight == 0:",
        "        if destination.phase is DestinationPhase.DRAINING:",
    ),
    Mutant(
        "Drained frees nothing",
        "7 Drained, I14",
        """        self.leases.release_of(session, drained.epoch)
""",
        "",
    ),
    Mutant(
        "Abort after Success fails a writer that sent all",
        "7 drain_s",
        "if destination.phase is DestinationPhase.CLOSING or (abort.finished and not destination.unwritten):",
        "if destination.phase is DestinationPhase.CLOSING:",
        "tests/protocol/test_rules.py",
    ),
    Mutant(
        "nobody asks a writer that does not close",
        "7 drain_s, I10",
        """                    self.endpoint.after(self.endpoint.config.drain_s, self.abort_writer, writer)
""",
        "                    pass\n",
        "tests/protocol/test_rules.py",
    ),
    Mutant(
        "no deadline of a room ends it at decode",
        "7 deadlines, I10",
        """        self.fail_room(room, DeadlineExceeded(f"room {room.id!r} {what}", remedy=remedy, room=room.id))
""",
        "",
    ),
    Mutant(
        "no deadline of a room ends it at prefill",
        "7 deadlines, I10",
        "        self.fail(room, DeadlineExceeded(what, remedy=remedy, room=room.id))\n",
        "",
    ),
    Mutant(
        "another checksum is ignored",
        "7 checksums, I5",
        "chunk.writer.session.checksums and checksum != chunk.checksum:",
        "chunk.writer.session.checksums and not checksum:",
    ),
    Mutant(
        "a tag that was lost is not said again with CloseOk",
        "7 tags by message, I10",
        """        for chunk in destination.chunks.values():
            self.chunks.tell_tag(chunk)
        self._close(""",
        "        self._close(",
    ),
    Mutant(
        "a tag that was lost is not said again to a Recall",
        "7 tags by message, I12",
        """                self.tell_tag(chunk)
                return
""",
        "                return\n",
        "tests/protocol/test_said_tags.py",
    ),
    Mutant(
        "a tag is said before its write is done",
        "7 tags by message, I5",
        """        self.endpoint.effects.append(Write(ticket, buffer, chunk, self._address(chunk), self._tag(chunk)))
""",
        """        self.endpoint.effects.append(Write(ticket, buffer, chunk, self._address(chunk), self._tag(chunk)))
        if chunk.destination.session.tags_as_messages:
            self.endpoint.send(chunk.destination.session, m.Tagged(self._tag(chunk)))
""",
    ),
    Mutant(
        "a tag is said under a session that is lost",
        "7 a lost session",
        """        if session.tags_as_messages and chunk.phase is ChunkPhase.WRITTEN and session.id in self.endpoint.sessions:
""",
        "        if session.tags_as_messages and chunk.phase is ChunkPhase.WRITTEN:\n",
        "tests/protocol/test_said_tags.py",
    ),
    Mutant(
        "a tag is said of a write that failed",
        "7 tags by message, I5",
        """        if session.tags_as_messages and chunk.phase is ChunkPhase.WRITTEN and session.id in self.endpoint.sessions:
""",
        """        begun = (ChunkPhase.GATHERING, ChunkPhase.WRITING, ChunkPhase.WRITTEN, ChunkPhase.BROKEN)
        if session.tags_as_messages and chunk.phase in begun and session.id in self.endpoint.sessions:
""",
    ),
    Mutant(
        "who says a tag may name any session",
        "7 tags by message, I6",
        "        if not session.tags_as_messages or tag.session != session.id:\n",
        "        if not session.tags_as_messages:\n",
        "tests/protocol/test_said_tags.py",
    ),
    Mutant(
        "the total of what waits for its room never falls",
        "10 limits, I14",
        "        destination.session.parked_nbytes -= destination.parked_nbytes\n",
        "",
        "tests/protocol/test_rooms.py",
    ),
]
