"""A state of a small world, and what one step makes of it.

For `explore`. A state is the number of each process's state, what is on its way, and what may still go wrong.

A write is *under way* until the first of its tag and its completion is told: until then it may land, so until then its
target must not be released (I2) nor its source (I8). A disconnect before that leaves open whether it landed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.state import State
from tests.sim.facts import Shape, must
from tests.sim.nodes import IN_PLACE, Did, Input, Nodes, Post

ROW = (-1, 0)
"""The tokens of an aux row, where tokens are named."""

TAG, DONE, UNDER, OK, BAD, MAYBE, DEAD = 1, 2, 4, 8, 16, 32, 64
"""Of a write: its tag is to be told; its completion is; it may not have landed yet; it may have succeeded; it may have
failed; its tag may never come; its writer's process is gone."""


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


@dataclass(frozen=True)
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
    """Frames on their way: decode to writer 1, writer 1 to decode, decode to writer 2, ...; then in the same order
    those that an earlier process at the same address sent: nothing keeps them in order with its successor's.
    """
    writes: tuple[tuple[int, int], ...]
    """(post, flags), ascending."""
    fences: tuple[tuple[int, m.SessionId], ...]
    """Disconnects under way: at which node, of which session."""
    fenced: tuple[m.SessionId, ...]
    left: Faults
    aborted: int
    """The room an engine aborted, or 0."""
    delivered: tuple[tuple[tuple[int, int], m.SessionId, int, int], ...]
    """What lies in its pages: room, whose, tokens."""
    spent: tuple[int, ...]
    """Posts that landed in leases or pages that are still lent."""


