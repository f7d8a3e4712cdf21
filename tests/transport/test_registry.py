"""Transports are found by name, and what is missing is said in words."""

from __future__ import annotations

import importlib.util
import re
import sys
from unittest import mock

import numpy as np
import pytest
from transport import postbox

from pdstage import Region, TransportError, UsageError
from pdstage.transport import available, names, open_from_config, open_transport, supporting
from tests.processes import python


def test_installed_transports_import_so_that_no_contract_test_is_skipped_in_silence():
    assert available().keys() == set(names())
    assert not {name for name in names() if name.startswith("_") or name == "base"}
    assert available()["local"] == ""
    assert (available()["nixl"] == "") == (importlib.util.find_spec("nixl") is not None)
    if importlib.util.find_spec("mooncake") is not None:  # the wheel: it needs libraries of the system too
        assert available()["mooncake"] == "" or "apt-get install" in available()["mooncake"]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("carrier-pigeon", {}, r"'carrier-pigeon'.*local"),
        ("local", {"wings": 2}, "wings"),
        ("auto", {"wings": 2}, "'auto'"),
    ],
)
def test_what_is_unknown_is_named(name, options, said):
    with pytest.raises(UsageError, match=said):
        open_transport(name, **options)


class Carded(postbox.Postbox):
    """It keeps what it was given."""

    def __init__(self, *, cards=(), node=0):
        super().__init__()
        self.given = cards, node


@pytest.fixture
def carded(monkeypatch):
    monkeypatch.setattr("pdstage.transport.load", lambda name: {"carded": Carded}[name])


@pytest.mark.parametrize(
    ("told", "given"),
    [
        ("carded", ((), 0)),
        ({"name": "carded"}, ((), 0)),
        ({"name": "carded", "cards": ["mlx5_7"]}, (["mlx5_7"], 0)),
        ({"name": "carded", "cards": {"cuda:0": ["mlx5_0"], "cuda:1": ["mlx5_1"]}, "node": 1}, (["mlx5_1"], 1)),
        ({"name": "carded", "node": {"cpu": 0, "cuda:1": 1}}, ((), 1)),
    ],
)
def test_a_setting_shared_by_the_ranks_of_a_host_gives_each_its_own(carded, told, given):
    with open_from_config(told, "cuda:1") as opened:
        assert opened.given == given


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"cards": ["mlx5_0"]}, "names no transport"),
        ({"name": 7}, "names no transport"),
        (None, "names no transport"),
        ({"name": "carded", "cards": {"cuda:0": [], "cuda:2": []}}, "cards for cuda:0, cuda:2, not for cuda:1"),
        ({"name": "carded", "wings": 2}, "wings"),
    ],
)
def test_a_setting_that_tells_of_no_transport(carded, told, words):
    with pytest.raises(UsageError, match=words):
        open_from_config(told, "cuda:1")


def test_missing_dependency_names_what_to_install(monkeypatch):
    """Row: library missing."""
    for module in ("nixl", "_nixl_agent"):
        monkeypatch.delitem(sys.modules, f"pdstage.transport.{module}", raising=False)
    for module in [name for name in sys.modules if name.partition(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(UsageError, match=r'nixl.*pip install "pdstage\[nixl\]"'):
        open_transport("nixl")
    assert 'pip install "pdstage[nixl]"' in available()["nixl"]
    with open_transport("auto") as auto:
        assert auto.traits.name == "local"


def test_a_fault_of_our_own_does_not_pass_for_a_missing_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "pdstage.transport.local", raising=False)
    monkeypatch.setitem(sys.modules, "pdstage.transport._peer", None)
    with pytest.raises(ImportError):
        open_transport("local")


def test_auto_goes_without_what_does_not_start(monkeypatch, caplog):
    def broken(self):
        raise TransportError("no device", remedy="plug it in")

    pytest.importorskip("nixl")
    with open_transport("auto") as both:
        assert list(both.offers()) == ["local", "nixl"], "the most preferred first"
    monkeypatch.setattr("pdstage.transport.nixl.NixlTransport.__init__", broken)
    with open_transport("auto") as transport:
        assert list(transport.offers()) == ["local"]
    assert "no device" in caplog.text


BROKEN = {  # entry points of a broken distribution, and what is said of each
    "gone": ("nowhere:Lost", "ModuleNotFoundError: No module named 'nowhere'"),
    "unnamed": ("outside:Nothing", "AttributeError.*Nothing"),
    "angry": ("angry:Angry", "OSError: libnpu.so"),
    "text": ("outside:TEXT", "not a Transport class"),
    "half": ("outside:Half", "lacks .*connect"),
    "bare": ("outside:Bare", "with traits"),
    "local": ("angry:Angry", ""),
}


def test_a_broken_distribution_is_told_of_and_harms_nobody_else(tmp_path, monkeypatch):
    (tmp_path / "angry.py").write_text("raise OSError('libnpu.so: cannot open shared object file')\n")
    (tmp_path / "outside.py").write_text(
        "from pdstage.transport import Transport\nfrom pdstage.transport.local import LocalTransport\nTEXT = 'local'\n"
        "class Half(Transport):\n    traits = LocalTransport.traits\n    preference = 90\n"
        "class Bare(LocalTransport):\n    traits = None\n    preference = 90\n"
    )
    info = tmp_path / "outside-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-pigeons\nVersion: 1.0\n")
    points = [f"{name} = {value}" for name, (value, _) in BROKEN.items()]
    (info / "entry_points.txt").write_text("\n".join(["[pdstage.transports]", *points]))
    monkeypatch.syspath_prepend(tmp_path)
    reasons = available()
    for name, (_, why) in BROKEN.items():
        if name == "local":
            assert reasons[name] == "", "a name of our own stays ours"
            continue
        assert re.search(rf"'{name}' of broken-pigeons .*{why}", reasons[name]), reasons[name]
        assert "uninstall" in reasons[name] and "pip install" not in reasons[name]
        with pytest.raises(UsageError, match=name):
            open_transport(name)
    assert "local" in supporting({"cpu"})
    with open_transport("auto") as auto:
        assert "local" in auto.offers()


def test_looking_for_names_imports_no_backend():
    code = "import sys, pdstage.transport as t; t.names(); assert not {'nixl', 'torch', 'zmq'} & set(sys.modules)"
    python("-c", code, check=True)


def test_what_is_unregistered_half_way_may_not_be_posted(monkeypatch):
    """The library let go of some of it, and refused the rest."""
    memory = np.zeros(8192, np.uint8)
    region = Region(memory.ctypes.data, memory.nbytes)
    with open_transport("local") as transport:
        transport.register([region])
        monkeypatch.setattr(transport, "_unregister", mock.Mock(side_effect=TransportError("refused")))
        with pytest.raises(TransportError, match="refused"):
            transport.unregister([region])
        assert not transport.own.regions
        with pytest.raises(UsageError, match="not registered"):
            transport.unregister([region])
