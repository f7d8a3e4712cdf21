"""Settings of a node that cannot go together are refused at its start, in one sentence that names what would do."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest

from pdstage import Config, Key, Region, RowLevel, UsageError, View
from pdstage.kernels import Pool, convert_reference
from pdstage.layout.topology import REPLICATED
from pdstage.transport import available
from pdstage.transport.local import LocalTransport
from tests.manager.engine import QUICK, Rank, decode_node
from tests.rows import either_side

VIEW = View(
    key=Key("kv", "latent", 0), region=0, offset=0, n_items=16, item_stride=32, tokens_per_item=16,
    rows=(RowLevel(16, 2),), shards=1, shard_stride=2, width=2, axis=REPLICATED, format="bytes",
)  # fmt: skip
CHECKED = replace(QUICK, checksums=True)


def test_numbers_of_any_kind_become_pythons():
    read = Config(drain_s=np.float32(2.5), max_peers=np.int16(7))
    assert [(type(value), value) for value in (read.drain_s, read.max_peers)] == [(float, 2.5), (int, 7)]


class HostOnly(LocalTransport):
    """A transport of host memory, whatever `local` learns to move."""

    traits = replace(LocalTransport.traits, name="host-only", kinds=frozenset({"cpu"}))
    opened: ClassVar[list[HostOnly]] = []

    def __init__(self) -> None:
        super().__init__()
        self.opened.append(self)


@pytest.fixture
def opened(monkeypatch) -> list[HostOnly]:
    """What nodes open as "local", to see that each is closed again."""
    monkeypatch.setattr("pdstage.transport.local.TRANSPORT", HostOnly)
    monkeypatch.setattr(HostOnly, "opened", [])
    return HostOnly.opened


def rank_on_a_device(pages: str = "cuda") -> Rank:
    """Nothing is allocated on the device: there is none here."""
    rank = Rank()
    rank.pool = Pool([Region(1 << 40, 4096, "cuda")], [VIEW], "cuda:0")
    rank.pool.runtime = lambda: SimpleNamespace(current=contextlib.nullcontext, flushes=False)
    if pages == "cpu":
        rank.pool.layout = replace(rank.pool.layout, regions=(Region(1 << 40, 4096, "cpu"),))
    return rank


@pytest.mark.parametrize("path", ["auto", "direct", "staged"])
@either_side
def test_a_device_pool_over_a_transport_of_host_memory(site, opened, path, side):
    with pytest.raises(UsageError, match=r"'host-only' moves cpu memory only, .* are on cuda:0") as caught:
        getattr(site, side)(rank_on_a_device(), path=path)
    info = caught.value
    for name in ("nixl", "mori"):  # mooncake: by its wheel
        assert (name in info.remedy.replace(",", "").split()) is (available().get(name) == "")
    assert "local" not in info.remedy
    assert info.fields == {"transport": "host-only", "device": "cuda:0"}
    assert [transport.closed for transport in opened] == [True]


@pytest.mark.parametrize("path", ["auto", "direct"])
@pytest.mark.parametrize(
    ("pages", "options", "words"),
    [
        ("cuda", {"staging_on": "host"}, "with staging memory on cpu"),
        ("cpu", {}, "with pages in host memory"),
    ],
)
def test_host_memory_of_a_gpus_pool_goes_with_the_staged_path_alone(opened, path, pages, options, words):
    """Where a NIC reaches its pages, it reaches staging memory beside them too."""
    with pytest.raises(UsageError, match=f"path '{path}' of a pool on cuda:0 {words}") as caught:
        decode_node(rank_on_a_device(pages), path=path, **options)
    info = caught.value
    if pages == "cpu":
        assert info.remedy == 'choose path="staged"'
    assert all(transport.closed for transport in opened)


def test_an_open_transport_that_cannot_serve_is_closed():
    """Also where no backend copies what is on the device."""
    rank = rank_on_a_device()
    for words in ("path is 'fast'", "no backend copies it"):
        transport = HostOnly()
        with pytest.raises(UsageError, match=words):
            decode_node(rank, transport=transport, path="fast")
        assert transport.closed
        rank.pool.runtime = mock.Mock(side_effect=UsageError("no backend copies it"))


def test_checksums_of_what_is_never_staged(site):
    with pytest.raises(UsageError, match=r'Config\.checksums with path="direct".*"staged"'):
        site.prefill(Rank(), path="direct", config=CHECKED)
    # What its peers send may be staged, whatever may be written here; and what converts is staged on every path.
    site.decode(Rank(), path="direct", config=CHECKED)
    site.prefill(Rank(), path="direct", config=replace(CHECKED, convert=True))


def test_a_path_that_is_set_is_checked_as_one_that_is_given(site):
    p = site.prefill(Rank(), config=Config(checksums=True))
    for path, words in (("pigeon", "path is 'pigeon'"), ("direct", "only what is staged carries a checksum")):
        with pytest.raises(UsageError, match=words):
            p.path = path
    assert p.path == "auto"
    p.path = "staged"
    assert p.status().info[2] == "staged"


def test_a_converting_pool_is_asked_before_a_transport_is_opened(opened, monkeypatch):
    monkeypatch.setattr(convert_reference, "missing", lambda: "install pdstage[torch]")
    with pytest.raises(UsageError, match=r"cannot convert formats here.*pdstage\[torch\]"):
        decode_node(Rank(), config=replace(QUICK, convert=True))
    assert not opened


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("llama", "model is 'llama'"),
        ({"revision": 1}, "model's revision is 1"),
        ({7: "llama"}, "a name in `model` is 7"),
        ({"name": "x" * 257}, "model's 'name' of 257 characters"),
        ({str(n): "x" for n in range(65)}, "a model of 65 facts"),
    ],
    ids=["text", "number", "name", "long", "many"],
)
def test_what_cannot_be_said_of_a_model(site, given, words) -> None:
    for make in (site.prefill, site.decode):
        with pytest.raises(UsageError) as caught:
            make(Rank(), model=given)
        assert words in str(caught.value)


def test_two_nodes_of_another_model(site) -> None:
    """Both hear of it in the same words, and no room begins."""
    pair = site.pair(prefill={"model": {"revision": "4f0c"}}, decode={"model": {"revision": "9a1d", "name": "llama"}})
    receiver = pair.receive(1)
    site.ends(receiver)
    assert "the model's revision is '4f0c' at prefill and '9a1d' at decode" in str(receiver.error)
