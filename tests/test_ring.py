"""Lanes against a model that keeps every byte's history in a list, and the cases DESIGN 6 and 8 name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdstage.errors import UsageError
from pdstage.protocol.lane import ALIGNMENT, Lane
from tests.rows import drawn

B = ALIGNMENT


class ListModel:
    """Counts in blocks of 256 bytes, remembers every entry ever made, padding included, and decides by enumeration."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: list[list] = []  # [cursor, blocks, state]
        self.head = 0

    def live(self) -> list[list]:
        return [e for e in self.entries if e[2] in ("granted", "landed")]

    def unreleased(self) -> list[list]:
        return [e for e in self.entries if e[2] in ("granted", "landed", "quarantined")]

    def carved(self) -> set[int]:
        return {
            block % self.capacity for e in self.entries if e[2] == "quarantined" for block in range(e[0], e[0] + e[1])
        }

    def one_lap_on(self, entry: list) -> list[list]:
        """Live entries on the bytes of `entry`, one lap later."""
        blocks = {block + self.capacity for block in range(entry[0], entry[0] + entry[1])}
        return [e for e in self.live() if blocks & set(range(e[0], e[0] + e[1]))]

    def watermark(self) -> int:
        at = 0
        for entry in self.entries:
            if entry[2] in ("granted", "landed") or (entry[2] == "quarantined" and self.one_lap_on(entry)):
                break
            at = entry[0] + entry[1]
        return at

    def largest(self) -> int:
        carved = self.carved()
        best = run = 0
        for block in range(self.capacity):
            run = 0 if block in carved else run + 1
            best = max(best, run)
        return best

    def place(self, blocks: int) -> int | None:
        carved, cursor = self.carved(), self.head
        while True:
            wanted = range(cursor, cursor + blocks)
            one_lap = wanted[0] // self.capacity == wanted[-1] // self.capacity
            if one_lap and not any(block % self.capacity in carved for block in wanted):
                break
            cursor += 1
        return cursor if cursor + blocks <= self.watermark() + 2 * self.capacity else None

    def grant(self, blocks: int) -> int | None:
        cursor = self.place(blocks)
        if cursor is not None:
            if cursor > self.head:
                self.entries.append([self.head, cursor - self.head, "padding"])
            self.entries.append([cursor, blocks, "granted"])
            self.head = cursor + blocks
        return cursor

    def is_open(self, entry: list) -> bool:
        return entry[0] + entry[1] <= self.watermark() + self.capacity


STEPS = st.sampled_from(["grant", "grant", "land", "release", "release", "quarantine", "recall"])


@settings(max_examples=drawn(60, full=600), deadline=None)
@given(st.integers(1, 9), st.lists(st.tuples(STEPS, st.integers(0, 99)), min_size=20, max_size=60))
def test_the_lane_keeps_the_books_of_the_list(capacity, steps):
    """I3, I4, I11 to I13."""
    lane, model = Lane(capacity * B), ListModel(capacity)
    for what, number in steps:
        if what == "grant":
            grant(lane, model, number % (capacity + 1) + 1, slack=number)
        elif what == "recall":
            for cursor in lane.in_the_way():
                entry = next(e for e in model.entries if e[0] * B == cursor and e[2] == "granted")
                assert not lane.is_open(cursor, entry[1] * B), "an open lease cannot be asked back"
                end(lane, model, entry, "release")
        elif held := [e for e in model.unreleased() if what == "release" or e[2] == "granted"]:
            entry = held[number % len(held)]
            if what != "land":
                end(lane, model, entry, what)
            elif model.is_open(entry):
                lane.land(entry[0] * B)
                entry[2] = "landed"
        same_books(lane, model)


def grant(lane, model, blocks, slack):
    nbytes = blocks * B - slack
    if blocks > model.largest():
        with pytest.raises(UsageError, match=f"does not fit.*largest free span is {model.largest() * B}") as refused:
            lane.grant(nbytes)
        assert refused.value.fields["max_nbytes"] == model.largest() * B
        return
    predicted, expected = lane.cursor_of_next(nbytes), model.grant(blocks)
    assert lane.grant(nbytes) == predicted == (None if expected is None else expected * B)


def end(lane, model, entry, verb):
    before = model.watermark()
    entry[2] = f"{verb}d"
    assert getattr(lane, verb)(entry[0] * B) == (model.watermark() > before)


def same_books(lane, model):
    watermark, held = model.watermark(), model.unreleased()
    assert (lane.head, lane.watermark) == (model.head * B, watermark * B)
    assert list(lane.leases()) == [(e[0] * B, e[1] * B, e[2]) for e in held]
    assert lane.largest() == model.largest() * B
    assert lane.quarantined_nbytes == len(model.carved()) * B
    assert all(lane.is_open(e[0] * B, e[1] * B) == model.is_open(e) for e in held)
    stuck = [e for e in held if e[2] == "quarantined"]
    assert lane.in_the_way() == sorted({e[0] * B for q in stuck for e in model.one_lap_on(q) if e[2] == "granted"})
    if not model.live():
        assert lane.watermark == lane.head, "an idle lane waits for no padding"
        if lane.largest():
            assert lane.cursor_of_next(lane.largest()) == model.place(model.largest()) * B


def test_padding_is_not_waited_for_when_idle():
    lane = Lane(4 * B)
    assert lane.grant(3 * B) == 0
    lane.release(0)
    assert lane.grant(4 * B) == 4 * B
    assert lane.watermark == 4 * B, "the padding in front is passed at once"
    assert lane.is_open(4 * B, 4 * B)


@pytest.mark.parametrize("capacity", [0, -256, 255, 257, 1000])
def test_a_capacity_must_be_a_positive_multiple_of_256(capacity):
    with pytest.raises(UsageError, match="multiple of 256"):
        Lane(capacity)


@pytest.mark.parametrize("nbytes", [0, -256])
def test_a_lease_has_bytes(nbytes):
    with pytest.raises(UsageError):
        Lane(4 * B).grant(nbytes)


def test_life_of_a_lease_allows_no_other_step():
    lane = Lane(4 * B)
    lane.grant(B)
    lane.land(0)
    for verb in (lane.land, lane.quarantine):
        with pytest.raises(UsageError, match="is landed"):
            verb(0)
    lane.release(0)
    for verb in (lane.land, lane.quarantine, lane.release):
        with pytest.raises(UsageError, match="not held"):
            verb(0)
    cursor = lane.grant(B)
    lane.quarantine(cursor)
    with pytest.raises(UsageError, match="is quarantined"):
        lane.land(cursor)


def test_a_writer_of_very_many_leases_stops_nothing() -> None:
    """All of a lost session's leases are quarantined in one turn: work per lease must not grow with their number."""
    lane = Lane(256 * 20_000)
    cursors = [lane.grant(256) for _ in range(20_000)]
    for cursor in cursors:
        lane.quarantine(cursor)
    assert lane.largest() == 0
    assert lane.watermark == lane.head
    for cursor in cursors:
        lane.release(cursor)
    assert lane.largest() == lane.capacity
