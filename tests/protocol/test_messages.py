"""The wire: every message and tag comes back as it went, its bytes never change unnoticed, and no input raises but
`PeerError`.
"""

from __future__ import annotations

import hashlib
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdstage.errors import PeerError, UsageError
from pdstage.layout import Key, Layout, Region, Row, View
from pdstage.plan import Rect, Share
from pdstage.protocol import messages as m
from pdstage.topology import Axis, Topology

U64 = st.integers(0, 2**64 - 1)
NUMBER = st.integers(0, 2**63 - 1)
WORD = st.text(max_size=12)
FINITE = st.floats(allow_nan=False)
RECT = st.builds(Rect, WORD, NUMBER, NUMBER, st.integers(0, 2**31), st.integers(0, 2**31))
RECTS = st.lists(RECT, max_size=4).map(tuple)
SHARE = st.builds(Share, WORD, WORD, st.tuples(NUMBER, NUMBER, NUMBER), NUMBER, NUMBER)
SESSION = st.builds(m.Session, U64, U64)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    n_layers, count, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 64))
    first = draw(st.integers(0, 3))
    views = [
        View(
            key=Key("kv", "k", layer),
            region=0,
            offset=layer * 4 * 2 * count * width,
            n_items=4,
            item_stride=2 * count * width,
            tokens_per_item=2,
            rows=(Row(1, count * width),),
            shards=count,
            shard_stride=width,
            width=width,
            axis=Axis("kv_head", first + count + draw(st.integers(0, 3)), first, count),
            format=draw(WORD),
        )
        for layer in range(n_layers)
    ]
    region = Region(
        draw(U64) & ~0xFFF,
        n_layers * 4 * 2 * count * width,
        draw(st.sampled_from(["cpu", "cuda"])),
        draw(st.integers(0, 7)),
    )
    return Layout.of([region], views, slots=draw(st.sampled_from([(), ("kv",)])))


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    sizes = [draw(st.integers(1, 8)) for _ in range(4)]
    ranks = [draw(st.integers(0, size - 1)) for size in sizes]
    return Topology(*(n for pair in zip(sizes, ranks, strict=True) for n in pair))


LANES = st.lists(st.builds(m.LaneSpan, NUMBER, NUMBER, WORD, st.integers(0, 7)), max_size=3).map(tuple)
ITEMS = st.builds(
    lambda name, first, data: m.Items(name, first, memoryview(data)), WORD, NUMBER, st.binary(max_size=64)
)
WORDS = st.lists(WORD, max_size=3).map(tuple)
MESSAGES: dict[type, st.SearchStrategy] = {
    m.Hello: st.builds(m.Hello, topologies(), layouts(), WORD, st.binary(max_size=32), LANES, FINITE, WORDS),
    m.Welcome: st.builds(m.Welcome, topologies(), layouts(), WORD, st.binary(max_size=32), FINITE, WORDS),
    m.HelloRefused: st.builds(m.HelloRefused, WORD),
    m.Ask: st.builds(m.Ask, NUMBER, st.binary(max_size=32)),
    m.Asking: st.builds(m.Asking, NUMBER, st.booleans()),
    m.Open: st.builds(
        m.Open,
        NUMBER,
        st.binary(max_size=32),
        st.lists(SHARE, max_size=3).map(tuple),
        st.lists(st.builds(m.Asked, WORD, NUMBER, NUMBER), max_size=3).map(tuple),
        st.lists(ITEMS, max_size=2).map(tuple),
        NUMBER,
        NUMBER,
        st.booleans(),
        st.integers(-5, 5),
        FINITE,
    ),
    m.Opened: st.builds(m.Opened, NUMBER, WORD, WORD),
    m.Reserve: st.builds(m.Reserve, NUMBER, NUMBER, NUMBER, NUMBER, RECTS),
    m.Lease: st.builds(m.Lease, *[NUMBER] * 7),
    m.Refused: st.builds(m.Refused, NUMBER, NUMBER, NUMBER, WORD, NUMBER),
    m.Watermark: st.builds(m.Watermark, NUMBER, NUMBER),
    m.Recall: st.builds(m.Recall, *[NUMBER] * 6),
    m.Returned: st.builds(m.Returned, *[NUMBER] * 5),
    m.CloseOk: st.builds(
        m.CloseOk,
        NUMBER,
        st.lists(st.builds(m.Written, NUMBER, NUMBER, NUMBER), max_size=3).map(tuple),
        st.none() | st.binary(max_size=32),
    ),
    m.CloseFailed: st.builds(m.CloseFailed, NUMBER, WORD),
    m.Closed: st.builds(m.Closed, NUMBER),
    m.Abort: st.builds(m.Abort, NUMBER, WORD, st.booleans()),
    m.Drained: st.builds(m.Drained, NUMBER),
    m.Heartbeat: st.builds(m.Heartbeat),
    m.Bye: st.builds(m.Bye),
    m.NoSession: st.builds(m.NoSession, U64),
}
ANY = st.one_of(list(MESSAGES.values()))

