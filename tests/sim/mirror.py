"""The symmetry of a world of two writers with a room each: one side exchanged for the other.

For `search`. Nothing is assumed of the cores: what a node's state, a frame or a write is turned into is found by giving
the exchanged input to the exchanged state, from the root on, whose image is itself; and `verify` holds every step that
the search took against its image, sends, posts and all that `Facts` tells. If all agree, and every image's image is the
original, the exchange is an automorphism of all that was explored, so one state of each pair stands for both.
"""

from __future__ import annotations

from typing import TypeVar, cast

from tests.sim.facts import FIRST_EPOCH, Facts
from tests.sim.nodes import Did, Input, Post
from tests.sim.sides import Parts, Side
from tests.sim.steps import Faults, Global

T = TypeVar("T")
_OTHER = (0, 2, 1)
"""Of each process its image."""


class Asymmetry(AssertionError):
    """Two writers are not treated alike."""


def _paired(table: dict, thing: object, image: object) -> None:
    if table.setdefault(thing, image) != image or table.setdefault(image, thing) != thing:
        raise Asymmetry(f"{thing} is both {table.get(thing)} and {image}, exchanged")


class Mirror:
    """What each part becomes when the writers and their rooms change places."""

    def __init__(self, parts: Parts, root: Global) -> None:
        self.parts, self.nodes = parts, parts.nodes
        self.before = len(self.nodes.memo)
        self.nodes.sent_by.clear()  # what was sent before the root has no image; what is sent again has
        self.atoms: dict[object, object] = {}
        first, second = parts.configuration.shape.numbers
        rooms = (first, second), (b"i%d" % first, b"i%d" % second), (FIRST_EPOCH, FIRST_EPOCH + 1)
        for one, two in (*rooms, (b"P0", b"P1")):  # the routes of those that are greeted anew
            _paired(self.atoms, one, two)
        for life in range(2):
            _paired(self.atoms, *(self.nodes.template(writer, life).incarnation for writer in (1, 2)))
        one, two = sorted(self.nodes.facts[root.nodes[0]].sessions, key=parts.writer_of)
        _paired(self.atoms, one.decode, two.decode)
        self.states: dict[object, object] = {}
        for node, number in enumerate(root.nodes):
            _paired(self.states, number, root.nodes[_OTHER[node]])
        self.frames: dict[object, object] = {}
        to_first, _, to_second, *_ = root.links
        for one, two in zip(to_first, to_second, strict=True):
            _paired(self.frames, one, two)
        self.tags: dict[object, object] = {}
        self._sides: dict[int, int] = {}

    def renamed(self, x: T) -> T:
        """Rooms, epochs and sessions in a name exchanged."""
        if isinstance(x, tuple):
            each = [self.renamed(part) for part in x]
            return cast("T", type(x)(*each) if hasattr(x, "_fields") else tuple(each))
        if isinstance(x, frozenset):
            return cast("T", frozenset(self.renamed(part) for part in x))
        if isinstance(x, dict):
            return cast("T", {self.renamed(key): self.renamed(value) for key, value in x.items()})
        return cast("T", self.atoms.get(x, x))

    # Nodes.

    def state(self, number: int) -> int:
        image = self.states.get(number)
        if image is None:
            self._find(number)
            image = self.states[number]
        return cast("int", image)

    def _find(self, number: int) -> None:
        if number in self.nodes.origin:
            self.did(*self.nodes.origin[number])
        else:
            node, life = self.nodes.home[number]
            _paired(self.states, number, self.nodes.born(_OTHER[node], life))

    def frame(self, number: int) -> int:
        if number not in self.frames:
            self.did(*self.nodes.sent_by["frame", number])
        return cast("int", self.frames[number])

    def tag(self, number: int) -> int:
        if number not in self.tags:
            self.did(*self.nodes.sent_by["tag", number])
        return cast("int", self.tags[number])

    def post(self, number: int) -> int:
        node, flight, session_id, room, tag, where = self.parts.whole.posts[number]
        rest = self.renamed((flight, session_id, room))
        return self.parts.whole.post_number(Post(_OTHER[node], *rest, self.tag(tag), self.renamed(where)))

    def given(self, given: Input) -> Input:
        match given:
            case ("hear", int() as src, int() as frame):
                return ("hear", _OTHER[src], self.frame(frame))
            case ("told", int() as tag):
                return ("told", self.tag(tag))
        return self.renamed(given)

    def did(self, state: int, given: Input) -> None:
        """Holds a step against its image, and learns what becomes of what."""
        did = self.nodes.step(state, given)
        image = self.nodes.step(self.state(state), self.given(given))
        _paired(self.states, did.after, image.after)
        self._alike(self.nodes.facts[did.after], self.nodes.facts[image.after])
        self._sent(did, image)
        for post, other in zip(did.posts, image.posts, strict=True):
            _paired(self.tags, post.tag, other.tag)
            if self.renamed(post._replace(node=_OTHER[post.node], tag=other.tag)) != other:
                raise Asymmetry(f"{post} and {other}")
        for name in ("lost", "met"):
            if sorted(self.renamed(getattr(did, name))) != sorted(getattr(image, name)):
                raise Asymmetry(f"{name}: {did} and {image}")

    def _sent(self, did: Did, image: Did) -> None:
        for dst in range(3):
            ours = [frame for to, frame in did.sends if to == dst]
            theirs = [frame for to, frame in image.sends if to == _OTHER[dst]]
            if len(ours) != len(theirs):
                raise Asymmetry(f"{did} and {image}")
            for frame, other in zip(ours, theirs, strict=True):
                _paired(self.frames, frame, other)

    def _alike(self, facts: Facts, others: Facts) -> None:
        for name, one, other in zip(Facts._fields, facts, others, strict=True):
            if name == "flat":
                same = bool(one) == bool(other)
            elif isinstance(one, tuple):
                same = sorted(map(repr, self.renamed(one))) == sorted(map(repr, other))  # type: ignore[arg-type]
            else:
                same = self.renamed(one) == other
            if not same:
                raise Asymmetry(f"{name}: {one} and {other}")

    def verify(self) -> int:
        """Every step of a node that was worked out has its image; returns how many there are."""
        steps = list(self.nodes.memo)[self.before :]
        for step in steps:
            self.did(*step)
        return len(steps)

    # Parts.

    def decode(self, number: int) -> int:
        return self.parts.decode(self.state(self.parts.decodes[number]))

    def side(self, number: int) -> int:
        image = self._sides.get(number)
        if image is None:
            node, links, writes, fences, fenced, delivered, spent = self.parts.sides[number]
            image = self._sides[number] = self.parts.side(
                Side(
                    self.state(node),
                    tuple(tuple(self.frame(frame) for frame in link) for link in links),
                    tuple(sorted((self.post(post), flags) for post, flags in writes)),
                    tuple(sorted((_OTHER[at], self.renamed(session_id)) for at, session_id in fences)),
                    tuple(sorted(self.renamed(fenced))),
                    tuple(sorted(self.renamed(delivered))),
                    tuple(sorted(self.post(post) for post in spent)),
                )
            )
            _paired(cast("dict", self._sides), number, image)
        return image

    def common(self, left: Faults, aborted: int) -> tuple[Faults, int]:
        return left, self.renamed(aborted)