class Steps:
    """What becomes of a state."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.shape = configuration.shape
        self.nodes = Nodes(self.shape)
        self.posts: list[Post] = []
        self._post_numbers: dict[Post, int] = {}
        self.trying: tuple[int, Input] = (0, ())

    def _heads(self, state: Global, node: int) -> list[tuple[int, int]]:
        """(from whom, over which link) a frame may come next."""
        links = [(0, 2 * node - 2)] if node else [(w, 2 * w - 1) for w in range(1, len(state.nodes))]
        links += [(src, link + len(state.links) // 2) for src, link in links]
        return [(src, link) for src, link in links if state.links[link]]

    def _without_head(self, state: Global, link: int) -> Global:
        links = state.links
        return state._replace(links=(*links[:link], links[link][1:], *links[link + 1 :]))

    def _hear(self, state: Global, node: int, src: int, link: int) -> Global:
        frame = state.links[link][0]
        after = self._without_head(state, link)
        if node == 0 and (tag := self.nodes.said(frame)) is not None:
            after = self._in_pages(after, tag)
        return self._give(after, node, ("hear", src, frame))

    def _give(self, state: Global, node: int, given: Input) -> Global:
        self.trying = (node, given)
        before = state.nodes[node]
        did = self.nodes.step(before, given)
        if did.after == before and not did.sends and not did.posts and not (did.lost or did.met):
            return self._judged(state, state)
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
            lost = tuple((node, session_id) for session_id in did.lost)
            after = after._replace(fences=tuple(sorted(after.fences + lost)))
        for session_id in did.met:  # a half-open session that expired, greeted again: connected anew
            if (node, session_id) in after.fences:
                after = self._fence(after, after.fences.index((node, session_id)))
            after = after._replace(fenced=tuple(s for s in after.fenced if s != session_id))
        return self._judged(state, after)

    def _posted(self, state: Global, did: Did) -> Global:
        writes = list(state.writes)
        for post in did.posts:
            place = (post.session, post.where, post.flight if post.where[0] in IN_PLACE else ())
            for number in (*(n for n, _ in state.writes), *state.spent):
                old = self.posts[number]
                same = (old.session, old.where, old.flight if old.where[0] in IN_PLACE else ()) == place
                must(not same, f"I15: written twice: {post}")
            flags = DONE | BAD if post.session in state.fenced else DONE | UNDER | OK
            if self.shape.notifies and post.session not in state.fenced:
                flags |= TAG
            writes.append((self.post_number(post), flags))
        return state._replace(writes=tuple(sorted(writes)))

    def post_number(self, post: Post) -> int:
        number = self._post_numbers.setdefault(post, len(self.posts))
        if number == len(self.posts):
            self.posts.append(post)
        return number

    def _flag(self, state: Global, number: int, flags: int) -> Global:
        rest = [entry for entry in state.writes if entry[0] != number]
        if flags & (TAG | DONE | UNDER):
            rest.append((number, flags))
        return state._replace(writes=tuple(sorted(rest)))

    def _told(self, state: Global, number: int, flags: int, taken: int) -> Global:
        told = self.posts[number].tag
        after = self._flag(state, number, flags & ~(taken | UNDER | BAD))
        after = self._in_pages(after, wire.decode_tag(self.nodes.tags[told], ("kv",)))
        return self._give(self._spend(after, number), 0, ("told", told))

    def _in_pages(self, state: Global, tag: wire.Tag) -> Global:
        """Decode learns of what landed: straight in pages it is delivered."""
        facts = self.nodes.facts[state.nodes[0]]
        if tag.lane not in IN_PLACE or tag.session not in facts.sessions or tag.epoch not in facts.epochs:
            return state
        span = (tag.rects[0].start, tag.rects[0].stop) if tag.rects else ROW
        return self._delivered(state, (facts.epochs[tag.epoch], tag.session, *span))

    def _delivered(self, state: Global, what: tuple[tuple[int, int], m.SessionId, int, int]) -> Global:
        return state._replace(delivered=tuple(sorted({*state.delivered, what})))

    def _spend(self, state: Global, number: int) -> Global:
        return state._replace(spent=tuple(sorted({*state.spent, number})))

    def _fence(self, state: Global, at: int) -> Global:
        """A disconnect is over: nothing of the session lands any more; what was under way landed or not."""
        node, session_id = state.fences[at]
        writes = []
        for number, flags in state.writes:
            new = flags
            if self.posts[number].session == session_id:
                unsure = bool(flags & UNDER)
                if node:  # the post still ends
                    new = flags & ~UNDER | (BAD | (MAYBE if flags & TAG else 0) if unsure else 0)
                else:  # decode hears no tag of a session it lost
                    new = flags & ~(TAG | UNDER | MAYBE) | (BAD if unsure else 0)
            if new & (TAG | DONE | UNDER):
                writes.append((number, new))
        fences = state.fences[:at] + state.fences[at + 1 :]
        fenced = tuple(sorted({*state.fenced, session_id}))
        after = state._replace(writes=tuple(writes), fences=fences, fenced=fenced)
        return self._give(after, node, ("fenced", session_id))

    def _crash(self, state: Global, node: int) -> Global:
        """Another process at the same address. What the old one sent is still on its way."""
        number = state.nodes[node]
        nodes = list(state.nodes)
        nodes[node] = self.nodes.born(node, self.nodes.home[number][1] + 1)
        writes, fenced, links = [], set(state.fenced), list(state.links)
        for link in [2 * node - 1] if node else [2 * w - 2 for w in range(1, len(nodes))]:
            links[link + len(links) // 2] += links[link]
            links[link] = ()
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
            links=tuple(links),
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
        for handle in self.succeeds(before.nodes[0], state.nodes[0]):
            self.covered(state, handle)
        return self.settled(state)

    def settled(self, state: Global) -> Global:
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
        if not state.spent and not state.delivered:
            return state
        ended = {handle for handle, status in facts.rooms if status & 0x7F in (State.SUCCESS, State.FAILED)}
        spent = tuple(n for n in state.spent if (self.posts[n].session, *self.posts[n].where) in facts.writable)
        delivered = tuple(d for d in state.delivered if d[0] not in ended)
        return state._replace(spent=spent, delivered=delivered)

    def succeeds(self, before: int, after: int) -> list[tuple[int, int]]:
        """Rooms that succeed with a step of decode."""
        if before == after:
            return []
        known = dict(self.nodes.facts[before].rooms)
        return [
            handle
            for handle, status in self.nodes.facts[after].rooms
            if status & 0x7F == State.SUCCESS and known.get(handle, 0) & 0x7F != State.SUCCESS
        ]

    def covered(self, state: Global, handle: tuple[int, int]) -> None:
        tokens: dict[m.SessionId, set[int]] = {}
        for room, session_id, start, stop in state.delivered:
            if room == handle:
                tokens.setdefault(session_id, set()).update(range(start, stop))
        whole = self.shape.tokens * self.shape.chunks
        rows = sum(ROW[0] in each for each in tokens.values())
        must(
            not self.shape.rows or self.configuration.faults.broken > 0 or rows == 1,
            f"I5: room {handle} succeeds without its aux row",
        )
        for each in tokens.values():
            each.discard(ROW[0])
        enough = len(tokens) == len(self.shape.writers_of(handle[0])) and all(len(t) == whole for t in tokens.values())
        must(enough, f"I5: room {handle} succeeds with {state.delivered}")