_VIEW = View(
    key=Key("kv", "k", 0),
    region=0,
    offset=0,
    n_items=4,
    item_stride=64,
    tokens_per_item=2,
    rows=(Row(1, 32),),
    shards=2,
    shard_stride=16,
    width=16,
    axis=Axis("kv_head", 4, 2, 2),
    format="bf16",
)
_LAYOUT = Layout.of([Region(0x1000, 256, "cuda", 3)], [_VIEW])
_TOPOLOGY = Topology(2, 1)
_RECT = Rect("kv", 0, 8, 0, 2)
SAMPLES = [
    m.Hello(_TOPOLOGY, _LAYOUT, "nixl", b"d", (m.LaneSpan(4096, 8192, "cuda", 3),), 10.0, ("direct",)),
    m.Welcome(_TOPOLOGY, _LAYOUT, "nixl", b"d", 10.0, ()),
    m.HelloRefused("no"),
    m.Ask(7, b"i13"),
    m.Asking(7, True),
    m.Open(
        7,
        b"i13",
        (Share("kv", "k", (0, 2, 1), 2, 2),),
        (m.Asked("kv", 0, 8),),
        (m.Items("kv", 0, memoryview(b"\1\0\0\0")),),
        0,
        1,
        True,
        5,
        60.0,
    ),
    m.Opened(7, "accepted", ""),
    m.Reserve(7, 1, 2, 4096, (_RECT,)),
    m.Lease(7, 1, 2, 0, 8192, 4096, 256),
    m.Refused(7, 1, 2, "too_big", 2048),
    m.Watermark(0, 8192),
    m.Recall(7, 1, 2, 0, 8192, 256),
    m.Returned(7, 1, 2, 0, 8192),
    m.CloseOk(7, (m.Written(1, 0, 8192), m.Written(2, m.DIRECT, 0)), b"aux"),
    m.CloseFailed(7, "why"),
    m.Closed(7),
    m.Abort(7, "why", False),
    m.Drained(7),
    m.Heartbeat(),
    m.Bye(),
    m.NoSession(2**64 - 1),
]
# These on the wire in version 1. A change here is a change of the protocol: raise messages.VERSION with it.
GOLDEN = {
    "Hello": "f013bc9d0627ed21f58216a921c4d8cec7f16e709a62719dc2d559a258e93f5d",
    "Welcome": "391853efd14dbffde42927583d2c84683ddc4410462bf13586aa876183331a8a",
    "HelloRefused": "9203a26e6f",
    "Ask": "930407c403693133",
    "Asking": "930507c3",
    "Open": "7fcadd0585af20dbbd647114bc8d55a8333bb6eb3e91b843b0ceaad237930edd",
    "Opened": "940707a86163636570746564a0",
    "Reserve": "9608070102cd10009195a26b7600080002",
    "Lease": "980907010200cd2000cd1000cd0100",
    "Refused": "960a070102a7746f6f5f626967cd0800",
    "Watermark": "930b00cd2000",
    "Recall": "970c07010200cd2000cd0100",
    "Returned": "960d07010200cd2000",
    "CloseOk": "940e0792930100cd20009302cdffff00c403617578",
    "CloseFailed": "930f07a3776879",
    "Closed": "921007",
    "Abort": "941107a3776879c2",
    "Drained": "921207",
    "Heartbeat": "9113",
    "Bye": "9114",
    "NoSession": "9215cfffffffffffffffff",
}


def test_every_message_is_tried() -> None:
    union = set(get_args(m.AnyMessage))
    assert set(MESSAGES) == union
    assert {type(message) for message in SAMPLES} == union
    assert set(GOLDEN) == {kind.__name__ for kind in union}


@given(SESSION, U64, ANY)
def test_round_trip(session: m.Session, seq: int, message: m.AnyMessage) -> None:
    assert m.decode(m.encode(session, seq, message)) == m.Frame(session, seq, message)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_golden_bytes(message: m.AnyMessage) -> None:
    frame = m.encode(m.Session(1, 2), 3, message)
    head, body = frame[:28].hex(), frame[28:]
    assert head == "50640100010000000000000002000000000000000300000000000000"
    shown = body.hex() if len(body) <= 48 else hashlib.sha256(body).hexdigest()
    assert shown == GOLDEN[type(message).__name__]


@given(st.binary(max_size=200))
@example(b"")
@example(b"Pd" + bytes(26))
@example(b"Pd\1\0" + bytes(24) + b"\xc1")
@example(b"Pd\1\0" + bytes(24) + b"\x90")
@example(b"Pd\1\0" + bytes(24) + b"\x92\x14" + b"\x91" * 100_000 + b"\xc0")
@example(b"Pd\1\0" + bytes(24) + b"\x92\x03\xa2\xff\xfe")
def test_garbage_raises_peer_error_only(data: bytes) -> None:
    try:
        m.decode(data)
    except PeerError as error:
        assert str(error)


