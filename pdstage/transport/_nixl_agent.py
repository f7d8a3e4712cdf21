"""NIXL's own objects: starting an agent, its exceptions, its descriptor lists and its registrations.

Descriptor lists are built for each post. NIXL 1.5.1 can also prepare them once and pick blocks by index, or describe
spans of one stride by one row. Neither was faster for a caller that has addresses (docs/transports.md). Nor is
one put of a whole list (`NIXL_UCX_SGL_ENABLE`), where UCX emulates it; docs/transports.md has its costs and its limits.
"""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

import numpy as np

from pdstage.errors import TransportError
from pdstage.transport._backend import environment_of
from pdstage.transport._fabric import device_ports, devices_at
from pdstage.transport.base import Figures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdstage.transport.base import Ints, Place


@contextmanager
def _torch_left_alone() -> Iterator[None]:
    """Inside, `nixl` does not import a CPU build of torch, a second's work, to learn that it was built for no CUDA.

    NIXL 1.5.1 chooses among its wheels by the CUDA of what is imported already, else by that of torch. Another version
    may not ask so; then nothing is changed.
    """
    try:
        utils: Any = import_module("nixl_meta_utils")
        asks = metadata.version("torch").endswith("+cpu") and not {"torch", "cupy", "cuda.bindings"} & set(sys.modules)
    except ImportError:
        asks = False
    if not asks or not hasattr(utils, "detect_cuda_major"):
        yield
        return
    asked, utils.detect_cuda_major = utils.detect_cuda_major, lambda: None
    try:
        yield
    finally:
        utils.detect_cuda_major = asked


with _torch_left_alone():
    _api: Any = import_module("nixl._api")
_bindings: Any = import_module("nixl._bindings")

# NIXL's exceptions share no base class but Exception.
Errors: tuple[type[Exception], ...] = tuple(
    kind for kind in vars(_bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)
)
_StartErrors: tuple[type[Exception], ...] = (*Errors, RuntimeError)
MEMORY = {"cpu": "DRAM", "cuda": "VRAM"}
_NET_DEVICES = "UCX_NET_DEVICES"
_TCP_GIVES_UP = "UCX_TCP_USER_TIMEOUT"
_GIVES_UP_AFTER = "60s"
"""A post's deadline for TCP too: UCX's keepalive is silent while bytes wait for an answer, and Linux tries for 15 min.
"""
log = logging.getLogger(__name__)


