"""The wire: a tag comes back as it went, and no input raises but `PeerError`; golden frames hold the messages."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdstage import PeerError
from pdstage.plan import Rect
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from tests import golden

U64 = st.integers(0, 2**64 - 1)
SESSION = st.builds(m.SessionId, U64, U64)


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


@given(st.sampled_from(list(golden.FRAMES.values())), st.data())
def test_a_damaged_or_truncated_frame_raises_peer_error_only(message: m.AnyMessage, data: st.DataObject) -> None:
    frame = bytearray(wire.encode(m.SessionId(1, 2), 3, message))
    with pytest.raises(PeerError):
        wire.decode(bytes(frame[: data.draw(st.integers(0, len(frame) - 1))]))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire.decode(bytes(frame))
    except PeerError as error:
        assert str(error)


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


def test_the_largest_tag_is_as_large_as_a_message_may_carry() -> None:
    """The limit is a number of `messages`, which knows nothing of how a tag is packed."""
    tag = wire.encode_tag(wire.Tag(m.SessionId(1, 2), 3, 4, 5, 6, (Rect("kv", 0, 1, 0, 1),) * m.MAX_RECTS), NAMES)
    assert len(tag) == m.MAX_TAG_NBYTES
    assert len(wire.decode_tag(tag, NAMES).rects) == m.MAX_RECTS
    assert wire.decode(wire.encode(m.SessionId(1, 2), 3, m.Tagged(tag))).message == m.Tagged(tag)
    with pytest.raises(PeerError, match="does not decode"):
        wire.decode(wire.encode(m.SessionId(1, 2), 3, m.Tagged(tag + b"\0")))


@pytest.mark.parametrize(
    "message",
    [
        m.Lease(1, 0, 0, -1, 0, 512, 0), m.Lease(1, 0, 0, 0, -256, 512, 0), m.Watermark(0, 1 << 63), m.Ask(-1, b"i1"),
        m.Ask(1, b"i" * 257), m.Abort(1, "x" * 4097, False), m.Refused(1, 0, 0, "w" * 257, 0),
    ],
    ids=["lane", "cursor", "watermark", "epoch", "room", "reason", "why"],
)  # fmt: skip
def test_numbers_have_63_bits_and_texts_an_end_by_the_schema(message: m.AnyMessage) -> None:
    with pytest.raises(PeerError, match="does not decode"):
        wire.decode(wire.encode(m.SessionId(1, 2), 3, message))
