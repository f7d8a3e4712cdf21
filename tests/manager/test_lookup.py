"""Who is looked up again, how often, and what is kept of the answers."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np
import pytest

from pdstage import DecodeNode, Pool, PrefillNode
from pdstage.control.bootstrap import Advert, BootstrapClient, BootstrapServer, Incomplete
from pdstage.errors import DeadlineExceeded
from pdstage.manager.lookup import Directory
from pdstage.tensors import build, paged_nhd
from pdstage.topology import Topology


@pytest.fixture
def directory():
    held = Directory(cache_s=1e-9)
    yield held
    held.close()


def test_answers_that_are_old_are_not_kept(directory: Directory) -> None:
    """Of thousands of instances each asked for once (I14)."""
    answers: queue.SimpleQueue = queue.SimpleQueue()
    with BootstrapServer() as server:
        for n in range(20):
            advert = Advert(
                instance=f"p{n}", topology=Topology(), endpoint=f"tcp://127.0.0.1:{n + 1}", incarnation=n + 1, layout=""
            )
            BootstrapClient(server.address).publish(advert)
            until = time.monotonic() + 20.0
            directory.lookup(server.address, None, advert.instance, until, lambda *a: answers.put(a))
            assert answers.get(timeout=20.0) == ([advert], None)
            assert len(directory._cache) == 1


def test_an_instance_that_is_not_there_is_asked_for_ever_more_seldom(directory: Directory, monkeypatch) -> None:
    asked_at: list[float] = []

    def lookup(self: BootstrapClient, dp_rank: int | None = None, *, instance: str | None = None) -> list[Advert]:
        asked_at.append(time.monotonic())
        raise Incomplete("nobody is there", (0,))

    monkeypatch.setattr(BootstrapClient, "lookup", lookup)
    answers: queue.SimpleQueue = queue.SimpleQueue()
    directory.lookup("127.0.0.1:1", None, "p", time.monotonic() + 1.0, lambda *a: answers.put(a))
    adverts, error = answers.get(timeout=20.0)
    assert adverts is None
    assert isinstance(error, DeadlineExceeded)
    assert 3 <= len(asked_at) <= 8, "0.1 s apart it would have been ten times"


@pytest.mark.parametrize("second", ["lookup", "close"])
def test_the_first_lookups_may_come_in_several_threads(monkeypatch, second: str) -> None:
    """The worker begins with the first. Two of them would share one word to end, and close would wait for ever."""
    asked: queue.SimpleQueue = queue.SimpleQueue()
    monkeypatch.setattr(BootstrapClient, "lookup", lambda *_, **__: asked.put(None) or [])
    directory, begun = Directory(), []
    other = threading.Thread(target=lambda: look() if second == "lookup" else directory.close())

    def look() -> None:
        directory.lookup("127.0.0.1:1", None, "p", time.monotonic() + 1.0, lambda *_: None)

    class Worker(threading.Thread):
        def __init__(self, **given) -> None:
            begun.append(self)
            if len(begun) == 1:
                other.start()
                other.join(0.2)  # what it can do while the first has not started its worker yet
            super().__init__(**given)

    monkeypatch.setattr("pdstage.manager.lookup.threading.Thread", Worker)
    look()
    other.join()
    directory.close()
    look()
    assert len(begun) == 1
    assert not begun[0].is_alive()
    assert asked.qsize() == 2 if second == "lookup" else asked.qsize() <= 1


def test_an_engine_may_keep_the_directory_itself() -> None:
    """As one does whose ranks hand what they advertise to its scheduler: no rank serves or renews anything."""
    src = np.arange(64, dtype=np.float32).reshape(1, 4, 2, 2, 4)
    dst = np.zeros_like(src)
    pools = [Pool.of(build(paged_nhd(held[..., :2], held[..., 2:], total_heads=2, tp=(1, 0)))) for held in (src, dst)]
    config = {"transport": "local", "progress": "thread"}
    with (
        BootstrapServer() as server,
        PrefillNode(pools[0], Topology(), publish=False, instance="engine-7", **config) as prefill,
        DecodeNode(pools[1], Topology(), **config) as decode,
    ):
        assert prefill.bootstrap_address == ""
        server.directory.publish(prefill.advert, None)
        receiver = decode.receive("room", prefill=server.address, instance="engine-7")
        receiver.bind([1, 2], tokens=4)
        sender = prefill.send("room")
        sender.chunk([0, 3], tokens=(0, 4))
        sender.finish()
        receiver.wait(timeout_s=30)
        receiver.wait_released(timeout_s=30)
    assert np.array_equal(dst[0, [1, 2]], src[0, [0, 3]])
