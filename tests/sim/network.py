"""Every state of a small world, and every step that may come next.

For `explore`. A state is the number of each process's state, what is on its way, and what may still go wrong. Nothing
knows the time: a frame may come at any moment after those before it on its link, a tag or a completion at any moment
after its post, a gather, scatter or disconnect may end at any moment.

A write is *under way* until the first of its tag and its completion is told: until then it may land, so until then its
target must not be released (I2) nor its source (I8). A disconnect before that leaves open whether it landed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pdstage.protocol import messages as m
from pdstage.protocol.room import State
from tests.sim.facts import Name, Shape, must
from tests.sim.frozen import LATER, SOON
from tests.sim.nodes import Did, Input, Nodes, Post

TAG, DONE, UNDER, OK, BAD, MAYBE, DEAD = 1, 2, 4, 8, 16, 32, 64
"""Of a write: its tag is to be told; its completion is; it may not have landed yet; it may have succeeded; it may have
failed; its tag may never come; its writer's process is gone."""

LATE_TAG = "tag of a writer that is gone"
QUESTIONS = frozenset({"hello", "asking", "open", "ask", "close", "abort", "recalls", "stranded"})
"""Timers of `retry_s`: questions that are asked again."""
ALIVE = frozenset({"beat", "silence"})
PEER_DEADLINES = frozenset({"drain", "hello_until"})


class Faults(NamedTuple):
    """How often each thing may still go wrong."""

    loss: int = 0
    """A frame is lost."""
    abort: int = 0
    """An engine aborts a room."""
    crash: int = 0
    """A process ends and another takes its address."""
    twice: int = 0
    """A tag is told again."""
    early: int = 0
    """A question is repeated although its answer is on its way."""
    late: int = 0
    """A deadline passes although nobody failed."""
    broken: int = 0
    """A post's outcome is unknown."""


NO_FAULTS = Faults()


@dataclass(frozen=True, kw_only=True)
class Configuration:
    name: str
    shape: Shape
    faults: Faults = NO_FAULTS
    connected: bool = True
    """The sessions are there at the start; else greetings are part of it."""
    begun: bool = True
    """All rooms were asked for on both sides at the start; else each may come at any moment."""
    fences: bool = True
    """A disconnect ends what is under way; else only the end of the other process does."""
    again: int = 0
    """How often a room that failed is asked for again, on both sides."""


class Global(NamedTuple):
    nodes: tuple[int, ...]
    links: tuple[tuple[int, ...], ...]
    """Frames on their way: decode to writer 1, writer 1 to decode, decode to writer 2, ..."""
    writes: tuple[tuple[int, int], ...]
    """(post, flags), ascending."""
    fences: tuple[tuple[int, m.Session], ...]
    """Disconnects under way: at which node, of which session."""
    fenced: tuple[m.Session, ...]
    left: Faults
    aborted: int
    """The room an engine aborted, or 0."""
    delivered: tuple[tuple[tuple[int, int], m.Session, int, int], ...]
    """What lies in its pages: room, whose, tokens."""
    spent: tuple[int, ...]
    """Posts that landed in leases or pages that are still lent."""


class Move(NamedTuple):
    what: str
    node: int
    given: Input
    fault: bool
    after: Global


