"""Kinds of state: their names, the constructors of their views, and helpers for addresses.

Views are held to the tensors' own contents; that such views arrive at unequal TP is for tests/any_layout to see.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from pdstage import Items, Key, Layout, UsageError
from pdstage.layout.addresses import Buffers, Paging, StateComponents, append_state_component, kv_pages
from pdstage.layout.states import StateType, canonical, kind_of, registered
from pdstage.layout.topology import REPLICATED, Axis, shard_axis
from pdstage.manager import items as checking
from pdstage.tensors import (
    Field,
    Section,
    block_pages,
    build,
    dsa_index,
    mamba_conv,
    mamba_ssm,
    mla,
    sglang_mha,
    slot_states,
)
from tests.test_tensors import as_bytes, contents, filled, holds

SLOTS, WINDOW = 5, 3

# Names.


def test_a_kind_has_one_name_on_both_sides():
    assert StateType.of("nsa") is StateType.of("DSA") is StateType.DSA is StateType.NSA
    assert canonical("nsa") == canonical("dsa") == StateType.NSA.component == "dsa"
    pool = np.zeros((4, 64 * 132), np.uint8)
    by_alias, by_name = (build(dsa_index([pool], page_size=64, component=name)) for name in ("nsa", "dsa"))
    assert by_alias == by_name
    assert by_alias.component("nsa") is by_alias.component("dsa")
    views = [replace(view, key=view.key._replace(component="nsa")) for view in by_name.views()]
    assert Layout.of(by_name.regions, views) == by_name, "views made by hand meet too"
    for name in ("nsa", "dsa"):
        found = checking.check(by_name, {name: [2, 1]}, {"nsa": (0, 100)}, unique=True)
        assert [(name, one.start, one.stop) for name, one in found.items()] == [("dsa", 0, 100)]


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


# Views.

DELTA_NET = [Section("q", 4, 8), Section("k", 4, 8), Section("v", 8, 4)]
STATE_SPACE = [Section("x", 8, 4), Section("B", 1, 6), Section("C", 3, 2, replicated=True)]


def conv_states(sections, tp, *, channels_last):
    """Conv states `[slot, channel, row]`, a page's padding apart as in vLLM's blocks; and each section's shards."""
    axes = [REPLICATED if s.replicated else shard_axis("conv_head", s.heads, *tp) for s in sections]
    units = [s.heads * s.head_dim if s.replicated else s.head_dim for s in sections]
    channels, rows = sum(axis.count * unit for axis, unit in zip(axes, units, strict=True)), WINDOW + 2
    inner = (rows, channels) if channels_last else (channels, rows)
    held = filled(SLOTS, channels * rows + 7)[:, :-7].unflatten(1, inner)
    states = held.transpose(1, 2) if channels_last else held
    parts = states.split([axis.count * unit for axis, unit in zip(axes, units, strict=True)], 1)
    shards = [part.unflatten(1, (axis.count, unit)) for part, axis, unit in zip(parts, axes, units, strict=True)]
    return held, axes, shards


def rows_of(shards):
    """`[slot, shard, ...]` as the bytes of a view of slots."""
    return as_bytes(shards).reshape(SLOTS, 1, shards.shape[1], -1)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("tp", [(1, 0), (2, 1), (4, 3)], ids=str)
@pytest.mark.parametrize("sections", [DELTA_NET, STATE_SPACE], ids=["delta net", "state space"])
def test_conv_states(sections, tp, channels_last):
    """A view for each section and row of the window, alike in both orders; or, whole, one for each section."""
    held, axes, shards = conv_states(sections, tp, channels_last=channels_last)
    how = {"sections": sections, "tp": tp, "channels_last": channels_last, "window": WINDOW}
    for section, axis, part in zip(sections, axes, shards, strict=True):
        layout = build(mamba_conv([held], **how))
        for row in range(WINDOW):
            key = Key("mamba", f"conv.{section.name}.{row}", 0)
            holds(layout, key, rows_of(part[..., row]))
            assert layout.by_key()[key].axis == axis
        whole = build(mamba_conv([held], whole=True, **how))
        key = Key("mamba", f"conv.{section.name}.{'rows' if channels_last else 'channels'}", 0)
        part = part[..., :WINDOW]  # noqa: PLW2901
        holds(whole, key, rows_of(part.transpose(2, 3) if channels_last else part))


@pytest.mark.parametrize("shape", [(2, 4, 6), (8, 6)], ids=["heads", "channels"])
def test_ssm_states(shape):
    states = filled(SLOTS, *shape, dtype=torch.float32)
    layout = build(mamba_ssm([states], total_heads=8, tp=(4, 2), layers=[7]))
    key = Key("mamba", "ssm", 7)
    holds(layout, key, rows_of(states.reshape(SLOTS, 2, -1)))
    assert layout.by_key()[key].axis == shard_axis("ssm_head", 8, 4, 2)
    assert [(c.positional, c.exact) for c in layout.components] == [(False, True)]


