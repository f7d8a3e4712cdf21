"""What peers say as bytes: frames of the control plane, and the tags that travel with the data.

A frame is a fixed header (magic, version, oldest version talked with, the session's two incarnations, seq) and one
msgpack body. A tag is a fixed header and its rectangles; it travels with the data, outside the frames' order. What may
change in them is said in docs/wire.md. Source: msgspec for the bodies.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, get_args

import msgspec

from pdstage.errors import PeerError
from pdstage.plan import Rect, Rects
from pdstage.protocol.messages import (
    MAX_RECTS,
    AnyMessage,
    Bye,
    Heartbeat,
    Hello,
    HelloRefused,
    NoSession,
    SessionId,
    Welcome,
)

VERSION = 2
"""Rises with every change of any message's or tag's bytes."""
OLDEST = 2
"""The oldest version this one talks with; rises when an older one could no longer read or be read."""


def talks_with(version: int, oldest: int) -> bool:
    """Whether this node and one of `version`, which talks with `oldest` and later, understand each other."""
    return version >= OLDEST and 1 <= oldest <= VERSION


class OtherVersion(PeerError):
    """A frame of a version that this node does not talk with. `greets`: it is a Hello, whose `session` to answer."""

    def __init__(self, version: int, oldest: int, session_id: SessionId, *, greets: bool) -> None:
        super().__init__(
            f"wire version {version} from the peer, {VERSION} here; the peer talks with {oldest} and later, "
            f"this node with {OLDEST} and later",
            remedy="run releases on both sides whose wire versions talk with each other",
            version=version,
        )
        self.session, self.greets = session_id, greets


MAX_FRAME_NBYTES = 16 << 20
_FRAME = struct.Struct("<2sBBQQQ")
_TAG = struct.Struct("<2sBBQQQQQQHH")
_RECT = struct.Struct("<HQQII")
_FRAME_MAGIC, _TAG_MAGIC = b"Pd", b"Pt"


class Frame(NamedTuple):
    session: SessionId
    seq: int
    message: AnyMessage


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_KINDS: dict[int, type[AnyMessage]] = {kind.__struct_config__.tag: kind for kind in get_args(AnyMessage)}


def _kind(frame: bytes | memoryview) -> int:
    """The tag of a message that may be of any version, or not one at all (-1): an array's first element."""
    body = frame[_FRAME.size : _FRAME.size + 2]
    return body[1] if len(body) > 1 and 0x91 <= body[0] <= 0x9F and body[1] < 0x80 else -1


def encode(session_id: SessionId, seq: int, message: AnyMessage) -> bytes:
    return _FRAME.pack(_FRAME_MAGIC, VERSION, OLDEST, *session_id, seq) + _encoder.encode(message)


class UnknownMessage(PeerError):
    """A message of a kind that this version does not know: not heard, but no reason to end its session."""


def decode(frame: bytes | memoryview) -> Frame:
    """Raises `PeerError` for anything that is not a frame, `OtherVersion` for one of a version not talked with."""
    session_id, seq = decode_head(frame)
    return Frame(session_id, seq, decode_body(frame))


def decode_head(frame: bytes | memoryview) -> tuple[SessionId, int]:
    """Whose frame it is, and its seq. Raises as `decode` does, for what the header tells."""
    if not _FRAME.size < len(frame) <= MAX_FRAME_NBYTES:
        raise PeerError(f"a control frame of {len(frame)} bytes", remedy=f"frames have {_FRAME.size} to 16 MiB")
    magic, version, oldest, at_decode, at_writer, seq = _FRAME.unpack_from(frame)
    if magic != _FRAME_MAGIC:
        raise PeerError(
            f"a control frame that starts with {bytes(magic)!r}", remedy="only pdstage nodes may connect here"
        )
    session_id = SessionId(at_decode, at_writer)
    usual = (version, oldest) == (VERSION, OLDEST)
    if not usual and not talks_with(version, oldest) and (kind := kind_of(frame)) is not HelloRefused:
        raise OtherVersion(version, oldest, session_id, greets=kind is Hello)
    return session_id, seq


OUTSIDE_A_SESSION: tuple[type[AnyMessage], ...] = Hello, Welcome, HelloRefused, Bye, NoSession
"""What may be said where there is no session, or none any more."""
UNREAD: AnyMessage = Heartbeat()
"""In place of any other message of no live session, which is not read."""


def kind_of(frame: bytes | memoryview) -> type[AnyMessage] | None:
    """Which message a frame says it is, without reading it; None for none that is known, which `decode_body` refuses
    at its first bytes.
    """
    return _KINDS.get(_kind(frame))


def decode_body(frame: bytes | memoryview) -> AnyMessage:
    """The message of a frame whose head is good. Raises `PeerError` for one that does not decode."""
    try:
        return _decoder.decode(memoryview(frame)[_FRAME.size :])
    except (msgspec.MsgspecError, RecursionError) as error:
        kind = _kind(frame)
        if kind >= 0 and kind not in _KINDS:
            raise UnknownMessage(
                f"control message number {kind} of wire version {VERSION}, which this node does not know",
                remedy="the greeting did not offer it: check the peer's version",
            ) from error
        raise PeerError(
            f"a control message that does not decode: {error}", remedy="check the peer's version"
        ) from error
    except ValueError as error:  # UsageError of a layout that contradicts itself
        raise PeerError(f"a control message that contradicts itself: {error}", remedy="check the peer") from error


class Tag(NamedTuple):
    """What a finished write says of itself. `lane` DIRECT means in place, AUX the aux row; then `cursor` is 0.

    `checksum` (`pdstage.kernels.checksum`) is of a staged chunk in a session where both sides offered it; else 0.
    """

    session: SessionId
    epoch: int
    chunk: int
    lane: int
    cursor: int
    rects: Rects
    checksum: int = 0


def encode_tag(tag: Tag, components: tuple[str, ...]) -> bytes:
    """`components` are the destination's component names in layout order; a tag names them by number."""
    head = _TAG.pack(
        _TAG_MAGIC, VERSION, OLDEST, *tag.session, tag.epoch, tag.chunk, tag.cursor, tag.checksum, tag.lane,
        len(tag.rects),
    )  # fmt: skip
    return head + b"".join(_RECT.pack(components.index(rect.component), *rect[1:]) for rect in tag.rects)


def tag_session(data: bytes) -> SessionId:
    """The session a tag belongs to. Raises `PeerError` for what is not a tag of a version talked with."""
    if len(data) < _TAG.size or data[:2] != _TAG_MAGIC or not talks_with(data[2], data[3]):
        raise PeerError(f"a tag of {len(data)} bytes that is not ours", remedy="only pdstage nodes may write here")
    return SessionId(*_TAG.unpack_from(data)[3:5])


def decode_tag(data: bytes, components: tuple[str, ...]) -> Tag:
    """Raises `PeerError` for anything but a well-formed tag about `components`."""
    session_id = tag_session(data)
    epoch, chunk, cursor, checksum, lane, n_rects = _TAG.unpack_from(data)[5:]
    if n_rects > MAX_RECTS or len(data) != _TAG.size + n_rects * _RECT.size:
        raise PeerError(f"a tag of {len(data)} bytes that announces {n_rects} rectangles", remedy="check the peer")
    rects = []
    for number, *rest in _RECT.iter_unpack(data[_TAG.size :]):
        if number >= len(components):
            raise PeerError(f"a tag about component number {number}", remedy=f"there are {len(components)} here")
        rects.append(Rect(components[number], *rest))
    return Tag(session_id, epoch, chunk, lane, cursor, tuple(rects), checksum)
