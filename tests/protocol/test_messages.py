"""The wire: every message and tag comes back as it went, and no input raises but `PeerError`."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdstage.errors import PeerError
from pdstage.layout import Key, Layout, Region, RowLevel, View
from pdstage.layout.topology import Axis, Topology
from pdstage.plan import Rect, Share
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from tests import golden

U64 = st.integers(0, 2**64 - 1)
NUMBER = st.integers(0, 2**63 - 1)
WORD = st.text(max_size=12)
FINITE = st.floats(allow_nan=False)
RECT = st.builds(Rect, WORD, NUMBER, NUMBER, st.integers(0, 2**31), st.integers(0, 2**31))
RECTS = st.lists(RECT, max_size=4).map(tuple)
SHARE = st.builds(Share, WORD, WORD, st.tuples(NUMBER, NUMBER, NUMBER), NUMBER, NUMBER)
SESSION = st.builds(m.SessionId, U64, U64)


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
            rows=(RowLevel(1, count * width),),
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
        st.lists(st.builds(m.Given, WORD, NUMBER), max_size=3).map(tuple),
    ),
    m.CloseFailed: st.builds(m.CloseFailed, NUMBER, WORD),
    m.Closed: st.builds(m.Closed, NUMBER),
    m.Abort: st.builds(m.Abort, NUMBER, WORD, st.booleans(), st.binary(max_size=8)),
    m.Drained: st.builds(m.Drained, NUMBER),
    m.Heartbeat: st.builds(
        m.Heartbeat,
        st.integers(0, 2),
        st.lists(st.builds(m.Wanted, NUMBER, st.binary(max_size=32))).map(tuple),
        st.lists(st.binary(max_size=32)).map(tuple),
    ),
    m.Bye: st.builds(m.Bye),
    m.NoSession: st.builds(m.NoSession, U64),
    m.Tagged: st.builds(m.Tagged, st.binary(max_size=128)),
}
ANY = st.one_of(list(MESSAGES.values()))


@given(SESSION, U64, ANY)
def test_round_trip(session_id: m.SessionId, seq: int, message: m.AnyMessage) -> None:
    assert wire.decode(wire.encode(session_id, seq, message)) == wire.Frame(session_id, seq, message)


@given(st.binary(max_size=200))
@example(b"")
@example(b"Pd" + bytes(26))
@example(b"Pd\1\1" + bytes(24) + b"\xc1")
@example(b"Pd\1\1" + bytes(24) + b"\x90")
@example(b"Pd\1\1" + bytes(24) + b"\x92\x14" + b"\x91" * 100_000 + b"\xc0")
@example(b"Pd\1\1" + bytes(24) + b"\x92\x03\xa2\xff\xfe")
def test_garbage_raises_peer_error_only(data: bytes) -> None:
    try:
        wire.decode(data)
    except PeerError as error:
        assert str(error)


@given(ANY, st.data())
def test_a_damaged_frame_raises_peer_error_only(message: m.AnyMessage, data: st.DataObject) -> None:
    frame = bytearray(wire.encode(m.SessionId(1, 2), 3, message))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire.decode(bytes(frame))
    except PeerError as error:
        assert str(error)


@given(ANY, st.data())
def test_a_truncated_frame_is_refused(message: m.AnyMessage, data: st.DataObject) -> None:
    frame = wire.encode(m.SessionId(1, 2), 3, message)
    with pytest.raises(PeerError):
        wire.decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


def test_an_oversize_frame_is_refused_unread() -> None:
    with pytest.raises(PeerError, match="frame of 16777217 bytes"):
        wire.decode(bytes(wire.MAX_FRAME_NBYTES + 1))


def test_a_layout_that_contradicts_itself_is_the_peers_fault() -> None:
    frame = wire.encode(m.SessionId(1, 2), 3, golden.HELLO)
    bad = frame.replace(b"\xa5width\x10", b"\xa5width\x00")
    assert bad != frame
    with pytest.raises(PeerError, match="has a size below 1"):
        wire.decode(bad)


NAMES = ("dsa", "kv", "swa")
TAG_RECTS = st.lists(
    st.builds(Rect, st.sampled_from(NAMES), U64, U64, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)),
    max_size=m.MAX_RECTS,
).map(tuple)
TAGS = st.builds(wire.Tag, SESSION, U64, U64, st.integers(0, m.DIRECT), U64, TAG_RECTS, U64)


@given(TAGS)
def test_tag_round_trip(tag: wire.Tag) -> None:
    data = wire.encode_tag(tag, NAMES)
    assert wire.tag_session(data) == tag.session
    assert wire.decode_tag(data, NAMES) == tag


@given(TAGS, st.data())
def test_a_damaged_tag_raises_peer_error_only(tag: wire.Tag, data: st.DataObject) -> None:
    whole = wire.encode_tag(tag, NAMES)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(PeerError):
        wire.decode_tag(whole[:cut], NAMES)
    with pytest.raises(PeerError):
        wire.decode_tag(whole + b"\0", NAMES)
    damaged = bytearray(whole)
    damaged[cut] ^= data.draw(st.integers(1, 255))
    try:
        wire.decode_tag(bytes(damaged), NAMES)
    except PeerError as error:
        assert str(error)


@given(st.binary(max_size=100))
def test_a_garbage_tag_raises_peer_error_only(data: bytes) -> None:
    with pytest.raises(PeerError):
        wire.tag_session(data)
    with pytest.raises(PeerError):
        wire.decode_tag(data, NAMES)


def test_a_tag_about_an_unknown_component_is_refused() -> None:
    data = wire.encode_tag(wire.Tag(m.SessionId(1, 2), 3, 4, 5, 6, (Rect("swa", 0, 1, 0, 1),)), NAMES)
    with pytest.raises(PeerError, match="component number 2"):
        wire.decode_tag(data, ("dsa", "kv"))


def test_the_largest_tag_is_as_large_as_a_message_may_carry() -> None:
    """The limit is a number of `messages`, which knows nothing of how a tag is packed."""
    rects = (Rect("kv", 0, 1, 0, 1),) * m.MAX_RECTS
    tag = wire.encode_tag(wire.Tag(m.SessionId(1, 2), 3, 4, 5, 6, rects), NAMES)
    assert len(tag) == m.MAX_TAG_NBYTES
    assert wire.decode(wire.encode(m.SessionId(1, 2), 3, m.Tagged(tag))).message == m.Tagged(tag)
    with pytest.raises(PeerError, match="does not decode"):
        wire.decode(wire.encode(m.SessionId(1, 2), 3, m.Tagged(tag + b"\0")))
