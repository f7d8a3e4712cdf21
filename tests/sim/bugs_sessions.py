"""Deliberate bugs in sessions: order, restarts, loss, fences, lateness (DESIGN 7)."""

from __future__ import annotations

from tests.sim.mutants import Mutant

MUTANTS = [
    Mutant(
        "what prefill has beyond decode is no misfit",
        "7 Hello, I5",
        '(("prefill", src_place), ("decode", dst_place))',
        '(("prefill", src_place),)',
        "tests/protocol/test_fit.py",
    ),
    Mutant(
        "no seq: frames count again and in any order",
        "7 seq, I4",
        "            if seq <= session.last_seq:",
        "            if False:",
    ),
    Mutant(
        "a frame of an old session is taken for the new one's",
        "7 session, I6",
        "            held = self.sessions.get(session_id)",
        "            held = self.sessions.get(session_id) or next((\n"
        "                k for k in self.sessions.values() if k.route == route), None)",
    ),
    Mutant(
        "Hello is not repeated",
        "7 Hello, I4",
        """        self.endpoint.back_off(peer.n_hellos, peer.nonce, self._greet, peer)
""",
        "",
    ),
    Mutant(
        "Welcome of another greeting is taken",
        "7 Welcome, I6",
        "        if peer is None or session_id.decode != peer.nonce:\n            return\n",
        "        if peer is None:\n            return\n",
        "tests/protocol/test_session.py",
    ),
    Mutant(
        "a half-open session replaces the old one at once",
        "7 half-open, I6",
        """            endpoint.begin(session, m.offers(hello))
""",
        """            endpoint.begin(session, m.offers(hello))
            self.confirm(session)
""",
        "tests/protocol/test_session.py",
    ),
    Mutant(
        "the old session stays beside the new one",
        "7 half-open, I14",
        """        if older is not None:
            self._owner.lose(older, PeerError("the decode node greeted again", remedy="see its log for why"))
""",
        "",
        "tests/protocol/test_session.py",
    ),
    Mutant(
        "a new session begins with the old one's watermarks",
        "6 cursors of a session",
        """        if older is not None:
            self._owner.lose(older""",
        """        if older is not None:
            session.marks.update(older.marks)
            self._owner.lose(older""",
        "tests/protocol/test_traces.py",
    ),
    Mutant(
        "NoSession of another process is taken as proof",
        "7 NoSession, I6",
        "                    if isinstance(answer, m.Bye) or answer.incarnation == stranded.id.writer:\n",
        "                    if True:\n",
        "tests/protocol/test_traces.py",
    ),
    Mutant(
        "NoSession is said while a write is in flight",
        "7 NoSession, I2",
        "        if self.chunks.in_flight(frame.session):",
        "        if False:",
        "tests/protocol/test_traces.py",
    ),
    Mutant(
        "NoSession is not said",
        "7 NoSession, I10",
        """        self.endpoint.send_loose(route, frame.session, m.NoSession(proof))
""",
        "        pass\n",
        "tests/protocol/test_session.py",
    ),
    Mutant(
        "no heartbeat",
        "7 silence, I4",
        "            self.send(session, Heartbeat(self.need_of(session)))\n",
        "            session.sent_at = self.now\n",
        "tests/protocol/test_traces.py",
    ),
    Mutant(
        "a room that decode waits with is not held",
        "7 open_wait_s, I4",
        "endpoint.after(min(left_s, max(room.open_wait_s, 3 * HOLD_EVERY_S)), self.unopened, room)",
        "pass",
        "tests/protocol/test_holds.py",
    ),
    Mutant(
        "an unanswered Ask is not asked again",
        "7 who asks again, I4",
        "asks = [m.Wanted(one.room.epoch, one.room.key) for one in unopened if one.asks]",
        "asks = []",
        "tests/protocol/test_holds.py",
    ),
    Mutant(
        "silence is never noticed",
        "7 silence, I10",
        """        self.owner.lose(session, DeadlineExceeded(late, remedy="look at that node"))
""",
        """        self.after(1.0, self._listen, session)
""",
        "tests/protocol/test_traces.py",
    ),
    Mutant(
        "a late turn does not push its deadlines",
        "7 late turns",
        "        if excess > 0:\n            self.timers.delay(excess)",
        "        if False:\n            self.timers.delay(excess)",
        "tests/protocol/test_session.py",
    ),
    Mutant(
        "a lost session's closed leases are kept",
        "7 lost, I14",
        "            if lease.phase is not LeasePhase.LANDED and never_writable:",
        "            if False:",
        "tests/protocol/test_rules.py",
    ),
    Mutant(
        "pages are free before the fence",
        "7 lost, I2",
        "            if not (writer.direct or (writer.has_aux and writer.room.row is not None)):\n",
        "            if True:\n",
    ),
    Mutant(
        "a lost session counts as fenced",
        "7 fences, I2",
        """        self.endpoint.effects.append(Detach(session))
        if self.holds(session):
""",
        """        self.endpoint.effects.append(Detach(session))
        self.fenced(session)
        if self.holds(session):
""",
    ),
    Mutant(
        "a fenced session gives nothing back",
        "7 fences, I14",
        """        self.leases.release_of(session, None)
""",
        "",
    ),
    Mutant(
        "prefill gives memory back before its fence",
        "7 fences, I8",
        """            if destination.in_flight == 0:
                self.forget(destination)
""",
        """            self.chunks.fenced(session)
            if destination.in_flight == 0:
                self.forget(destination)
""",
    ),
    Mutant(
        "the connection to a silent peer is kept",
        "8 routes, I10",
        "            self.effects.append(Renew(session.route))\n",
        "            pass\n",
        "tests/protocol/test_session.py::test_the_connection_to_a_peer_that_was_silent_is_made_anew",
    ),
]
