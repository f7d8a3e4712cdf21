"""Checks both ends of a session: what decode took as written or ended, against prefill's journal of the same chunks.

No clock is used. If prefill had sent `sent` frames when a write ended, the write is over for a decode that has received
more frames than that: prefill sent the next frame afterwards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdstage.tools.judge.replay import LANDED, QUIET, RELEASED, Claim, Flight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from pdstage.manager.journal import Line
    from pdstage.tools.judge.read import Place
    from pdstage.tools.judge.replay import Replay


class Across:
    """One decode node against the prefill nodes whose journals are present, by incarnation."""

    def __init__(self, writers: Mapping[str, Replay], wrong: Callable[[Place, str, str], None]) -> None:
        self.n_writes = 0
        """Writes found at both ends."""
        self._writers = writers
        self._wrong = wrong

    def run(self, decode: Replay) -> None:
        name = decode.node.name
        for place, line in decode.node.lines:
            writer = self._writers.get(line.session.partition("-")[2])
            if writer is None:
                continue
            if line.after == LANDED or line.what == "tag":
                self._written(place, name, line, writer)
            elif line.proved:  # the process is dead or fenced, or reported it: `Replay` judges its reports
                continue
            elif line.what == "lease" and line.after == RELEASED and line.before != LANDED:
                self._over(place, name, line, _flights(writer, line, staged=True))
            elif line.what == "writer" and line.after == QUIET:
                self._over(place, name, line, _flights(writer, line, staged=False))

    def _written(self, place: Place, name: str, line: Line, writer: Replay) -> None:
        found = [one for one in _flights(writer, line, staged=line.what == "lease") if one.began.chunk == line.chunk]
        if found:
            self.n_writes += 1
        elif writer.node.whole:
            what = f"lease {line.lane}:{line.cursor}" if line.what == "lease" else "pages"
            self._wrong(place, "I6", f"{name}: a tag says that {what} got chunk {line.chunk}, and nobody wrote it")
        for one in found:
            if not line.row and one.began.nbytes != line.nbytes:
                both = f"{one.began.nbytes} at {one.place}, {line.nbytes} here"
                self._wrong(place, "I5", f"{name}: chunk {line.chunk} of session {line.session} has two sizes: {both}")

    def _over(self, place: Place, name: str, line: Line, flights: Iterator[Flight]) -> None:
        for one in flights:
            if one.ended is None or one.ended.sent >= line.heard:
                what = f"lease {line.lane}:{line.cursor}" if line.what == "lease" else "the room's own memory"
                self._wrong(
                    place, "I2",
                    f"{name}: {what} is given back while chunk {one.began.chunk} of session {line.session}, epoch "
                    f"{line.epoch}, may be written: {one.place} began it, and nothing heard by then says it ended",
                )  # fmt: skip


def _flights(writer: Replay, line: Line, *, staged: bool) -> Iterator[Flight]:
    """The writes into a lease, or into the memory of a room."""
    claim: Claim = (line.session, line.epoch)
    where = (line.lane, line.cursor) if staged else None
    return (one for one in writer.flights.get(claim, ()) if one.where == where)
