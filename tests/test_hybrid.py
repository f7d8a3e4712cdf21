"""Names of state kinds, what the constructors of states refuse, the items of each kind, and helpers for addresses."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from emulator import sglang
from test_states import TPS, Kind, check, slots

from pdstage.errors import UsageError
from pdstage.layout import Layout
from pdstage.layout.addresses import Paging, StateComponents, append_state_component
from pdstage.layout.items import Items, prefix_items, ring_items, slot_items, window_items
from pdstage.layout.states import StateType, canonical, kind_of, registered
from pdstage.manager import items as checking
from pdstage.tensors import (
    Field,
    Ring,
    Section,
    block_pages,
    build,
    dsa_index,
    kv_scales,
    mamba_conv,
    mamba_ssm,
    mla,
    mxfp8_scales,
    rings,
    slot_states,
)

# Names.


def test_a_kind_has_one_name_on_both_sides():
    assert StateType.of("nsa") is StateType.of("DSA") is StateType.DSA is StateType.NSA
    assert canonical("nsa") == canonical("dsa") == StateType.NSA.component == "dsa"
    pool = np.zeros((4, 64 * 132), np.uint8)
    by_alias, by_name = (build(dsa_index([pool], page_size=64, component=name)) for name in ("nsa", "dsa"))
    assert by_alias == by_name
    assert by_alias.component("nsa") is by_alias.component("dsa")
    views = [view.__class__(**{**fields(view), "key": view.key._replace(component="nsa")}) for view in by_name.views()]
    assert Layout.of(by_name.regions, views) == by_name, "views made by hand meet too"


def fields(view):
    return {name: getattr(view, name) for name in view.__slots__}


def test_items_go_by_any_name_of_a_kind():
    layout = build(dsa_index([np.zeros((4, 64 * 132), np.uint8)], page_size=64))
    for name in ("nsa", "dsa"):
        found = checking.check(layout, {name: [2, 1]}, {"nsa": (0, 100)}, unique=True)
        assert [(one.component, one.start, one.stop) for one in found.values()] == [("dsa", 0, 100)]


def test_an_unknown_kind_is_refused_naming_what_there_is():
    with pytest.raises(UsageError, match=r"unknown state kind 'rwkv'; registered are 'none', 'mamba', 'swa', 'nsa' \("):
        StateType.of("rwkv")
    with pytest.raises(UsageError, match="'none' has no component"):
        _ = StateType.NONE.component


def test_more_kinds_can_be_registered():
    kind = StateType("test_rwkv", ("test_rwkv",), positional=False, exact=True, aliases=("test_rwkv7",))
    assert StateType.register(kind) is kind
    assert StateType.register(kind) in registered()
    assert StateType.of("test_rwkv7") is kind_of("test_rwkv7") is kind
    layout = build(slot_states([np.zeros((3, 8), np.float32)], component="test_rwkv7"))
    assert [(c.name, c.positional, c.exact) for c in layout.components] == [("test_rwkv", False, True)]
    for claim in ("mamba", "nsa", "test_rwkv"):
        with pytest.raises(UsageError, match=f"'test_other' claims the name '{claim}' of"):
            StateType.register(StateType("test_other", ("test_other",), aliases=(claim,)))


# Shapes that no state kind of an engine has by itself.


class Ssm(sglang.Mamba):
    """Temporal states alone, `[slots, heads, head_dim, state]` or, `turned`, `[slots, heads, state, head_dim]`."""

    turned = False

    def __post_init__(self):
        super().__post_init__()
        self.memory.clear()
        slot_layers, n = self.temporal.shape[:2], self.temporal.shape[2]
        inner = (self.state, self.head_dim) if self.turned else (self.head_dim, self.state)
        self.held = self.garbage(*slot_layers, n, *inner, dtype=np.uint32)
        self.temporal = self.held.swapaxes(3, 4) if self.turned else self.held


class TurnedSsm(Ssm):
    turned = True


@pytest.mark.parametrize(("src", "dst"), list(itertools.product([Ssm, TurnedSsm], repeat=2)))
@pytest.mark.parametrize("by_element", [False, True])
def test_ssm_states_of_both_orders(src, dst, by_element):
    """By heads where both sides have one order, which may have heads and their rows as one axis; else by element."""
    if not by_element and src is not dst:
        return

    def parts(e):
        held = e.held if by_element or e.turned else e.held.reshape(*e.held.shape[:2], -1, e.held.shape[4])
        tp = (e.tp, e.rank)
        return [mamba_ssm(held, total_heads=8, tp=tp, state_first=e.turned, by_element=by_element, format="fp32")]

    for tp in TPS:
        check(Kind(src, parts, slots("mamba_ssm" if by_element else "mamba"), decode=dst), *tp, {}, {})


# Items.


def test_items_of_a_prefix():
    row = np.array([8, 9, 10, 11, 20, 21, 22, 23, 4, 5])
    assert list(prefix_items(row, page_size=4).pages) == [2, 5, 1]
    held = prefix_items(row, page_size=4, held=6)
    assert (list(held.pages), held.first_token) == ([5, 1], 4)
    short = prefix_items(row, page_size=4, stop=8)
    assert list(short.pages) == [2, 5]
    assert not len(prefix_items(row, page_size=4, stop=0).pages)


@pytest.mark.parametrize(("window", "held", "first"), [(4, 0, 4), (2, 0, 8), (100, 0, 0), (6, 0, 4), (100, 9, 8)])
def test_a_window_starts_with_a_page_and_has_slots_of_its_own(window, held, first):
    row = np.array([40, 41, 42, 43, 52, 53, 54, 55, 36, 37])
    mapping = np.zeros(60, np.int64)
    mapping[row] = np.arange(4, 14)  # pages 1, 2, 3
    for given in (mapping, torch.from_numpy(mapping)):
        items = window_items(row, page_size=4, window=window, held=held, mapping=given)
        assert (list(items.pages), items.first_token) == ([1, 2, 3][first // 4 :], first)
    assert list(window_items(row, page_size=4, window=window, held=held).pages) == [10, 13, 9][first // 4 :]


def test_rows_of_a_ring_come_in_position_order():
    ring = Ring(rows=6, slot_step=6)
    items = ring_items(2, ring, stop=14, window=5)
    assert (list(items.pages), items.first_token) == ([15, 16, 17, 12, 13], 9)
    assert not len(ring_items(2, ring, stop=0, window=5).pages)
    with pytest.raises(UsageError, match="window of 7 tokens in a ring of 6"):
        ring_items(2, ring, stop=14, window=7)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (prefix_items, {"page_size": 0}),
        (prefix_items, {"page_size": 4, "stop": 9}),
        (prefix_items, {"page_size": 4, "held": -3}),
        (window_items, {"page_size": 4, "window": 0}),
    ],
)
def test_items_refuse_what_cannot_be(make, wrong):
    with pytest.raises(UsageError):
        make(np.arange(8), **wrong)


def test_no_items_are_nothing_to_move():
    """Also of a component that this rank, a pipeline stage say, does not have; but not one item of it."""
    layout = build(slot_states([np.zeros(4)], format="fp64"))
    found = checking.check(layout, {"request_row": slot_items(), "mamba": slot_items(), "kv": []}, None, unique=True)
    (said,) = checking.rects_of(layout, found, None)
    assert said.component == "request_row"
    assert said.start == said.stop, "of slots it is said that there are none"
    with pytest.raises(UsageError, match="no component 'mamba'"):
        checking.check(layout, {"mamba": slot_items(1)}, None, unique=True)
    with pytest.raises(UsageError, match="tokens of 'swa' without its items"):
        checking.check(layout, {"mamba": Items([])}, {"swa": (0, 1)}, unique=True)


# Addresses.


def test_two_pools_for_one_layer_are_refused():
    states = StateComponents((2, 0))
    append_state_component(states, "mamba", [4096], [960], [96])
    with pytest.raises(UsageError, match=r"state\.0.* layer=0\) is at 0x1000 and at 0x2000"):
        append_state_component(states, "mamba", [8192], [960], [96])


def test_a_component_of_no_buffers_is_one_with_nothing_to_send():
    states = StateComponents((1, 0))
    append_state_component(states, "swa", [], [], [], paging=Paging(4))
    append_state_component(states, "mamba", [4096], [0], [0])
    assert (states.parts, states.names) == ([], ["swa", "mamba"])


def appended(kind="mamba", **changes):
    given = {"data_ptrs": [4096], "data_lens": [960], "item_lens": [96], **changes}
    states = StateComponents(given.pop("tp", (2, 1)))
    append_state_component(states, kind, **given)
    return build(*states.parts)


@pytest.mark.parametrize("total", [4096, 10240, 2688, 136, 134])
def test_every_tp_size_up_to_32_that_divides_a_dimension_slices_it(total):
    axes = []
    for tp in (tp for tp in range(1, 33) if total % tp == 0):
        dim = total // tp
        view = next(appended(tp=(tp, 0), data_lens=[dim * 4], item_lens=[dim * 4], dim_per_tensor=[dim]).views())
        axes.append(view.axis._replace(count=0))
        assert view.shards * view.width == dim * 4
    assert len(set(axes)) == 1


MISUSES = {
    "kind": (lambda: appended("rwkv"), "unknown state kind 'rwkv'"),
    "paging": (lambda: appended("swa"), "'swa' has token positions"),
    "entries": (lambda: appended(layer_ids=[1, 2]), "layer_ids has 2 entries, data_ptrs has 1"),
    "part of an item": (lambda: appended(data_lens=[1000]), r"data_ptrs\[0\] has items of 96 bytes in 1000"),
    "dimension": (lambda: appended(dim_per_tensor=[36]), r"has 96 bytes for 1 rows of 36"),
    "groups": (
        lambda: appended(dim_per_tensor=[24], conv_shard_groups=[[8, 8, 8]]),
        r"1 rows of 24, a part of \[8, 8, 8\] over TP 2",
    ),
    "groups that do not divide": (
        lambda: appended(dim_per_tensor=[24], conv_shard_groups=[[15, 33]]), r"cannot slice 15 over TP 2 evenly",
    ),
    "tokens of a page": (lambda: appended("swa", paging=Paging(5, by_token=True)), "pages of 96 bytes for 5 tokens"),
    "sections": (lambda: conv(sections=[Section("q", 2, 8)]), r"has 24 channels, this rank's sections 16 \(q 16\)"),
    "too many sections": (lambda: conv(sections=[Section("q", 2, 20)]), "has 24 channels, the sections 40"),
    "window": (lambda: conv(window=4), "has 3 rows, not the 4 of window"),
    "conv axes": (lambda: conv(states=[np.zeros((2, 24), np.float32)]), r"not \[slots, channels, rows\]"),
    "ssm heads": (
        lambda: mamba_ssm([np.zeros((3, 4, 2, 2), np.float32)], total_heads=4, tp=(2, 1)),
        r"has 4 heads, but this rank holds 2 of 4 \(from head 2\)",
    ),
    "ssm channels": (
        lambda: mamba_ssm([np.zeros((3, 5, 2), np.float32)], total_heads=4, tp=(2, 1)), "has 5 channels for 2 heads",
    ),
    "ring rows": (lambda: rings([np.zeros((10, 4), np.float32)], rows=4), "has 10 rows, not a multiple of 4"),
    "rings numbered otherwise": (
        lambda: rings([np.zeros((4, 3, 8), np.uint8), np.zeros((4, 4, 8), np.uint8)[:, :3]]),
        r"is numbered as Ring\(rows=3, slot_step=4, row_step=1\), not as Ring\(rows=3, slot_step=3",
    ),
    "gaps in a row": (lambda: rings([np.zeros((4, 3, 8, 2), np.uint8)[:, :, :, :1]]), "entries are not dense"),
    "gaps in a state": (lambda: slot_states([np.zeros((4, 8, 4), np.uint8)[:, :, :2]]), "entries are not dense"),
    "index page": (
        lambda: dsa_index([np.zeros((4, 64 * 128), np.uint8)], page_size=64),
        "has 8192 bytes a page, not 64 tokens in blocks of 64 at 132 bytes for every 1",
    ),
    "blocks of a page": (
        lambda: block_pages([np.zeros((4, 960), np.uint8)], fields=[Field("a", 10, "x")], page_size=96, block_size=64),
        "not 96 tokens in blocks of 64",
    ),
    "scales of heads": (
        lambda: kv_scales([np.zeros((8, 5), np.uint8)], [np.zeros((8, 5), np.uint8)], total_heads=2, tp=(1, 0),
                          page_size=4),
        "has 5 scales a token, not a number for each of 2 heads",
    ),
    "interleaved heads": (
        lambda: mxfp8_scales([np.zeros((2, 3, 32, 4, 2), np.uint8)], [], total_heads=4, tp=(2, 0)), "has 3 heads",
    ),
    "interleaved tokens": (
        lambda: mxfp8_scales([np.zeros((2, 4, 4, 32, 2), np.uint8)], [], total_heads=4, tp=(1, 0)),
        r"has shape \[2, 4, 4, 32, 2\]: 4 tokens, not 32, on its third axis",
    ),
    "layers of an index": (
        lambda: dsa_index([np.zeros((4, 64 * 132), np.uint8)] * 2, page_size=64, layers=[3]),
        "layers has 1 entries, caches has 2",
    ),
    "blocks of nothing": (
        lambda: block_pages([np.zeros((4, 960), np.uint8)], fields=[Field("a", 10, "x")], page_size=96, block_size=0),
        "not 96 tokens in blocks of 0",
    ),
    "rows of no tokens": (
        lambda: mla([np.zeros((8, 1, 4), np.float32)], page_size=8, tokens_per_row=0),
        "not a whole number of rows of 0",
    ),
    "compressed page": (
        lambda: mla([np.zeros((8, 1, 4), np.float32)], page_size=6, tokens_per_row=4),
        "a page of 6 tokens is not a whole number of rows of 4",
    ),
}  # fmt: skip


def conv(states=None, **changes):
    given = {"sections": [Section("q", 2, 4), Section("k", 2, 4), Section("v", 2, 4)], "tp": (1, 0), **changes}
    return mamba_conv([np.zeros((2, 24, 3), np.float32)] if states is None else states, **given)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_by_name(name):
    misuse, words = MISUSES[name]
    with pytest.raises(UsageError, match=words):
        misuse()


def test_the_table_of_kinds_is_true():
    """docs/states.md has a row for each registered kind, with its rules."""
    page = (Path(__file__).parent.parent / "docs" / "states.md").read_text()
    table = page.split("| kind |")[1].split("\n\n")[0]
    said = {}
    for line in table.splitlines()[2:]:
        names, _, _, positions, exact, _ = (cell.strip() for cell in line.strip("|").split("|"))
        name, *alias = re.findall(r"`(\w+)`", names)
        said[name] = tuple(alias), positions == "yes", exact == "yes"
    kinds = [kind for kind in registered() if kind.components and not kind.name.startswith("test_")]
    assert said == {kind.name: (kind.aliases, kind.positional, kind.exact) for kind in kinds}


def test_what_lies_before_a_window_is_not_looked_at():
    """Engines free a window's slots behind it, and map freed ones to slot 0."""
    row = np.array([99, 99, 99, 43, 52, 53, 54, 55])
    mapping = np.zeros(100, np.int64)
    mapping[[43, 52, 53, 54, 55]] = [7, 12, 13, 14, 15]
    assert list(window_items(row, page_size=4, window=5, mapping=mapping).pages) == [1, 3]
    assert list(prefix_items(row, page_size=4, held=3).pages) == [10, 13]
    assert list(prefix_items(row[:4], page_size=4, held=4).pages) == []
    assert list(prefix_items(row[:6], page_size=4, held=6).pages) == [13]
