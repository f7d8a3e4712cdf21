"""Targets: the bytes of frames, tags and transports' descriptions, and what is computed from a peer's layout."""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np
from msgspec import structs

from pdstage.columns import Columns, Placed, lacking, problem, share
from pdstage.errors import PdstageError, PeerError, UsageError
from pdstage.layout import Layout, Region
from pdstage.layout.topology import Topology
from pdstage.plan import Rect, selects, shares, wire_order
from pdstage.plan.spans import DirectPlan, Index
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.compat import incompatible, items_problem, layout_problem
from pdstage.transport.local import LocalTransport
from tests import golden
from tests.fuzz.draw import Draw, altered_bytes, altered_msgpack, bent_msgpack
from tests.pair import COLUMNS, Memory, make_layout, pool_nbytes

_HEAD = 28
_SHAPE = {"heads": 2, "tp": 1, "rank": 0, "layers": (0, 2), "n_pages": 16}
COMPONENTS = ("kv", "swa")


@cache
def own_layout() -> Layout:
    return make_layout(Memory(pool_nbytes(**_SHAPE)), **_SHAPE)


_KINDS = (
    "Hello, rows|Welcome, columns|HelloRefused|Ask|Asking|Open, row|Opened, accepted|Reserve|Lease|Refused|Watermark|"
    "Recall|Returned|CloseOk|CloseFailed|Closed|Abort|Drained|Heartbeat, waiting|Bye|NoSession|Tagged"
)


@cache
def samples() -> tuple[m.AnyMessage, ...]:
    """One message of each kind, the golden ones, with a layout and an epoch that the nodes here have."""
    place = {"topology": Topology(), "layout": own_layout(), "transport": "test", "description": b"", "epoch": 1}
    found = [golden.FRAMES[kind] for kind in _KINDS.split("|")]
    return tuple(
        structs.replace(one, **{name: place[name] for name in place.keys() & set(one.__struct_fields__)})
        for one in found
    )


# Frames.


def frame_seeds() -> list[bytes]:
    return [wire.encode(m.SessionId(1, 2), 3, message) for message in samples()]


def alter_frame(frame: bytes, draw: Draw) -> bytes:
    if draw.chance(32):
        return altered_bytes(frame, draw)
    return frame[:_HEAD] + altered_msgpack(frame[_HEAD:], draw)


def bend_frame(frame: bytes, draw: Draw) -> bytes:
    """A frame that decodes mostly, with one thing in it that is not so."""
    return frame[:_HEAD] + bent_msgpack(frame[_HEAD:], draw)


def run_frame(data: bytes) -> None:
    """What decodes comes back as it went; all else is a `PeerError` of a bounded length."""
    try:
        frame = wire.decode(data)
    except PeerError as error:
        assert len(str(error)) < 8192, "an error that a peer can make as long as it likes"
        return
    again = wire.encode(*frame)
    assert wire.encode(*wire.decode(again)) == again
    match frame.message:
        case m.Hello(layout=layout, columns=columns) | m.Welcome(layout=layout, columns=columns):
            _use_layout(layout)
            _use_columns(columns)
        case m.Open(items=items, asked=asked):
            _use_items(items, asked)


def _use_columns(theirs: tuple[Placed, ...]) -> None:
    """What a peer's columns make of a row: nothing outside of either."""
    ours = Columns(COLUMNS)
    for src, dst in ((ours.placed, theirs), (theirs, ours.placed)):
        words = (problem(theirs, ours.row_nbytes), lacking(src, dst))
        shared = share(src, dst)
        assert all(len(each) < 8192 for each in (*words, *shared.left_out))
        if not words[0]:
            assert all(0 <= at <= ours.row_nbytes - n for s, d, n in shared.spans for at in (s, d))
            assert sum(len(data) for _, data in shared.unpack(bytes(shared.nbytes))) == shared.nbytes


