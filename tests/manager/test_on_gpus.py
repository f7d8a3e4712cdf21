"""Two nodes in two processes, with their pools on the second device of the double of CUDA."""

from __future__ import annotations

import contextlib
import os
from multiprocessing import get_context

import pytest

from pdstage import Config, State, UsageError
from pdstage.bench import kv_transfer as kv
from pdstage.bench import shapes
from pdstage.bench.ranks import Rank
from pdstage.bench.sides import Fabric
from pdstage.control.bootstrap import BootstrapServer
from tests import cuda_double

pytestmark = pytest.mark.skipif(bool(cuda_double.missing()), reason=cuda_double.missing())
DEVICE, LOCAL = "cuda:1", Fabric("local", "local", {})
CASE = kv.Case(shapes.Model("two layers", shapes.kv(range(2), 4, 64), 16), 64, kv.Kept(), kv.Kept(1, 32, True))
LAUNCH_FAILED = 719  # which a context keeps


class _Breakable:
    def break_down(self) -> None:
        """The device answers everything with an error from now on."""
        with cuda_double.use() as double:
            double["broken"] = LAUNCH_FAILED

    def ended(self) -> str:
        """How this side's room ended."""
        (room,), self.handles = self.handles, []
        self.until(lambda: room.state in {State.SUCCESS, State.FAILED})
        return f"{room.state}: {room.error}"


class Giver(_Breakable, kv.Sources):
    pass


class Taker(_Breakable, kv.Sinks):
    def take(self, burst: int) -> None:
        (node,), (request,) = self.nodes, self.case.requests("dst", burst, 1)
        room, self.handles = node.receive(f"{burst}-0", self._directory), []
        self.until(lambda: room.state is not State.BOOTSTRAPPING)
        self.handles = [room]
        with contextlib.suppress(UsageError):  # the node has failed
            room.bind({"kv": request.pages}, {"kv": (0, self.case.tokens)})


@pytest.fixture
def gpus(monkeypatch, tmp_path):
    """Processes from now on have the double's two devices."""
    # What they would be forked from may be there already, without any.
    monkeypatch.setattr(Rank, "context", get_context("spawn"))
    for name, value in cuda_double.everywhere(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{cuda_double.folder() / 'lib'}:{os.environ.get('LD_LIBRARY_PATH', '')}")


def test_rooms_with_checksums_on_the_second_device(gpus):
    with kv.Bed(CASE, LOCAL, DEVICE, options={"config": Config(checksums=True)}) as both:
        for _ in range(2):
            both.seconds("staged", 1)


@pytest.mark.parametrize(("broken", "met"), [("prefill", False), ("prefill", True), ("decode", True)])
def test_a_node_whose_device_has_failed_fails_with_its_rooms_and_says_why(gpus, broken, met):
    options = {"config": Config(max_silence_s=5.0, hello_s=5.0), "progress": "thread"}
    with BootstrapServer() as server, contextlib.ExitStack() as held:
        giver, taker = ends = [Rank(end, CASE, server.address, LOCAL, DEVICE, options) for end in (Giver, Taker)]
        for end in ends:
            held.callback(end.close)
        for end in ends:
            end.ready()
        if met:
            giver.call("offer", "staged", 0, 1)
            taker.call("pull", 0, 1)
        giver.call("offer", "staged", 1, 1)
        (giver if broken == "prefill" else taker).call("break_down")
        taker.call("take", 1)
        said = {"decode": taker.call("ended")}
        assert said["decode"].startswith(f"{State.FAILED}: "), said
        said["prefill"] = giver.call("ended")
        assert f"failed with {LAUNCH_FAILED}" in said[broken]
