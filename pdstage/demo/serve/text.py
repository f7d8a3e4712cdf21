"""What stands in for a tokenizer: a prompt's tokens are its bytes, those of an answer read as syllables.

Layer 6 (demo). Pure: must not know models, requests or HTTP.
"""

from __future__ import annotations

VOCAB = 512
EOS = 0
_ONSETS = "bcdfghklmnprstvz"
_RIMES = ("a", "e", "i", "o", "u", "an", "en", "in", "on", "un", "ar", "er", "or", "al", "el", "is")
# Every token reads differently, and so do any two answers: whoever compares texts compares tokens.
_SYLLABLES = [space + onset + rime for space in ("", " ") for onset in _ONSETS for rime in _RIMES]


def encode(text: str) -> list[int]:
    """The UTF-8 bytes of `text`."""
    return list(text.encode())


def syllable(token: int) -> str:
    return _SYLLABLES[token]


class Growing:
    """The text of an answer that grows token by token, up to the first of `stop`, which is not part of it.

    What might be the beginning of a stop string is held back until it is known.
    """

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self.stopped = False
        self._stop = stop
        self._held = ""

    def add(self, token: int) -> str:
        """What may be shown now that `token` has come."""
        text = self._held + syllable(token)
        found = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        kept = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def end(self) -> str:
        """What was held back, now that nothing more comes."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the first of `stop`, less than all of it."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
