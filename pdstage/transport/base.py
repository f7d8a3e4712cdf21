"""The interface of every transport: the verbs, the traits and the events. The contract suite in tests/transport pins
it.

A transport moves bytes between addresses, and carries tags whose meaning it does not know.

Each post is one ticket. Each ticket ends with exactly one `Done` or `PostFailed`, also after `disconnect`; `close` ends
all of them silently. Calls must not overlap: the caller serialises them. `register`, `unregister` and `describe` may
run beside other calls.
"""

from __future__ import annotations

import threading
import zlib
from abc import abstractmethod
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast

import msgspec
import numpy as np

from pdstage.closing import Closing
from pdstage.errors import PeerError, TransportError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from pdstage.layout import Region
    from pdstage.plan.spans import Spans

    Ints = npt.NDArray[np.int64]

_FEW = 16
_INT64 = np.dtype(np.int64)
_making = threading.Lock()

Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Traits:
    """What a transport promises, and the defaults of its cost model.

    `notifies`: a post's tag reaches the peer's `poll` after the post's bytes; otherwise the caller sends the tag as a
    message once the post is done. `post_blocks`: `post` may last as long as the write. `fences`: nothing of a peer
    lands here after `disconnect(peer)`. `stops_reads`: after it, our posts to that peer no longer read our memory.
    `maps`: peers on this host map registered memory of `pdstage.shared`. `polled`: bytes move only while `poll` is
    called, here and at the peer; else the backend, or a NIC, moves them by itself.
    A post of n spans and b bytes costs about `post_s + n * descriptor_s + b / bytes_per_s`.
    """

    name: str
    notifies: bool
    max_descriptors: int
    kinds: frozenset[str]
    post_blocks: bool
    fences: bool
    stops_reads: bool
    bytes_per_s: float
    descriptor_s: float
    post_s: float
    maps: bool = False
    polled: bool = False


@dataclass(frozen=True, slots=True)
class Figures:
    """What a backend measured of one post: descriptors after merging, bytes, and seconds.

    `post_s` is the caller's time to start it, `write_s` the time from then until it was seen to be done.
    """

    n_descriptors: int
    nbytes: int
    post_s: float
    write_s: float


@dataclass(frozen=True, slots=True)
class Done:
    """Every byte of the post is in the peer's memory, and its tag is on its way. `figures` only if asked for."""

    ticket: int
    figures: Figures | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class PostFailed:
    """The outcome is unknown: none, some or all bytes landed. The post no longer reads our memory.

    Not `settled`: bytes in flight may still land, and only the end of the connection at the peer stops them.
    """

    ticket: int
    error: TransportError
    settled: bool = True


@dataclass(frozen=True, slots=True)
class Inbound:
    """A tag that a peer posted; the bytes of that post are in our memory."""

    tag: bytes


Event = Done | PostFailed | Inbound


