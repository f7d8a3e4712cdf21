"""Peers that cost little: the real cores over real ZMQ sockets, several in one thread, without pool or staging.

Their rooms ask for no tokens, as after a full prefix hit: all that travels is the request's aux row. What they have of
a transport is the description of one that stands for them all.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing

import numpy as np
import zmq

from pdstage.control.bootstrap import Advert, BootstrapClient
from pdstage.control.zmq import route_of
from pdstage.layout import Layout, Region
from pdstage.layout.topology import Topology
from pdstage.protocol import messages as m
from pdstage.protocol.config import Config
from pdstage.protocol.decode import DecodeCore
from pdstage.protocol.decode_rooms import DecodeRoom
from pdstage.protocol.destinations import PrefillRoom
from pdstage.protocol.prefill import PrefillCore
from pdstage.protocol.room import room_key
from pdstage.protocol.session import Detach, Send
from pdstage.protocol.wire import VERSION
from pdstage.transport import open_transport

LANE_NBYTES = 4096


class Crew:
    """What the fakes of one run share: a context, a transport's description, a layout, and turns."""

    def __init__(self, layout: Layout, config: Config, transport: str = "local") -> None:
        self.layout, self.config = layout, config
        self._stack = ExitStack()
        self.transport = self._stack.enter_context(closing(open_transport(transport)))
        self._lane = np.zeros(LANE_NBYTES, np.uint8)
        self.region = Region(self._lane.ctypes.data, LANE_NBYTES)
        self.transport.register([self.region])
        self.description = self.transport.describe()
        self.context = zmq.Context(io_threads=1)
        self.context.max_sockets = 10_000
        self._stack.callback(self.context.destroy, 0)
        self.poller = zmq.Poller()
        self.fakes: dict[zmq.Socket, Fake] = {}
        self.used: set[int] = set()
        """Ports."""

    def listen(self, one: zmq.Socket) -> int:
        """Binds to a port that no fake had before: a node that still asks for one that is gone must find nobody."""
        while (port := one.bind_to_random_port("tcp://127.0.0.1")) in self.used:
            one.unbind(one.last_endpoint)
        self.used.add(port)
        return port

    def close(self) -> None:
        self._stack.close()

    def turn(self) -> None:
        """What has arrived for any of them, and every deadline that has passed."""
        for heard, _ in self.poller.poll(0):
            self.fakes[heard].hear()
        now = time.monotonic()
        for fake in list(self.fakes.values()):
            fake.tick(now)


class Fake:
    """One peer. A room's end is seen in its handle."""

    core: PrefillCore | DecodeCore

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.incarnation = secrets.randbits(63) | 1
        self.socket = crew.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.name_there = self.socket.identity = route_of(self.incarnation.to_bytes(8, "little"))
        self.socket.router_mandatory = True
        self.socket.router_handover = True
        crew.fakes[self.socket] = self
        crew.poller.register(self.socket, zmq.POLLIN)

    def hear(self) -> None:
        while self.socket.get(zmq.EVENTS) & zmq.POLLIN:
            route, *frames = self.socket.recv_multipart()
            for frame in frames:
                self.core.receive(route, frame, time.monotonic())
        self.carry()

    def tick(self, now: float) -> None:
        next_at = self.core.next_at()
        if next_at is not None and next_at <= now:
            self.core.tick(now)
            self.carry()

    def carry(self) -> None:
        for effect in self.core.take_effects():
            if isinstance(effect, Send):
                try:
                    self.socket.send_multipart([effect.route, effect.frame], zmq.DONTWAIT)
                except zmq.ZMQError:  # gone: loss, as on any wire
                    continue
            elif isinstance(effect, Detach):
                self.core.fenced(effect.session, time.monotonic())

    def bye(self) -> None:
        """Ends its sessions in order; `gone` follows once its peer has heard."""
        self.core.bye(time.monotonic())
        self.carry()

    def stop(self) -> None:
        """It neither listens nor speaks any more, though its connection stays."""
        del self.crew.fakes[self.socket]
        self.crew.poller.unregister(self.socket)

    def gone(self) -> None:
        """As a process that was killed."""
        if self.socket in self.crew.fakes:
            self.stop()
        self.socket.close(0)


class FakePrefill(Fake):
    def __init__(self, crew: Crew, directory: BootstrapClient, *, listens: bool = True) -> None:
        """Not `listens`: it publishes an endpoint at which nobody is."""
        super().__init__(crew)
        self._held: socket.socket | None = None
        if listens:
            port = crew.listen(self.socket)
        else:  # held by a socket that does not listen
            self._held = socket.socket()
            self._held.bind(("127.0.0.1", 0))
            port = self._held.getsockname()[1]
            crew.used.add(port)
        self.core = PrefillCore(
            self.incarnation, layout=crew.layout, topology=Topology(), transport=crew.transport.traits.name,
            description=crew.description, n_buffers=2, buffer_nbytes=LANE_NBYTES, config=crew.config,
            choose=lambda _: False, direct=False,
        )  # fmt: skip
        self.name = f"fake {self.incarnation:x}"
        self._directory = directory
        self.advert = Advert(
            instance=self.name, topology=Topology(), endpoint=f"tcp://127.0.0.1:{port}",
            incarnation=self.incarnation, layout="", transports=("local",), version=VERSION,
        )  # fmt: skip
        directory.publish(self.advert, ttl_s=3600.0)
        if not listens:
            self.stop()

    def gone(self) -> None:
        super().gone()
        if self._held is not None:
            self._held.close()

    def send(self, room: int) -> PrefillRoom:
        sent = self.core.submit(room_key(room), time.monotonic())
        self.core.finish(sent, b"aux", time.monotonic())
        self.carry()
        return sent

    def withdraw(self) -> None:
        self._directory.withdraw(self.advert)


class FakeDecode(Fake):
    def __init__(self, crew: Crew, endpoint: str) -> None:
        super().__init__(crew)
        lanes = (m.LaneSpan(crew.region.base, crew.region.nbytes),)
        self.core = DecodeCore(
            self.incarnation, layout=crew.layout, topology=Topology(), transport=crew.transport.traits.name,
            description=crew.description, lanes=lanes, config=crew.config, direct=False,
        )  # fmt: skip
        self.socket.set(zmq.CONNECT_ROUTING_ID, b"there")
        self.socket.connect(endpoint)

    def receive(self, room: int) -> DecodeRoom:
        now = time.monotonic()
        handle = self.core.announce(room_key(room), {0: b"there"}, now, deadline_s=60.0)
        self.core.bind(handle, (m.Asked("kv", 8, 8),), {}, now)
        self.carry()
        return handle


def until(done: Callable[[], bool], turns: Iterable[Callable[[], object]], timeout_s: float = 30.0) -> None:
    """Gives everybody turns until `done`."""
    deadline_at = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline_at, "it did not come to pass"
        for turn in turns:
            turn()
