"""Whatever is opened is closed by `with`, also when its block raises: in order, once, and with nothing left behind."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import weakref
from contextlib import ExitStack

import pytest

import pdstage
from pdstage import MetadataBuffers, State, TransportError, UsageError
from pdstage.control.bootstrap import BootstrapServer
from pdstage.control.keys import Keys
from pdstage.control.zmq import ControlSocket
from pdstage.manager.copy_thread import CopyThread
from pdstage.manager.lookup import Directory
from pdstage.metadata import usual_columns
from pdstage.tools.calibrate.caller import Caller
from pdstage.tools.calibrate.peer import Peer
from pdstage.transport import available, open_transport
from tests import descriptors
from tests.manager.engine import Rank, decode_node, prefill_node
from tests.manager.test_lifecycle import held, leaks

N = 2


class Boom(Exception):
    pass


def copier() -> CopyThread:
    made = CopyThread(lambda: None)
    made.submit(lambda: None)
    return made


OPENERS = {
    "prefill, inline": lambda: prefill_node(Rank(), None),
    "prefill, thread": lambda: prefill_node(Rank(), None, progress="thread"),
    "decode, inline": lambda: decode_node(Rank()),
    "decode, thread": lambda: decode_node(Rank(), progress="thread"),
    "bootstrap": BootstrapServer,
    "bootstrap with keys": lambda: BootstrapServer(keys=Keys(b"k" * 32)),
    "control socket": lambda: ControlSocket(identity=b"me"),
    "control socket with keys": lambda: ControlSocket(identity=b"me", keys=Keys(b"k" * 32)),
    "metadata buffers": lambda: MetadataBuffers(usual_columns(), 4),
    "calibration's peer": lambda: Peer("tcp://127.0.0.1:0"),
    "calibration's caller": lambda: Caller("tcp://127.0.0.1:1"),
    "directory": Directory,
    "copier": copier,
    **{f"transport {name}": lambda name=name: open_transport(name) for name in ("local", "nixl", "mooncake", "auto")},
}


@pytest.mark.parametrize("name", OPENERS)
def test_with_closes_whatever_its_block_does(name):
    transport = name.removeprefix("transport ")
    if why_not := available().get(transport):
        pytest.skip(why_not)

    def once() -> None:
        with pytest.raises(Boom), OPENERS[name]() as opened:
            raise Boom
        opened.close()  # again: nothing

    once()  # a library may open something once
    before = held()
    for _ in range(N):
        once()
    assert not leaks(before, n_turns=N)


OWNED = {
    "ControlPort",
    "Port",
    "Target",
    "Unheld",
    "Bell",
    "Copies",
    "Devices",
    "Journal",
    "Here",
    "Process",
    "There",
    "Met",
    "Inbox",
    "Outbox",
    "Memory",
}
"""Parts of one of the above, which closes them; nobody else opens one."""


def closable():
    """Every class of the package with a `close` without arguments, but private ones, the demo's and the engines'."""
    left_out = ("pdstage.tools.demo", "pdstage.bench", "pdstage.kernels", "pdstage.integrations")
    for found in pkgutil.walk_packages(pdstage.__path__, "pdstage.", onerror=lambda _: None):  # an engine not here
        name = found.name
        if name.startswith(left_out) or "._native" in name:
            continue
        try:
            module = importlib.import_module(name)
        except (ImportError, UsageError):  # what is not installed here
            continue
        for kind in vars(module).values():
            if inspect.isclass(kind) and kind.__module__ == name and callable(getattr(kind, "close", None)):
                needed = [
                    one
                    for one in list(inspect.signature(kind.close).parameters.values())[1:]
                    if one.default is inspect.Parameter.empty
                ]
                if not needed and not kind.__name__.startswith("_") and kind.__name__ not in OWNED:
                    yield kind


def test_what_has_a_close_is_a_context_manager():
    kinds = list(closable())
    assert {"PrefillNode", "LocalTransport", "BootstrapServer", "MetadataBuffers"} <= {kind.__name__ for kind in kinds}
    assert [kind for kind in kinds if not (hasattr(kind, "__enter__") and hasattr(kind, "__exit__"))] == []


@pytest.mark.parametrize("progress", ["inline", "thread"])
def test_a_whole_site_closes_in_order_in_the_middle_of_a_room(progress, monkeypatch):
    """The innermost first: nodes while their directory answers, rows after the node whose rooms have them."""
    order = []
    for kind in (MetadataBuffers, BootstrapServer, *(type(node) for node in _kinds())):
        close = kind.close

        def closing(self, *args: object, kind=kind, close=close) -> object:
            order.append(kind.__name__)
            return close(self, *args)

        monkeypatch.setattr(kind, "close", closing)
    src, dst = Rank(page=4), Rank(page=8)
    with (
        pytest.raises(Boom),
        BootstrapServer() as directory,
        MetadataBuffers(usual_columns(), 4) as rows,
        prefill_node(src, directory.address, progress=progress) as p,
        decode_node(dst, progress=progress, metadata=rows) as d,
    ):
        receiver, sender = d.receive(1, directory.address), p.send(1)
        receiver.bind(dst.allocate(30), 30, aux=rows.allocate())
        sender.chunk(src.allocate(16), (0, 16))
        raise Boom
    assert order == ["DecodeNode", "PrefillNode", "MetadataBuffers", "BootstrapServer"]
    assert (receiver.state, receiver.released) == (State.FAILED, True)
    assert sender.state is State.FAILED
    with pytest.raises(UsageError, match="closed"):
        rows.allocate()


def _kinds():
    with ExitStack() as stack:
        return [stack.enter_context(decode_node(Rank())), stack.enter_context(prefill_node(Rank(), None))]


def test_rows_outlive_their_buffers_in_whoever_holds_one():
    with MetadataBuffers(usual_columns(), 4) as rows:
        row = rows.allocate()
        row["output_ids"] = [7]
        lent = rows.allocate()
        rows.lend(lent)
    assert row["output_ids"][0] == 7
    memory = weakref.ref(rows._memory)
    assert memory() is not None, "a peer may still write what is lent"
    rows.give_back(lent)
    rows.free(row)
    rows.close()
    assert rows._memory is None


def check_leaves_nothing(once) -> None:
    once()
    before, shared = held(), descriptors.count("/memfd:pdstage")
    for _ in range(N):
        once()
    assert not leaks(before, n_turns=N)
    assert descriptors.count("/memfd:pdstage") == shared


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"n_lanes": 10_000}, UsageError),
        ({"staging": "a tensor"}, UsageError),
        ({"progress": "magic"}, UsageError),
        ({"keys": "/nowhere"}, UsageError),
    ],
)
def test_a_node_that_cannot_be_made_leaves_nothing_open(options, error):
    def once() -> None:
        with pytest.raises(error):
            decode_node(Rank(), **options)

    check_leaves_nothing(once)


def test_a_node_whose_address_is_taken_leaves_nothing_open():
    with ControlSocket(identity=b"first") as taken:

        def once() -> None:
            with pytest.raises(TransportError, match="cannot listen"):
                decode_node(Rank(), bind=taken.endpoint)

        check_leaves_nothing(once)


def test_a_prefill_node_that_cannot_publish_leaves_nothing_open():
    def once() -> None:
        with pytest.raises(TransportError):
            prefill_node(Rank(), "127.0.0.1:1")

    check_leaves_nothing(once)
