"""Deliberate bugs in how sessions end that nobody needs, who makes place at the limit, and how greetings back off."""

from __future__ import annotations

from tests.sim.mutants import Mutant

_FILE = "tests/protocol/test_parting.py"


def _bug(name: str, rule: str, old: str, new: str) -> Mutant:
    return Mutant(name, rule, old, new, _FILE)


MUTANTS = [
    _bug(
        "decode ends a session that prefill still needs",
        "parting, I10",
        "if beat.idle == m.IN_USE or self._owner.in_use(session):",
        "if self._owner.in_use(session):",
    ),
    _bug(
        "idle sessions never end",
        "parting, I14",
        "        return SPARE if session.spare or now - session.used_at >= self.config.idle_s else IDLE",
        "        return IDLE",
    ),
    _bug(
        "a session is idle from its beginning",
        "parting, idle_s",
        "            session.used_at, session.spare = now, False",
        "            session.spare = False",
    ),
    _bug(
        "Bye is not repeated",
        "parting, I4",
        """        self.endpoint.back_off(("bye", session), now, n_byes, session.id.decode)
""",
        "",
    ),
    _bug(
        "Bye is answered while a write is in flight",
        "parting, I2",
        "        if not self.chunks.in_flight(session.id):\n",
        "        if True:\n",
    ),
    _bug(
        "at the limit prefill lets the latest go",
        "max_peers",
        "        idlest = min(unused",
        "        idlest = max(unused",
    ),
    _bug(
        "decode has as many peers as it likes",
        "max_peers, I14",
        "        if len(unused) < n_over:",
        "        if False:",
    ),
    _bug(
        "greetings do not back off",
        "retry_cap_s",
        "self.config.retry_s * 2.0 ** min(n_tries, 64)",
        "self.config.retry_s",
    ),
    _bug(
        "greetings go on after hello_s",
        "hello_s, I14",
        '("hello", "hello_until")',
        '("hello_until",)',
    ),
]
