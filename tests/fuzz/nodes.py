"""Target: hostile frames, tags and descriptions into real nodes, whose driver carries out what the cores ask for.

A prefill and a decode node of this process, over the local transport, hear the input as if it had come by their
sockets. A liar's memory is registered with a transport of its own, and is all that prefill may write; the two nodes
serve a room of their own after each input.
"""

from __future__ import annotations

import itertools
import time
from functools import cache

import numpy as np

from pdstage import AuxRow, Column, Config, DecodeNode, MetadataBuffers, Pool, PrefillNode, Sender, Topology, native
from pdstage.errors import PdstageError
from pdstage.layout import Layout, Region
from pdstage.manager.node import Node
from pdstage.plan import Share
from pdstage.plan.convert import Encoding, fp8_token_head, mxfp8
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.room import room_key
from pdstage.protocol.session import Send
from pdstage.tensors import build, paged_nhd
from pdstage.transport.local import LocalTransport
from tests.fuzz.draw import Draw, altered_bytes
from tests.fuzz.wire import alter_frame, bend_frame, samples

_LAYERS, _HEADS, _DIM, _PAGE, _PAGES = 2, 2, 32, 4, 16
_WAIT_S = 240.0
_TRIES, _SLOW_S = 3, 3.0
_ROWS, COLUMNS = 64, (Column("ids", "int32", (16,)), Column("draft", "float16", (33,)))


def _pool(format: str = "bf16") -> tuple[np.ndarray, Layout]:
    """bf16 values, or what they are encoded as."""
    encoding = Encoding.parse(format)
    shape = (2, _LAYERS, _PAGES, _PAGE, _HEADS)
    kv = np.zeros((*shape, encoding.nbytes(_DIM)), np.uint8) if encoding else np.zeros((*shape, _DIM), np.uint16)
    return kv, build(paged_nhd(kv[0], kv[1], total_heads=_HEADS, tp=(1, 0), format=format))


class _Bed:
    def __init__(self) -> None:
        self.src, src_layout = _pool()
        self.dst, dst_layout = _pool()
        self.theirs = [_pool(), _pool(mxfp8()), _pool(fp8_token_head()), _pool(mxfp8(part="data"))]
        self.src[:] = np.random.default_rng(1).integers(0, 1 << 16, self.src.shape, np.uint16)
        self.staging = np.zeros(1 << 14, np.uint8)
        self.transport = LocalTransport()
        regions = [region for _, layout in self.theirs for region in layout.regions]
        self.their_rows = MetadataBuffers(COLUMNS, _ROWS)
        self.transport.register(
            [*regions, Region(self.staging.ctypes.data, self.staging.nbytes), self.their_rows.region]
        )
        self.src_rows, self.dst_rows = MetadataBuffers(COLUMNS, _ROWS), MetadataBuffers(COLUMNS, _ROWS)
        self.lent: list[tuple[Sender, AuxRow]] = []
        """Rows that prefill gave to rooms of a liar's."""
        common = {"transport": "local", "staging_nbytes": 1 << 16, "progress": "inline", "copy_thread": False}
        common |= {"config": Config(convert=native.ext is not None), "aux": "rdma"}
        self.prefill = PrefillNode(Pool.of(src_layout), Topology(), path="auto", metadata=self.src_rows, **common)
        self.decode = DecodeNode(Pool.of(dst_layout), Topology(), metadata=self.dst_rows, **common)
        self.was_well_at = time.monotonic()
        self.rooms = itertools.count(1)
        self.nonces = itertools.count(1 << 32)
        self.seq = itertools.count(1)

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()
        self.transport.close()


@cache
def _bed() -> _Bed:
    return _Bed()


def close() -> None:
    """Ends what the inputs had in common, if there was one."""
    if _bed.cache_info().currsize:
        _bed().close()
        _bed.cache_clear()


def run(data: bytes) -> None:
    draw, bed = Draw(data), _bed()
    _lie_to_prefill(bed, draw)
    _lie_to_decode(bed, draw)
    _serve(bed)
    bed.prefill.completions()
    bed.decode.completions()


def _hear(node: Node, route: bytes, frame: bytes) -> None:
    """As a turn does with what its socket gave."""
    with node.driver.acting, node.driver.lock:
        node.core.receive(route, frame, time.monotonic())


def _turn(node: Node) -> None:
    """One turn; what would go to the liar has no way there."""
    with node.driver.lock:
        kept = node.driver._kept
        node.driver._kept = [e for e in kept + node.core.take_effects() if not (isinstance(e, Send) and _is_liar(e))]
    node.turn()


def _is_liar(effect: Send) -> bool:
    return effect.route.startswith(b"liar")


