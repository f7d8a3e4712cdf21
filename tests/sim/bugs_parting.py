"""Deliberate bugs in how sessions end that nobody needs, who makes place at the limit, and how greetings back off."""

from __future__ import annotations

from tests.sim.mutants import Mutant

_FILE = "tests/protocol/test_parting.py"


def _bug(name: str, rule: str, function: str, old: str, new: str) -> Mutant:
    return Mutant(name, rule, function, old, new, _FILE)


MUTANTS = [
    _bug(
        "decode ends a session that prefill still needs",
        "parting, I10",
        "on_heartbeat",
        "if beat.idle == m.IN_USE or self._owner.in_use(session):",
        "if self._owner.in_use(session):",
    ),
    _bug(
        "decode ends a session that its rooms need",
        "parting, I10",
        "in_use",
        "        return bool(session.claims) or (peer is not None and bool(peer.rooms))",
        "        return peer is None",
    ),
    _bug(
        "rooms that wait for another writer do not count",
        "parting, I10",
        "in_use",
        "        return bool(session.claims) or (peer is not None and bool(peer.rooms))",
        "        return bool(session.claims)",
    ),
    _bug(
        "prefill says that it needs no session",
        "parting, I10",
        "PrefillCore.in_use",
        "        return bool(session.claims)",
        "        return False",
    ),
    _bug(
        "idle sessions never end",
        "parting, I14",
        "need_of",
        "        return SPARE if session.spare or now - session.used_at >= self.config.idle_s else IDLE",
        "        return IDLE",
    ),
    _bug(
        "a session is idle from its beginning",
        "parting, idle_s",
        "_moves_on",
        "            session.used_at, session.spare = now, False",
        "            session.spare = False",
    ),
    _bug(
        "Bye is not repeated",
        "parting, I4",
        "_say_bye",
        """        self.endpoint.back_off(("bye", session), now, n_byes, session.id.decode)
""",
        "",
    ),
    _bug(
        "Bye is not answered",
        "parting, I14",
        "_on_bye",
        """            self.endpoint.send(session, m.Bye(), now)
""",
        "            pass\n",
    ),
    _bug(
        "Bye is answered while a write is in flight",
        "parting, I2",
        "_on_bye",
        "        if not self.chunks.in_flight(session.id):\n",
        "        if True:\n",
    ),
    _bug(
        "a lost answer to Bye is not asked for",
        "parting, I4",
        "_say_bye",
        """            self.endpoint.send_loose(session.route, session.id, m.Heartbeat())
""",
        "            pass\n",
    ),
    _bug(
        "Bye is said for ever",
        "parting, I14",
        "_leave",
        """        self.endpoint.timers.set(("bye_until", session), now + session.silence_s)
""",
        "",
    ),
    _bug(
        "the connection goes before Bye is heard",
        "parting, I4",
        "needs",
        "if route in self.handshake.peers or route in self.farewells:",
        "if route in self.handshake.peers:",
    ),
    _bug(
        "connections are never given up",
        "parting, I14",
        "hang_up",
        "            self.endpoint.effects.append(HangUp(route))",
        "            pass",
    ),
    _bug(
        "a connection goes while a lost session's writer is asked over it",
        "7 lost, I14",
        "needs",
        "        return any(session.route == route for session in self._stranded.values())",
        "        return False",
    ),
    _bug(
        "at the limit prefill lets the latest go",
        "max_peers",
        "_ask_idlest",
        "        idlest = min(unused",
        "        idlest = max(unused",
    ),
    _bug(
        "prefill asks the same idle peer again and again",
        "max_peers",
        "_ask_idlest",
        "            idlest.spare, idlest.used_at = True, now",
        "            idlest.spare = True",
    ),
    _bug(
        "at the limit prefill refuses although a peer is idle",
        "max_peers",
        "on_hello",
        "                if self._ask_idlest(now):\n                    return",
        "                if False:\n                    return",
    ),
    _bug(
        "at the limit decode lets the latest go",
        "max_peers",
        "make_place",
        "key=lambda session: session.used_at)",
        "key=lambda session: -session.used_at)",
    ),
    _bug(
        "decode has as many peers as it likes",
        "max_peers, I14",
        "make_place",
        "        if len(unused) < n_over:",
        "        if False:",
    ),
    _bug(
        "prefill does not answer that it is idle",
        "max_peers",
        "on_heartbeat",
        """            self.endpoint.send(session, m.Heartbeat(m.IDLE), now)
""",
        "            pass\n",
    ),
    _bug(
        "greetings do not back off",
        "retry_cap_s",
        "back_off",
        "self.config.retry_s * 2.0 ** min(n_tries, 64)",
        "self.config.retry_s",
    ),
    _bug(
        "greetings back off without end",
        "retry_cap_s",
        "back_off",
        "        longest_s = max(self.config.retry_s, self.config.retry_cap_s)",
        "        longest_s = 1e9",
    ),
    _bug(
        "a fleet greets in step",
        "retry_cap_s",
        "back_off",
        "wait_s * (0.5 + 0.5 * drawn(salt + n_tries))",
        "wait_s",
    ),
    _bug(
        "greetings go on after hello_s",
        "hello_s, I14",
        "_stop_greeting",
        '("hello", "hello_until")',
        '("hello_until",)',
    ),
]
