"""Deliberate bugs in the aux row's way: written in place, packed in Close, or one after the other (DESIGN 10)."""

from __future__ import annotations

from tests.sim.mutants import Mutant

TESTS = "tests/protocol/test_aux.py"

MUTANTS = [
    Mutant(
        "Close does not wait for the row",
        "10 aux, I5",
        """        destination.unwritten += 1
        self.chunks.advance(chunk)""",
        "        self.chunks.advance(chunk)",
    ),
    Mutant(
        "a failed row is never sent",
        "10 aux, I5",
        "            by_write = any(written.lane == m.AUX for written in destination.written)\n",
        "            by_write = any(chunk.row for chunk in destination.chunks.values())\n",
    ),
    Mutant(
        "a row is written although none was named",
        "10 aux, I2",
        'return "a receiver was bound without an aux row" if destination.open.row is None else ""',
        'return ""',
    ),
    Mutant(
        "rows are those of another room",
        "10 aux, I2",
        "rows.base + destination.open.row * rows.row_nbytes",
        "rows.base + destination.epoch % rows.n_rows * rows.row_nbytes",
    ),
    Mutant(
        "a column more moves the others, in place",
        "10 aux, I5",
        "            spans.append(Span(src.offset, dst.offset, src.nbytes))",
        "            spans.append(Span(src.offset, src.offset, src.nbytes))",
    ),
    Mutant(
        "a column more moves the others, packed",
        "10 aux, I5",
        "            yield column, view[at : at + column.nbytes]",
        "            yield column, view[column.offset : column.offset + column.nbytes]",
    ),
    Mutant(
        "Close carries the row as it is when it is repeated",
        "10 aux, I8",
        "        written = tuple(destination.written)\n",
        "        written = tuple(destination.written)\n"
        "        if destination.room is not None:\n            self._set_aux(destination, destination.room)\n",
    ),
    Mutant(
        "a row's tag counts where none was named",
        "10 aux, I6",
        "return writer.has_aux and writer.room.row is not None and not writer.row_arrived and not tag.rects",
        "return writer.has_aux and not writer.row_arrived and not tag.rects",
        TESTS,
    ),
    Mutant(
        "a row alone ends the wait",
        "10 aux, I10",
        "        fresh = tag.lane == m.AUX or not writer.coverage.covers(tag.rects)",
        "        fresh = not writer.coverage.covers(tag.rects)",
        TESTS,
    ),
]