@given(ANY, st.data())
def test_a_damaged_frame_raises_peer_error_only(message: m.AnyMessage, data: st.DataObject) -> None:
    frame = bytearray(m.encode(m.Session(1, 2), 3, message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        m.decode(bytes(frame))
    except PeerError as error:
        assert str(error)


@given(ANY, st.data())
def test_a_truncated_frame_is_refused(message: m.AnyMessage, data: st.DataObject) -> None:
    frame = m.encode(m.Session(1, 2), 3, message)
    with pytest.raises(PeerError):
        m.decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


def test_another_version_is_named() -> None:
    frame = bytearray(m.encode(m.Session(1, 2), 3, m.Bye()))
    frame[2:4] = (9).to_bytes(2, "little")
    with pytest.raises(PeerError, match=r"wire version 9 from the peer, 1 here"):
        m.decode(bytes(frame))


def test_another_protocol_is_named() -> None:
    with pytest.raises(PeerError, match=r"starts with b'GE'"):
        m.decode(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n")


def test_an_oversize_frame_is_refused_unread() -> None:
    with pytest.raises(PeerError, match="frame of 16777217 bytes"):
        m.decode(bytes(m.MAX_FRAME_NBYTES + 1))


def test_a_layout_that_contradicts_itself_is_the_peers_fault() -> None:
    frame = m.encode(m.Session(1, 2), 3, SAMPLES[0])
    bad = frame.replace(b"\xa5width\x10", b"\xa5width\x00")
    assert bad != frame
    with pytest.raises(PeerError, match="has a size below 1"):
        m.decode(bad)


NAMES = ("dsa", "kv", "swa")
TAG_RECTS = st.lists(
    st.builds(Rect, st.sampled_from(NAMES), U64, U64, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    max_size=m.MAX_RECTS,
).map(tuple)
TAGS = st.builds(m.Tag, SESSION, U64, U64, st.integers(0, m.DIRECT), U64, TAG_RECTS, U64)


@given(TAGS)
def test_tag_round_trip(tag: m.Tag) -> None:
    data = m.encode_tag(tag, NAMES)
    assert m.tag_session(data) == tag.session
    assert m.decode_tag(data, NAMES) == tag


def test_tag_golden_bytes() -> None:
    tag = m.Tag(m.Session(1, 2), 3, 4, 5, 6, (Rect("kv", 7, 8, 9, 10),), 11)
    numbers = [1, 2, 3, 4, 6, 11]
    head = b"Pt" + (1).to_bytes(2, "little") + b"".join(n.to_bytes(8, "little") for n in numbers)
    rect = (
        (1).to_bytes(2, "little") + b"".join(n.to_bytes(8, "little") for n in (7, 8)) + bytes([9, 0, 0, 0, 10, 0, 0, 0])
    )
    assert m.encode_tag(tag, NAMES) == head + (5).to_bytes(2, "little") + (1).to_bytes(2, "little") + rect


@given(TAGS, st.data())
def test_a_damaged_tag_raises_peer_error_only(tag: m.Tag, data: st.DataObject) -> None:
    whole = m.encode_tag(tag, NAMES)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(PeerError):
        m.decode_tag(whole[:cut], NAMES)
    with pytest.raises(PeerError):
        m.decode_tag(whole + b"\0", NAMES)
    damaged = bytearray(whole)
    damaged[cut] ^= data.draw(st.integers(1, 255))
    try:
        m.decode_tag(bytes(damaged), NAMES)
    except PeerError as error:
        assert str(error)


@given(st.binary(max_size=100))
def test_a_garbage_tag_raises_peer_error_only(data: bytes) -> None:
    with pytest.raises(PeerError):
        m.tag_session(data)
    with pytest.raises(PeerError):
        m.decode_tag(data, NAMES)


def test_a_tag_about_an_unknown_component_is_refused() -> None:
    data = m.encode_tag(m.Tag(m.Session(1, 2), 3, 4, 5, 6, (Rect("swa", 0, 1, 0, 1),)), NAMES)
    with pytest.raises(PeerError, match="component number 2"):
        m.decode_tag(data, ("dsa", "kv"))


def test_room_ids_of_different_types_differ() -> None:
    rooms = [1, "1", b"1", -1, 2**63, "i1", b"s1", ""]
    assert len({m.room_key(room) for room in rooms}) == len(rooms)


@pytest.mark.parametrize("room", [True, None, 1.5, ("a",), "x" * 256, b"x" * 256, 10**300])
def test_what_is_no_room_id(room: object) -> None:
    with pytest.raises(UsageError, match="no room id"):
        m.room_key(room)  # type: ignore[arg-type]
