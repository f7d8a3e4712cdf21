"""The calibration file: read back as written, refused with the file's and the field's name, and used by nodes."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pdstage import PrefillNode, Topology
from pdstage.environment import CALIBRATION
from pdstage.errors import UsageError
from pdstage.manager.calibration import Calibration, read
from pdstage.plan.cost import CostModel
from pdstage.tools.results import save
from tests.manager.engine import Rank

COST = CostModel.linear(bytes_per_s=5e9, descriptor_s=2e-6, post_s=1e-5)


def calibration(cost: CostModel = COST, transport: str = "local") -> Calibration:
    made_at = "2026-01-01T00:00:00+00:00"
    return Calibration(version=1, made_at=made_at, prefill_host="a", decode_host="b", transports={transport: cost})


@pytest.fixture
def path(tmp_path):
    save(calibration(), tmp_path / "costs.json")
    return tmp_path / "costs.json"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"version": 2}, "version"),
        ({"transports": None}, "transports"),
        ({"colour": "red"}, "colour"),
        ({"post_s": "fast"}, "post_s"),
        ({"descriptors": None}, "descriptors"),
        ({"overlap": 2.0}, "overlap"),
        ({"gather_bytes_per_sec": 1e9}, "gather_bytes_per_sec"),
    ],
)
def test_what_it_may_not_hold_is_refused_by_name(path, change, field):
    """None: the field is not there."""
    held = json.loads(path.read_text())
    place = held if field in {*held, "colour"} else held["transports"]["local"]
    place |= change
    if change[field] is None:
        del place[field]
    path.write_text(json.dumps(held))
    for ask in (lambda: read(path), lambda: PrefillNode(Rank().pool, Topology(), transport="local", calibration=path)):
        with pytest.raises(UsageError) as caught:
            ask()
        assert str(path) in str(caught.value) and field in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[1, 2]", b'{"transports": {"a": {"x": ' + b"[" * 100_000])
def test_what_is_no_calibration_is_refused(path, content):
    path.write_bytes(content)
    with pytest.raises(UsageError, match="calibrate"):
        read(path)


def test_a_file_is_there_whole_or_not_at_all(path, monkeypatch):
    """A node that starts while one is written reads the old one; a disk that is full leaves it."""
    seen, write_text, made = [], Path.write_text, calibration()

    def first_half(self, text):
        write_text(self, text[: len(text) // 2])
        seen.append(read(path))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", first_half)
    changed = msgspec.structs.replace(made, made_at="2026-02-02T00:00:00+00:00")
    with pytest.raises(UsageError, match=r"costs\.json.*No space"):
        save(changed, path)
    assert seen == [made] and read(path) == made
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.undo()
    link = path.with_name("link.json")
    link.symlink_to(path)
    save(changed, link)
    assert link.is_symlink() and read(path) == changed
    save(changed, Path(os.devnull))
    assert not Path(os.devnull).is_file()


def test_nodes_take_the_argument_then_the_environment_then_the_traits(site, path, tmp_path, monkeypatch):
    rank, other = Rank(), CostModel.linear(bytes_per_s=1e9, descriptor_s=1e-6, post_s=1e-5)
    node = site.prefill(rank, publish=False)
    host = node.transport.traits
    device = replace(host, bytes_per_s=50e9, descriptor_s=3e-6)  # a transport may cost two peers differently
    for traits in (host, device, host):
        defaults = CostModel.linear(traits.bytes_per_s, traits.descriptor_s, traits.post_s)
        assert node.cost_of(traits) == defaults
    monkeypatch.setenv(CALIBRATION.name, str(path))
    assert site.prefill(rank, publish=False).cost_of(host) == COST
    for transport, taken in (("local", other), ("nixl", defaults)):
        save(calibration(other, transport), tmp_path / "other.json")
        assert site.prefill(rank, publish=False, calibration=tmp_path / "other.json").cost_of(host) == taken


@pytest.mark.parametrize(("descriptor_s", "taken"), [(0.0, "direct"), (1e-3, "staged")])
def test_auto_goes_by_the_file(site, path, descriptor_s, taken):
    """The same room, by a transport whose descriptors cost nothing or everything."""
    save(calibration(CostModel.linear(bytes_per_s=1e9, descriptor_s=descriptor_s, post_s=0.0)), path)
    pair = site.pair(Rank(), Rank(), path="auto", prefill={"calibration": path})
    pair.p.transport.mapped = lambda *_: None  # where pages are mapped no cost decides
    pair.move(1)
    assert pair.p.stats()[f"chunks_{taken}"] == 1
