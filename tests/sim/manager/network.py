"""Control sockets: what `ControlSocket` promises, with connections that take their time, break and come back.

Frames of one connection keep their order and come once; those of several do not wait for each other. What is under way
is lost where a connection breaks or is given up. The side that connects keeps what it sends until the connection is
there; the other side has no route until then.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pdstage.control.zmq import ControlCounters, Ready, route_of
from pdstage.errors import UsageError
from pdstage.protocol.wire import decode_head

if TYPE_CHECKING:
    from pdstage.protocol.messages import SessionId
    from tests.sim.manager.scheduler import Process, Scheduler

_AGAIN_S = 0.02


@dataclass(frozen=True, slots=True)
class Delays:
    """How long frames take, and how often one takes much longer; seconds."""

    usual_s: float = 1e-3
    late: float = 0.0
    late_s: float = 0.5


class Descriptor:
    """What an event loop and a wait can watch: it has a number, and is readable or not."""

    def __init__(self, network: Network) -> None:
        self.number = 100_000 + len(network.descriptors)
        self.readable = False
        network.descriptors[self.number] = self


@dataclass(eq=False)
class Connection:
    """One that `source` made to `endpoint`, where it is known by `name` once it is up."""

    source: Socket
    route: bytes
    endpoint: str
    name: bytes
    up: bool = False
    given_up: bool = False
    life: int = 0
    """Rises when it breaks: what was under way then is lost."""
    held: deque[Sequence[bytes]] = field(default_factory=deque)
    arrive_at: dict[bool, float] = field(default_factory=dict)
    """When the latest frame of each direction is there."""


class Network:
    """All sockets, by endpoint."""

    def __init__(self, scheduler: Scheduler, rng: random.Random, delays: Delays) -> None:
        self.scheduler, self._rng, self._delays = scheduler, rng, delays
        self.sockets: dict[str, Socket] = {}
        self.connections: list[Connection] = []
        self.descriptors: dict[int, Descriptor] = {}
        self.said_by: Callable[[str, bytes], bytes] = lambda process, frame: frame
        """What becomes of a frame that a process sends: a liar's is another."""

    def delay_s(self) -> float:
        rng, delays = self._rng, self._delays
        return rng.uniform(0, delays.late_s if rng.random() < delays.late else delays.usual_s)

    def open(self, connection: Connection) -> None:
        """The connection comes up, now or when somebody listens."""
        there = self.sockets.get(connection.endpoint)
        if connection.given_up or connection.up:
            return
        if there is None or there.closed or there.process.dead or connection.source.process.dead:
            if not connection.source.closed:
                self.scheduler.at(_AGAIN_S, lambda: self.open(connection))
            return
        connection.up = True
        there.names[connection.name] = connection
        while connection.held:
            self.carry(connection, connection.held.popleft(), forth=True)

    def carry(self, connection: Connection, frames: Sequence[bytes], *, forth: bool) -> None:
        """One message is under way; behind those before it."""
        at = max(self.scheduler.now + self.delay_s(), connection.arrive_at.get(forth, 0.0))
        connection.arrive_at[forth] = at
        life, frames = connection.life, list(frames)

        def arrive() -> None:
            if connection.life != life:
                return
            there = self.sockets.get(connection.endpoint) if forth else connection.source
            if there is not None and not there.closed and not there.process.dead:
                there.arrived(connection.name if forth else connection.route, frames)

        self.scheduler.at(at - self.scheduler.now, arrive)

    def cut(self, connection: Connection, for_s: float) -> None:
        """It breaks, and is made again after `for_s`."""
        self._break(connection)
        self.scheduler.at(for_s, lambda: self.open(connection))

    def give_up(self, connection: Connection) -> None:
        self._break(connection)
        connection.given_up = True
        connection.held.clear()
        self.connections.remove(connection)

    def _break(self, connection: Connection) -> None:
        connection.up = False
        connection.life += 1
        connection.arrive_at.clear()
        there = self.sockets.get(connection.endpoint)
        if there is not None and there.names.get(connection.name) is connection:
            del there.names[connection.name]

    def end_of(self, socket: Socket) -> None:
        """Its process closed it, or ended."""
        for connection in list(self.connections):
            if connection.source is socket:
                self.give_up(connection)
            elif connection.endpoint == socket.endpoint:
                self.cut(connection, _AGAIN_S)