def _lie_to_prefill(bed: _Bed, draw: Draw) -> None:
    """A greeting with some lies, then a room's life as far as it goes."""
    room, nonce, route = next(bed.rooms), next(bed.nonces), b"liar%d" % draw.below(3)
    sender = bed.prefill.send(room)
    sender.chunk([1, 2], tokens=(0, 2 * _PAGE))
    given = _row_of(bed, room)
    bed.lent.append((sender, given))
    sender.finish(aux=given)
    at, half = bed.staging.ctypes.data, bed.staging.nbytes // 2
    lanes = (m.LaneSpan(at, half), m.LaneSpan(at + half, half))
    items = np.array([3, 5], np.int32)
    shares = tuple(Share("kv", role, (0, _LAYERS, 1), 0, _HEADS) for role in ("k", "v"))
    direct = ("direct",) if draw.chance(160) else ()
    _, layout = bed.theirs[nonce % len(bed.theirs)]
    features = (*direct, m.CONVERT_FEATURE)
    rows = m.RowSpan(bed.their_rows.region.base, bed.their_rows.row_nbytes, _ROWS)
    columns = bed.their_rows.columns.placed
    hello = m.Hello(Topology(), layout, "local", bed.transport.describe(), lanes, 5.0, features, columns, rows)
    wire_items = (m.Items("kv", 0, memoryview(items).cast("B")),) if direct else ()
    session_id = m.SessionId(nonce, bed.prefill.incarnation)
    row = draw.below(_ROWS) if draw.chance(160) else None
    said: list[tuple[m.SessionId, m.AnyMessage]] = [
        (m.SessionId(nonce, 0), hello),
        (session_id, m.Heartbeat()),
        (session_id, m.Open(1, room_key(room), shares, (m.Asked("kv", 0, 8),), wire_items, 0, 1, True, 0, 60.0, row)),
        (session_id, m.Lease(1, 0, 0, 0, 0, half, 0)),
        (session_id, draw.pick(samples())),
    ]
    before = _own_bytes(bed)
    for number, (whose, message) in enumerate(said):
        frame = wire.encode(whose, number + 1, message)
        if draw.chance(80):
            frame = bend_frame(frame, draw) if draw.chance(160) else alter_frame(frame, draw)
        _hear(bed.prefill, route, frame)
        if draw.chance(128):
            _turn(bed.prefill)
    _turn(bed.prefill)
    assert _own_bytes(bed) == before, "a liar had prefill write into the nodes' own pools or rows"
    sender.abort()
    with bed.prefill.driver.lock:
        for session in [session for session in bed.prefill.core.sessions.values() if session.route.startswith(b"liar")]:
            bed.prefill.core.receive(session.route, wire.encode(session.id, (1 << 64) - 1, m.Bye()), time.monotonic())
    _turn(bed.prefill)


def _own_bytes(bed: _Bed) -> tuple[bytes, ...]:
    rows = (bytes(held._memory) for held in (bed.src_rows, bed.dst_rows))
    return bed.src.tobytes(), bed.dst.tobytes(), *rows


def _row_of(bed: _Bed, room: int) -> AuxRow:
    """A row filled for `room`; those that liars' rooms had are free once these are released."""
    for sender, row in [lent for lent in bed.lent if lent[0].released]:
        bed.lent.remove((sender, row))
        bed.src_rows.free(row)
    row = bed.src_rows.allocate()
    row["ids"] = room
    return row


def _lie_to_decode(bed: _Bed, draw: Draw) -> None:
    for _ in range(1 + draw.below(4)):
        session = next(iter(bed.decode.core.sessions.values()), None)
        session_id = session.id if session is not None else m.SessionId(1, 2)
        frame = wire.encode(session_id, 1 << 60, draw.pick(samples()))
        _hear(bed.decode, b"liar", alter_frame(frame, draw) if draw.chance(128) else frame)
        with bed.decode.driver.lock:
            tag = wire.encode_tag(wire.Tag(session_id, draw.below(9), 0, draw.pick((0, 1, m.DIRECT)), 0, ()), ("kv",))
            bed.decode.core.tag(altered_bytes(tag, draw), time.monotonic())
    _turn(bed.decode)


def _serve(bed: _Bed) -> None:
    """The nodes still serve each other, byte for byte.

    A room may fail on a machine so busy that somebody seems silent, in it or since the last one; that takes seconds,
    and the next is well.
    """
    for _ in range(_TRIES):
        error = _room(bed)
        if error is None:
            bed.was_well_at = time.monotonic()
            return
        assert time.monotonic() - bed.was_well_at > _SLOW_S, error
    raise error


def _room(bed: _Bed) -> PdstageError | None:
    """The error of a room that failed."""
    room = next(bed.rooms)
    bed.dst[:] = 0
    receiver = bed.decode.receive(room, prefill=bed.prefill.bootstrap_address)
    into = bed.dst_rows.allocate()
    receiver.bind(items=[7, 2], tokens=2 * _PAGE, aux=into)
    sender = bed.prefill.send(room)
    sender.chunk([4, 6], tokens=(0, 2 * _PAGE))
    given = _row_of(bed, room)
    sender.finish(aux=given)
    until = time.monotonic() + _WAIT_S
    while not (receiver.released and sender.released):
        _turn(bed.prefill)
        _turn(bed.decode)
        if receiver.error is not None:
            sender.abort()
        assert time.monotonic() < until, (receiver.poll(), receiver.error, sender.poll(), sender.error)
    bed.src_rows.free(given)
    bed.dst_rows.free(into)
    if receiver.error is not None:
        return receiver.error
    assert isinstance(receiver.aux, AuxRow)
    assert receiver.aux["ids"][0] == room
    assert np.array_equal(bed.dst[:, :, [7, 2]], bed.src[:, :, [4, 6]])
    return None


def seeds() -> list[bytes]:
    return [b"", bytes(range(256)), bytes([0, 255, 0, 4, 255, 200, 3, 255, 9, 255]) * 12, b"\xff" * 40]