def _use_layout(layout: Layout) -> None:
    """All that cores and nodes compute from a layout they accepted."""
    problem = layout_problem(layout)
    if problem:
        assert len(problem) < 8192
        return
    layout.digest()
    wire_order(own_layout(), layout)
    if incompatible(own_layout(), layout, Topology(), Topology()):
        return
    try:
        dealt = shares({0: layout}, own_layout(), (1, 0))[0]
    except UsageError:
        return
    rects = (Rect("kv", 0, 8, 0, 2),)
    plan = DirectPlan(own_layout(), selects(own_layout(), dealt, rects), layout, selects(layout, dealt, rects))
    plan.n_descriptors({"kv": (0, 8)})
    last = layout.component("kv").n_items - 1
    pages = np.array([min(last, (1 << 31) - 1), 0], np.int32)
    try:
        spans = plan.spans({"kv": (0, 8)}, {"kv": Index.of(np.array([3, 1], np.int32))}, {"kv": Index.of(pages)})
    except UsageError:
        return
    check_inside(spans.dst.tolist(), spans.nbytes.tolist(), layout.regions)
    check_inside(spans.src.tolist(), spans.nbytes.tolist(), own_layout().regions)


def check_inside(starts: list[int], sizes: list[int], regions: tuple[Region, ...]) -> None:
    """Every span lies in one region."""
    for start, nbytes in zip(starts, sizes, strict=True):
        assert any(region.base <= start and start + nbytes <= region.base + region.nbytes for region in regions), (
            f"a span of {nbytes} bytes at {start:#x} is outside every region"
        )


def _use_items(items: tuple[m.Items, ...], asked: tuple[m.Asked, ...]) -> None:
    by_name = {ask.component: ask for ask in asked}
    for one in items:
        if items_problem(own_layout(), one, by_name.get(one.component)):
            continue
        numbers = np.frombuffer(one.data, "<i4").tolist()
        assert all(0 <= number < 16 for number in numbers)
        assert len(set(numbers)) == len(numbers)


# Tags.


def tag_seeds() -> list[bytes]:
    rects = (Rect("kv", 0, 8, 0, 2), Rect("swa", 4, 8, 1, 2))
    tags = [wire.Tag(m.SessionId(1, 2), 1, 0, lane, 0, rects[:n], 7) for lane, n in ((0, 1), (m.DIRECT, 2), (1, 0))]
    return [wire.encode_tag(tag, COMPONENTS) for tag in tags]


def run_tag(data: bytes) -> None:
    try:
        tag = wire.decode_tag(data, COMPONENTS)
    except PeerError as error:
        assert str(error)
        return
    assert wire.encode_tag(tag, COMPONENTS)[4:] == data[4:], "all but the versions, which a later node may raise"
    assert wire.tag_session(data) == tag.session


# Descriptions of the local transport.

_MEMORY = np.zeros(4096, np.uint8)


@cache
def _ends() -> tuple[LocalTransport, LocalTransport, Region]:
    """One that meets strangers, an honest one beside it, and memory of the honest one."""
    honest, region = LocalTransport(), Region(_MEMORY.ctypes.data, _MEMORY.nbytes)
    honest.register([region])
    return LocalTransport(), honest, region


def description_seeds() -> list[bytes]:
    return [bytes(8), b"\xff\x93\xafpdstage.local.1\x94\xa0\x80\x01\x02\xa0\x90", b"\xfe1234\xc0"]


def run_description(data: bytes) -> None:
    """`data`: choices that alter a true description, or, after a first byte of 0xff, the description itself."""
    victim, honest, region = _ends()
    body = data[1:] if data[:1] == b"\xff" else altered_msgpack(honest.describe()[4:], Draw(data))
    described = data if data[:1] == b"\xfe" else zlib.crc32(body).to_bytes(4, "little") + body
    try:
        victim.connect("peer", described)
        victim.prepare("peer", [region])
    except PdstageError as error:
        assert len(str(error)) < 1 << 20
    else:
        life = victim.links["peer"].description.life
        assert life == honest._inbox.name, "connected to a transport that it was not told of"
    finally:
        victim.disconnect("peer")
