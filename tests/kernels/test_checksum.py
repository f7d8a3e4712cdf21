"""The checksum: its definition again, slowly; sums that add up over writers; and that no changed cell goes unseen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import FUSED, HND, NHD, Logical, Stored, hold, transfers
from rigs import HOST_CODES, REFERENCE, SUM_BEFORE, Rig, outcome

from pdstage.errors import UsageError
from pdstage.kernels import Index, Pool
from pdstage.kernels.checksum import SEGMENT, SHARD, TOKEN, WORD, checksum
from pdstage.plan import HEAD_MAJOR, TOKEN_MAJOR, Select
from pdstage.plan.tables import Table
from tests.rows import drawn

MASK = 2**64 - 1
RIGS = [*(Rig("host", code) for code in HOST_CODES), REFERENCE]
by_code = pytest.mark.parametrize("rig", RIGS, ids=lambda rig: f"{rig.backend}-{rig.code}")


def mixed(x):
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def slow_sum(seed, token, shard, segment, cell):
    """One cell's terms, as the module's docstring has them."""
    place = (seed + token * TOKEN + shard * SHARD + segment * SEGMENT) & MASK
    words = (int.from_bytes(cell[at : at + 8], "little") for at in range(0, len(cell), 8))
    return sum(mixed(word ^ (mixed(place) + j * WORD & MASK)) for j, word in enumerate(words)) & MASK


def slow_sum_of(held, select, index, tokens):
    """Everything that a call on `held` moves, cell by cell."""
    total = 0
    for chosen, row in zip(sorted(select), Table.of(held.layout, select).rows, strict=True):
        view, entry = held.layout.by_key()[chosen.key], index[chosen.key.component]
        start, stop = tokens[chosen.key.component]
        per, memory = view.tokens_per_row, held.memory[view.region]
        for token in range(start // per * per, stop if stop > start else 0, per):
            item, t = divmod(token - entry.first_token, view.tokens_per_item)
            at = 64 + view.offset + int(entry.keep[item]) * view.item_stride + view.row_offset(t)
            for shard in range(chosen.start, chosen.start + chosen.count):
                for seg in range(view.segs):
                    cell = at + shard * view.shard_stride + seg * view.seg_stride
                    name = (row.seed, token, view.axis.first + shard, seg)
                    total += slow_sum(*name, bytes(memory[cell : cell + view.width]))
    return total & MASK


@settings(max_examples=drawn(20, full=60), deadline=None)
@given(transfer=transfers().filter(lambda t: t.checksum))
def test_the_reference_sums_what_the_definition_says(transfer):
    t = transfer
    want = (SUM_BEFORE + slow_sum_of(t.src, t.src_select, t.src_index, t.tokens)) & MASK
    found = outcome(REFERENCE, t)
    assert found["gather: checksum"].view(np.uint64)[0] == want
    assert found["copy: checksum"].view(np.uint64)[0] == want
    if t.wire == TOKEN_MAJOR:  # where page sizes differ, head-major staging means something else on either side
        assert found["scatter: checksum"].view(np.uint64)[0] == want


@settings(max_examples=drawn(30, full=100), deadline=None)
@given(
    cells=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(1, 40)),
    seed=st.integers(-(2**63), 2**63 - 1),
    first=st.integers(0, 2**40),
    shard=st.integers(0, 9),
)
def test_one_view_is_summed_cell_by_cell(cells, seed, first, shard):
    data = np.random.default_rng(0).integers(0, 256, cells, dtype=np.uint8)
    tokens = first + 4 * np.arange(cells[0])
    want = sum(
        slow_sum(seed, int(tokens[i]), shard + j, k, data[i, j, k].tobytes()) for i, j, k in np.ndindex(cells[:3])
    )
    assert checksum(seed, tokens, shard, data) == want & MASK


def gathered(rig, held, select, index, tokens, wire=TOKEN_MAJOR):
    plan, total = rig.plan(held.layout, select, wire, True), np.zeros(1, np.uint64)
    out = np.zeros(plan.nbytes(tokens), np.uint8)
    plan.gather(out.ctypes.data, out.size, index, tokens, sum_ptr=total.ctypes.data)
    return int(total[0])


OF = Logical(layers=2, roles=2, shards=4, segs=2, width=20)


def whole(order=NHD, rows=4, n_items=8, shards=slice(0, 4), fill=3):
    """A rank's pool of `OF` whose cells' bytes depend on view, token, shard and segment alone; items in any order."""
    count = shards.stop - shards.start
    of = Logical(OF.name, OF.layers, OF.roles, count, OF.segs, OF.width)
    held = hold([Stored(of, n_items=n_items, rows_per_item=rows, order=order, first=shards.start, total=4)], fill)
    items = np.random.default_rng(rows).permutation(n_items)
    for number, view in enumerate(held.layout.views()):
        memory = held.memory[view.region][64:]
        for token in range(n_items * rows):
            at = view.offset + int(items[token // rows]) * view.item_stride + view.row_offset(token % rows)
            for shard, seg in np.ndindex(count, 2):
                cell = at + shard * view.shard_stride + seg * view.seg_stride
                name = (number, token, shards.start + shard, seg)
                memory[cell : cell + OF.width] = np.random.default_rng(name).integers(0, 256, OF.width)
    return held, [Select(key, 0, count) for key in OF.view_keys()], {"kv": Index.of(items)}


@by_code
def test_layouts_orders_page_sizes_and_writers_all_sum_to_the_same(rig):
    tokens = {"kv": (3, 30)}
    want = gathered(REFERENCE, *whole(), tokens)
    for order in (NHD, HND, FUSED):
        for rows, n_items in ((1, 32), (4, 8), (16, 2), (32, 1)):
            for wire in (TOKEN_MAJOR, HEAD_MAJOR):
                assert gathered(rig, *whole(order, rows, n_items), tokens, wire) == want
    ranks = [gathered(rig, *whole(shards=slice(at, at + n)), tokens) for at, n in ((0, 1), (1, 2), (3, 1))]
    assert sum(ranks) & MASK == want
    held, select, index = whole()
    cuts = [(3, 4), (4, 17), (17, 17), (17, 30)]
    assert sum(gathered(rig, held, select, index, {"kv": cut}) for cut in cuts) & MASK == want
    assert sum(gathered(rig, held, [one], index, tokens) for one in select) & MASK == want


@by_code
def test_no_changed_swapped_or_misplaced_cell_goes_unseen(rig):
    tokens = {"kv": (0, 32)}
    held, select, index = whole()
    want = gathered(rig, held, select, index, tokens)
    seen = {want}
    rng = np.random.default_rng(4)
    for memory in held.memory:
        inside = memory[64:-64]
        for at in rng.choice(inside.size, 40, replace=False):  # any byte, by any bit
            inside[at] ^= 1 << int(rng.integers(8))
            seen.add(gathered(rig, held, select, index, tokens))
        cells = inside.reshape(-1, OF.width)
        for _ in range(40):
            i, j = rng.choice(len(cells), 2, replace=False)
            cells[[i, j]] = cells[[j, i]]
            seen.add(gathered(rig, held, select, index, tokens))
        cells[:] = np.roll(cells, 1, axis=0)
        seen.add(gathered(rig, held, select, index, tokens))
    assert len(seen) == 1 + len(held.memory) * 81
    items = index["kv"].keep.copy()
    items[[1, 5]] = items[[5, 1]]
    assert gathered(rig, held, select, {"kv": Index.of(items)}, tokens) not in seen


@by_code
def test_zeros_in_another_place_are_another_sum(rig):
    """The sum is of places too: nothing of it is the same where all bytes are."""
    held, select, index = whole()
    for memory in held.memory:
        memory[:] = 0
    sums = [gathered(rig, held, select, index, {"kv": (at, at + 1)}) for at in range(32)]
    assert len(set(sums)) == 32
    assert 0 not in sums


def test_a_plan_made_without_checksums_refuses_a_place_for_one():
    held, select, index = whole()
    total = np.zeros(1, np.uint64)
    plan = Pool.of(held.layout).plan(select)
    out = np.zeros(plan.nbytes({"kv": (0, 32)}), np.uint8)
    with pytest.raises(UsageError, match="computes no checksums"):
        plan.gather(out.ctypes.data, out.size, index, {"kv": (0, 32)}, sum_ptr=total.ctypes.data)
    assert not total[0]
    assert not out.any()
