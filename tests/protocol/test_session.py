"""Sessions: seq, staleness, heartbeats, silence, late turns, greetings that are refused, repeated, replaced or left
half-open.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from pdstage import Axis, Component, Config, DeadlineExceeded, Layout, PeerError, Region, RowLevel, State
from pdstage.protocol import messages as m
from pdstage.protocol import wire
from pdstage.protocol.compat import layout_problem
from pdstage.protocol.prefill import PrefillCore
from pdstage.protocol.session import Attach, PeerWarning, Renew, Send, Session
from tests.pair import Decode, Prefill, World, assert_failed, is_kind, is_message
from tests.rows import either_side

HELLO = World().d.core.handshake.hello


def greet(core: PrefillCore, route: bytes = b"D0", nonce: int = 5, **change: object) -> list[object]:
    """What `core` does at a Hello with these fields changed."""
    hello = msgspec.structs.replace(HELLO, **change)
    core.endpoint.receive(route, wire.encode(m.SessionId(nonce, 0), 0, hello))
    return core.endpoint.take_effects()


def warnings(effects: list[object]) -> list[str]:
    return [str(effect.error) for effect in effects if isinstance(effect, PeerWarning)]


def met(world: World) -> tuple[Prefill, Decode, Session, Session]:
    """A world whose pair has greeted, with no room left."""
    handle = world.announce(0)
    world.run()
    world.abort(world.d, handle, "only to greet")
    world.run()
    assert world.p.session.id == world.d.session.id
    return world.p, world.d, world.p.session, world.d.session


def test_a_frame_of_an_unknown_session_is_counted_and_answered_with_our_name() -> None:
    prefill, decode, session, _ = met(World())
    for node, name in ((prefill, b"D0"), (decode, b"P0")):
        core = node.core
        stale = core.counters.frames_stale
        other = m.SessionId(session.id.decode ^ 1, session.id.writer)
        core.endpoint.receive(name, wire.encode(other, 9, m.Heartbeat()))
        (answer,) = core.endpoint.take_effects()
        assert isinstance(answer, Send)
        assert wire.decode(answer.frame) == wire.Frame(other, 0, m.NoSession(core.incarnation))
        assert core.counters.frames_stale == stale + 1
        core.endpoint.receive(name, wire.encode(other, 9, m.NoSession(1)))
        core.endpoint.receive(name, wire.encode(other, 9, m.Bye()))
        assert not core.endpoint.take_effects(), "NoSession and Bye are not answered: two strangers would never end"


def test_a_silent_peer_is_lost_after_its_own_promise() -> None:
    """I10."""
    world = World(max_silence_s=2.0)
    _, decode, _, session = met(world)
    handle = world.receive(1)
    world.run()
    world.drop(lambda item: item.src is world.p)
    received_at = session.received_at
    world.run(until=received_at + 1.9)
    assert handle.state is State.WAITING_FOR_INPUT
    world.run(until=received_at + 2.1)
    assert_failed(handle, "silent for 2.0 s", DeadlineExceeded)
    assert session.id not in decode.core.sessions


def test_a_late_turn_pushes_its_deadlines_by_the_excess() -> None:
    """A process that was stopped judges nobody by the time it slept: its peers had no chance to be heard. Each is given
    as much longer, from when it was last heard.
    """
    world = World(max_silence_s=2.0, wait_s=8.0)
    prefill, decode, at_prefill, session = met(world)
    handle = world.receive(1)
    world.run(until=4.0)
    core, start = decode.core, decode.core.endpoint._ticked_at

    def wait_ends_at() -> float:
        return next(at for key, (at, *_) in core.endpoint.timers._at.items() if key[-1] == "wait")

    before = wait_ends_at()
    world.now = start + 1.5
    world.say(decode, m.Heartbeat())
    world.now = start + 30.0
    core.endpoint.tick()
    assert not handle.ended, handle.error
    assert wait_ends_at() == pytest.approx(before + 28.0), "30 s late, of which it had promised 2"
    assert session.id in core.sessions, "so it is as if the peer had been heard half a second ago"
    world.now = start + 31.4
    core.endpoint.tick()
    assert session.id in core.sessions
    world.now = start + 31.6
    core.endpoint.tick()
    assert session.id not in core.sessions
    assert prefill.core.sessions == {at_prefill.id: at_prefill}


def test_an_idle_node_keeps_its_deadlines() -> None:
    """A node without peers never ticks; the deadlines of the first room after an hour must hold all the same (I10)."""
    world = World(hello_s=5.0)
    world.drop(is_kind("frame"))
    decode = world.d
    decode.core.endpoint.tick()
    world.now = 3600.0
    handle = world.announce(1)
    decode.core.endpoint.tick()
    world.run(until=3606.0)
    assert_failed(handle, "prefill gave no answer in 5.0 s")


def test_a_half_open_session_expires_whatever_it_promised() -> None:
    world = World(hello_s=3.0)
    core = world.p.core
    greet(core, max_silence_s=1e300)
    for world.now in (1.0, 2.9):
        core.endpoint.tick()
        assert core.sessions
    world.now = 3.1
    core.endpoint.tick()
    assert not core.sessions
    assert core.counters.sessions_lost == 0, "it never was one"


def test_half_open_sessions_are_capped_and_keep_nobody_out() -> None:
    """At the limit the oldest goes, of the route that greets if it has one: a flood of Hellos ends its own (I14)."""
    core = World(max_peers=3).p.core
    effects = greet(core, b"first", 100)
    for n in range(5):
        effects += greet(core, b"flood", n + 1)
    assert sorted(session.id.decode for session in core.sessions.values()) == [4, 5, 100]
    for n in range(5):
        effects += greet(core, b"X%d" % n, 200 + n)
    assert sorted(session.id.decode for session in core.sessions.values()) == [202, 203, 204]
    assert len(warnings(effects)) == 8
    assert all("handshake was not completed" in words for words in warnings(effects))
    for session in list(core.sessions.values()):
        core.endpoint.receive(session.route, wire.encode(session.id, 1, m.Heartbeat()))
    greet(core, b"X9", 309)
    assert len(core.sessions) == 3, "confirmed ones are no half-open ones"


def test_the_first_frame_of_a_new_session_replaces_the_old_one() -> None:
    world = World()
    prefill, decode, session, _ = met(world)
    room = world.send(3)
    handle = world.receive(3)
    assert not handle.ended
    assert not room.ended
    fresh = world.restart(decode)
    world.hold(lambda item: item.kind == "frame" and not isinstance(item.message, m.Hello | m.Welcome))
    world.announce(4)
    world.run()
    assert len(prefill.core.sessions) == 2, "half-open beside the old: Hello alone proves nothing"
    world.free()
    world.run()
    assert list(prefill.core.sessions.values()) != [session]
    assert len(prefill.core.sessions) == 1
    assert_failed(room, "greeted again")
    assert fresh.core.sessions


def test_a_lost_session_is_never_resumed() -> None:
    """A late Hello of it begins nothing: its seq would start at zero, its leases be granted twice (I6, I15)."""
    world = World(max_silence_s=1.0)
    prefill, decode, session, _ = met(world)
    hello = wire.encode(m.SessionId(session.id.decode, 0), 0, decode.core.handshake.hello)
    world.drop(is_kind("frame"))
    world.run(until=10.0)
    assert not prefill.core.sessions
    world.free()
    prefill.core.endpoint.take_effects()
    stale = prefill.core.counters.frames_stale
    prefill.core.endpoint.receive(b"D0", hello)
    assert not prefill.core.sessions
    assert not prefill.core.endpoint.take_effects()
    assert prefill.core.counters.frames_stale == stale + 1
    world.announce(1)
    world.run(until=12.0)
    (again,) = prefill.core.sessions
    assert again.decode != session.id.decode


def test_what_prefill_remembers_of_lost_sessions_is_bounded() -> None:
    """I14."""
    prefill = World().p.core
    for n in range(5000):
        greet(prefill, b"D", n + 1)
        prefill.endpoint.receive(b"D", wire.encode(m.SessionId(n + 1, prefill.incarnation), 1, m.Bye()))
        prefill.endpoint.take_effects()
    assert not prefill.sessions
    assert not prefill.handshake._at
    assert len(prefill.handshake.lost) <= 4096
    assert not len(prefill.endpoint.timers)


def test_a_welcome_to_another_greeting_is_ignored() -> None:
    """An answer to a session that was lost since begins nothing."""
    world = World()
    world.hold(is_message(m.Hello))
    handle = world.announce(0)
    core = world.d.core
    core.endpoint.receive(b"P0", wire.encode(m.SessionId(12345, 1000), 1, world.p.core.handshake.welcome))
    assert not core.sessions
    assert handle.state is State.BOOTSTRAPPING
    world.free()
    world.run()
    assert handle.state is State.WAITING_FOR_INPUT


@pytest.mark.parametrize(
    "hello",
    [
        {"lanes": ()},
        {"lanes": (m.LaneSpan(0, 0),)},
        {"lanes": (m.LaneSpan(0, 256),) * m.DIRECT},
        {"max_silence_s": float("inf")},
        {"max_silence_s": float("nan")},
        {"max_silence_s": -1.0},
    ],
    ids=["no lanes", "empty lane", "too many lanes", "inf", "nan", "negative"],
)
def test_a_hello_that_makes_no_sense_is_refused(hello: dict[str, object]) -> None:
    core = World().p.core
    assert [type(effect) for effect in greet(core, **hello)] == [PeerWarning]
    assert not core.sessions


def test_a_peer_that_cannot_be_reached_fails_the_rooms_that_wait_for_it_only() -> None:
    """Its keys do not fit, say: its rooms need not wait for Hello's deadline, and may be tried again (I10)."""
    world = World(hello_s=5.0)
    core = world.d.core
    error = PeerError("the peer refuses this node's key", remedy="add it to its list")
    core.unreachable(b"nobody", error)
    assert not core.endpoint.take_effects()
    room = core.announce(b"i1", deadline_s=60.0)
    core.found(room, {0: b"P9"})
    core.endpoint.take_effects()
    core.unreachable(b"P9", error)
    assert room.state is State.FAILED
    assert room.error is error
    assert room.released
    assert [effect for effect in core.endpoint.take_effects() if isinstance(effect, PeerWarning)] == [
        PeerWarning(b"P9", error)
    ]
    assert core.counters.sessions_refused == 1
    assert core.endpoint.timers.next_at() is None, "nobody is greeted any more"
    assert b"P9" not in core.handshake.peers
    core.found(core.announce(b"i1", deadline_s=60.0), {0: b"P9"})
    greeting = next(e for e in core.endpoint.take_effects() if isinstance(e, Send))
    assert isinstance(wire.decode(greeting.frame).message, m.Hello), "another room greets it again"


