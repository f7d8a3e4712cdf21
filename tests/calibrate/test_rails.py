"""`pdstage calibrate --rails`: which ways are measured, over real devices between two namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdstage import cli
from pdstage.errors import UsageError
from pdstage.tools.calibrate import rails
from pdstage.tools.calibrate.rails import Measured, Way
from pdstage.transport import _rails
from tests.cables import two_hosts
from tests.transport.sysfs import machine

__all__ = ["two_hosts"]
ROOT = Path(__file__).resolve().parent.parent.parent
DEADLINE_S = 240


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
