"""`pdstage instances --watch`: what came, went, and was replaced, and a directory that is away meanwhile."""

from __future__ import annotations

import itertools
import subprocess
import sys

from pdstage.control.bootstrap import BootstrapServer, client_of
from pdstage.tools.watch.instances import changes, ranks_of
from tests.control.test_directory import advert


def test_each_change_is_one_line():
    with BootstrapServer() as server:
        client = client_of(server.address)
        seen = [ranks_of(client.instances())]
        for step in (
            lambda: [client.publish(advert(rank)) for rank in range(2)],
            lambda: client.publish(advert(0, incarnation=255)),
            lambda: client.publish(advert(0, incarnation=255)),  # a renewal
            lambda: client.withdraw(advert(1)),
        ):
            step()
            seen.append(ranks_of(client.instances()))
    lines = [list(changes(one, other)) for one, other in itertools.pairwise(seen)]
    assert lines == [
        ["+ p0 rank 0 tcp://127.0.0.1:9000 0000000000000001", "+ p0 rank 1 tcp://127.0.0.1:9001 0000000000000001"],
        ["* p0 rank 0 tcp://127.0.0.1:9000 00000000000000ff"],
        [],
        ["- p0 rank 1 tcp://127.0.0.1:9001 0000000000000001"],
    ]


def test_the_command_goes_on_while_the_directory_is_away():
    with BootstrapServer() as server:
        address = server.address
        client_of(address).publish(advert(0, tp=1))
        command = [sys.executable, "-m", "pdstage", "instances", address, "--watch", "0.05"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            assert " + p0 rank 0 tcp://127.0.0.1:9000 " in process.stdout.readline()
            server.close()
            assert " ! no bootstrap server answers" in process.stdout.readline()
            with BootstrapServer(address) as again:
                again.directory.publish(advert(0, tp=1, incarnation=2), 60.0)
                assert " ! it answers again" in process.stdout.readline()
                assert " * p0 rank 0 " in process.stdout.readline()
        finally:
            process.kill()
            process.communicate()
