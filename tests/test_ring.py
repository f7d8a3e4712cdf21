"""Lanes against a model that keeps every byte's history in a list, and the cases DESIGN 6 and 8 name."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pdstage.protocol.lane import ALIGNMENT, Lane, Lease
from pdstage.protocol.state import LEASE, LeaseEvent
from tests.rows import drawn

B = ALIGNMENT


class ListModel:
    """Counts in blocks of 256 bytes, remembers every entry ever made, padding included, and decides by enumeration."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: list[list] = []  # [cursor, blocks, state]
        self.head = 0

    def live(self, *others: str) -> list[list]:
        return [e for e in self.entries if e[2] in ("granted", "landed", *others)]

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


@settings(max_examples=drawn(60, full=600))
@given(st.integers(1, 9), st.lists(st.tuples(STEPS, st.integers(0, 99)), min_size=20, max_size=60))
def test_the_lane_keeps_the_books_of_the_list(capacity, steps):
    """I3, I4, I11 to I13."""
    lane, model = Lane(capacity * B), ListModel(capacity)
    for what, number in steps:
        if what == "grant":
            grant(lane, model, number % (capacity + 1) + 1, slack=number)
        elif what == "recall":
            for lease in lane.in_the_way():
                entry = next(e for e in model.entries if e[0] * B == lease.cursor and e[2] == "granted")
                assert not lane.is_open(lease.end), "an open lease cannot be asked back"
                end(lane, model, entry, "release")
        elif held := [e for e in model.live("quarantined") if what == "release" or e[2] == "granted"]:
            entry = held[number % len(held)]
            if what != "land":
                end(lane, model, entry, what)
            elif model.is_open(entry):
                LEASE.move(lane.at(entry[0] * B), LeaseEvent.LAND)
                entry[2] = "landed"
        same_books(lane, model)


def grant(lane, model, blocks, slack):
    nbytes = blocks * B - slack
    expected = model.grant(blocks) if blocks <= model.largest() else None
    lease = lend(lane, nbytes)
    assert (None if lease is None else lease.cursor) == (None if expected is None else expected * B)


def lend(lane, nbytes):
    """A lease of `nbytes`; None if it must wait."""
    cursor = lane.place(nbytes)
    if cursor is None:
        return None
    lease = Lease(None, 1, 0, 0, nbytes, (), 0)
    lane.grant(lease, cursor, 0.0)
    return lease


def end(lane, model, entry, verb):
    before, now = model.watermark(), lane.moved_at + 1.0
    entry[2] = f"{verb}d"
    getattr(lane, verb)(lane.at(entry[0] * B), now)
    assert (lane.moved_at == now) == (model.watermark() > before)


def same_books(lane, model):
    watermark, held = model.watermark(), model.live("quarantined")
    assert (lane.head, lane.watermark) == (model.head * B, watermark * B)
    leases = lane.leases()
    assert [(one.cursor, one.end, one.phase) for one in leases] == [(e[0] * B, (e[0] + e[1]) * B, e[2]) for e in held]
    assert lane.largest() == model.largest() * B
    assert lane.quarantined_nbytes == len(model.carved()) * B
    assert all(lane.is_open(one.end) == model.is_open(e) for one, e in zip(leases, held, strict=True))
    stuck = [e for e in held if e[2] == "quarantined"]
    above = {e[0] * B for q in stuck for e in model.one_lap_on(q) if e[2] == "granted"}
    assert {one.cursor for one in lane.in_the_way()} == above
    if not model.live():
        assert lane.watermark == lane.head, "an idle lane waits for no padding"
        if lane.largest():
            assert lane.place(lane.largest()) == model.place(model.largest()) * B


def test_padding_is_not_waited_for_when_idle():
    lane = Lane(4 * B)
    first = lend(lane, 3 * B)
    assert first.cursor == 0
    lane.release(first, 0.0)
    second = lend(lane, 4 * B)
    assert second.cursor == lane.watermark == 4 * B, "the padding in front is passed at once"
    assert lane.is_open(second.end)


def test_a_writer_of_very_many_leases_stops_nothing() -> None:
    """All of a lost session's leases are quarantined in one turn: work per lease must not grow with their number."""
    lane = Lane(256 * 20_000)
    leases = [lend(lane, 256) for _ in range(20_000)]
    for lease in leases:
        lane.quarantine(lease, 0.0)
    assert lane.largest() == 0
    assert lane.watermark == lane.head
    for lease in leases:
        lane.release(lease, 0.0)
    assert lane.largest() == lane.capacity