def start(  # one keyword per choice that NIXL or UCX leaves to its user
    name: str,
    *,
    devices: Sequence[str],
    host: str,
    telemetry: bool,
) -> Any:  # noqa: ANN401  (NIXL's classes have no types)
    """A new agent with the UCX plugin. Raises `UsageError` for a choice that this host lacks, else `TransportError`."""
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it prints each start to stdout
    config = _api.nixl_agent_config(
        enable_prog_thread=False,
        capture_telemetry=telemetry,
        backends=["UCX"],
        sync_mode=_api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    names = device_ports(devices)
    if not names and host and _NET_DEVICES not in os.environ:
        names = devices_at(host)
    # UCX reads its environment as it starts. NIXL 1.5.1 passes it one plain device, or several RDMA devices at their
    # first port, silently ignores its own documented `ucx_devices`, and passes nothing about UCX's use of TCP.
    choices = {_TCP_GIVES_UP: os.environ.get(_TCP_GIVES_UP, _GIVES_UP_AFTER)}
    if names:
        choices[_NET_DEVICES] = ",".join(names)
    with environment_of(choices):
        try:
            agent = _api.nixl_agent(name, config)
        except _StartErrors as error:
            raise failed("NIXL does not start", error) from error
    if "UCX" not in agent.backends:
        raise TransportError("NIXL has no UCX plugin here", remedy="install a NIXL with it, or set NIXL_PLUGIN_DIR")
    return agent


def descriptors(addresses: Ints, nbytes: Ints, place: Place) -> Any:  # noqa: ANN401
    """NIXL's list of the spans, each with its device."""
    kind, device = place
    rows: Any
    if len(addresses) == 1:
        only = device if isinstance(device, int) else int(device[0])
        rows = [(int(addresses[0]), int(nbytes[0]), only)]
    else:
        rows = np.empty((len(addresses), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, device
    return _bindings.nixlXferDList(_bindings.DRAM_SEG if kind == "cpu" else _bindings.VRAM_SEG, rows)


def figures(agent: Any, handle: Any) -> Figures | None:  # noqa: ANN401
    """What NIXL measured of a post that ended well; None if NIXL does not report it."""
    try:
        telemetry = agent.get_xfer_telemetry(handle)
    except Errors:
        return None
    return Figures(
        n_descriptors=telemetry.descCount,
        nbytes=telemetry.totalBytes,
        post_s=telemetry.postDuration * 1e-6,
        write_s=telemetry.xferDuration * 1e-6,
    )


def attempt(release: Callable[..., None], *args: object) -> None:
    """Returns something to NIXL. A refusal is only logged, since nothing can be done about it."""
    try:
        release(*args)
    except Errors:
        log.warning("NIXL refused %s%r", release.__name__, args, exc_info=True)


def failed(what: str, error: Exception, remedy: str = "run with NIXL_LOG_LEVEL=INFO to learn more") -> TransportError:
    return TransportError(f"{what}: {type(error).__name__}({error})", remedy=remedy)


_HEAD = b"nixlSerDes|"
_MAX_FIELD_NBYTES = 1 << 20
_MAX_MEMORY_KIND = 15
_MIN_DESCRIPTOR_NBYTES = 32
"""An address, a length, a device, and the length of what the backend adds: 8 bytes each."""

_UCX_ADDRESS_VERSIONS = (0, 1)
"""The lower half of the first byte. UCX ends the process for any other value (src/ucp/wireup/address.c)."""


def check_metadata(metadata: bytes, agent: str) -> None:
    """Raises `ValueError` unless metadata is laid out as NIXL 1.5.1 lays out `agent`'s. NIXL's reader trusts every
    length in it, and some lengths end the process (src/core/nixl_agent.cpp, `loadRemoteMD`; src/utils/serdes).

    It is a blob of NIXL's serializer: a head, then fields of a tag, a length of 8 bytes, that many bytes, and a bar.
    """
    if not metadata.startswith(_HEAD):
        raise ValueError("it is not a blob of NIXL's serializer")
    left = memoryview(metadata)[len(_HEAD) :]

    def take(tag: bytes) -> bytes:
        """The bytes of the next field."""
        nonlocal left
        at = len(tag) + 8
        end = at + int.from_bytes(left[at - 8 : at], "little")
        if left[: len(tag)].tobytes() != tag or end - at > _MAX_FIELD_NBYTES or left[end : end + 1].tobytes() != b"|":
            raise ValueError(f"no whole field {tag.decode()!r} {len(left)} bytes before its end")
        taken, left = bytes(left[at:end]), left[end + 1 :]
        return taken

    def count(tag: bytes, most: int) -> int:
        n = int.from_bytes(take(tag), "little")
        if n > most:
            raise ValueError(f"{n} entries in field {tag.decode()!r}")
        return n

    if take(b"Agent") != agent.encode():
        raise ValueError("it belongs to another agent")
    for _ in range(count(b"Conns", 64)):
        backend, address = take(b"t"), take(b"c")
        if not backend or not address:
            raise ValueError("a connection without backend or address")
        if backend == b"UCX" and address[0] & 0x0F not in _UCX_ADDRESS_VERSIONS:
            raise ValueError(f"an address of UCX's version {address[0] & 0x0F}")
    if take(b"") != b"MemSection":
        raise ValueError("it has no memory section")
    for _ in range(count(b"nixlSecElms", 64)):
        take(b"bknd")
        if take(b"nixlDList") != b"nixlSDList":
            raise ValueError("a list of an unknown kind")
        count(b"t", _MAX_MEMORY_KIND)
        for _ in range(count(b"n", 1 << 20)):
            if len(take(b"")) < _MIN_DESCRIPTOR_NBYTES:
                raise ValueError("a descriptor that is cut off")
    if left:
        raise ValueError(f"{len(left)} bytes follow its end")


def is_known(metadata: bytes, agent: str) -> bool:
    """Whether this NIXL lays out metadata as `check_metadata` reads it; else peers' metadata is not checked."""
    try:
        check_metadata(metadata, agent)
    except ValueError as error:
        log.info(
            "this NIXL has an unknown metadata layout (%s): peers' metadata is not checked before NIXL reads it", error
        )
        return False
    return True
