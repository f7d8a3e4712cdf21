"""Every step that may come next in a small world.

For `explore`. Nothing knows the time: a frame may come at any moment after those before it on its link, a tag or a
completion at any moment after its post, a gather, scatter or disconnect may end at any moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.state import State
from tests.sim.facts import Name, must
from tests.sim.frozen import LATER, SOON
from tests.sim.nodes import Input
from tests.sim.steps import BAD, DEAD, DONE, MAYBE, OK, TAG, UNDER, Global, Steps

LATE_TAG = "tag of a writer that is gone"
QUESTIONS = frozenset({"hello", "asking", "open", "reserve", "close", "abort", "recalls", "stranded"})
"""Timers of `retry_s`: questions that are asked again."""
ALIVE = frozenset({"beat", "silence"})
PEER_DEADLINES = frozenset({"drain", "hello_until"})


class Move(NamedTuple):
    what: str
    node: int
    given: Input
    fault: bool
    after: Global


class Network(Steps):
    """The transition relation of one configuration."""

    def first(self) -> Global:
        nodes, shape, configuration = self.nodes, self.shape, self.configuration
        n_nodes = 1 + shape.writers
        ids = tuple(nodes.born(node) for node in range(n_nodes))
        state = Global(ids, ((),) * (4 * shape.writers), (), (), (), configuration.faults, 0, (), ())
        if configuration.connected:
            for writer in range(1, n_nodes):
                state = self._give(state, 0, ("greet", writer))
            while any(state.links):
                node = next(n for n in range(n_nodes) if self._heads(state, n))
                src, link = self._heads(state, node)[0]
                state = self._hear(state, node, src, link)
        if configuration.begun:
            for node in range(n_nodes):
                for given in self._asked_for(state, node):
                    state = self._give(state, node, given)
        return state

    # What may happen.

    def moves(self, state: Global) -> list[Move]:
        found = [move for node in range(len(state.nodes)) for move in self._of(state, node)]
        if all(move.fault or move.what == LATE_TAG for move in found):
            found += self._time_passes(state)
        return found

    def _of(self, state: Global, node: int) -> Iterator[Move]:
        yield from self._from_others(state, node)
        yield from self._of_itself(state, node)

    def _move(self, what: str, node: int, given: Input, after: Global, spent: str = "") -> Move:
        return Move(what, node, given, bool(spent), self._charge(after, spent))

    def _from_others(self, state: Global, node: int) -> Iterator[Move]:
        """What is between this process and others."""
        move = self._move
        for src, link in self._heads(state, node):
            given = ("hear", src, state.links[link][0])
            yield move("hear", node, given, self._hear(state, node, src, link))
            if state.left.loss:
                yield move("lose", node, given, self._without_head(state, link), "loss")
        for at, (node_at, session_id) in enumerate(state.fences):
            if node_at == node and self._may_end(state, node, session_id):
                yield move("fence", node, ("fenced", session_id), self._fence(state, at))
        yield from self._of_writes(state, node)

    def _of_itself(self, state: Global, node: int) -> Iterator[Move]:
        facts = self.nodes.facts[state.nodes[node]]
        for flight in facts.flights:
            given = ("scattered" if node == 0 else "gathered", flight)
            came = state if node else self._delivered(state, facts.landed[flight])
            yield self._move("copied", node, given, self._give(came, node, given))
        for given in self._asked_for(state, node):
            yield self._move("engine", node, given, self._give(state, node, given))
        yield from self._faults(state, node)

    def _of_writes(self, state: Global, node: int) -> Iterator[Move]:
        move = self._move
        for number, flags in state.writes:
            post = self.posts[number]
            if node == 0 and flags & TAG:
                given = ("told", post.tag)
                what = LATE_TAG if flags & DEAD else "tag"
                yield move(what, node, given, self._told(state, number, flags, TAG | MAYBE))
                if state.left.twice and not flags & MAYBE:
                    yield move("tag kept", node, given, self._told(state, number, flags, 0), "twice")
                if flags & MAYBE:
                    yield move("no tag", node, given, self._flag(state, number, flags & ~(TAG | MAYBE)))
            elif post.node == node and flags & DONE and not flags & DEAD:
                if flags & OK:
                    after = self._flag(state, number, flags & ~(DONE | UNDER | MAYBE | BAD))
                    given = ("written", post.flight, True)
                    yield move("done", node, given, self._give(self._spend(after, number), node, given))
                if flags & BAD or (state.left.broken and flags & UNDER):
                    tag = MAYBE if flags & UNDER and flags & TAG else 0
                    after = self._flag(state, number, flags & ~(DONE | UNDER | OK) | tag)
                    given = ("written", post.flight, False)
                    spent = "" if flags & BAD else "broken"
                    yield move("failed", node, given, self._give(after, node, given), spent)

    def _faults(self, state: Global, node: int) -> Iterator[Move]:
        move = self._move
        left, facts = state.left, self.nodes.facts[state.nodes[node]]
        if left.abort:
            for handle, status in facts.rooms:
                if status & 0x7F not in (State.SUCCESS, State.FAILED):
                    after = self._give(state, node, ("abort", handle))._replace(aborted=handle[0])
                    yield move("abort", node, ("abort", handle), after, "abort")
        if left.crash:
            yield move("crash", node, (), self._crash(state, node), "crash")
        for timer in facts.timers:
            kind = timer[0]
            if left.early and kind in QUESTIONS:
                for given in self._fired(timer):
                    yield move("early", node, given, self._give(state, node, given), "early")
            elif left.late and kind not in QUESTIONS and kind != "beat":
                for given in self._fired(timer):
                    yield move("late", node, given, self._give(state, node, given), "late")

    def _time_passes(self, state: Global) -> Iterator[Move]:
        """Nothing is under way: any question may be repeated and, once something failed, a deadline may pass."""
        sure = self._sure(state)
        for node, number in enumerate(state.nodes):
            for timer in self.nodes.facts[number].timers:
                kind = timer[0]
                if kind in ALIVE:
                    due = not self._has_other_end(state, node, timer)
                elif kind in PEER_DEADLINES:
                    due = not sure
                else:
                    due = kind in QUESTIONS or not sure or (state.aborted and timer[1] == b"i%d" % state.aborted)
                for given in self._fired(timer) if due else ():
                    yield Move("timer", node, given, False, self._give(state, node, given))

    def _fired(self, timer: Name) -> list[Input]:
        """A timer comes. Two look at how long something has waited: not long enough, or long enough."""
        unsure = timer[0] == "recalls" or (timer[0] == "reserve" and self.shape.path == "auto")
        return [("timer", timer, at) for at in ((SOON, LATER) if unsure else (LATER,))]

    def _sure(self, state: Global) -> bool:
        """Nothing went wrong but losses, and at most an abort: every other room must succeed (I11)."""
        had, left = self.configuration.faults, state.left
        return (had.crash, had.late, had.broken) == (left.crash, left.late, left.broken)

    def _has_other_end(self, state: Global, node: int, timer: Name) -> bool:
        session_id = m.SessionId(*timer[2:4])  # type: ignore[arg-type]
        others = range(1, len(state.nodes)) if node == 0 else (0,)
        return any(session_id in self.nodes.facts[state.nodes[other]].sessions for other in others)

    def _may_end(self, state: Global, node: int, session_id: m.SessionId) -> bool:
        """Whether a disconnect is a fence: the transport says so, or the process at the other end is gone."""
        if self.configuration.fences:
            return True
        lives = [self.nodes.template(n, self.nodes.home[number][1]) for n, number in enumerate(state.nodes)]
        if node == 0:
            return session_id.writer not in {core.incarnation for core in lives[1:]}
        return session_id.decode not in self.nodes.nonces(lives[0].incarnation)

    def _asked_for(self, state: Global, node: int) -> list[Input]:
        """What the engine does of itself, each in its own time."""
        number = state.nodes[node]
        facts, life, again = self.nodes.facts[number], self.nodes.home[number][1], self.configuration.again
        found: list[Input] = [("ready", handle, n) for handle, n in facts.late]
        latest = {handle[0]: (handle[1], status & 0x7F) for handle, status in facts.rooms}
        for room in self.shape.numbers:
            if node and node - 1 not in self.shape.writers_of(room):
                continue
            times, ended = latest.get(room, (-1, State.FAILED))
            if ended == State.FAILED and times + 1 <= again and (life == 0 or again):
                found.append(("send" if node else "receive", room))
        return found

    # The end, and words.

    def left_over(self, state: Global) -> str:
        """What keeps the world from being at its end; empty at a good end."""
        if any(state.links) or state.writes or any(self._may_end(state, *fence) for fence in state.fences):
            return "something is on its way"
        for node, number in enumerate(state.nodes):
            if self._asked_for(state, node):
                return "an engine is not done"
            if self.nodes.facts[number].flat:
                return f"{self.nodes.names[node].decode()}: {self.nodes.facts[number].flat}"
        return ""

    def end(self, state: Global) -> None:
        """At a good end: every room that nothing happened to succeeded (I11)."""
        if not self._sure(state):
            return
        for node, number in enumerate(state.nodes):
            for handle, status in self.nodes.facts[number].rooms:
                good = status & 0x7F == State.SUCCESS or handle[0] == state.aborted
                must(good, f"I11: room {handle} failed at {self.nodes.names[node].decode()} though nothing went wrong")

    def words(self, what: str, at: int, given: Input) -> str:
        """One step, its frame or tag spelt out."""
        who = f"{self.nodes.names[at].decode()}, {what}"
        match given:
            case ("hear", int() as src, int() as frame):
                return f"{who} from {self.nodes.names[src].decode()}: {wire.decode(self.nodes.frames[frame]).message}"
            case ("told", int() as tag):
                return f"{who}: {wire.decode_tag(self.nodes.tags[tag], ('kv',))}"
        return f"{who}: {' '.join(str(part) for part in given)}"
