"""A bench between two hosts: prefill here, decode where `pdstage bench kv-transfer --serve` waits.

The two speak as `pdstage calibrate` and its peer do: msgpack, one frame each, over a control socket, encrypted if it
has keys. Each question is one of the types below, and each method of a rank that may be asked for is in `METHODS` with
the types of what it takes and gives: nothing is unpickled, no name of a file or a variable travels, and a fabric's
environment comes from this module. The other host makes new processes for each case, as this one does, since UCX reads
its environment once: one for the nodes, and one for each library beside them. A caller that dies leaves its last case
there until the next one starts.

Addresses: every node and the directory listen at the address that `Place` names, with any free port.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
import traceback
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, TypeAlias

import msgspec
from msgspec import Meta

from pdstage.control.address import Address
from pdstage.control.bootstrap import BootstrapServer
from pdstage.control.keys import Keys
from pdstage.control.zmq import ControlSocket
from pdstage.errors import PdstageError, TransportError, UsageError
from pdstage.layout import Region
from pdstage.transport import available

from . import harness
from .sides import Fabric

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .ranks import Rank

_CONNECT_S = 10.0
_WAIT_S = 330.0
"""Longer than a rank's own answer may take (ranks.py), so that the reason comes from there."""
_ONE_HOST = {"local": "it moves bytes within one host", "nixl, shared memory": "two hosts share none"}
_WAYS_OVER: dict[str, tuple[tuple[str, dict[str, str]], ...]] = {
    "nixl": (("nixl", {}), ("nixl, TCP", {"UCX_TLS": "tcp,self"})),
}
"""NIXL over what UCX chooses, and over TCP by any network card: a lock to loopback ends at the first host."""

Count: TypeAlias = Annotated[int, Meta(ge=0, le=1 << 40)]
Size: TypeAlias = Annotated[int, Meta(ge=1, le=1 << 24)]
Kept: TypeAlias = tuple[Annotated[int, Meta(ge=1, le=64)], Annotated[int, Meta(ge=1, le=4096)], bool]
Index: TypeAlias = Annotated[int, Meta(ge=0, le=64)]
Word: TypeAlias = Annotated[str, Meta(max_length=512)]


class Place(NamedTuple):
    """Where one side's nodes listen, whom they trust, and where its pools are. Key files go by path: each process reads
    them itself.
    """

    host: str = "127.0.0.1"
    keys: str = ""
    allow: str = ""
    insecure: bool = False
    device: str = "cpu"

    def held(self) -> Keys | None:
        """Raises `UsageError` for a key file that is none."""
        return Keys.load(self.keys, self.allow or None) if self.keys else None

    def of_node(self) -> dict[str, Any]:
        """Options of a node."""
        return {"bind": f"tcp://{Address(self.host, 0)}", "keys": self.held(), "insecure": self.insecure}

    def directory(self) -> BootstrapServer:
        """One at this place. Raises `UsageError` as `Address.check_exposure` does."""
        return BootstrapServer(str(Address(self.host, 0)), insecure=self.insecure, keys=self.held())

    @property
    def far_host(self) -> str:
        """The host for a library that has an option for it; empty where both sides are on this one."""
        return "" if self._replace(device="cpu") == Place() else self.host


class Requests(msgspec.Struct, frozen=True, tag=True):
    """A `Case` of kv_transfer.py. A side is its TP size, tokens a page, and whether pages are HND."""

    model: Word
    layers: Annotated[int, Meta(ge=1, le=1024)]
    tokens: Size
    src: Kept
    dst: Kept
    sizes: Annotated[list[Size], Meta(min_length=1, max_length=64)]


class About(msgspec.Struct, frozen=True, tag=True):
    """Say what this host has; the answer is a `Side`."""