def test_the_connection_to_a_peer_that_does_not_answer_is_made_anew() -> None:
    """Its other end may be another's by now. The question is asked on the new one."""
    core = World(hello_s=5.0).d.core
    core.found(core.announce(b"i1", deadline_s=60.0), {0: b"P9"})
    said = []
    while b"P9" in core.handshake.peers:
        said += [
            "hello" if isinstance(e, Send) else e for e in core.endpoint.take_effects() if isinstance(e, Send | Renew)
        ]
        core.endpoint.now = core.endpoint.timers.next_at()
        core.endpoint.tick()
    assert said[:6] == [*["hello"] * 4, Renew(b"P9"), "hello"]
    assert said.count(Renew(b"P9")) >= 1


def test_the_connection_to_a_peer_that_was_silent_is_made_anew() -> None:
    world = World()
    _, decode, _, session = met(world)
    decode.core.endpoint.take_effects()
    for world.now in (60.0, 60.0 + session.silence_s):
        decode.core.endpoint.tick()
    assert session.id not in decode.core.sessions
    assert [e.route for e in decode.core.endpoint.take_effects() if isinstance(e, Renew)] == [session.route]


@either_side
def test_what_strangers_say_is_not_read_where_it_is_of_no_use(side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading takes long: 25 frames of 7.7 MB made most of 600 rooms fail, whose peers heard nothing meanwhile."""
    world = World()
    prefill, decode, *_ = met(world)
    node = prefill if side == "prefill" else decode
    monkeypatch.setattr("pdstage.protocol.session.decode_body", lambda _: pytest.fail("it was read"))
    nobody = m.SessionId(1, 2)
    greeting = m.Welcome(*[None] * 6) if side == "prefill" else decode.core.handshake.hello  # type: ignore[arg-type]
    for message in (m.CloseOk(1, (m.Written(0, 0, 0),) * 1000, None), m.Bye(), m.NoSession(7), greeting):
        node.core.endpoint.receive(b"stranger", wire.encode(nobody, 1, message))
    answers = [effect for effect in node.core.endpoint.take_effects() if isinstance(effect, Send)]
    assert len(answers) == 1, "NoSession to the first; an answer to an answer would have no end"
    assert node.core.sessions


@pytest.mark.parametrize(
    ("side", "message"),
    [
        ("prefill", m.Reserve(1, 0, 0, 128, ())), ("prefill", m.CloseOk(1, (), None)), ("prefill", m.Drained(1)),
        ("decode", m.Open(1, b"i0", (), (), (), 0, 1, False, 0, 1.0)), ("decode", m.Lease(1, 0, 0, 0, 0, 0, 0)),
        ("decode", m.Abort(1, "", False)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)  # fmt: skip
def test_a_message_of_the_other_role_ends_the_session(side: str, message: m.AnyMessage) -> None:
    world = World()
    met(world)
    (node,) = getattr(world, side)
    world.say(node, message)
    assert not node.core.sessions
    assert "check the peer's role" in node.peer_warnings[-1]


@either_side
@pytest.mark.parametrize("message", [m.Bye(), m.NoSession(1000), m.Heartbeat(), m.Ask(-1, b"i1")])
def test_nobody_else_speaks_for_a_peer(side: str, message: m.AnyMessage) -> None:
    """Who knows a session's numbers, which a directory tells in part, still has another route."""
    prefill, decode, *_ = met(World())
    core = (prefill if side == "prefill" else decode).core
    (session,) = core.sessions.values()
    heard = session.last_seq
    core.endpoint.receive(b"a stranger", wire.encode(session.id, 1 << 40, message))
    assert core.sessions == {session.id: session}
    assert session.last_seq == heard, "its own frames are still accepted"
    (warning,) = core.endpoint.take_effects()
    assert isinstance(warning, PeerWarning)
    assert warning.route == b"a stranger"


def test_a_peers_fault_keeps_no_frame_alive() -> None:
    """Engines keep a failed room's error; it must not keep the 16 MiB that the peer sent for it (I14)."""
    world = World()
    prefill, *_ = met(world)
    world.receive(7)
    sent = world.submit(7)
    world.run()
    world.say(prefill, m.Watermark(9, 0))
    assert isinstance(sent.error, PeerError)
    assert sent.error.__traceback__ is None
    assert sent.error.__context__ is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"item_stride": (1 << 64) - 1, "n_items": 1}, "beyond 2^62"),
        ({"shard_stride": -(1 << 63), "shards": 1, "axis": Axis("kv_head", 2, 0, 1)}, "beyond 2^62"),
        ({"seg_stride": 1 << 63}, "beyond 2^62"),
        ({"tokens_per_item": 1 << 21}, "2097152 tokens"),
        ({"n_items": 1 << 33, "item_stride": 0}, "8589934592 items"),
        ({"tokens_per_item": 1 << 62, "rows": (RowLevel(1, 0),)}, "beyond 2^62"),  # which no check may walk through
        ({"format": "f" * 257}, "more than 256"),
        ({"offset": -1}, "covers bytes -1"),
    ],
)
def test_a_layout_whose_numbers_fit_no_table_is_refused(change: dict[str, object], words: str) -> None:
    """Strides of an axis of one go into the tables of the direct path all the same."""
    view = replace(next(HELLO.layout.views()), **change)
    assert words in layout_problem(Layout(HELLO.layout.regions, (Component("kv", (view,)),)))