class Transport(Closing):
    """Writes this process's registered memory into peers' memory. A backend is one module with a class named
    `TRANSPORT`.

    A context manager. A node owns the transport it is given, and closes it.
    """

    traits: ClassVar[Traits]
    preference: ClassVar[int] = 0  # "auto" takes the highest that reaches a peer; below 1: only by name
    caveat: ClassVar[str] = ""  # a warning to log when it is opened

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Makes `regions` readable by our posts and writable by peers. Registering an equal region again has no effect.

        Raises `UsageError` (kind, or overlap with another region) or `TransportError`, and then registers none of them.
        """

    @abstractmethod
    def unregister(self, regions: Sequence[Region]) -> None:
        """Removes `regions`. Call it before the memory is freed, and while no post of ours or of a peer uses it.

        Peers must stop writing by themselves: no backend here stops a write to memory that is still mapped.
        """

    @abstractmethod
    def describe(self) -> bytes:
        """What a peer's `connect` needs, as of now. Call it after each `register`."""

    def offers(self) -> dict[str, bytes]:
        """What a node sends its peers: each transport that moves its bytes, best first, with that transport's
        `describe`.
        """
        return {self.traits.name: self.describe()}

    def described(self, offers: Mapping[str, bytes]) -> bytes:
        """The argument for `connect` and `identify`, from a peer's `offers`. At least one name must be in our own
        offers.
        """
        return offers[self.traits.name]

    def traits_of(self, peer: str) -> Traits:
        """The traits between this process and `peer`, valid from `connect` or `identify` until `forget`."""
        del peer
        return self.traits

    @abstractmethod
    def connect(self, peer: str, description: bytes) -> None:
        """Makes `peer` a name for the transport that gave `description`. Never blocks: a broken connection shows later.

        Repeating a description has no effect. A newer description of the same life refreshes the peer's regions. One of
        another life replaces the connection and drops what was prepared. Raises `PeerError` for a description that is
        damaged, of another transport or of an unreachable place, and `TransportError` if the process has ended.
        """

    @abstractmethod
    def prepare(self, peer: str, regions: Sequence[Region]) -> None:
        """Declares the peer's regions that posts may write from now on, instead of those declared before.

        Raises `PeerError` for a region that the peer has not registered.
        """

    @abstractmethod
    def identify(self, peer: str, description: bytes) -> None:
        """Learns which process `peer` is, without a connection. A rank that is only written to needs this for
        `proved_dead`. Raises as `connect` does. A connected peer is identified already.
        """

    @abstractmethod
    def post(self, peer: str, spans: Spans, tag: bytes) -> int:
        """Starts one write from addresses `src` here to `dst` at the peer, and returns its ticket.

        With `traits.notifies` the tag reaches the peer after the bytes of all spans; an empty tag sends none. Posts are
        not ordered among each other. Raises `UsageError` (unknown peer, a span outside registered or prepared memory,
        too many spans), `PeerError` (the peer's memory is not as it described it) or `TransportError`. Then no byte is
        or will be written, and there is no ticket.
        """

    def mapped(self, peer: str, address: int, nbytes: int) -> Mapped | None:
        """Where those bytes of the peer's prepared memory lie in this process, if a plain copy can write them.

        The caller writes them itself; device memory is written by kernels of the device that holds the caller's memory.
        Then it posts the tag with `notify`. `disconnect` does not stop such a write: it is in flight until it is done,
        whatever `stops_reads` and `fences` say.
        """
        del peer, address, nbytes
        return None

    def notify(self, peer: str, tag: bytes) -> int:
        """Posts a tag alone, after a write to where `mapped` said."""
        raise UsageError(f"{self.traits.name} maps no memory of peer {peer!r}", remedy="post the bytes with their tag")

    @abstractmethod
    def poll(self) -> list[Event]:
        """Returns the events since the last poll, without blocking. It also advances backends that have no thread."""

    def filenos(self) -> Sequence[int]:
        """Descriptors that are readable while `poll` has events. An empty list means that `poll` must be called
        regularly.
        """
        return ()

    @abstractmethod
    def disconnect(self, peer: str) -> None:
        """Drops `peer`; unknown names are ignored. `traits.fences` and `stops_reads` say what may still move
        afterwards.
        """

    def proved_dead(self, peer: str) -> bool:
        """Whether each process ever identified as `peer` has ended, and all its writes have landed, so that none
        follows.

        May be called after `disconnect` too, until `forget`. False proves nothing.
        """
        del peer
        return False

    @abstractmethod
    def forget(self, peer: str) -> None:
        """Ends `proved_dead` for `peer`, which must not be connected; unknown names are ignored."""

    @abstractmethod
    def close(self) -> None:
        """Releases everything. Open tickets end without an event. May be repeated."""


class Mapped(NamedTuple):
    """A peer's memory in this process. It stays mapped while this object lives. `kind` says which code can write it."""

    address: int
    held: object
    kind: str = "cpu"


class Place(NamedTuple):
    """The memory kind of some spans, and their device, or one device per span if there are several."""

    kind: str
    device: int | Ints


