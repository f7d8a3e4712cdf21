"""A state of a small world in parts that are looked up, not copied: decode's core, and each writer's *side*.

For `search`. A side is all that is between decode and one writer: the writer's core, the frames, writes and disconnects
of their sessions. What a writer does depends on its side alone, and what decode does with an input from a side on that
side and decode's core; to other sides decode only adds (frames, disconnects, what a scatter brought). So a step of the
whole is found by looking up a part's step, which is worked out once, by `network`: the same code as for a whole state.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import NamedTuple

from pdstage.protocol import messages as m
from tests.sim.network import LATE_TAG, Move, Network
from tests.sim.steps import NO_FAULTS, Configuration, Faults, Global


class Side(NamedTuple):
    """As in `Global`, of one writer."""

    node: int
    links: tuple[tuple[int, ...], ...] = ((), (), (), ())
    """To the writer, to decode, and the same of earlier processes."""
    writes: tuple[tuple[int, int], ...] = ()
    fences: tuple[tuple[int, m.SessionId], ...] = ()
    fenced: tuple[m.SessionId, ...] = ()
    delivered: tuple[tuple[tuple[int, int], m.SessionId, int, int], ...] = ()
    spent: tuple[int, ...] = ()


class Added(NamedTuple):
    """What a step of decode adds to a side that it did not come from."""

    frames: tuple[int, ...] = ()
    fences: tuple[tuple[int, m.SessionId], ...] = ()
    delivered: tuple[tuple[tuple[int, int], m.SessionId, int, int], ...] = ()


NOTHING = Added()


class Step(NamedTuple):
    """A step of a part. Numbers are those of `Parts`; -1 is "as before"."""

    late: bool
    """A tag that may never come: nothing waits for it."""
    spent: int
    """Which of `Faults` it takes, or -1."""
    decode: int
    side: int
    """Of the side that it came from."""
    added: tuple[int, ...]
    """To each side."""
    aborted: int
    """The room it aborts, or 0."""


class _Part(Network):
    """Steps of a part are not judged: what is judged concerns decode and a side together (`Parts.settled`)."""

    def _judged(self, before: Global, state: Global) -> Global:
        return state


class Parts:
    """Every part met of every state, by number."""

    def __init__(self, configuration: Configuration, *, every_order: bool = False) -> None:
        self.configuration = configuration
        self.whole = Network(configuration, every_order=every_order)
        self.part = _Part(configuration, every_order=every_order)
        self.part.share(self.whole)
        self.nodes = self.whole.nodes
        self.n_sides = configuration.shape.writers
        self.sides: list[Side] = []
        self.added: list[Added] = [NOTHING]
        self.decodes: list[int] = []
        self._numbers: dict[Hashable, int] = {NOTHING: 0}
        self._writer_of: dict[int, int] = {}
        for name in ("blank", "born", "settled", "merged", "crashed", "apart", "life"):
            setattr(self, name, cache(getattr(self, name)))

    # Numbers.

    def _number(self, thing: Hashable, table: list) -> int:
        number = self._numbers.setdefault(thing, len(table))
        if number == len(table):
            table.append(thing)
        return number

    def side(self, side: Side) -> int:
        return self._number(side, self.sides)

    def decode(self, node: int) -> int:
        number = self._numbers.setdefault(("decode", node), len(self.decodes))
        if number == len(self.decodes):
            self.decodes.append(node)
        return number

    def writer_of(self, session_id: m.SessionId) -> int:
        """Which side a session is of."""
        writer = self._writer_of.get(session_id.writer)
        if writer is None:
            for (node, _), core in self.nodes.templates.items():
                if node:
                    self._writer_of[core.incarnation] = node
            writer = self._writer_of[session_id.writer]
        return writer

    # Parts of a whole.

    def split(self, state: Global) -> tuple[int, list[Side]]:
        posts, of = self.whole.posts, self.writer_of
        half = len(state.links) // 2
        sides = []
        for w in range(1, len(state.nodes)):
            to, back = 2 * w - 2, 2 * w - 1
            sides.append(
                Side(
                    state.nodes[w],
                    (state.links[to], state.links[back], state.links[half + to], state.links[half + back]),
                    tuple(e for e in state.writes if posts[e[0]].node == w),
                    tuple(f for f in state.fences if of(f[1]) == w),
                    tuple(s for s in state.fenced if of(s) == w),
                    tuple(d for d in state.delivered if of(d[1]) == w),
                    tuple(n for n in state.spent if posts[n].node == w),
                )
            )
        return self.decode(state.nodes[0]), sides

    def joined(self, decode: int, sides: list[int], left: Faults, aborted: int = 0) -> Global:
        return self._joined(self.decodes[decode], [self.sides[side] for side in sides], left, aborted)

    def _joined(self, decode: int, sides: list[Side], left: Faults, aborted: int) -> Global:
        def all_of(name: str) -> tuple:
            return tuple(sorted(each for side in sides for each in getattr(side, name)))

        return Global(
            (decode, *(side.node for side in sides)),
            tuple(link for at in (0, 2) for side in sides for link in side.links[at : at + 2]),
            all_of("writes"), all_of("fences"), all_of("fenced"), left, aborted, all_of("delivered"), all_of("spent"),
        )  # fmt: skip

    def blank(self) -> list[Side]:
        return [Side(self.nodes.born(writer)) for writer in range(1, self.n_sides + 1)]

    def _alone(self, decode: int, writer: int = 0, side: Side | None = None, left: Faults = NO_FAULTS) -> Global:
        """Decode and one side, the others blank."""
        sides = self.blank()
        if side is not None:
            sides = [side if n == writer else each for n, each in enumerate(sides, 1)]
        return self._joined(decode, sides, left, 0)

    # Steps of parts.

    def of_writer(self, writer: int, life: int, side: int, left: Faults) -> list[Step]:
        """What a writer may do while decode is in its `life`-th process."""
        state = self._alone(self.born(life), writer, self.sides[side], left)
        moves = self.part._of(state, writer)
        return [self._step(left, move, -1, self.split(move.after)[1][writer - 1], ()) for move in moves]

    def of_side(self, writer: int, decode: int, side: int, left: Faults) -> list[Step]:
        """What decode may do with what a side brings."""
        state = self._alone(self.decodes[decode], writer, self.sides[side], left)
        return [self._of_decode(left, decode, move, writer) for move in self.part._from_others(state, 0)]

    def of_decode(self, decode: int, left: Faults) -> list[Step]:
        """What decode may do of itself, but for its crash (`crashed`)."""
        state = self._alone(self.decodes[decode], left=left)
        moves = [move for move in self.part._of_itself(state, 0) if move.what != "crash"]
        return [self._of_decode(left, decode, move, 0) for move in moves]

    def _of_decode(self, left: Faults, before: int, move: Move, writer: int) -> Step:
        decode, sides = self.split(move.after)
        did = self.nodes.memo.get((self.decodes[before], move.given))
        if did is not None and any(self.writer_of(session_id) != writer for session_id in did.met):
            raise NotImplementedError(f"a session of another side is met: {move.given}")
        added = []
        for n, side in enumerate(sides, 1):
            extra = Added(side.links[0], side.fences, side.delivered) if n != writer else NOTHING
            added.append(self._number(extra, self.added))
        return self._step(left, move, decode, sides[writer - 1] if writer else None, tuple(added))

    def _step(self, left: Faults, move: Move, decode: int, side: Side | None, added: tuple[int, ...]) -> Step:
        spent = next((n for n, few in enumerate(move.after.left) if few != left[n]), -1)
        number = -1 if side is None else self.side(side)
        return Step(move.what == LATE_TAG, spent, decode, number, added, move.after.aborted)

    def merged(self, side: int, added: int) -> int:
        before, more = self.sides[side], self.added[added]
        to, *rest = before.links
        return self.side(
            before._replace(
                links=(to + more.frames, *rest),
                fences=tuple(sorted(before.fences + more.fences)),
                delivered=tuple(sorted({*before.delivered, *more.delivered})),
            )
        )

    def crashed(self, writer: int, decode: int, side: int) -> int:
        """A side when decode crashes."""
        state = self._alone(self.decodes[decode], writer, self.sides[side], Faults(crash=1))
        return self.side(self.split(self.part._crash(state, 0))[1][writer - 1])

    def born_again(self, decode: int) -> int:
        return self.decode(self.born(self.life(decode) + 1))

    def born(self, life: int) -> int:
        return self.nodes.born(0, life)

    def life(self, decode: int) -> int:
        return self.nodes.home[self.decodes[decode]][1]

    # What must hold.

    def settled(self, writer: int, decode: int, side: int) -> int:
        """Judges a side beside decode's core (I2, I8), and forgets what is over in it."""
        state = self._alone(self.decodes[decode], writer, self.sides[side])
        return self.side(self.split(self.whole.settled(state))[1][writer - 1])

    def succeeds(self, before: int, after: int) -> list[tuple[int, int]]:
        return self.whole.succeeds(self.decodes[before], self.decodes[after])

    def apart(self, writer: int, side: int) -> bool:
        """Whether a writer's steps commute with all else's, once nobody crashes."""
        state = self._alone(self.born(0), writer, self.sides[side])
        return self.part._apart(state, writer)
