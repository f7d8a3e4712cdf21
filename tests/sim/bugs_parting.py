"""Deliberate bugs in how sessions end that nobody needs, how many there may be, and how greetings back off."""

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
        "        return SPARE if self.now - session.used_at >= self.config.idle_s else IDLE",
        "        return IDLE",
    ),
    _bug(
        "a session is idle from its beginning",
        "parting, idle_s",
        "            session.used_at = self.now",
        "            pass",
    ),
    _bug(
        "Bye is not repeated",
        "parting, I4",
        """        self.endpoint.back_off(session.n_byes, session.id.decode, self._say_bye, session)
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
        "decode has as many peers as it likes",
        "max_peers, I14",
        "        elif n_peers > most:",
        "        elif False:",
    ),
    _bug(
        "greetings do not back off",
        "retry_s",
        "min(2 ** min(n_tries, 5), 20)",
        "1",
    ),
    _bug(
        "greetings go on after hello_s",
        "hello_s, I14",
        "        self.endpoint.cancel(self._greet, peer)\n",
        "",
    ),
]