def test_a_layout_of_too_much_is_refused() -> None:
    view = next(HELLO.layout.views())
    assert not layout_problem(HELLO.layout)
    assert "twice" in layout_problem(Layout(HELLO.layout.regions, (Component("kv", (view, view)),)))
    assert "0 views" in layout_problem(Layout(HELLO.layout.regions, ()))
    assert "at 18446744073709551615" in layout_problem(Layout((Region(2**64 - 1, 1 << 20),), HELLO.layout.components))
    many = tuple(replace(view, key=view.key._replace(layer=n)) for n in range((1 << 14) + 1))
    assert "16385 views" in layout_problem(Layout(HELLO.layout.regions, (Component("kv", many),)))


@pytest.mark.parametrize(("transport", "other", "fits"), [("a", "test", True), ("test", "a", True), ("a", "b", False)])
def test_the_transports_of_both_sides_need_one_in_common(transport: str, other: str, fits: bool) -> None:
    offer = m.Offer(other, other.encode())
    effects = greet(World().p.core, transport=transport, others=(offer,))
    attached = [effect.offers for effect in effects if isinstance(effect, Attach)]
    if fits:
        assert attached == [m.offers(msgspec.structs.replace(HELLO, transport=transport, others=(offer,)))]
    else:
        assert not attached
        assert "transport 'test' at prefill, 'a' or 'b' at decode" in warnings(effects)[0]


def test_a_hello_over_a_new_connection_is_answered_there() -> None:
    """Decode makes its connection anew where prefill was slow to answer: to the old one nothing can be sent."""
    prefill = World().p.core
    greet(prefill, b"R1")
    (welcome,) = [effect for effect in greet(prefill, b"R2") if isinstance(effect, Send)]
    (session,) = prefill.sessions.values()
    assert welcome.route == session.route == b"R2"
    greet(prefill, b"R1")  # which lay in the old connection still
    prefill.endpoint.receive(b"R2", wire.encode(session.id, 1, m.Heartbeat()))
    assert not session.half_open
    greet(prefill, b"R3")
    assert session.route == b"R2", "once it is confirmed, nobody else speaks for it"


@either_side
def test_one_side_alone_has_no_checksums(side: str) -> None:
    world = World(checksums=side == "prefill")
    world.config = Config(checksums=side == "decode")
    world.decode[0] = world.make_decode(0)
    handle, _ = world.serve(7)
    world.check(handle, 7)
    assert not any(session.checksums for node in world.nodes() for session in node.core.sessions.values())