class Ranges:
    """Disjoint regions in address order, to find the region that holds a span. Immutable, so readers need no lock."""

    def __init__(self, whose: str, regions: Iterable[Region] = ()) -> None:
        """Raises `UsageError` for empty or overlapping regions. `whose` names their owner in every error."""
        self.whose = whose
        self.regions = tuple(sorted(dict.fromkeys(regions), key=lambda region: (region.base, region.nbytes)))
        self._starts = [region.base for region in self.regions]
        self._ends = [region.base + region.nbytes for region in self.regions]
        for region in self.regions:
            if region.base <= 0 or region.nbytes < 1 or region.base + region.nbytes >= 1 << 63:
                raise UsageError(
                    f"{region} of {whose} has no valid address and size", remedy="give both", region=region
                )
            if not 0 <= region.device < 1 << 31:
                raise UsageError(f"{region} of {whose} has no device", remedy="give its number", region=region)
        for one, other in zip(self.regions, self.regions[1:], strict=False):
            if other.base < one.base + one.nbytes:
                raise UsageError(
                    f"{other} of {whose} overlaps {one}", remedy="register an allocation once", region=other
                )
        self._starts_array = np.array(self._starts, np.int64)
        self._ends_array = np.array(self._ends, np.int64)
        self._devices = np.array([region.device for region in self.regions], np.int64)
        places = {Place(region.kind, region.device) for region in self.regions}
        self._place = places.pop() if len(places) == 1 else None

    def with_regions(self, regions: Iterable[Region]) -> Ranges:
        return Ranges(self.whose, (*self.regions, *regions))

    def without(self, regions: Iterable[Region]) -> Ranges:
        """Raises `UsageError` for a region that is not in this set."""
        gone = set(regions)
        for region in gone.difference(self.regions):
            raise UsageError(f"{region} is not registered", remedy="unregister what was registered", region=region)
        return Ranges(self.whose, (region for region in self.regions if region not in gone))

    def holds(self, base: int, nbytes: int) -> bool:
        """Whether one region holds all of `[base, base + nbytes)`."""
        i = bisect_right(self._starts, base) - 1
        return i >= 0 and base + nbytes <= self._ends[i]

    def index(self, addresses: Ints) -> Ints:
        """The index in `regions` of the region that holds each address, if it is inside of one."""
        return np.searchsorted(self._starts_array, addresses, side="right") - 1

    def find(self, addresses: Ints, nbytes: Ints) -> Place:
        """Where the spans lie. Check their sizes first, with `check_spans`.

        Raises `UsageError` unless each span lies in one region, and all of them in memory of one kind.
        """
        if (
            len(addresses) <= _FEW and self._place is not None
        ):  # plain Python is several times faster than numpy's calls
            for at, n in zip(addresses.tolist(), nbytes.tolist(), strict=True):
                if not self.holds(at, n):
                    raise self._outside(at, at + n)
            return self._place
        index = self.index(addresses)
        inside = index >= 0
        if self.regions:  # an address inside is at least the base, so the difference cannot wrap around
            inside &= nbytes <= self._ends_array[index] - addresses
        if not inside.all():
            bad = int(np.argmin(inside))
            raise self._outside(int(addresses[bad]), int(addresses[bad]) + int(nbytes[bad]))
        if self._place is not None:
            return self._place
        kinds = {self.regions[i].kind for i in np.unique(index)}
        if len(kinds) > 1:
            raise UsageError(f"one post of {' and '.join(sorted(kinds))} memory", remedy="post each kind by itself")
        return Place(kinds.pop(), self._devices[index])

    def _outside(self, start: int, end: int) -> UsageError:
        return UsageError(
            f"bytes {start:#x}..{end:#x} do not lie in one region of {self.whose}",
            remedy="register or prepare the whole range, and keep each span in one region",
            start=start,
            end=end,
        )


def check_spans(spans: Spans, traits: Traits) -> None:
    """Raises `UsageError` unless `spans` are 1 to `max_descriptors` spans of at least one byte, as int64."""
    n = len(spans.nbytes)
    for name, values in zip(spans._fields, spans, strict=True):
        if values.dtype != _INT64 or values.shape != (n,):
            raise UsageError(
                f"spans.{name} is {values.dtype}{list(values.shape)}, not int64[{n}]", remedy="give three int64 arrays"
            )
    if not 1 <= n <= traits.max_descriptors:
        raise UsageError(
            f"a post of {n} spans, where {traits.name} takes 1 to {traits.max_descriptors}",
            remedy="split it into several posts",
            n_spans=n,
        )
    if (min(spans.nbytes.tolist()) if n <= _FEW else int(spans.nbytes.min())) < 1:
        raise UsageError("a span of less than one byte", remedy="leave empty spans out")


def check_kinds(regions: Iterable[Region], traits: Traits) -> None:
    """Raises `UsageError` for a region of a memory kind that the transport cannot reach."""
    for region in regions:
        if region.kind not in traits.kinds:
            raise UsageError(
                f"{region} is of kind {region.kind!r}, {traits.name} moves {', '.join(sorted(traits.kinds))}",
                remedy="use another transport, or staging memory of a kind it moves",
                region=region,
            )


def not_connected(peer: str) -> UsageError:
    return UsageError(f"peer {peer!r} is not connected", remedy="connect it first", peer=peer)


def write_description(description: msgspec.Struct) -> bytes:
    """Encodes the result of `describe`, with a checksum in front, since a backend's parser may not survive damage."""
    body = msgspec.msgpack.encode(description)
    return zlib.crc32(body).to_bytes(4, "little") + body


@cache
def _decoder_of(kind: type[object]) -> msgspec.msgpack.Decoder[Any]:
    """Under a lock: two threads that resolve a type for the first time at once end the process (msgspec 0.22)."""
    with _making:
        return msgspec.msgpack.Decoder(kind)


def read_description(peer: str, description: bytes, kind: type[Read], traits: Traits) -> Read:
    """Decodes what `write_description` of the same transport encoded; raises `PeerError` for anything else."""
    body = description[4:]
    whole = zlib.crc32(body).to_bytes(4, "little") == description[:4]
    try:
        return cast("Read", _decoder_of(kind).decode(body if whole else b""))  # type: ignore[arg-type]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        fault = "not one" if whole else "damaged, or not a description"
        raise PeerError(
            f"the description of peer {peer!r} is {fault} of transport {traits.name}",
            remedy="choose one transport and one version on both sides",
            peer=peer,
        ) from error
