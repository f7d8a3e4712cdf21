"""`--metrics-port`: ranks of one command, each at the first free port, and nothing at all without the option."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pdstage import UsageError, cli
from pdstage.bench.rooms import Pair
from pdstage.tools.watch.option import N_PORTS, VARIABLE, Watching, asked_by_environment, checked
from tests.manager.engine import Rank
from tests.watch.conftest import Samples, get


def test_processes_alike_take_ports_of_their_own(site):
    with Watching(0) as first:
        first.expose(site.decode(Rank(), observers=first.observers))
        with Watching(first.endpoint.port) as second:
            second.expose(site.prefill(Rank(), observers=second.observers))
            assert first.endpoint.port < second.endpoint.port <= first.endpoint.port + N_PORTS
            for one in (first, second):
                assert Samples(get(one.endpoint.address)).names >= {"pdstage_rooms", "pdstage_room_seconds_count"}


def test_without_the_option_nothing_is_observed_served_or_imported(site):
    watching = Watching(None)
    node = site.decode(Rank(), observers=watching.observers)
    watching.expose(node)
    assert watching.observers == () == node.observers
    assert watching.endpoint is None
    code = "import sys, pdstage.tools.watch.option as o; o.Watching(None); print('prometheus_client' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("port", [-1, 65536])
def test_no_port_is_refused(port):
    with pytest.raises(UsageError, match="--metrics-port"):
        checked(port)
    assert cli.main(["bench", "wire", "--metrics-port", str(port)]) == 2


@pytest.mark.parametrize(("said", "port"), [("", None), ("0", 0), ("9470", 9470)])
def test_the_environment_tells_ranks(monkeypatch, said, port):
    monkeypatch.setenv(VARIABLE, said)
    assert asked_by_environment() == port


def test_ranks_of_a_bench_are_exported_while_they_run(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    with Pair("local", "inline") as pair:
        pair.both("run", pair.rooms(20))
        for rank, role in ((pair.prefill, "prefill"), (pair.decode, "decode")):
            told = Samples(get(rank.call("metrics_address")))
            assert told("pdstage_rooms_ended_total", role=role, outcome="success") == 20
            assert told("pdstage_room_seconds_count", role=role, outcome="success") == 20


def test_a_missing_client_is_one_error_that_names_the_extra(tmp_path):
    """Where prometheus_client is not installed, the command says so in one line and exits with 2."""
    (tmp_path / "prometheus_client.py").write_text("raise ModuleNotFoundError('no prometheus_client')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-m", "pdstage.cli", "top", "1", "--once"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "[top]" in done.stderr