class Socket:
    """A node's. A wrong use is a violation: after `close`, or two threads that receive at a time."""

    def __init__(self, network: Network, process: Process, identity: bytes) -> None:
        self._network, self.process, self._identity = network, process, identity
        self._scheduler = network.scheduler
        self.endpoint = f"tcp://10.0.0.1:{1000 + len(network.sockets)}"
        network.sockets[self.endpoint] = self
        self.counters = ControlCounters()
        self.names: dict[bytes, Connection] = {}
        self._routes: dict[str, Connection] = {}
        self._by_route: dict[bytes, Connection] = {}
        self._generation = itertools.count()
        self._inbox: deque[tuple[bytes, list[bytes]]] = deque()
        self._messages, self._wakes = Descriptor(network), Descriptor(network)
        self._receiver = ""
        self._numbers: dict[SessionId, int] = {}
        self.closed = False

    def _use(self, verb: str) -> None:
        self._scheduler.pause(verb)
        if self.closed:
            self._scheduler.violate(f"the control socket of {self.process.name} is used by {verb} after its close")

    # Connections.

    def connect(self, endpoint: str) -> bytes:
        self._use("connect")
        if not endpoint.startswith("tcp://"):
            raise UsageError(f"{endpoint!r} is no endpoint", remedy="give one")
        connection = self._routes.get(endpoint)
        if connection is None:
            connection = self._connect(endpoint, b"@%d" % next(self._generation))
        return connection.route

    def _connect(self, endpoint: str, route: bytes) -> Connection:
        again = b"#%d" % next(self._generation)
        connection = Connection(self, route, endpoint, route_of(self._identity) + again)
        self._routes[endpoint] = self._by_route[route] = connection
        self._network.connections.append(connection)
        self._scheduler.at(self._network.delay_s(), lambda: self._network.open(connection))
        return connection

    def renew(self, route: bytes) -> None:
        self._use("renew")
        connection = self._by_route.get(route)
        if connection is not None:
            self._network.give_up(connection)
            self._connect(connection.endpoint, route)

    def disconnect(self, route: bytes) -> None:
        self._use("disconnect")
        connection = self._by_route.pop(route, None)
        if connection is not None:
            del self._routes[connection.endpoint]
            self._network.give_up(connection)

    def endpoint_of(self, route: bytes) -> str:
        connection = self._by_route.get(route)
        return connection.endpoint if connection is not None else route.hex()

    def take_refusals(self) -> list[tuple[bytes, Exception]]:
        return []

    # Messages.

    def send(self, route: bytes, frames: Sequence[bytes]) -> bool:
        self._use("send")
        self._keep_order(frames)
        frames = [self._network.said_by(self.process.name, frame) for frame in frames]
        connection = self._by_route.get(route)
        if connection is not None:
            if connection.up:
                self._network.carry(connection, frames, forth=True)
            else:
                connection.held.append(list(frames))
        elif (connection := self.names.get(route)) is not None:
            self._network.carry(connection, frames, forth=False)
        else:
            self.counters.unroutable += 1
            return False
        self.counters.sent += 1
        return True

    def _keep_order(self, frames: Sequence[bytes]) -> None:
        """A session's frames leave in the order in which the core numbered them; a Welcome, the first, begins anew."""
        for frame in frames:
            session, number = decode_head(frame)
            if number:
                if number != 1 and number <= self._numbers.get(session, 0):
                    self._scheduler.violate(f"frame {number} of a session leaves {self.process.name} too late")
                self._numbers[session] = number

    def arrived(self, route: bytes, frames: list[bytes]) -> None:
        self._inbox.append((route, frames))
        self._messages.readable = True

    def recv(self) -> list[tuple[bytes, list[bytes]]]:
        self._use("recv")
        taken = list(self._inbox)
        self._inbox.clear()
        self._messages.readable = False
        self.counters.received += len(taken)
        return taken

    # Waiting.

    def wait(self, timeout_s: float | None, extra_fds: Sequence[int] = ()) -> Ready:
        self._use("wait")
        me, scheduler = self._scheduler.current, self._scheduler
        if self._receiver:
            scheduler.violate(f"{me.name} waits at a socket where {self._receiver} does")
        self._receiver = me.name
        watched = [self._messages, self._wakes, *(self._network.descriptors[fd] for fd in extra_fds)]
        scheduler.block("its socket", timeout_s, lambda: self.closed or any(one.readable for one in watched))
        self._receiver = ""
        woken = self._wakes.readable
        self._wakes.readable = False
        return Ready(bool(self._inbox), woken, tuple(one.number for one in watched[2:] if one.readable))

    def wake(self) -> None:
        self._scheduler.pause("wake")
        self._wakes.readable = True

    def close(self) -> None:
        self._scheduler.pause("close")
        if not self.closed:
            self.closed = True
            self._wakes.readable = True
            self._network.end_of(self)
