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
from typing import TYPE_CHECKING

from pdstage import TransportError
from pdstage.transport import Done, PostFailed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.transport import Event, Spans, Transport

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


class Injected:
    """What stands before some of a transport's verbs."""

    def __init__(self, transport: Transport, faults: Faults):
        self.faults = faults
        self.until = time.monotonic() + faults.for_s
        self.rng = random.Random(faults.seed)
        self.post_there, self.poll_there, self.filenos_there = transport.post, transport.poll, transport.filenos
        self.made_up, self.n_events, self.n_posts = count(-1, -1), count(), 0  # tickets of posts that never began
        self.to_fail = set()
        self.late = []

    def now(self) -> Faults:
        return self.faults if time.monotonic() < self.until else Faults()

    def post(self, peer, spans: Spans, tag):
        faults, draw = self.now(), self.rng.random
        self.n_posts += 1
        refused, failed, written, lost = (
            draw() < chance for chance in (faults.refuse, faults.fail, faults.fail_written, faults.lose_tag)
        )
        if refused or self.n_posts > faults.die_after:
            raise TransportError(f"a post to peer {peer!r} was refused", remedy=REMEDY)
        if failed:
            ticket = next(self.made_up)
            self.tell(PostFailed(ticket, TransportError(f"a post to peer {peer!r} failed", remedy=REMEDY)))
            return ticket
        ticket = self.post_there(peer, spans, b"" if lost else tag)
        self.to_fail |= {ticket} if written else set()
        return ticket

    def poll(self) -> list[Event]:
        for event in self.poll_there():
            if isinstance(event, Done) and event.ticket in self.to_fail:
                unknown = TransportError("a post that was written failed", remedy=REMEDY)
                self.tell(PostFailed(event.ticket, unknown))
            else:
                self.tell(event)
        events, now = [], time.monotonic()
        while self.late and self.late[0][0] <= now:
            events.append(heapq.heappop(self.late)[2])
        return events

    def tell(self, event: Event):
        faults = self.now()
        due = time.monotonic() + self.rng.uniform(0.0, faults.delay_s) if self.rng.random() < faults.delay else 0.0
        heapq.heappush(self.late, (due, next(self.n_events), event))

    def filenos(self) -> Sequence[int]:
        """None while a delayed event waits, since no descriptor announces it."""
        return () if self.late else self.filenos_there()


def faulty(transport: Transport, **faults) -> Transport:
    """The transport, with faults from now on. It maps no memory of peers, so that every write is a post."""
    injected = Injected(transport, Faults(**faults))
    for verb in ("post", "poll", "filenos"):
        setattr(transport, verb, getattr(injected, verb))
    transport.traits, transport.mapped = replace(transport.traits, maps=False), lambda *_: None
    return transport
