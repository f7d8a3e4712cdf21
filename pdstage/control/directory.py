"""The directory's table: the adverts of prefill ranks, each under a lease that ends unless it is renewed.

The clock is an argument.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from operator import itemgetter
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from pdstage.errors import PeerError, UsageError
from pdstage.layout.topology import Topology  # noqa: TC001  (msgspec resolves the annotation at run time)
from pdstage.log_limit import LogLimit

log = logging.getLogger(__name__)

MAX_TTL_S = 3600.0
_LOST_S = 24 * 3600
DECODE = "decode:"
"""Before the names of instances that decode, which are in a directory for operators alone."""
MAX_ADVERTS = 4096
_LARGER = f"it takes {MAX_ADVERTS}; for more have the directory in etcd (docs/directory.md), or one for each deployment"
MAX_REPLICA = 65535
_MAX_NAME = 256
_Word = Annotated[str, Meta(max_length=_MAX_NAME)]


class Advert(msgspec.Struct, frozen=True, kw_only=True):
    """What one prefill rank publishes about itself.

    `instance` names its engine, `topology` its place in it, `endpoint` its control socket, `incarnation` its process
    life. `layout` is its `Layout.digest()`, `transports` its data transports, best first, and `version` the wire's:
    that of the first release, if it is not said.
    `replica` is the number of an engine among those behind one address, if each has an instance name of its own.
    `process` is for the node that wants this rank's place: it tells whether the process has ended. Nodes of either
    `role` are listed for operators, with the `engine` that they run in and the address of their `metrics`; rooms are
    looked up among those that prefill.
    """

    instance: _Word
    topology: Topology
    endpoint: _Word
    incarnation: int
    layout: _Word
    transports: Annotated[tuple[_Word, ...], Meta(max_length=64)] = ()
    version: int = 2
    replica: Annotated[int, Meta(ge=0, le=MAX_REPLICA)] = 0
    process: dict[str, Any] = {}
    role: _Word = "prefill"
    engine: _Word = ""
    model: _Word = ""
    metrics: _Word = ""

    @property
    def group(self) -> str:
        """The name under which a directory holds its instance's ranks of its role."""
        return self.instance if self.role == "prefill" else DECODE + self.instance

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The sizes that every rank of one instance must agree on: dp, pp, cp, tp."""
        place = self.topology
        return place.dp_size, place.pp_size, place.cp_size, place.tp_size

    @property
    def where(self) -> str:
        """The rank, for messages."""
        place = self.topology
        ranks = f"dp {place.dp_rank}, pp {place.pp_rank}, cp {place.cp_rank}, tp {place.tp_rank}"
        return f"rank {place.unique_rank} ({ranks}) of instance {self.instance!r}"


class Incomplete(PeerError):
    """A rank that must answer is not registered yet: ask again until the deadline.

    `missing` holds the unique ranks that are absent; it is empty if nothing of the instance is known.
    """

    def __init__(self, what: str, missing: tuple[int, ...] = (), **fields: object) -> None:
        super().__init__(
            what, remedy="wait for the prefill ranks to register, and ask again", missing=missing, **fields
        )
        self.missing = missing


class Conflict(PeerError):
    """The name is taken: by a live instance of another shape, or by another process, whose advert is the field `holder`
    if it may have ended.
    """


class Held(msgspec.Struct, frozen=True):
    """What a directory holds at a rank's place: its advert, and the incarnations that it replaced, the last 32."""

    advert: Advert
    predecessors: tuple[int, ...] = ()


class _Entry(NamedTuple):
    held: Held
    expires_at: float