def test_states_that_every_rank_holds():
    states = filled(SLOTS, 4, 3)
    holds(build(slot_states([states])), Key("request_row", "state", 0), rows_of(states.reshape(SLOTS, 1, -1)))


@pytest.mark.parametrize(("page", "block", "pool", "pad"), [(128, 64, 1, 0), (64, 64, 1, 12), (256, 128, 4, 100)])
def test_index_pages_of_keys_and_scales(page, block, pool, pad):
    """Pages of `[keys][scales]` blocks, a row for `pool` tokens."""
    rows = block // pool
    cache = filled(SLOTS, page // pool * 132 + pad, dtype=torch.uint8)
    layout = build(dsa_index([cache], page_size=page, block_size=block, tokens_per_row=pool))
    blocks = cache.numpy()[:, : page // pool * 132].reshape(SLOTS, page // block, rows * 132)
    for role, part, width in (
        ("index_k", blocks[..., : rows * 128], 128),
        ("index_scale", blocks[..., rows * 128 :], 4),
    ):
        by_token = np.repeat(part.reshape(SLOTS, page // pool, width), pool, 1)[:, :, None]
        holds(layout, Key("dsa", role, 0), by_token)
    assert [view.format for view in layout.views()] == ["fp8_e4m3", "fp32"]


# Addresses.


def told(tensors, item=1):
    """A pool as SGLang's transfer code sees it: addresses, lengths and item lengths of tensors of items."""
    nbytes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    items = [n // len(tensor) * item for n, tensor in zip(nbytes, tensors, strict=True)]
    return [tensor.data_ptr() for tensor in tensors], nbytes, items


def appended(kind="mamba", *infos, tp=(2, 1), **changes):
    states = StateComponents(tp)
    given = dict(zip(("data_ptrs", "data_lens", "item_lens"), infos or ([4096], [960], [96]), strict=True)) | changes
    for _ in range(2):  # what two paths lead to is there once
        append_state_component(states, kind, **given)
    return build(*states.parts)


@pytest.mark.parametrize("channels_last", [False, True])
def test_addressed_states_are_sliced_by_groups(channels_last):
    tp, (held, _, shards) = (4, 1), conv_states(DELTA_NET, (4, 1), channels_last=channels_last)
    held, temporal = held.contiguous(), filled(SLOTS, 2, 4, 6, dtype=torch.float32)
    layout = appended(
        "mamba", *told([held, temporal]), tp=tp, layer_ids=[3, 3], dim_per_tensor=[24, 2],
        slice_outer_counts=[WINDOW + 2 if channels_last else 1, 1], conv_shard_groups=[[32, 32, 32], None],
    )  # fmt: skip
    for number, part in enumerate(shards):
        channels = part.flatten(1, 2).unsqueeze(2)  # a shard is one channel: 32 of a group are 32 units
        holds(layout, Key("mamba", f"state.0.{number}", 3), rows_of(channels))
    holds(layout, Key("mamba", "state.1", 3), rows_of(temporal))
    assert layout.by_key()["mamba", "state.0.2", 3].axis == shard_axis("unit", 32, *tp)


def test_addressed_pages_of_tokens():
    """Rows of heads by token; without a word on what is in a page, pages move whole."""
    pool = filled(8 * 4, 2, 8)
    layout = appended("swa", *told([pool], 4), tp=(2, 0), dim_per_tensor=[2], paging=Paging(4, by_token=True))
    holds(layout, Key("swa", "state.0", 0), as_bytes(pool).reshape(8, 4, 2, -1))
    layout = appended("nsa", *told([pool], 4), paging=Paging(4))
    np.testing.assert_array_equal(contents(layout, Key("dsa", "state.0", 0))[:, 3, 0], as_bytes(pool).reshape(8, -1))


@pytest.mark.parametrize("tp", [(4, 3), (2, 0), (8, 5), (1, 0)])
def test_addressed_caches_are_those_of_tensors(tp):
    axis = shard_axis("kv_head", 4, *tp)
    k, v = ([filled(8 * 16, axis.count, dim) for _ in range(2)] for dim in (32, 16))  # heads of K and V may differ
    roles = {role: Buffers(*told(pools, 16), [3, 7]) for role, pools in (("k", k), ("v", v))}
    by_address = build(kv_pages(roles, page_size=16, axis=axis, format="bf16"))
    by_tensor = build(sglang_mha(k, v, page_size=16, total_heads=4, tp=tp, layers=[3, 7]))
    assert by_address.digest() == by_tensor.digest()
    for key in by_tensor.by_key():
        np.testing.assert_array_equal(contents(by_address, key), contents(by_tensor, key))


def test_two_pools_for_one_layer_are_refused():
    states = StateComponents((2, 0))
    append_state_component(states, "mamba", [4096], [960], [96])
    with pytest.raises(UsageError, match=r"state\.0.* layer=0\) is at 0x1000 and at 0x2000"):
        append_state_component(states, "mamba", [8192], [960], [96])


def test_a_component_of_no_buffers_is_one_with_nothing_to_send():
    states = StateComponents((1, 0))
    append_state_component(states, "swa", [], [], [], paging=Paging(4))
    append_state_component(states, "mamba", [4096], [0], [0])
    assert not states.parts


@pytest.mark.parametrize("total", [4096, 10240, 2688, 136, 134])
def test_every_tp_size_up_to_32_that_divides_a_dimension_slices_it(total):
    axes = []
    for tp in (tp for tp in range(1, 33) if total % tp == 0):
        dim = total // tp
        view = next(appended(tp=(tp, 0), data_lens=[dim * 4], item_lens=[dim * 4], dim_per_tensor=[dim]).views())
        axes.append(view.axis._replace(count=0))
        assert view.shards * view.width == dim * 4
    assert len(set(axes)) == 1


# Items.


def test_no_items_are_nothing_to_move():
    """Also of a component that this rank, a pipeline stage say, does not have; but not one item of it."""
    layout = build(slot_states([np.zeros(4)], format="fp64"))
    found = checking.check(layout, {"request_row": [], "mamba": Items([]), "kv": []}, None, unique=True)
    (said,) = checking.rects_of(layout, found, None)
    assert said.component == "request_row"
    assert said.start == said.stop, "of slots it is said that there are none"
    with pytest.raises(UsageError, match="no component 'mamba'"):
        checking.check(layout, {"mamba": [1]}, None, unique=True)
    with pytest.raises(UsageError, match="tokens of 'swa' without its items"):
        checking.check(layout, {"mamba": Items([])}, {"swa": (0, 1)}, unique=True)
    assert not checking.check(layout, {"mamba": Items([])}, {"mamba": (0, 0)}, unique=True)


# Misuse.


def conv(shape=(2, 24, 3), **changes):
    given = {"sections": [Section("q", 2, 4), Section("k", 2, 4), Section("v", 2, 4)], "tp": (1, 0), **changes}
    return mamba_conv([np.zeros(shape, np.float32)], **given)


def ssm(*shape):
    return mamba_ssm([np.zeros(shape, np.float32)], total_heads=4, tp=(2, 1))


def blocks(block_size):
    return block_pages(
        [np.zeros((4, 960), np.uint8)], fields=[Field("a", 10, "x")], page_size=96, block_size=block_size
    )  # fmt: skip


def compressed(page_size, per_row):
    return mla([np.zeros((8, 1, 4), np.float32)], page_size=page_size, tokens_per_row=per_row)


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
    "heads of a page": (
        lambda: kv_pages({"v": Buffers([4096], [15360], [1536], [0])}, page_size=16, axis=Axis("kv_head", 20, 0, 5),
                         format="uint8"),
        r"v\[0\] has pages of 1536 bytes for 16 tokens of 5 heads",
    ),
    "sections": (lambda: conv(sections=[Section("q", 2, 8)]), r"has 24 channels, this rank's sections 16 \(q 16\)"),
    "window": (lambda: conv(window=4), "has 3 rows, not the 4 of window"),
    "conv axes": (lambda: conv((2, 24)), r"not \[slots, channels, rows\]"),
    "ssm heads": (lambda: ssm(3, 4, 2, 2), r"has 4 heads, but this rank holds 2 of 4 \(from head 2\)"),
    "ssm channels": (lambda: ssm(3, 5, 2), "has 5 channels for 2 heads"),
    "gaps in a state": (lambda: slot_states([np.zeros((4, 8, 4), np.uint8)[:, :, :2]]), "entries are not dense"),
    "index page": (
        lambda: dsa_index([np.zeros((4, 64 * 128), np.uint8)], page_size=64),
        "has 8192 bytes a page, not 64 tokens in blocks of 64 at 132 bytes for every 1",
    ),
    "blocks of a page": (lambda: blocks(64), "not 96 tokens in blocks of 64"),
    "blocks of nothing": (lambda: blocks(0), "not 96 tokens in blocks of 0"),
    "rows of no tokens": (lambda: compressed(8, 0), "not a whole number of rows of 0"),
    "compressed page": (lambda: compressed(6, 4), "a page of 6 tokens is not a whole number of rows of 4"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_refused_by_name(name):
    misuse, words = MISUSES[name]
    with pytest.raises(UsageError, match=words):
        misuse()
