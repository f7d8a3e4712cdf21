"""Whatever is opened is closed by `with`, also when its block raises: in order, once, and with nothing left behind."""

from __future__ import annotations

import weakref

import pytest

from pdstage import Keys, MetadataBuffers, TransportError, UsageError
from pdstage.control.bootstrap import BootstrapServer
from pdstage.control.zmq import ControlSocket
from pdstage.manager.lookup import Directory
from pdstage.metadata import usual_columns
from pdstage.tools.calibrate.caller import Caller
from pdstage.tools.calibrate.peer import Peer
from pdstage.transport import available, open_transport
from tests.manager.engine import Rank, decode_node, prefill_node
from tests.manager.test_lifecycle import held, leaks

N = 2


class Boom(Exception):
    pass


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

    leaves_nothing(once)


def leaves_nothing(once):
    once()  # a library may open something once
    before = held()
    for _ in range(N):
        once()
    assert not leaks(before, n_turns=N)


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


def listen_where_another_does() -> None:
    with ControlSocket(identity=b"first") as taken:
        decode_node(Rank(), bind=taken.endpoint)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: decode_node(Rank(), n_lanes=10_000), UsageError, "parts"),
        (lambda: decode_node(Rank(), keys="/nowhere"), UsageError, "/nowhere"),
        (listen_where_another_does, TransportError, "cannot listen"),
        (lambda: prefill_node(Rank(), "127.0.0.1:1"), TransportError, "127.0.0.1:1"),
    ],
    ids=["lanes", "keys", "address", "directory"],
)
def test_a_node_that_cannot_be_made_leaves_nothing_open(make, error, words):
    def once() -> None:
        with pytest.raises(error, match=words):
            make()

    leaves_nothing(once)
