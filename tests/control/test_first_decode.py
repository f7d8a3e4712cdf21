"""Threads that decode a type's first bytes at the same moment: as when all ranks come up, and publish at once."""

from __future__ import annotations

import pytest

from tests.processes import python

TOGETHER = """
import sys, threading, time
from pdstage.transport import open_transport
sys.setswitchinterval(1e-6)

def together(run, n=16):
    barrier = threading.Barrier(n)
    threads = [threading.Thread(target=lambda: (barrier.wait(), run())) for _ in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""
ADVERTS = """
import msgspec
from pdstage.control import directory_api
from pdstage.control.directory import Advert, Directory
from pdstage.layout.topology import Topology
advert = Advert(
    instance="p", topology=Topology(), endpoint="tcp://127.0.0.1:9", incarnation=1, layout="it", transports=("local",),
    version=1,
)
body = msgspec.json.encode(directory_api.Publish(advert, 15.0))
directory = Directory(time.monotonic)
together(lambda: directory_api.answer(directory, "PUT", "/v1/ask", body))
"""
DESCRIPTIONS = """
one, others = open_transport("local"), [open_transport("local") for _ in range(16)]
told, left = one.describe(), list(others)
together(lambda: left.pop().identify("one", told))
"""


@pytest.mark.parametrize("what", [ADVERTS, DESCRIPTIONS], ids=["adverts", "descriptions"])
def test_the_first_of_a_type_may_come_in_several_threads(what: str) -> None:
    """In a process of its own, which msgspec ends where its look into a type is looked into."""
    for _ in range(5):
        python("-c", TOGETHER + what, check=True)