class Start(msgspec.Struct, frozen=True, tag=True):
    """Make a process with the decode side of `case`, and answer its number. With `library`, it is one more of the same
    case, with the decode end of that library; else the last case's processes end.
    """

    case: Requests
    fabric: Word
    directory: Word
    library: Word = ""


class Call(msgspec.Struct, frozen=True, tag=True):
    """Call a method of process `rank`."""

    rank: Index
    method: Word
    given: msgspec.Raw


class Stand(msgspec.Struct, frozen=True, tag=True):
    """Let process `rank` stand still, or go on."""

    rank: Index
    still: bool


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End all processes of the case."""


class Side(msgspec.Struct, frozen=True, tag=True):
    """`transports`: every known one, with the reason if it cannot be used. `memory`: bytes that a case may use.
    `libraries`: those that can be measured beside nodes.
    """

    libraries: Annotated[list[Word], Meta(max_length=64)]
    transports: dict[Word, Annotated[str, Meta(max_length=4096)]]
    memory: Count
    machine: dict[Word, Any]


class Gave(msgspec.Struct, frozen=True, tag=True):
    value: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, tag=True):
    why: str
    remedy: str = ""


Question = About | Start | Call | Stand | Stop
Answer = Side | Gave | Failed
_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)

# What a decode rank may be asked for: the types of what it takes, and of what it gives.
METHODS: dict[str, tuple[Any, Any]] = {
    "describe": (tuple[()], tuple[bytes, Region]),
    "connect": (tuple[bytes, Region], None),
    "use_raw": (tuple[bool], None),
    "clear": (tuple[()], None),
    "pull": (tuple[Count, Count], float),
    "check": (tuple[Count, Count], None),
    "copies": (tuple[Count, Count], float),
    "begin_cost": (tuple[()], None),
    "cost": (tuple[()], float),
    "n_descriptors": (tuple[()], Count),
    "meet": (tuple[()], tuple[int, Any]),
    "met": (tuple[int, Any], None),
    "pulls": (tuple[()], bool),
    "burst": (tuple[Count, Count], float),
}


def ways() -> dict[str, Fabric]:
    """Every fabric that may lie between two hosts, by name, whether or not this one has it."""
    over = {name: _WAYS_OVER.get(name, ((name, {}),)) for name in available() if name not in _ONE_HOST}
    return {what: Fabric(what, name, env) for name, several in over.items() for what, env in several}


def fabrics_between(side: Side) -> tuple[list[Fabric], list[str]]:
    """Those that this host and the other both offer, and why the others are left out."""
    here = available()
    left_out = [f"{name}: {why}" for name, why in _ONE_HOST.items()]
    found = []
    for fabric in ways().values():
        problem = here[fabric.transport]
        if not problem and (there := side.transports.get(fabric.transport, "this release does not know it")):
            problem = f"at the peer: {there}"
        if problem:
            left_out.append(f"{fabric.name}: {problem}")
        else:
            found.append(fabric)
    return found, left_out


class There:
    """The other host. A context manager.

    `address` is HOST:PORT as `--serve` printed it, with its key or without. `place` is this side's; its host, if empty,
    becomes this host's address towards the other. `side` is what the other host has. Raises `TransportError` if nobody
    listens there, `UsageError` for keys on one side only, and for an address that others can reach without keys or
    `insecure`.
    """

    def __init__(self, address: str, place: Place) -> None:
        target = Address.parse(address, "tcp")
        self._address = str(target)
        self._unanswered: TransportError | None = None
        self.place = place._replace(host=place.host or _own_host(target))
        own = Address.parse(str(Address(self.place.host, 0)), "tcp", listening=True)
        _check_named(own)
        own.check_exposure(place.insecure, keys := place.held())
        self._socket = ControlSocket(None, identity=secrets.token_bytes(16), keys=keys, insecure=place.insecure)
        try:
            self._route = self._socket.connect(f"tcp://{target.keyed}")
            self.side = self._about()
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def rank(self, case: Requests, directory: str, fabric: Fabric, library: str = "") -> FarRank:
        """The decode side of a case, or of a library beside it, not started yet."""
        return FarRank(self, Start(case, fabric.name, directory, library))

    def gave(self, question: Start | Call | Stand | Stop, kind: Any) -> Any:  # noqa: ANN401  (as the type says)
        """The answer, of type `kind`. Raises `TransportError` with the other host's reason, or for no answer."""
        answer = self._ask(question, _WAIT_S)
        if not isinstance(answer, Gave):
            raise self._other()
        return msgspec.msgpack.decode(answer.value, type=kind)

    def _about(self) -> Side:
        answer = self._ask(About(), 2 * _CONNECT_S)
        if not isinstance(answer, Side):
            raise self._other()
        return answer

    def _other(self) -> TransportError:
        return TransportError(f"{self._address} answers another question", remedy="ask it from one place at a time")

    def _ask(self, question: Question, wait_s: float) -> Side | Gave:
        if self._unanswered is not None:  # the next answer may belong to that question
            raise self._unanswered
        self._socket.send(self._route, [msgspec.msgpack.encode(question)])
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            if self._socket.wait(0.2).messages:
                for _, (frame, *_) in self._socket.recv():
                    return self._read(frame)
            for _, error in self._socket.take_refusals():
                raise error
        self._unanswered = TransportError(
            f"no answer from {self._address} in {wait_s:g} s",
            remedy="is pdstage bench kv-transfer --serve still running there, with keys as here?",
        )
        raise self._unanswered

    def _read(self, frame: bytes) -> Side | Gave:
        try:
            answer: Answer = _answers.decode(frame)
        except msgspec.DecodeError as error:
            what = f"{self._address} gave an answer that cannot be read: {error}"
            raise TransportError(what, remedy="run one release on both sides") from error
        if isinstance(answer, Failed):
            raise TransportError(answer.why, remedy=answer.remedy or "see what the peer printed")
        return answer


