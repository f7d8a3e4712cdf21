"""Transports are found by name, and what is missing is said in words."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys

import pytest

from pdstage.errors import TransportError, UsageError
from pdstage.transport import Transport, available, names, open_transport


def test_the_names_are_the_modules():
    assert {"local", "nixl"} <= set(names())
    assert not {name for name in names() if name.startswith("_") or name == "base"}
    assert available().keys() == set(names())


def test_installed_transports_import_so_that_no_contract_test_is_skipped_in_silence():
    assert available()["local"] == ""
    assert (available()["nixl"] == "") == (importlib.util.find_spec("nixl") is not None)


def test_unknown_name_lists_the_known():
    with pytest.raises(UsageError, match=r"'carrier-pigeon'.*local"):
        open_transport("carrier-pigeon")


def test_unknown_option_is_named():
    with pytest.raises(UsageError, match="wings"):
        open_transport("local", wings=2)


def test_missing_dependency_names_what_to_install(monkeypatch):
    for module in ("nixl", "_nixl_agent"):
        monkeypatch.delitem(sys.modules, f"pdstage.transport.{module}", raising=False)
    for module in [name for name in sys.modules if name.partition(".")[0] == "nixl"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(UsageError, match=r'nixl.*pip install "pdstage\[nixl\]"'):
        open_transport("nixl")
    assert 'pip install "pdstage[nixl]"' in available()["nixl"]
    auto = open_transport("auto")
    assert auto.traits.name == "local"
    auto.close()


def test_a_fault_of_our_own_does_not_pass_for_a_missing_package(monkeypatch):
    monkeypatch.delitem(sys.modules, "pdstage.transport.local", raising=False)
    monkeypatch.setitem(sys.modules, "pdstage.transport._peer", None)
    with pytest.raises(ImportError):
        open_transport("local")


def test_auto_offers_all_that_it_may_choose_of_and_local_first():
    transport = open_transport("auto")
    imports = [name for name in ("local", "nixl") if not available()[name]]
    assert list(transport.offers()) == imports
    transport.close()


def test_auto_has_no_options():
    with pytest.raises(UsageError, match="'auto'"):
        open_transport("auto", progress_thread=True)


def test_auto_goes_without_what_does_not_start(monkeypatch, caplog):
    def broken(self):
        raise TransportError("no device", remedy="plug it in")

    pytest.importorskip("nixl")
    nixl = importlib.import_module("pdstage.transport.nixl").NixlTransport
    monkeypatch.setattr(nixl, "__init__", broken)
    transport = open_transport("auto")
    assert list(transport.offers()) == ["local"]
    assert "no device" in caplog.text
    transport.close()


def test_a_transport_of_another_distribution_is_found_by_its_entry_point(tmp_path, monkeypatch):
    (tmp_path / "pigeon.py").write_text(
        "from pdstage.transport.local import LocalTransport\nclass Pigeon(LocalTransport):\n    preference = 0\n"
    )
    info = tmp_path / "pigeon-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pigeon\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[pdstage.transports]\npigeon = pigeon:Pigeon\nlost = nowhere:Lost\n")
    monkeypatch.syspath_prepend(tmp_path)
    transport = open_transport("pigeon")
    assert type(transport).__name__ == "Pigeon"
    assert isinstance(transport, Transport)
    transport.close()
    assert available()["pigeon"] == ""
    assert "nowhere" in available()["lost"]
    auto = open_transport("auto")
    assert "pigeon" not in auto.offers()  # an unknown transport is never chosen unasked
    auto.close()


def test_looking_for_names_imports_no_backend():
    code = "import sys, pdstage.transport as t; t.names(); assert not {'nixl', 'torch', 'zmq'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["local", "nixl"])
def test_open_and_close_leave_nothing_behind(name, no_leaks):
    if available()[name]:
        pytest.skip(available()[name])
    closed = [open_transport(name) for _ in range(4)]
    for transport in closed:
        transport.close()
