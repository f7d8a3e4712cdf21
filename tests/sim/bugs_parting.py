"""Deliberate bugs in how sessions end that nobody needs, how many there may be, and how greetings back off."""

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
        "idle sessions never end",
        "parting, I14",
        "need_of",
        "        return SPARE if now - session.used_at >= self.config.idle_s else IDLE",
        "        return IDLE",
    ),
    _bug(
        "a session is idle from its beginning",
        "parting, idle_s",
        "_moves_on",
        "            session.used_at = now",
        "            pass",
    ),
    _bug(
        "Bye is not repeated",
        "parting, I4",
        "_say_bye",
        """        self.endpoint.back_off(("bye", session), now, session.n_byes, session.id.decode)
""",
        "",
    ),
    _bug(
        "Bye is answered while a write is in flight",
        "parting, I2",
        "_on_bye",
        "        if not self.chunks.in_flight(session.id):\n",
        "        if True:\n",
    ),
    _bug(
        "decode has as many peers as it likes",
        "max_peers, I14",
        "_admit",
        "        if n_peers > most:",
        "        if False:",
    ),
    _bug(
        "greetings do not back off",
        "retry_s",
        "back_off",
        "min(2 ** min(n_tries, 5), 20)",
        "1",
    ),
    _bug(
        "greetings go on after hello_s",
        "hello_s, I14",
        "_stop_greeting",
        '("hello", "hello_until")',
        '("hello_until",)',
    ),
]
