"""How far a lane may be written: to the byte, and of sizes that are no multiples of anything (I2, I3)."""

from __future__ import annotations

from types import SimpleNamespace

from hypothesis import example, given
from hypothesis import strategies as st

from pdstage.protocol.lane import ALIGNMENT, Lane
from pdstage.protocol.prefill_chunks import Windows
from pdstage.protocol.state import ChunkPhase

CAPACITY = 4 * ALIGNMENT


class Session(SimpleNamespace):
    __hash__ = object.__hash__
    __eq__ = object.__eq__


def chunk(session: Session, cursor: int, nbytes: int) -> SimpleNamespace:
    return SimpleNamespace(
        destination=SimpleNamespace(session=session), lane=0, cursor=cursor, nbytes=nbytes, phase=ChunkPhase.HELD
    )


def windows() -> tuple[Windows, Session]:
    return Windows(), Session(lanes=[SimpleNamespace(nbytes=CAPACITY)])


@given(mark=st.integers(0, 3 * CAPACITY), cursor=st.integers(0, 4 * CAPACITY), nbytes=st.integers(1, CAPACITY))
@example(mark=0, cursor=0, nbytes=CAPACITY)
@example(mark=0, cursor=1, nbytes=CAPACITY)
@example(mark=256, cursor=CAPACITY, nbytes=257)
def test_a_window_ends_one_capacity_beyond_its_watermark_to_the_byte(mark: int, cursor: int, nbytes: int) -> None:
    held, session = windows()
    list(held.raise_mark(session, 0, mark))  # type: ignore[arg-type]
    one = chunk(session, cursor, nbytes)
    assert held.is_open(one) == (cursor + nbytes - mark <= CAPACITY)  # type: ignore[arg-type]
    lane = Lane(CAPACITY)
    lane.watermark = mark
    assert lane.is_open(cursor, nbytes) == held.is_open(one), "both ends say the same"  # type: ignore[arg-type]


@given(
    marks=st.lists(st.integers(0, 4 * CAPACITY), max_size=8), ends=st.lists(st.integers(1, 6 * CAPACITY), max_size=8)
)
@example(marks=[256], ends=[CAPACITY + 255, CAPACITY + 256, CAPACITY + 257])
def test_a_rising_watermark_gives_what_it_opens_and_nothing_else(marks: list[int], ends: list[int]) -> None:
    held, session = windows()
    for end in ends:
        held.wait(chunk(session, end - 1, 1))  # type: ignore[arg-type]
    given_out = [one for mark in marks for one in held.raise_mark(session, 0, mark)]  # type: ignore[arg-type]
    limit = max(marks, default=0) + CAPACITY if any(mark > 0 for mark in marks) else 0
    assert sorted(one.cursor + 1 for one in given_out) == sorted(end for end in ends if end <= limit)