class FarRank:
    """The decode side's process at the other host, driven as `Rank` is."""

    def __init__(self, there: There, start: Start) -> None:
        self._there, self._start = there, start
        self._number = 0
        self._begun: tuple[str, tuple[object, ...]] = ("", ())

    def ready(self) -> Self:
        """Starts it, and waits until its actor is made."""
        self._number = self._there.gave(self._start, int)
        return self

    def pause(self) -> None:
        self._there.gave(Stand(self._number, still=True), None)

    def resume(self) -> None:
        self._there.gave(Stand(self._number, still=False), None)

    def call(self, method: str, *given: object) -> Any:  # noqa: ANN401
        encoded = msgspec.Raw(msgspec.msgpack.encode(given))
        return self._there.gave(Call(self._number, method, encoded), METHODS[method][1])

    def begin(self, method: str, *given: object) -> None:
        """As of `Rank`, but the call is made by `result`: two hosts share nothing that both at once would need."""
        self._begun = (method, given)

    def result(self) -> Any:  # noqa: ANN401
        method, given = self._begun
        return self.call(method, *given)

    def close(self) -> None:
        """Ends all processes of its case there."""
        with contextlib.suppress(TransportError):  # the next case's start ends them too
            self._there.gave(Stop(), None)


class Server:
    """Answers one question at a time at `bind`, HOST:PORT, until `close`. A context manager.

    `start` makes the decode side's process of a case, or of one of `libraries`; it raises `PdstageError` for one that
    cannot be. `memory` says how many bytes a case may use. Raises `UsageError` for an address that others can reach
    without keys or `insecure`, and for a wildcard: nodes listen at the same address, and the other host has to reach
    them.
    """

    def __init__(
        self,
        bind: str,
        place: Place,
        start: Callable[[Requests, str, Fabric, Place, str], Rank],
        memory: Callable[[], int],
        libraries: Sequence[str] = (),
    ) -> None:
        address = Address.parse(bind, "tcp", listening=True)
        _check_named(address)
        self._place, self._make, self._memory = place._replace(host=address.host), start, memory
        self._libraries = list(libraries)
        self._ranks: list[Rank] = []
        self._asked_by = b""
        keys = place.held()
        self._socket = ControlSocket(f"tcp://{address}", identity=b"bench", keys=keys, insecure=place.insecure)
        self.endpoint = self._socket.endpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Answers until `until()`, which is called several times a second."""
        while not until():
            if self._socket.wait(0.2).messages:
                for route, frames in self._socket.recv():
                    for frame in frames:
                        self._socket.send(route, [msgspec.msgpack.encode(self._answer(route, frame))])

    def close(self) -> None:
        """Ends the case's processes and stops listening. May be repeated."""
        self._stop()
        self._socket.close()

    def _stop(self) -> None:
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            rank.close()

    def _answer(self, route: bytes, frame: bytes) -> Answer:
        try:
            return self._answer_to(route, _questions.decode(frame))
        except msgspec.DecodeError as error:
            return Failed(f"at the peer: the question cannot be read: {error}", "run one release on both sides")
        except PdstageError as error:
            return Failed(f"at the peer: {error.what}", error.remedy)
        except (RuntimeError, OSError, EOFError, ValueError) as error:  # of the case's process, or of its start
            traceback.print_exc()
            self._stop()
            lines = str(error).strip().splitlines()
            return Failed(f"at the peer: {lines[-1] if lines else type(error).__name__}")

    def _answer_to(self, route: bytes, question: Question) -> Answer:
        value: object = None
        match question:
            case About():
                return Side(self._libraries, available(), self._memory(), harness.machine())
            case Start():
                value = self._begin(route, question)
            case Call():
                value = self._call(route, question)
            case Stand(number, still):
                rank = self._held(route, number)
                (rank.pause if still else rank.resume)()
            case Stop():
                if route == self._asked_by:
                    self._stop()
        return Gave(msgspec.Raw(msgspec.msgpack.encode(value)))

    def _begin(self, route: bytes, asked: Start) -> int:
        """The number of the new process."""
        if not asked.library or route != self._asked_by:
            self._stop()
        self._asked_by, fabric = route, self._fabric(asked.fabric)
        self._ranks.append(self._make(asked.case, asked.directory, fabric, self._place, asked.library))
        self._ranks[-1].ready()
        return len(self._ranks) - 1

    def _held(self, route: bytes, number: int) -> Rank:
        if number >= len(self._ranks) or route != self._asked_by:
            raise UsageError("no case of yours is running", remedy="ask one peer from one place at a time")
        return self._ranks[number]

    def _fabric(self, name: str) -> Fabric:
        fabric = ways().get(name)
        if fabric is None or available()[fabric.transport]:
            raise UsageError(f"no fabric {name!r}", remedy=f"choose one of {', '.join(ways())}", field="fabric")
        return fabric

    def _call(self, route: bytes, asked: Call) -> object:
        if asked.method not in METHODS:
            raise UsageError(f"{asked.method!r} may not be asked for", remedy="run one release on both sides")
        rank = self._held(route, asked.rank)
        given = msgspec.msgpack.decode(asked.given, type=METHODS[asked.method][0])
        return rank.call(asked.method, *given)


def _check_named(address: Address) -> None:
    if address.is_wildcard:
        raise UsageError(f"{address} names every interface", remedy="name the address that the other host reaches")


def _own_host(target: Address) -> str:
    """This side's own address of a connection to `target`."""
    remedy = f"run `pdstage bench kv-transfer --serve {target}` there, and look at routes and firewalls"
    try:
        with socket.create_connection((target.host, target.port), _CONNECT_S) as probe:
            return str(probe.getsockname()[0])
    except OSError as error:
        raise TransportError(f"{target} cannot be reached ({error})", remedy=remedy) from error
