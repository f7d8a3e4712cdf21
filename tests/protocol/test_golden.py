"""Compatibility: golden bytes kept for ever, and what is refused in which words.

docs/wire.md has the rules that these hold.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, get_args

import msgspec
import pytest

from pdstage import PeerError
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.session import PeerWarning, Send
from pdstage.protocol.wire import OLDEST, VERSION, talks_with
from tests import golden
from tests.pair import World, assert_failed

PINNED = {2: "6759d3e5cb25d5b773087710f02fbf8ae7e8a7ff6efcbd5fd6ea06259203e4a5"}
"""SHA-256 of every version's golden file. From a version's first release on its line never changes: what the other side
of a rolling upgrade says does not change either.
"""
TALKED_WITH = range(OLDEST, VERSION + 1)
HEADER_NBYTES = 28


def held(version: int) -> dict[str, Any]:
    path = golden.path(version)
    assert path.exists(), f"version {version} has no golden file: run tests.golden; pin it"
    return json.loads(path.read_text())


def entries(part: str) -> list[Any]:
    return [
        pytest.param(version, entry, id=f"v{version} {name}")
        for version in TALKED_WITH
        for name, entry in held(version)[part].items()
    ]


def test_golden_files_never_change() -> None:
    assert list(PINNED) == list(TALKED_WITH), "a new wire version has a file of its own: python -m tests.golden"
    for version, digest in PINNED.items():
        found = hashlib.sha256(golden.path(version).read_bytes()).hexdigest()
        assert found == digest, f"v{version}.json changed: raise wire.VERSION, and keep the file of {version}"


def test_todays_bytes_are_this_versions() -> None:
    found = golden.path(VERSION).read_text()
    assert golden.lines() == found, "the wire changed: raise wire.VERSION, then python -m tests.golden"


def test_every_message_has_a_golden_frame() -> None:
    kinds = {entry["kind"] for entry in held(VERSION)["frames"].values()}
    assert kinds == {kind.__name__ for kind in get_args(m.AnyMessage)}


@pytest.mark.parametrize(("version", "entry"), entries("frames"))
def test_todays_decoder_reads_every_frame_it_talks_with(version: int, entry: dict[str, Any]) -> None:
    file, data = held(version), bytes.fromhex(entry["hex"])
    frame = wire.decode(data)
    assert type(frame.message).__name__ == entry["kind"]
    assert frame[:2] == (tuple(file["session"]), file["seq"])
    found = golden.readable(frame.message)
    assert {name: found[name] for name in entry["fields"]} == entry["fields"]
    assert data[2:4] == bytes([version, file["oldest"]])


@pytest.mark.parametrize(("version", "entry"), entries("tags"))
def test_todays_decoder_reads_every_tag_it_talks_with(version: int, entry: dict[str, Any]) -> None:
    tag = wire.decode_tag(bytes.fromhex(entry["hex"]), tuple(held(version)["components"]))
    assert golden.readable(tag) == entry["fields"]


# What may be added without harm.


def later(data: bytes, *, version: int = VERSION + 1, oldest: int = OLDEST) -> bytes:
    """The frame as a node of another version would have sent it."""
    return data[:2] + bytes([version, oldest]) + data[4:]


def test_which_versions_talk() -> None:
    assert talks_with(VERSION, OLDEST)
    assert talks_with(VERSION + 1, VERSION), "it is later, and knows how to talk with us"
    assert talks_with(200, 1)
    assert not talks_with(VERSION + 1, VERSION + 1)
    assert not talks_with(OLDEST - 1, OLDEST - 1)
    assert not talks_with(VERSION, 0)


@pytest.mark.parametrize("message", golden.FRAMES.values(), ids=golden.FRAMES)
def test_a_later_versions_new_field_is_ignored(message: m.AnyMessage) -> None:
    """Fields are added at the end of a message and have a default: either side may be the later one."""
    body = msgspec.msgpack.decode(wire.encode(golden.SESSION, 3, message)[HEADER_NBYTES:])
    frame = later(wire.encode(golden.SESSION, 3, message)[:HEADER_NBYTES] + msgspec.msgpack.encode([*body, {"new": 1}]))
    assert wire.decode(frame).message == message


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("Hello", 5),
        ("Open", 3),
        ("Open", 4),
        ("Open, direct", 5),
        ("Reserve", 5),
        ("CloseOk", 2),
        ("CloseOk, slots", 4),
    ],
    ids=["LaneSpan", "Share", "Asked", "Items", "Rect", "Written", "Given"],
)
def test_the_tuples_inside_messages_are_closed(message: str, field: int) -> None:
    """What would break: one number more in a Share, a Rect... So such news is a field of the message."""
    frame = wire.encode(golden.SESSION, 3, golden.FRAMES[message])
    body = msgspec.msgpack.decode(frame[HEADER_NBYTES:])
    body[field][0].append(1)
    with pytest.raises(PeerError, match="does not decode"):
        wire.decode(frame[:HEADER_NBYTES] + msgspec.msgpack.encode(body))


def test_features_that_only_the_peer_knows_are_ignored() -> None:
    """On both sides; what both know still counts."""
    world = World(checksums=True)
    prefill, decode = world.p.core, world.d.core
    new = ("teleport", "")
    decode.handshake.hello = msgspec.structs.replace(
        decode.handshake.hello, features=(*new, *decode.handshake.hello.features)
    )
    prefill.handshake.welcome = msgspec.structs.replace(
        prefill.handshake.welcome, features=(*prefill.handshake.welcome.features, *new)
    )
    handle, _ = world.serve(1)
    world.check(handle, 1)
    assert all(session.checksums for core in (prefill, decode) for session in core.sessions.values())
    assert not world.p.peer_warnings + world.d.peer_warnings


# What cannot be talked with.


def test_versions_that_do_not_talk_refuse_each_other_in_words_on_both_sides() -> None:
    """Neither waits for a deadline: prefill answers a Hello that it cannot read, in a form that never changes."""
    world = World()
    prefill, decode = world.p.core, world.d.core
    handle = world.announce(0)
    (hello,) = [item for item in world.queue if isinstance(item.message, m.Hello)]
    world.queue.clear()
    greeting = wire.encode(m.SessionId(next(iter(decode.handshake.peers.values())).nonce, 0), 0, hello.message)
    unread = greeting[:HEADER_NBYTES] + b"\x93\x01" + b"\xc1what a later version says"
    prefill.endpoint.receive(b"D0", later(unread, version=VERSION + 2, oldest=VERSION + 1))
    warning, answer = prefill.endpoint.take_effects()
    words = f"wire version {VERSION + 2} from the peer, {VERSION} here"
    assert isinstance(warning, PeerWarning)
    assert words in str(warning.error)
    assert not prefill.sessions
    assert isinstance(answer, Send)
    decode.endpoint.receive(b"P0", later(answer.frame, version=VERSION + 2, oldest=VERSION + 1))
    assert_failed(handle, words)
    assert "prefill refused this node" in str(handle.error)
    assert (prefill.counters.sessions_refused, decode.counters.sessions_refused) == (1, 1)


@pytest.mark.parametrize("name", ["Welcome", "Open", "Heartbeat", "Bye", "NoSession"])
def test_only_a_hello_is_answered_across_versions(name: str) -> None:
    """Two strangers that answered everything would never end."""
    world = World()
    for core in (world.p.core, world.d.core):
        frame = wire.encode(m.SessionId(5, 0), 0, golden.FRAMES[name])
        core.endpoint.receive(b"??", later(frame, oldest=VERSION + 1))
        (effect,) = core.endpoint.take_effects()
        assert isinstance(effect, PeerWarning)


def test_a_message_that_nobody_offered_is_named_and_changes_nothing() -> None:
    """Its sender repeats it until its own deadline; the session goes on (I6)."""
    world = World()
    world.announce(0)
    world.run()
    for node in world.nodes():
        session = node.session
        frame = wire.encode(session.id, session.last_seq + 1, m.Heartbeat())[:HEADER_NBYTES] + b"\x92\x63\x01"
        node.core.endpoint.receive(session.route, frame)
        (warning,) = node.core.endpoint.take_effects()
        assert isinstance(warning, PeerWarning)
        assert f"control message number 99 of wire version {VERSION}" in str(warning.error)
        assert "did not offer it" in str(warning.error)
        assert node.core.sessions
        assert node.core.counters.frames_malformed == 1


def test_a_tag_of_another_version_is_refused() -> None:
    data = wire.encode_tag(golden.TAGS["staged"], golden.COMPONENTS)
    assert wire.tag_session(later(data)) == golden.SESSION
    with pytest.raises(PeerError, match="is not ours"):
        wire.tag_session(later(data, oldest=VERSION + 1))