class Directory:
    """The table of one host or one rack: `MAX_ADVERTS` ranks at most. Several threads may use it. `clock` is monotonic,
    in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._log_limit = LogLimit()
        self._instances: dict[str, dict[int, _Entry]] = {}
        self._lost: dict[tuple[str, int], _Entry] = {}
        """Whose lease ended, in that order."""

    def publish(self, advert: Advert, ttl_s: float | None, after: int = 0) -> None:
        """Registers or renews a rank for `ttl_s`. None means until it is withdrawn, and is only for the directory's own
        process. `after` is an incarnation whose place it takes at once, since that process has ended.

        Raises `UsageError` for a bad name or duration, `Conflict` if the instance is live in another shape or another
        process holds this place, and `PeerError` if the directory is full.
        """
        check_advert(advert, ttl_s)
        if math.prod(advert.shape) > MAX_ADVERTS:  # a lookup visits them all
            raise UsageError(f"{advert.where} is one of {math.prod(advert.shape)} ranks", remedy=_LARGER)
        with self._lock:
            self._expire()
            ranks = self._instances.get(advert.group, {})
            try:
                held = check_place(advert, {rank: entry.held for rank, entry in ranks.items()}, after)
            except Conflict as error:
                if text := self._log_limit.due(advert.endpoint, error.what, self._clock()):
                    log.warning("%s was refused: %s", advert.endpoint, text)
                raise
            is_new = advert.topology.unique_rank not in ranks
            if is_new and sum(map(len, self._instances.values())) >= MAX_ADVERTS:
                raise PeerError(f"the directory is full: {MAX_ADVERTS} ranks are registered", remedy=_LARGER)
            expires_at = math.inf if ttl_s is None else self._clock() + ttl_s
            ranks[advert.topology.unique_rank] = _Entry(held, expires_at)
            self._instances[advert.group] = ranks
            self._lost.pop((advert.group, advert.topology.unique_rank), None)

    def withdraw(self, advert: Advert) -> None:
        """Removes a rank, unless another incarnation holds its place now."""
        with self._lock:
            ranks = self._instances.get(advert.group, {})
            entry = ranks.get(advert.topology.unique_rank)
            if entry is not None and entry.held.advert.incarnation == advert.incarnation:
                del ranks[advert.topology.unique_rank]
                if not ranks:
                    del self._instances[advert.group]
            key = advert.group, advert.topology.unique_rank
            if (lost := self._lost.get(key)) is not None and lost.held.advert.incarnation == advert.incarnation:
                del self._lost[key]

    def lookup(self, instance: str | None = None, dp_rank: int | None = None) -> list[Advert]:
        """All ranks of one dp replica of `instance`, by group rank.

        `instance` may be omitted if only one is registered, `dp_rank` if there is only one replica. Raises `Incomplete`
        while ranks are missing, and `UsageError` for a missing or impossible choice.
        """
        with self._lock:
            self._expire()
            instance = choose(self._instances, instance)
            held = {rank: entry.held.advert for rank, entry in self._instances.get(instance, {}).items()}
        return replica(instance, held, dp_rank)

    def instances(self) -> dict[str, list[tuple[Advert, float]]]:
        """Every advert with the seconds left of its lease, by instance and unique rank; negative of those whose lease
        ended in the last day, while nobody has their place.
        """
        with self._lock:
            self._expire()
            now, held = self._clock(), dict(self._lost)
            held |= {(name, rank): entry for name, ranks in self._instances.items() for rank, entry in ranks.items()}
        shown = defaultdict(list)
        for (name, _), entry in sorted(held.items(), key=itemgetter(0)):
            shown[name].append((entry.held.advert, entry.expires_at - now))
        return shown

    def _expire(self) -> None:
        now = self._clock()
        for name, held in list(self._instances.items()):
            for rank in [rank for rank, entry in held.items() if entry.expires_at <= now]:
                self._lost[name, rank] = held.pop(rank)
            if not held:
                del self._instances[name]
        while self._lost and (
            len(self._lost) > MAX_ADVERTS or next(iter(self._lost.values())).expires_at < now - _LOST_S
        ):
            del self._lost[next(iter(self._lost))]


def check_advert(advert: Advert, ttl_s: float | None) -> None:
    """Raises `UsageError` for a name, an endpoint or a duration that no directory takes."""
    for word in (advert.instance, advert.endpoint):
        if not 1 <= len(word) <= _MAX_NAME or not word.isprintable():
            raise UsageError(f"{word[:64]!r} cannot be published", remedy=f"give 1 to {_MAX_NAME} printable characters")
    if advert.instance.startswith(DECODE):
        raise UsageError(f"instance {advert.instance!r} begins with {DECODE!r}", remedy="give another name")
    if ttl_s is not None and not 0 < ttl_s <= MAX_TTL_S:
        raise UsageError(
            f"a lease of {ttl_s} s for {advert.where}", remedy=f"give more than 0, at most {MAX_TTL_S:g} s"
        )


def check_place(advert: Advert, ranks: Mapping[int, Held], after: int) -> Held:
    """What `advert` takes its place as, among the ranks of its instance; `after` has ended. Raises `Conflict` if it may
    not.
    """
    there = ranks.get(advert.topology.unique_rank)
    if there is not None and advert.incarnation in there.predecessors:
        raise Conflict(
            f"{advert.where} was taken over by a newer process at {there.advert.endpoint}",
            remedy="stop the older process, or give the instances different names",
            endpoint=there.advert.endpoint,
        )
    other = next((held.advert for held in ranks.values() if held.advert.shape != advert.shape), None)
    if other is not None:
        raise Conflict(
            f"instance {advert.instance!r} is live with (dp, pp, cp, tp) = {other.shape}, not {advert.shape}",
            remedy="withdraw the old ranks or wait for their leases to end, or use another instance name",
            endpoint=other.endpoint,
        )
    if there is None:
        return Held(advert)
    if there.advert.incarnation == advert.incarnation:
        return Held(advert, there.predecessors)
    if there.advert.incarnation != after:
        raise Conflict(
            f"{advert.where} is registered by another process, at {there.advert.endpoint}",
            remedy="give each engine an instance name of its own; if that one was killed, its lease ends in 15 s",
            endpoint=there.advert.endpoint,
            holder=there.advert,
        )
    return Held(advert, (*there.predecessors[-31:], there.advert.incarnation))


def choose(instances: Collection[str], instance: str | None) -> str:
    """The instance that a lookup means: the only one, if it names none; "" if there is none. Raises `UsageError`."""
    if instance is not None:
        return instance
    instances = [name for name in instances if not name.startswith(DECODE)]
    if len(instances) > 1:
        names = ", ".join(sorted(instances)[:8])
        raise UsageError(f"{len(instances)} instances are registered ({names})", remedy="name one of them")
    return next(iter(instances), "")


def replica(instance: str, held: Mapping[int, Advert], dp_rank: int | None) -> list[Advert]:
    """The ranks of one dp replica, of those that an instance has registered. Raises as `Directory.lookup`."""
    if not held:
        raise Incomplete(f"no rank of instance {instance!r} is registered" if instance else "no rank is registered")
    place = next(iter(held.values())).topology
    if dp_rank is None and place.dp_size > 1:
        raise UsageError(
            f"instance {instance!r} has {place.dp_size} dp replicas",
            remedy="pass the dp_rank its request was sent to",
            dp_size=place.dp_size,
        )
    dp_rank = dp_rank or 0
    if not 0 <= dp_rank < place.dp_size:
        raise UsageError(
            f"instance {instance!r} has no dp replica {dp_rank}",
            remedy=f"pass 0 <= dp_rank < {place.dp_size}",
            dp_size=place.dp_size,
        )
    wanted = range(dp_rank * place.group_size, (dp_rank + 1) * place.group_size)
    missing = tuple(rank for rank in wanted if rank not in held)
    if missing:
        raise Incomplete(
            f"instance {instance!r}: {len(missing)} of {place.group_size} ranks of dp replica {dp_rank} "
            f"are not registered, ranks {', '.join(map(str, missing[:8]))}{', ...' if len(missing) > 8 else ''}",
            missing,
            instance=instance,
        )
    return [held[rank] for rank in wanted]
