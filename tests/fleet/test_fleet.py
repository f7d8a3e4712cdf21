"""Small fleets: an engine replaced while rooms flow, and the proof that the checks can fail."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdstage.control.bootstrap import BootstrapServer
from tests.fleet import switch
from tests.fleet.member import Job
from tests.fleet.rank import Memory
from tests.fleet.router import Fleet, reason_of

JOB = Job(role="", tokens=1024)


@pytest.fixture
def fleet(tmp_path):
    with BootstrapServer() as directory, Fleet(tmp_path, directory.address, JOB) as fleet:
        fleet.start("prefill", "prefill", tp=2)
        fleet.start("decode", "decode", page=8, hnd=True)
        fleet.until_up()
        yield fleet


def test_an_engine_replaced_in_order_loses_no_room(fleet):
    fleet.window = 4
    fleet.load(3)
    ports = [rank.port for rank in fleet.engines["prefill"].ranks]
    fleet.close(fleet.engines["prefill"])
    fleet.start("prefill", "prefill", tp=2, ports=ports)
    fleet.until_up()
    fleet.load(3)
    fleet.rest()
    assert fleet.counts["rooms failed"] == 0
    assert fleet.counts["rooms succeeded"] >= 6
    assert not fleet.wrong


def test_a_killed_engine_fails_rooms_with_a_reason(fleet):
    """Both ends say why, and the rooms succeed when they are sent again."""
    room = fleet.send(fleet.engines["prefill"], fleet.engines["decode"], 1, 900)
    fleet.kill(fleet.engines["decode"])
    fleet.until(lambda: not any(m.job.role == "decode" for m in room.awaited), "decode ends")
    assert "decode: its process ended" in room.reasons
    assert not fleet.wrong


def test_other_bytes_are_seen(fleet):
    """Decode is told of another room's content than prefill: what it gets is not what it must be."""
    room = fleet.send(fleet.engines["prefill"], fleet.engines["decode"], 7, 40)
    for rank in fleet.engines["decode"].ranks:
        order = {"key": "other", "serial": 8, "tokens": 40, "instance": "prefill", "prefill": fleet.directory}
        rank.order("room", **order)
    for rank in fleet.engines["prefill"].ranks:
        rank.order("room", key="other", serial=9, tokens=40)
    with pytest.raises(AssertionError, match="other: the aux row differs"):
        fleet.until(lambda: False, "never")
    assert not room.awaited or room.reasons == []


def test_a_rank_that_dies_by_itself_is_wrong(fleet):
    fleet.engines["decode"].ranks[0].order("unheard of")
    fleet.engines["decode"].ranks[0].order("room", unknown=1)
    with pytest.raises(AssertionError, match="decode decode died, code 1"):
        fleet.until(lambda: False, "never")


def test_a_page_written_while_it_is_free_is_seen():
    memory = Memory({"tp": 1, "rank": 0, "page": 8, "hnd": False, "layers": 1, "tokens": 64, "hybrid": True})
    pages, slots = memory.take(20)
    memory.fill(3, pages, 0, 20)
    memory.fill_state(3, slots)
    assert memory.differs(3, pages, slots, 20) == ""
    memory.states[0, slots[0], 1] ^= 1
    assert memory.differs(3, pages, slots, 20) == "the state of layer 0 differs"
    memory.kv[0, 1, pages[2], 3] ^= 1
    assert memory.differs(3, pages, slots, 20) == "K and V of layer 0 differ"
    memory.give_back(pages, slots)
    assert memory.altered() == []
    memory.kv[0, 0, pages[1]] ^= 1
    assert memory.altered() == [f"page {pages[1]} changed while it was free"]


def test_reasons_are_counted_without_numbers():
    one, other = (reason_of(f"no decode rank opened room 'r-{n}' in {n}.0 s") for n in (1, 9))
    assert one == other


@pytest.mark.skipif(not switch.permitted(), reason="network namespaces and /dev/net/tun need root")
def test_hosts_behind_the_switch():
    """What a host sends arrives late by its delay, and not at all over a cut."""

    def ping(network, source, target, tries=60):
        command = [
            "ip",
            "netns",
            "exec",
            network.namespaces[source],
            sys.executable,
            "-c",
            PING,
            network.host(target),
            str(tries),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    with switch.Network(3) as network:
        server = subprocess.Popen(
            ["ip", "netns", "exec", network.namespaces[1], sys.executable, "-c", ECHO], stdout=subprocess.PIPE
        )
        try:
            assert server.stdout.readline()
            network.link(0, delay_s=0.05)
            assert float(ping(network, 0, 1)) >= 0.1
            network.cut([(1, 0)])
            assert ping(network, 0, 1, tries=2) == "nothing"
            assert ping(network, 2, 1) != "nothing"
            network.heal([(1, 0)])
            assert ping(network, 0, 1) != "nothing"
            assert network.counts()["cut"] > 0
        finally:
            server.kill()
            server.communicate()


ECHO = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("", 7))
print("up", flush=True)
while True:
    s.sendto(*s.recvfrom(100))
"""
PING = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(0.5)
for _ in range(int(sys.argv[2])):
    at = time.monotonic()
    s.sendto(b"hello", (sys.argv[1], 7))
    try:
        s.recv(100)
    except TimeoutError:
        continue
    print(time.monotonic() - at)
    break
else:
    print("nothing")
"""
