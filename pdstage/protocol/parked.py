"""What decode ranks say of rooms that were not submitted here yet: records of their Opens, and who asks.

Layer 2, pure. Must not know messages' order or rooms' states; `sending` and `prefill` say when things move.

Both tables have a cap, since any peer may name any room. Where the records' is reached, the session that holds most of
it makes room for the others: no peer can keep another's rooms out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdstage.protocol.outbox import Record
    from pdstage.protocol.session import Session

_RECORD_NBYTES = 512


class Parked:
    """Records without a room. One that was turned away still counts, until its destination has agreed."""

    def __init__(self, most: int, most_nbytes: int) -> None:
        self._most, self._most_nbytes = most, most_nbytes
        self._nbytes: dict[Record, int] = {}
        self._total = 0
        self._waiting: dict[bytes, dict[Record, None]] = {}
        self._of: dict[Session, dict[Record, None]] = {}
        self._nbytes_of: dict[Session, int] = {}

    def __len__(self) -> int:
        return len(self._nbytes)

    def add(self, record: Record) -> tuple[bool, list[Record]]:
        """Holds `record` if there is a place for it; and which others made room: those are to be forgotten."""
        nbytes = _RECORD_NBYTES + sum(len(items.data) for items in record.open.items)
        out: list[Record] = []
        while len(self) >= self._most or self._total + nbytes > self._most_nbytes:
            session = max(self._of, key=self._weight, default=record.session)
            if self._weight(session) <= self._weight(record.session) + self._weight_of(1, nbytes):
                return False, out
            out.append(next(reversed(self._of[session])))
            self.remove(out[-1])
        self._nbytes[record] = nbytes
        self._total += nbytes
        self._waiting.setdefault(record.open.room, {})[record] = None
        self._of.setdefault(record.session, {})[record] = None
        self._nbytes_of[record.session] = self._nbytes_of.get(record.session, 0) + nbytes
        return True, out

    def take(self, key: bytes) -> list[Record]:
        """The records that wait for a room; they are no longer held."""
        records = list(self._waiting.get(key, ()))
        for record in records:
            self.remove(record)
        return records

    def epoch_of(self, key: bytes, session: Session) -> int:
        """The latest in which `session` waits for this room; -1 if it does not."""
        return max((record.epoch for record in self._waiting.get(key, ()) if record.session is session), default=-1)

    def waiting(self) -> Iterator[Record]:
        for records in list(self._waiting.values()):
            yield from list(records)

    def turn_away(self, record: Record) -> None:
        """It waits no more, but counts."""
        records = self._waiting.get(record.open.room, {})
        records.pop(record, None)
        if not records:
            self._waiting.pop(record.open.room, None)

    def remove(self, record: Record) -> None:
        if record not in self._nbytes:
            return
        self.turn_away(record)
        nbytes = self._nbytes.pop(record)
        self._total -= nbytes
        self._nbytes_of[record.session] -= nbytes
        records = self._of[record.session]
        del records[record]
        if not records:
            del self._of[record.session], self._nbytes_of[record.session]

    def _weight(self, session: Session) -> float:
        return self._weight_of(len(self._of.get(session, ())), self._nbytes_of.get(session, 0))

    def _weight_of(self, n: int, nbytes: int) -> float:
        """The larger of its parts of the two caps."""
        return max(n / self._most, nbytes / self._most_nbytes)


class Askers:
    """Who asked whether a room is there; of each session and room the latest epoch. Beyond the cap none is noted."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._n = 0
        self._of: dict[bytes, dict[Session, int]] = {}

    def __len__(self) -> int:
        """Rooms asked for."""
        return len(self._of)

    def note(self, key: bytes, session: Session, epoch: int) -> bool:
        asking = self._of.get(key, {})
        if session not in asking:
            if self._n >= self._most:
                return False
            self._n += 1
        asking[session] = max(epoch, asking.get(session, epoch))
        self._of[key] = asking
        return True

    def take(self, key: bytes) -> list[tuple[Session, int]]:
        asking = self._of.pop(key, {})
        self._n -= len(asking)
        return list(asking.items())

    def epoch_of(self, key: bytes, session: Session) -> int:
        """The latest in which `session` asked for this room; -1 if it did not."""
        return self._of.get(key, {}).get(session, -1)

    def drop(self, session: Session) -> list[bytes]:
        """Forgets a session; the rooms that nobody asks for any more."""
        empty = []
        for key, asking in list(self._of.items()):
            if asking.pop(session, None) is not None:
                self._n -= 1
            if not asking:
                del self._of[key]
                empty.append(key)
        return empty
