"""Lanes against a model that keeps every byte's history in a list, and the cases DESIGN 6 and 8 name."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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


class LaneMachine(RuleBasedStateMachine):
    """The lane and the model take the same steps; writers write while their window is open, quarantined or not."""

    @initialize(capacity=st.integers(1, 9))
    def start(self, capacity):
        self.model = ListModel(capacity)
        self.lane = Lane(capacity * B)
        self.writers: list[set[int]] = [set() for _ in range(capacity)]  # who may have a write under way, per block
        self.last_watermark = 0

    def pick(self, data, states):
        held = [e for e in self.model.entries if e[2] in states]
        return data.draw(st.sampled_from(held)) if held else None

    def snapshot(self):
        lane = self.lane
        return lane.head, lane.watermark, lane.largest(), lane.quarantined_nbytes, list(lane.leases())

    @rule(data=st.data(), small=st.booleans(), slack=st.integers(0, B - 1))
    def grant(self, data, small, slack):
        blocks = data.draw(st.integers(1, 2 if small else self.model.capacity + 1))
        nbytes = blocks * B - slack
        if blocks > self.model.largest():
            before = self.snapshot()
            with pytest.raises(UsageError, match="does not fit"):
                self.lane.grant(nbytes)
            assert self.snapshot() == before
            return
        before = self.snapshot()
        predicted = self.lane.cursor_of_next(nbytes)
        assert self.snapshot() == before
        cursor = self.lane.grant(nbytes)
        expected = self.model.grant(blocks)
        assert cursor == predicted == (None if expected is None else expected * B)
        if cursor is None:
            assert self.snapshot() == before

    @rule(data=st.data())
    def write(self, data):
        entry = self.pick(data, ("granted", "quarantined"))
        if entry is None or not self.lane.is_open(entry[0] * B, entry[1] * B):
            return
        stuck = {e[0] for e in self.model.entries if e[2] == "quarantined"}
        for block in range(entry[0], entry[0] + entry[1]):
            others = self.writers[block % self.model.capacity] - {entry[0]}
            if entry[2] == "quarantined":  # two writers nobody hears of may meet: neither's bytes are anybody's
                others -= stuck
            assert not others, f"{entry} would be written over {others}"
            self.writers[block % self.model.capacity].add(entry[0])

    @rule(data=st.data())
    def land(self, data):
        entry = self.pick(data, ("granted",))
        if entry and self.model.is_open(entry):
            self.lane.land(entry[0] * B)
            entry[2] = "landed"

    @rule(data=st.data(), states=st.sampled_from([("landed",), ("granted",), ("quarantined",), ("granted", "landed")]))
    def release(self, data, states):
        entry = self.pick(data, states)
        if entry:
            self.end(entry, "released", self.lane.release)

    @rule(data=st.data())
    def quarantine(self, data):
        entry = self.pick(data, ("granted",))
        if entry:
            self.end(entry, "quarantined", self.lane.quarantine)

    @precondition(lambda self: self.lane.in_the_way())
    @rule()
    def recall(self):
        for cursor in self.lane.in_the_way():
            entry = next(e for e in self.model.entries if e[0] * B == cursor and e[2] == "granted")
            assert not self.lane.is_open(cursor, entry[1] * B), "an open lease cannot be asked back"
            self.end(entry, "released", self.lane.release)

    def end(self, entry, state, verb):
        before = self.model.watermark()
        entry[2] = state
        assert verb(entry[0] * B) == (self.model.watermark() > before)
        if state == "released":
            for block in self.writers:
                block.discard(entry[0])

    @invariant()
    def same_books(self):
        lane, model = self.lane, self.model
        watermark = model.watermark()
        assert (lane.head, lane.watermark) == (model.head * B, watermark * B)
        assert watermark >= self.last_watermark  # I4
        self.last_watermark = watermark
        assert list(lane.leases()) == [(e[0] * B, e[1] * B, e[2]) for e in model.unreleased()]
        assert all(lane.state(e[0] * B) == e[2] for e in model.unreleased())
        assert lane.largest() == model.largest() * B
        assert lane.quarantined_nbytes == len(model.carved()) * B
        assert all(lane.is_open(e[0] * B, e[1] * B) == model.is_open(e) for e in model.unreleased())
        standing = next((e for e in model.live() if e[0] == watermark), None)
        assert lane.blocker() == (standing[0] * B if standing else None)
        stuck = [e for e in model.entries if e[2] == "quarantined"]
        way = sorted({e[0] * B for q in stuck for e in model.one_lap_on(q) if e[2] == "granted"})
        assert lane.in_the_way() == way

    @invariant()
    def open_leases_are_disjoint(self):
        """I3, and nothing live is open on bytes a quarantined writer may be writing."""
        owner: dict[int, list] = {}
        for entry in self.model.unreleased():
            if not self.model.is_open(entry):
                continue
            for block in range(entry[0], entry[0] + entry[1]):
                other = owner.setdefault(block % self.model.capacity, entry)
                assert other is entry or other[2] == entry[2] == "quarantined", (other, entry)

    @invariant()
    def idle_lane_grants_its_largest(self):
        """I13."""
        if not self.model.live():
            assert self.lane.watermark == self.lane.head
            if self.lane.largest():
                cursor = self.lane.cursor_of_next(self.lane.largest())
                assert cursor is not None
                assert cursor == self.model.place(self.model.largest()) * B

    def teardown(self):
        """Whatever happened, asking the blocker and what is in the way to come back empties the lane: I11, I12."""
        if not hasattr(self, "lane"):
            return
        while back := {*self.lane.in_the_way(), *([self.lane.blocker()] if self.lane.blocker() is not None else [])}:
            for cursor in back:
                self.lane.release(cursor)
        assert self.lane.watermark == self.lane.head
        assert {state for _, _, state in self.lane.leases()} <= {"quarantined"}
        for cursor, _, _ in list(self.lane.leases()):
            assert not self.lane.release(cursor)
        assert self.lane.largest() == self.lane.capacity


TestLaneAgainstList = LaneMachine.TestCase
TestLaneAgainstList.settings = settings(max_examples=drawn(100, full=300), stateful_step_count=60, deadline=None)


def test_padding_is_not_waited_for_when_idle():
    lane = Lane(4 * B)
    assert lane.grant(3 * B) == 0
    lane.release(0)
    assert lane.grant(4 * B) == 4 * B
    assert lane.watermark == 4 * B, "the padding in front is passed at once"
    assert lane.is_open(4 * B, 4 * B)


def test_a_stuck_head_is_carved_out_and_the_lane_lives_on():
    lane = Lane(4 * B)
    assert lane.grant(B) == 0
    assert lane.quarantine(0), "nothing lies on it one lap on, so the watermark passes"
    assert (lane.watermark, lane.largest(), lane.quarantined_nbytes) == (B, 3 * B, B)
    for lap in range(3):
        cursor = lane.grant(3 * B)
        assert cursor == (4 * lap + 1) * B
        assert lane.is_open(cursor, 3 * B)
        lane.release(cursor)
    with pytest.raises(UsageError, match="largest free span is 768") as refused:
        lane.grant(4 * B)
    assert refused.value.fields["max_nbytes"] == 3 * B
    assert not lane.release(0)
    assert lane.state(0) is None
    assert lane.grant(4 * B) == 12 * B


@pytest.mark.parametrize("capacity", [0, -256, 255, 257, 1000])
def test_a_capacity_must_be_a_positive_multiple_of_256(capacity):
    with pytest.raises(UsageError, match="multiple of 256"):
        Lane(capacity)


@pytest.mark.parametrize("nbytes", [0, -1, -256, 4 * B + 1])
def test_a_lease_must_fit(nbytes):
    lane = Lane(4 * B)
    with pytest.raises(UsageError):
        lane.grant(nbytes)
    assert lane.head == 0


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


def test_memory_is_flat_over_many_laps():
    """I14: behind a stuck head the lane stores unreleased leases only, and none once they are gone."""
    lane = Lane(64 * B)
    for _ in range(5_000):
        first = lane.grant(3 * B)
        rest = [lane.grant(5 * B) for _ in range(20)]
        for cursor in rest:
            if cursor is not None:
                lane.release(cursor)
        assert len(list(lane.leases())) == 1
        lane.release(first)
    assert list(lane.leases()) == []
    assert lane.head > 5_000 * 64 * B, "cursors never restart"


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
