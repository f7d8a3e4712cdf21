"""`pdstage calibrate --rails`: which ways are measured, over real devices between two namespaces."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdstage import cli
from pdstage.errors import UsageError
from pdstage.tools.calibrate import rails
from pdstage.tools.calibrate.rails import Measured, Way
from pdstage.transport import _rails, available
from tests.cables import two_hosts
from tests.transport.sysfs import machine

__all__ = ["two_hosts"]
ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 240
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may make network namespaces")


def test_each_device_alone_then_more_and_more_of_them():
    assert rails.ways(["a", "b"]) == [Way(["a"], 1), Way(["b"], 1), Way(["a", "b"], 2)]
    five = list("abcde")
    assert [way.rails for way in rails.ways(five)] == [1, 1, 1, 1, 1, 2, 4, 5]
    assert all(way.devices == five for way in rails.ways(five)[5:])


def test_the_table_is_beside_the_fastest_alone():
    rows = [Measured(Way([name], 1), rate, rate, rate) for name, rate in (("a", 1e9), ("b", 2e9))]
    lines = rails.table([*rows, Measured(Way(["a", "b"], 2), 3e9, 2.9e9, 3.1e9)]).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["0.50", "1.00", "1.50"]
    assert lines[-1].split()[:3] == ["a,b", "2", "3"]


@pytest.mark.parametrize(("name", "said"), [("", "no RDMA NIC"), ("roce-bonds", "one NIC (mlx5_bond_0:1)")])
def test_without_several_nics_one_line_says_so(tmp_path, monkeypatch, capsys, name, said):
    monkeypatch.setattr(_rails, "SYS", machine(name, tmp_path) if name else tmp_path)
    monkeypatch.setattr(_rails, "_DEV", tmp_path / "dev")
    assert cli.main(["calibrate", "--rails"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(said) and "--rails" in line


def test_one_host_has_no_rails_to_itself(capsys):
    assert cli.main(["calibrate", "--rails", "lo,eth0"]) != 0
    assert "--peer" in capsys.readouterr().err
    with pytest.raises(UsageError, match="rails of 1"):
        rails.measure(None, ["lo"])


@as_root
@pytest.mark.skipif(bool(available()["nixl"]), reason="NIXL does not import here")
def test_two_rails_between_two_hosts(two_hosts):
    """Each way writes over its own devices: bytes are counted, nothing is held against a clock."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "UCX_TLS": "tcp,self"}
    here, there = (["ip", "netns", "exec", space, sys.executable, "-m", "pdstage.cli"] for space in two_hosts)
    serve = [*there, "calibrate", "--serve", "tcp://10.77.0.2:0", "--insecure"]
    ends = ["--bind", "tcp://10.77.0.1:0", "--insecure", "--quick", "--json"]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env=env | {"UCX_NET_DEVICES": "b0,b1"}) as peer:
        try:
            endpoint = peer.stdout.readline().split()[-1]
            command = [*here, "calibrate", "--rails", "a0,a1", "--peer", endpoint, *ends]
            done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=DEADLINE_S, check=False)
        finally:
            peer.terminate()
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert [one["way"] for one in measured] == [
        {"devices": ["a0"], "rails": 1}, {"devices": ["a1"], "rails": 1}, {"devices": ["a0", "a1"], "rails": 2},
    ]  # fmt: skip
    assert all(0 < one["least"] <= one["bytes_per_s"] <= one["most"] for one in measured)
    sent = [_sent(two_hosts[0], name) for name in ("a0", "a1")]
    rooms = 2 * 5 * (16 << 20)  # of each way, two repeats of one room and four
    assert all(0.98 * 1.5 * rooms < nbytes < 1.1 * 1.5 * rooms for nbytes in sent), "its own, and half of those of both"


def _sent(space: str, device: str) -> int:
    shown = subprocess.run(["ip", "-n", space, "-j", "-s", "link", "show", device], capture_output=True, check=True)
    return int(json.loads(shown.stdout)[0]["stats64"]["tx"]["bytes"])
