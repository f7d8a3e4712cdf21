"""Any transport with deliberate faults, so that an engine's team can test its own error paths.

    PrefillNode(..., transport={"name": "nixl", "faults": {"seed": 7, "fail": 0.01, "lose_tag": 0.001, "delay": 0.1}})

The faults are drawn from the seed, one post after the other: the same posts get the same faults. They affect only this
side's posts and events. No byte is altered, and nothing is written where the transport itself would not write.
Mooncake's TENT has a similar proxy, `FaultProxyTransport`.
"""

from __future__ import annotations

import heapq
import math
import random
import time
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import TYPE_CHECKING, Any

from pdstage import arguments
from pdstage.errors import TransportError, UsageError
from pdstage.transport.base import Done, Event, Inbound, PostFailed, Traits, Transport

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdstage.plan.spans import Spans

_REMEDY = "this fault is deliberate: see docs/transports.md, Deliberate faults"


@dataclass(frozen=True, slots=True, kw_only=True)
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
    """All bytes arrive, but the tag never does. No effect where tags travel as messages."""
    delay: float = 0.0
    """Events of either side's posts are reported up to `delay_s` later."""
    delay_s: float = 0.1
    die_after: int = 0
    """Every post from this one on is refused, as if all peers were gone; 0: never."""
    for_s: float = 0.0
    """All faults end this many seconds after the transport was made; 0: never."""

    @classmethod
    def of(cls, given: object) -> Faults:
        """Raises `UsageError` for an unknown fault or an impossible probability."""
        names = [field.name for field in fields(cls)]
        if not isinstance(given, dict):
            raise UsageError(f"faults are {arguments.shown(given)}", remedy=f"give a mapping of {', '.join(names)}")
        read: dict[str, int | float] = {}
        for name, value in given.items():
            if name not in names:
                raise UsageError(f"no fault {arguments.shown(name)}", remedy=f"choose of {', '.join(names)}")
            if name in ("seed", "die_after"):
                read[name] = arguments.integer(f"fault {name}", value)
                continue
            read[name] = arguments.number(f"fault {name}", value)
            if read[name] < 0 or (not name.endswith("_s") and read[name] > 1):
                raise UsageError(f"fault {name} is {value}", remedy="give a chance of 0 to 1, or 0 seconds or more")
        return cls(**read)  # type: ignore[arg-type]


_NONE = Faults()


def _of_inner(verb: str) -> Any:  # noqa: ANN401
    def call(self: FaultyTransport, *given: object) -> object:
        return getattr(self._inner, verb)(*given)

    return call


class FaultyTransport(Transport):
    """`inner` with faults. It owns `inner`. It maps no memory of peers, so that every write is a post."""

    register, unregister, describe = map(_of_inner, ("register", "unregister", "describe"))
    offers, described = map(_of_inner, ("offers", "described"))
    connect, prepare, identify = map(_of_inner, ("connect", "prepare", "identify"))
    disconnect, proved_dead, forget = map(_of_inner, ("disconnect", "proved_dead", "forget"))

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self._inner, self._faults = inner, faults
        self._until = time.monotonic() + (faults.for_s or math.inf)
        self._rng = random.Random(faults.seed)
        self.traits = replace(inner.traits, maps=False)  # type: ignore[misc]
        self._tickets = count(1)
        self._n_posts = 0
        self._under_way: dict[int, tuple[int, bool]] = {}
        """By `inner`'s ticket: our ticket, and whether it must fail once it is written."""
        self._late: list[tuple[float, int, Event]] = []
        self._n_events = count()

    def _now(self) -> Faults:
        return self._faults if time.monotonic() < self._until else _NONE

    def post(self, peer: str, spans: Spans, tag: bytes) -> int:
        faults, draw = self._now(), self._rng.random
        self._n_posts += 1
        refused, failed, written, lost = (
            draw() < chance for chance in (faults.refuse, faults.fail, faults.fail_written, faults.lose_tag)
        )
        if refused or 0 < faults.die_after < self._n_posts:
            raise TransportError(f"a post to peer {peer!r} was refused", remedy=_REMEDY)
        ticket = next(self._tickets)
        if failed:
            self._tell(PostFailed(ticket, TransportError(f"a post to peer {peer!r} failed", remedy=_REMEDY)))
        else:
            self._under_way[self._inner.post(peer, spans, b"" if lost else tag)] = ticket, written
        return ticket

    def poll(self) -> list[Event]:
        for event in self._inner.poll():
            self._tell(event if isinstance(event, Inbound) else self._ours(event))
        events, now = [], time.monotonic()
        while self._late and self._late[0][0] <= now:
            events.append(heapq.heappop(self._late)[2])
        return events

    def _ours(self, event: Done | PostFailed) -> Done | PostFailed:
        ticket, fails = self._under_way.pop(event.ticket)
        if fails and isinstance(event, Done):
            return PostFailed(ticket, TransportError("a post that was written failed", remedy=_REMEDY))
        return replace(event, ticket=ticket)

    def _tell(self, event: Event) -> None:
        faults = self._now()
        late = self._rng.random() < faults.delay
        due = time.monotonic() + self._rng.uniform(0.0, faults.delay_s) if late else 0.0
        heapq.heappush(self._late, (due, next(self._n_events), event))

    def filenos(self) -> Sequence[int]:
        """None while a delayed event waits, since no descriptor announces it."""
        return () if self._late else self._inner.filenos()

    def traits_of(self, peer: str) -> Traits:
        return replace(self._inner.traits_of(peer), maps=False)

    def close(self) -> None:
        self._late.clear()
        self._inner.close()
