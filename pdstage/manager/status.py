"""What a node is doing, as plain numbers: for whoever watches it."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from pdstage.protocol.state import LeasePhase, State

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from pdstage.manager.handle import Handle
    from pdstage.protocol.lane import Lease


class LaneStatus(NamedTuple):
    """One staging lane of a decode node, in bytes.

    Of its leases: those that may be written and were not yet, those that must wait for the watermark, one lap ahead,
    and those that were written and are being scattered. Then what is carved out, and how far the watermark is behind
    the head, padding and leases ahead included, so that this may exceed the capacity.
    """

    capacity_nbytes: int
    granted_nbytes: int
    ahead_nbytes: int
    landed_nbytes: int
    quarantined_nbytes: int
    lag_nbytes: int


class Status(NamedTuple):
    """One node at one moment. Totals are since its start; `lanes` are a decode node's, `buffers` a prefill node's."""

    info: tuple[str, ...]
    """Version, transport, path, and the node's place: "rank/size" of tp, pp, cp and dp."""
    counters: dict[str, int]
    """By field of `pdstage.metrics.Counters`."""
    control: dict[str, int]
    """By field of `pdstage.control.zmq.ControlCounters`."""
    sessions_over: dict[str, int]
    """Sessions that began, by transport."""
    rooms: dict[str, int]
    """Rooms that hold something here, by state; ended ones until they are released."""
    n_sessions: int
    n_unfenced: int
    """Lost sessions that keep memory of this node out of use."""
    n_copies: int
    """Gathers, writes and scatters under way."""
    n_rows_lent: int = 0
    lanes: tuple[LaneStatus, ...] = ()
    n_waiting: int = 0
    """Chunks that wait for a lease."""
    n_buffers: int = 0
    n_buffers_free: int = 0
    buffer_nbytes: int = 0
    failed: bool = False
    """The driver broke: every room of the node has failed."""
    draining: bool = False
    """No room begins any more: the node drains, or closes."""
    directory: Mapping[str, float] = MappingProxyType({})
    """As `manager.lookup.Directory.status` says."""


class OpenRoom(NamedTuple):
    """A room that holds something at this node."""

    room: str
    state: str
    age_s: float


STATES = tuple(state.name.lower() for state in State)


def lanes(cursors: list[tuple[int, int, int, int]], leases: list[Lease]) -> tuple[LaneStatus, ...]:
    """Of each lane its capacity, watermark, head and quarantined bytes, and all live leases, in numbers for people."""
    nbytes: Counter[tuple[int, str]] = Counter()
    for lease in leases:
        capacity, watermark, *_ = cursors[lease.lane]
        shut = lease.phase is LeasePhase.GRANTED and lease.end > watermark + capacity
        nbytes[lease.lane, "ahead" if shut else lease.phase.value] += lease.nbytes
    return tuple(
        LaneStatus(
            capacity, nbytes[number, "granted"], nbytes[number, "ahead"], nbytes[number, "landed"], carved,
            head - watermark,
        )
        for number, (capacity, watermark, head, carved) in enumerate(cursors)
    )  # fmt: skip


def with_rooms(now: Status, handles: Collection[Handle]) -> Status:
    """And what `handles` tell."""
    return now._replace(rooms=by_state(handles), n_rows_lent=sum(handle.row is not None for handle in handles))


def by_state(handles: Iterable[Handle]) -> dict[str, int]:
    """How many of `handles` are in each state."""
    return dict.fromkeys(STATES, 0) | Counter(STATES[handle.status & 0x7F] for handle in handles)


def oldest(handles: Iterable[Handle], n: int) -> list[OpenRoom]:
    """The `n` rooms of `handles` that began first, the oldest first; their names as the router wrote them."""
    now = time.monotonic()
    return [
        OpenRoom(
            one.id.hex() if isinstance(one.id, bytes) else str(one.id), STATES[one.status & 0x7F], now - one.began_at
        )
        for one in heapq.nsmallest(n, handles, key=attrgetter("began_at"))
    ]
