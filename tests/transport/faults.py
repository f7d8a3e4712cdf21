"""Any transport with deliberate faults, for the judge's and the chaos' nodes.

The faults are drawn from the seed, one post after the other: the same posts get the same faults. They affect only this
side's posts and events. No byte is altered, and nothing is written where the transport itself would not write.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from dataclasses import dataclass, replace
from itertools import count

from pdstage.errors import TransportError
from pdstage.transport import Done, Inbound, PostFailed, Transport

REMEDY = "this fault is deliberate"


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong, and how often: probabilities from 0 to 1, per post."""

    seed: int = 0
    refuse: float = 0.0
    """`post` raises and writes nothing."""
    fail: float = 0.0
    """The post fails after `post` returned, and nothing is written."""
    fail_written: float = 0.0
    """The post fails although all its bytes and its tag are written."""
    lose_tag: float = 0.0
    """All bytes arrive, but the tag never does."""
    delay: float = 0.0
    """Events of either side's posts are reported up to `delay_s` later."""
    delay_s: float = 0.1
    die_after: float = math.inf
    """Every later post is refused, as if all peers were gone."""
    for_s: float = math.inf
    """All faults end this many seconds after the transport was made."""


NONE = Faults()


def of_inner(verb):
    return lambda self, *given: getattr(self._inner, verb)(*given)


class FaultyTransport(Transport):
    """`inner` with faults; it owns `inner`. It maps no memory of peers, so that every write is a post."""

    register, unregister, describe = map(of_inner, ("register", "unregister", "describe"))
    offers, described = map(of_inner, ("offers", "described"))
    connect, prepare, identify = map(of_inner, ("connect", "prepare", "identify"))
    disconnect, proved_dead, forget = map(of_inner, ("disconnect", "proved_dead", "forget"))

    def __init__(self, inner: Transport, **faults: float) -> None:
        self._inner, self._faults = inner, Faults(**faults)
        self._until = time.monotonic() + self._faults.for_s
        self._rng = random.Random(self._faults.seed)
        self.traits = self.traits_of("")
        self._tickets, self._n_events, self._n_posts = count(1), count(), 0
        self._under_way: dict[int, tuple[int, bool]] = {}
        """By the inner ticket: our ticket, and whether it must fail once it is written."""
        self._late: list[tuple[float, int, object]] = []

    def _now(self):
        return self._faults if time.monotonic() < self._until else NONE

    def post(self, peer, spans, tag):
        faults, draw = self._now(), self._rng.random
        self._n_posts += 1
        refused, failed, written, lost = (
            draw() < chance for chance in (faults.refuse, faults.fail, faults.fail_written, faults.lose_tag)
        )
        if refused or self._n_posts > faults.die_after:
            raise TransportError(f"a post to peer {peer!r} was refused", remedy=REMEDY)
        ticket = next(self._tickets)
        if failed:
            self._tell(PostFailed(ticket, TransportError(f"a post to peer {peer!r} failed", remedy=REMEDY)))
        else:
            self._under_way[self._inner.post(peer, spans, b"" if lost else tag)] = ticket, written
        return ticket

    def poll(self):
        for event in self._inner.poll():
            self._tell(event if isinstance(event, Inbound) else self._ours(event))
        events, now = [], time.monotonic()
        while self._late and self._late[0][0] <= now:
            events.append(heapq.heappop(self._late)[2])
        return events

    def _ours(self, event):
        ticket, fails = self._under_way.pop(event.ticket)
        if fails and isinstance(event, Done):
            return PostFailed(ticket, TransportError("a post that was written failed", remedy=REMEDY))
        return replace(event, ticket=ticket)

    def _tell(self, event):
        faults = self._now()
        late = self._rng.random() < faults.delay
        due = time.monotonic() + self._rng.uniform(0.0, faults.delay_s) if late else 0.0
        heapq.heappush(self._late, (due, next(self._n_events), event))

    def filenos(self):
        """None while a delayed event waits, since no descriptor announces it."""
        return () if self._late else self._inner.filenos()

    def traits_of(self, peer):
        return replace(self._inner.traits_of(peer), maps=False)

    def close(self):
        self._late.clear()
        self._inner.close()