class Network:
    """The transition relation of one configuration."""

    def __init__(self, configuration: Configuration, *, every_order: bool = False) -> None:
        self.configuration = configuration
        self.every_order = every_order
        self.shape = configuration.shape
        self.nodes = Nodes(self.shape)
        self.posts: list[Post] = []
        self._post_numbers: dict[Post, int] = {}
        self.trying: tuple[int, Input] = (0, ())
        self.unsure = bool(configuration.faults.crash or configuration.faults.late)

    def first(self) -> Global:
        nodes, shape, configuration = self.nodes, self.shape, self.configuration
        n_nodes = 1 + shape.writers
        ids = tuple(nodes.born(node) for node in range(n_nodes))
        state = Global(ids, ((),) * (2 * shape.writers), (), (), (), configuration.faults, 0, (), ())
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
        """Every step of interest: where one writer's steps commute with all else, its steps alone."""
        for writer in range(1, 1 + self.shape.writers if not self.every_order else 1):
            if self._apart(state, writer):
                return list(self._of(state, writer))
        found = [move for node in range(len(state.nodes)) for move in self._of(state, node)]
        if all(move.fault or move.what == LATE_TAG for move in found):
            found += self._time_passes(state)
        return found

    def _apart(self, state: Global, writer: int) -> bool:
        """A writer with a frame to hear: nobody else's step can give it another step to take first."""
        if not state.links[2 * writer - 2]:
            return False
        return not self.unsure or not any(
            flags & (UNDER | DONE) and self.posts[post].node == writer for post, flags in state.writes
        )

    def _of(self, state: Global, node: int) -> Iterator[Move]:
        left, facts = state.left, self.nodes.facts[state.nodes[node]]

        def move(what: str, given: Input, after: Global, spent: str = "") -> Move:
            return Move(what, node, given, bool(spent), self._charge(after, spent))

        for src, link in self._heads(state, node):
            given = ("hear", src, state.links[link][0])
            yield move("hear", given, self._hear(state, node, src, link))
            if left.loss:
                yield move("lose", given, self._without_head(state, link), "loss")
        for flight in facts.flights:
            given = ("scattered" if node == 0 else "gathered", flight)
            came = state if node else self._delivered(state, facts.landed[flight])
            yield move("copied", given, self._give(came, node, given))
        for at, (node_at, session) in enumerate(state.fences):
            if node_at == node and self._may_end(state, node, session):
                yield move("fence", ("fenced", session), self._fence(state, at))
        for given in self._asked_for(state, node):
            yield move("engine", given, self._give(state, node, given))
        yield from self._of_writes(state, node, move)
        yield from self._faults(state, node, move)

    def _of_writes(self, state: Global, node: int, move) -> Iterator[Move]:
        for number, flags in state.writes:
            post = self.posts[number]
            if node == 0 and flags & TAG:
                given = ("told", post.tag)
                what = LATE_TAG if flags & DEAD else "tag"
                yield move(what, given, self._told(state, number, flags, TAG | MAYBE))
                if state.left.twice and not flags & MAYBE:
                    yield move("tag kept", given, self._told(state, number, flags, 0), "twice")
                if flags & MAYBE:
                    yield move("no tag", given, self._flag(state, number, flags & ~(TAG | MAYBE)))
            elif post.node == node and flags & DONE and not flags & DEAD:
                if flags & OK:
                    after = self._flag(state, number, flags & ~(DONE | UNDER | MAYBE | BAD))
                    given = ("written", post.flight, True)
                    yield move("done", given, self._give(self._spend(after, number), node, given))
                if flags & BAD or (state.left.broken and flags & UNDER):
                    tag = MAYBE if flags & UNDER and flags & TAG else 0
                    after = self._flag(state, number, flags & ~(DONE | UNDER | OK) | tag)
                    given = ("written", post.flight, False)
                    spent = "" if flags & BAD else "broken"
                    yield move("failed", given, self._give(after, node, given), spent)

    def _faults(self, state: Global, node: int, move) -> Iterator[Move]:
        left, facts = state.left, self.nodes.facts[state.nodes[node]]
        if left.abort:
            for handle, status in facts.rooms:
                if status & 0x7F not in (State.SUCCESS, State.FAILED):
                    after = self._give(state, node, ("abort", handle))._replace(aborted=handle[0])
                    yield move("abort", ("abort", handle), after, "abort")
        if left.crash:
            yield move("crash", (), self._crash(state, node), "crash")
        for timer in facts.timers:
            kind = timer[0]
            if left.early and kind in QUESTIONS:
                for given in self._fired(timer):
                    yield move("early", given, self._give(state, node, given), "early")
            elif left.late and kind not in QUESTIONS and kind != "beat":
                for given in self._fired(timer):
                    yield move("late", given, self._give(state, node, given), "late")

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
        unsure = timer[0] == "recalls" or (timer[0] == "ask" and self.shape.path == "auto")
        return [("timer", timer, at) for at in ((SOON, LATER) if unsure else (LATER,))]

    def _sure(self, state: Global) -> bool:
        """Nothing went wrong but losses, and at most an abort: every other room must succeed (I11)."""
        had, left = self.configuration.faults, state.left
        return (had.crash, had.late, had.broken) == (left.crash, left.late, left.broken)

    def _has_other_end(self, state: Global, node: int, timer: Name) -> bool:
        session = m.Session(*timer[2:4])  # type: ignore[arg-type]
        others = range(1, len(state.nodes)) if node == 0 else (0,)
        return any(session in self.nodes.facts[state.nodes[other]].sessions for other in others)

    def _may_end(self, state: Global, node: int, session: m.Session) -> bool:
        """Whether a disconnect is a fence: the transport says so, or the process at the other end is gone."""
        if self.configuration.fences:
            return True
        lives = [self.nodes.template(n, self.nodes.home[number][1]) for n, number in enumerate(state.nodes)]
        if node == 0:
            return session.writer not in {core.incarnation for core in lives[1:]}
        return session.decode not in self.nodes.nonces(lives[0].incarnation)

    def _asked_for(self, state: Global, node: int) -> list[Input]:
        """What the engine does of itself, each in its own time."""
        number = state.nodes[node]
        facts, life, again = self.nodes.facts[number], self.nodes.home[number][1], self.configuration.again
        found: list[Input] = [("ready", handle, n) for handle, n in facts.late]
        latest = {handle[0]: (handle[1], status & 0x7F) for handle, status in facts.rooms}
        for room in range(1, self.shape.rooms + 1):
            if node and node - 1 not in self.shape.writers_of(room):
                continue
            times, ended = latest.get(room, (-1, State.FAILED))
            if ended == State.FAILED and times + 1 <= again and (life == 0 or again):
                found.append(("send" if node else "receive", room))
        return found

    # What becomes of it.

    def _heads(self, state: Global, node: int) -> list[tuple[int, int]]:
        """(from whom, over which link) a frame may come next."""
        links = [(0, 2 * node - 2)] if node else [(w, 2 * w - 1) for w in range(1, len(state.nodes))]
        return [(src, link) for src, link in links if state.links[link]]

    def _without_head(self, state: Global, link: int) -> Global:
        links = state.links
        return state._replace(links=(*links[:link], links[link][1:], *links[link + 1 :]))

    def _hear(self, state: Global, node: int, src: int, link: int) -> Global:
        return self._give(self._without_head(state, link), node, ("hear", src, state.links[link][0]))

    def _give(self, state: Global, node: int, given: Input) -> Global:
        self.trying = (node, given)
        before = state.nodes[node]
        did = self.nodes.step(before, given)
        if did.after == before and not did.sends and not did.posts and not (did.lost or did.met):
            return state
        nodes = list(state.nodes)
        nodes[node] = did.after
        links = state.links
        if did.sends:
            changed = [*links]
            for dst, frame in did.sends:
                changed[2 * node - 1 if node else 2 * dst - 2] += (frame,)
            links = tuple(changed)
        after = state._replace(nodes=tuple(nodes), links=links)
        if did.posts:
            after = self._posted(after, did)
        if did.lost:
            lost = tuple((node, session) for session in did.lost)
            after = after._replace(fences=tuple(sorted(after.fences + lost)))
        for session in did.met:  # a half-open session that expired, greeted again: connected anew
            if (node, session) in after.fences:
                after = self._fence(after, after.fences.index((node, session)))
            after = after._replace(fenced=tuple(s for s in after.fenced if s != session))
        return self._judged(state, after)

    def _posted(self, state: Global, did: Did) -> Global:
        writes = list(state.writes)
        for post in did.posts:
            place = (post.session, post.where, post.flight if post.where[0] == m.DIRECT else ())
            for number in (*(n for n, _ in state.writes), *state.spent):
                old = self.posts[number]
                same = (old.session, old.where, old.flight if old.where[0] == m.DIRECT else ()) == place
                must(not same, f"I15: written twice: {post}")
            number = self._post_numbers.setdefault(post, len(self.posts))
            if number == len(self.posts):
                self.posts.append(post)
            writes.append((number, DONE | BAD if post.session in state.fenced else TAG | DONE | UNDER | OK))
        return state._replace(writes=tuple(sorted(writes)))

    def _flag(self, state: Global, number: int, flags: int) -> Global:
        rest = [entry for entry in state.writes if entry[0] != number]
        if flags & (TAG | DONE | UNDER):
            rest.append((number, flags))
        return state._replace(writes=tuple(sorted(rest)))

    def _told(self, state: Global, number: int, flags: int, taken: int) -> Global:
        post = self.posts[number]
        after = self._flag(state, number, flags & ~(taken | UNDER | BAD))
        facts = self.nodes.facts[state.nodes[0]]
        if post.where[0] == m.DIRECT and post.session in facts.sessions and post.where[1] in facts.epochs:
            (rect,) = m.decode_tag(self.nodes.tags[post.tag], ("kv",)).rects
            after = self._delivered(after, (facts.epochs[post.where[1]], post.session, rect.start, rect.stop))
        return self._give(self._spend(after, number), 0, ("told", post.tag))

    def _delivered(self, state: Global, what: tuple[tuple[int, int], m.Session, int, int]) -> Global:
        return state._replace(delivered=tuple(sorted({*state.delivered, what})))

    def _spend(self, state: Global, number: int) -> Global:
        return state._replace(spent=tuple(sorted({*state.spent, number})))

    def _fence(self, state: Global, at: int) -> Global:
        """A disconnect is over: nothing of the session lands any more; what was under way landed or not."""
        node, session = state.fences[at]
        writes = []
        for number, flags in state.writes:
            new = flags
            if self.posts[number].session == session:
                unsure = bool(flags & UNDER)
                if node:  # the writer's core forgets the post by itself
                    new = flags & ~(DONE | UNDER) | (MAYBE if unsure and flags & TAG else 0)
                else:  # decode hears no tag of a session it lost
                    new = flags & ~(TAG | UNDER | MAYBE) | (BAD if unsure else 0)
            if new & (TAG | DONE | UNDER):
                writes.append((number, new))
        fences = state.fences[:at] + state.fences[at + 1 :]
        fenced = tuple(sorted({*state.fenced, session}))
        after = state._replace(writes=tuple(writes), fences=fences, fenced=fenced)
        return self._give(after, node, ("fenced", session))

    def _crash(self, state: Global, node: int) -> Global:
        """Another process at the same address. What the old one sent is still on its way."""
        number = state.nodes[node]
        nodes = list(state.nodes)
        nodes[node] = self.nodes.born(node, self.nodes.home[number][1] + 1)
        writes, fenced = [], set(state.fenced)
        for post, flags in state.writes:
            new = flags
            if node == 0:
                new = flags & ~(TAG | UNDER | MAYBE) | (BAD if flags & UNDER else 0)
            elif self.posts[post].node == node:
                new = flags & ~DONE | DEAD
            if new & (TAG | DONE | UNDER):
                writes.append((post, new))
        delivered = state.delivered
        if node == 0:
            delivered = ()
            fenced |= self.nodes.facts[number].sessions | {s for n, s in state.fences if n == 0}
        after = state._replace(
            nodes=tuple(nodes),
            writes=tuple(writes),
            fences=tuple(fence for fence in state.fences if fence[0] != node),
            fenced=tuple(sorted(fenced)),
            delivered=delivered,
        )
        return self._judged(state, after)

    def _charge(self, state: Global, spent: str) -> Global:
        if not spent:
            return state
        return state._replace(left=state.left._replace(**{spent: getattr(state.left, spent) - 1}))

    # What must hold.

    def _judged(self, before: Global, state: Global) -> Global:
        """Checks what concerns more than one process (I2, I5, I8), and forgets what is over."""
        facts = self.nodes.facts[state.nodes[0]]
        for number, flags in state.writes:
            if not flags & UNDER:
                continue
            post = self.posts[number]
            place = (post.session, *post.where)
            must(place in facts.writable, f"I2: a write under way into what was released: {post}")
            if not flags & DEAD:
                released = post.room in self.nodes.facts[state.nodes[post.node]].released
                must(not released, f"I8: source memory given back under a write: {post}")
        if state.nodes[0] == before.nodes[0] and state.delivered == before.delivered and state.spent == before.spent:
            return state
        ended = {handle for handle, status in facts.rooms if status & 0x7F in (State.SUCCESS, State.FAILED)}
        known = dict(self.nodes.facts[before.nodes[0]].rooms)
        for handle, status in facts.rooms:
            if status & 0x7F == State.SUCCESS and known.get(handle, 0) & 0x7F != State.SUCCESS:
                self._covered(state, handle)
        spent = tuple(n for n in state.spent if (self.posts[n].session, *self.posts[n].where) in facts.writable)
        delivered = tuple(d for d in state.delivered if d[0] not in ended)
        return state._replace(spent=spent, delivered=delivered)

    def _covered(self, state: Global, handle: tuple[int, int]) -> None:
        tokens: dict[m.Session, set[int]] = {}
        for room, session, start, stop in state.delivered:
            if room == handle:
                tokens.setdefault(session, set()).update(range(start, stop))
        whole = self.shape.tokens * self.shape.chunks
        enough = len(tokens) == len(self.shape.writers_of(handle[0])) and all(len(t) == whole for t in tokens.values())
        must(enough, f"I5: room {handle} succeeds with {state.delivered}")

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

    def words(self, move: Move) -> str:
        return self.words_of(move.node, move.given, move.what)

    def words_of(self, at: int, given: Input, what: str = "") -> str:
        """One step in words."""
        node = self.nodes.names[at].decode()
        kinds = {"hear": "hear", "told": "tag"}
        match what or kinds.get(str(given[0]), "at last"), given:
            case ("hear" | "lose") as what, (_, int() as src, int() as frame):
                message = m.decode(self.nodes.frames[frame]).message
                who = self.nodes.names[src].decode()
                return f"{node} hears {who}: {message}" if what == "hear" else f"lost, {who} to {node}: {message}"
            case ("tag" | "tag kept" | "no tag" | "tag of a writer that is gone") as what, (_, int() as tag):
                told = m.decode_tag(self.nodes.tags[tag], ("kv",))
                return f"{node}, {what}: epoch {told.epoch} chunk {told.chunk} lane {told.lane} cursor {told.cursor}"
            case "crash", _:
                return f"{node} crashes and is started again"
            case what, _:
                return f"{node}, {what}: {' '.join(str(part) for part in given)}"
