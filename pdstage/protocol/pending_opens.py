"""Opens and Asks of decode ranks for rooms that are not submitted at prefill yet.

Both tables have a cap, since any peer may name any room. At the cap of Opens, the session with the most entries loses
some to the others, so that no peer can keep another's rooms out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdstage.protocol.destinations import Destination
    from pdstage.protocol.session import Session

_OPEN_NBYTES = 512


class PendingOpens:
    """Destinations without a room. One that was turned away still counts until its decode rank has answered."""

    def __init__(self, most: int, most_nbytes: int) -> None:
        self._most, self._most_nbytes = most, most_nbytes
        self._nbytes: dict[Destination, int] = {}
        self._total = 0
        self._waiting: dict[bytes, dict[Destination, None]] = {}
        self._of: dict[Session, dict[Destination, None]] = {}
        self._nbytes_of: dict[Session, int] = {}

    def __len__(self) -> int:
        return len(self._nbytes)

    def add(self, destination: Destination) -> tuple[bool, list[Destination]]:
        """Whether `destination` is held now, and which others were removed for it: the caller forgets those."""
        nbytes = _OPEN_NBYTES + sum(len(items.data) for items in destination.open.items)
        out: list[Destination] = []
        while len(self) >= self._most or self._total + nbytes > self._most_nbytes:
            session = max(self._of, key=self._weight, default=destination.session)
            if self._weight(session) <= self._weight(destination.session) + self._weight_of(1, nbytes):
                return False, out
            out.append(next(reversed(self._of[session])))
            self.remove(out[-1])
        self._nbytes[destination] = nbytes
        self._total += nbytes
        self._waiting.setdefault(destination.open.room, {})[destination] = None
        self._of.setdefault(destination.session, {})[destination] = None
        self._nbytes_of[destination.session] = self._nbytes_of.get(destination.session, 0) + nbytes
        return True, out

    def take(self, key: bytes) -> list[Destination]:
        """The destinations that wait for a room; they are no longer held."""
        destinations = list(self._waiting.get(key, ()))
        for destination in destinations:
            self.remove(destination)
        return destinations

    def epoch_of(self, key: bytes, session: Session) -> int:
        """The latest in which `session` waits for this room; -1 if it does not."""
        return max(
            (destination.epoch for destination in self._waiting.get(key, ()) if destination.session is session),
            default=-1,
        )

    def waiting(self) -> Iterator[Destination]:
        for destinations in list(self._waiting.values()):
            yield from list(destinations)

    def turn_away(self, destination: Destination) -> None:
        """It no longer waits, but still counts."""
        destinations = self._waiting.get(destination.open.room, {})
        destinations.pop(destination, None)
        if not destinations:
            self._waiting.pop(destination.open.room, None)

    def remove(self, destination: Destination) -> None:
        if destination not in self._nbytes:
            return
        self.turn_away(destination)
        nbytes = self._nbytes.pop(destination)
        self._total -= nbytes
        self._nbytes_of[destination.session] -= nbytes
        destinations = self._of[destination.session]
        del destinations[destination]
        if not destinations:
            del self._of[destination.session], self._nbytes_of[destination.session]

    def _weight(self, session: Session) -> float:
        return self._weight_of(len(self._of.get(session, ())), self._nbytes_of.get(session, 0))

    def _weight_of(self, n: int, nbytes: int) -> float:
        """The larger of its parts of the two caps."""
        return max(n / self._most, nbytes / self._most_nbytes)


class Askers:
    """Which sessions asked for which room, with the latest epoch of each. Beyond the cap nothing is noted."""

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
