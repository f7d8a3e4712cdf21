"""What a node is doing, as plain numbers: for whoever watches it.

Reading holds the node's lock only while a few numbers are copied: what grows with the rooms open is counted outside.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import pdstage
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.prefill import PrefillCore
from pdstage.protocol.state import LeasePhase, State

if TYPE_CHECKING:
    from pdstage.manager.handle import Handle
    from pdstage.manager.node import Node
    from pdstage.protocol.leases import Lease
    from pdstage.protocol.room import RoomId


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
    n_rows_lent: int
    lanes: tuple[LaneStatus, ...] = ()
    n_waiting: int = 0
    """Chunks that wait for a lease."""
    n_buffers: int = 0
    n_buffers_free: int = 0
    buffer_nbytes: int = 0
    failed: bool = False
    """The driver broke: every room of the node has failed."""


class OpenRoom(NamedTuple):
    """A room that holds something at this node."""

    room: str
    state: str
    age_s: float


STATES = tuple(state.name.lower() for state in State)


def read(node: Node[Any, Any]) -> Status:
    """The node's status. Any thread may ask, of a closed node too."""
    core = node.core
    of_role: dict[str, Any]
    leases: list[Lease] = []
    with node._lock:
        counters = core.counters.as_dict()
        over = dict(node.sessions.over)
        n_sessions, n_unfenced, n_rows = len(core.sessions), len(node.sessions.lost), len(node.lent)
        if isinstance(core, DecodeCore):
            held = core.leases
            leases = held.live()
            cursors = [(lane.capacity, lane.watermark, lane.head, lane.quarantined_nbytes) for lane in held.lanes]
            of_role = {"n_waiting": held.n_waiting}
        else:
            assert isinstance(core, PrefillCore)
            cursors = []
            of_role = {"n_buffers": len(node.parts), "n_buffers_free": len(core.chunks.buffers.free)}
            of_role["buffer_nbytes"] = node.parts[0].nbytes
        of_role["n_copies"] = len(core.chunks.flights)
    return Status(
        _info(node), counters, asdict(node.socket.counters), over, _by_state(node), n_sessions, n_unfenced,
        n_rows_lent=n_rows, lanes=_lanes(cursors, leases), failed=node._failure is not None, **of_role,
    )  # fmt: skip


def _lanes(cursors: list[tuple[int, int, int, int]], leases: list[Lease]) -> tuple[LaneStatus, ...]:
    nbytes: Counter[tuple[int, str]] = Counter()
    for lease in leases:
        capacity, watermark, *_ = cursors[lease.lane]
        shut = lease.phase is LeasePhase.GRANTED and lease.end > watermark + capacity
        nbytes[lease.lane, "ahead" if shut else lease.phase.value] += lease.request.nbytes
    return tuple(
        LaneStatus(
            capacity, nbytes[number, "granted"], nbytes[number, "ahead"], nbytes[number, "landed"], carved,
            head - watermark,
        )
        for number, (capacity, watermark, head, carved) in enumerate(cursors)
    )  # fmt: skip


def _info(node: Node[Any, Any]) -> tuple[str, ...]:
    place = node.topology
    places = ((place.tp_rank, place.tp_size), (place.pp_rank, place.pp_size), (place.cp_rank, place.cp_size))
    numbers = (f"{rank}/{size}" for rank, size in (*places, (place.dp_rank, place.dp_size)))
    return pdstage.__version__, node.transport.traits.name, node.path, *numbers


def _by_state(node: Node[Any, Any]) -> dict[str, int]:
    found = Counter(dict.fromkeys(range(len(STATES)), 0))
    for handle in node.handles():  # without the lock, and in steps between which other threads run
        found[handle.status & 0x7F] += 1
    return {STATES[state]: n for state, n in found.items()}


def oldest(node: Node[Any, Any], n: int) -> list[OpenRoom]:
    """The `n` rooms of the node that began first and are not released yet, the oldest first."""
    now = time.monotonic()
    slowest = heapq.nsmallest(n, node.handles(), key=_began_at)
    return [OpenRoom(_named(one.id), STATES[one.status & 0x7F], now - one.began_at) for one in slowest]


def _began_at(handle: Handle) -> float:
    return handle.began_at


def _named(room: RoomId) -> str:
    """As its router wrote it; what is no text, in hexadecimal digits."""
    return room.hex() if isinstance(room, bytes) else str(room)
