"""Device half of triton_copy.py: one kernel that gathers, scatters and copies, for NVIDIA and AMD.

Imports triton, so it is imported only when a plan is made.

A *unit* is up to 16 bytes of one run of `width` bytes, numbered in staged order, so that consecutive lanes access
consecutive staged bytes. A program takes every `programs`-th tile of `UNITS` units; a tile lies in one view. Runs, rows
and items of a unit are found by multiplications with reciprocals from the table. A division by a number that the
compiler does not know would cost more than everything else here.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803, N806, PLR0912, PLR0915, PLR0917
# (Triton reads annotations as types; capitals are constants, and branches on them are made when compiling.)
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the table of groups (int64), as triton_copy.py writes them: common ones, then those of the plan's own pool
# at SIDE_1 and of a peer's at SIDE_2. PER_ are reciprocals, see `_over`.
FIRST_VIEW = tl.constexpr(0)
N_VIEWS = tl.constexpr(1)
ACCESS_CLASS = tl.constexpr(2)
TOKENS_PER_ROW = tl.constexpr(3)
WIDTH = tl.constexpr(4)
N_SEGS = tl.constexpr(5)
N_SHARDS = tl.constexpr(6)
FIRST_SHARD = tl.constexpr(7)
UNITS_PER_RUN = tl.constexpr(8)
PER_RUN = tl.constexpr(9)
PER_SEGS = tl.constexpr(10)
PER_SHARDS = tl.constexpr(11)
SIDE_1 = tl.constexpr(12)
N_ITEMS = tl.constexpr(0)
ITEM_STRIDE = tl.constexpr(1)
ROWS_PER_ITEM = tl.constexpr(2)
PER_ITEM = tl.constexpr(3)
OUTER_ROWS = tl.constexpr(4)
PER_OUTER = tl.constexpr(5)
OUTER_STRIDE = tl.constexpr(6)
INNER_STRIDE = tl.constexpr(7)
SHARD_STRIDE = tl.constexpr(8)
SEG_STRIDE = tl.constexpr(9)
SIDE_2 = tl.constexpr(22)
COLUMNS = tl.constexpr(32)

GATHER = tl.constexpr(0)
SCATTER = tl.constexpr(1)
COPY = tl.constexpr(2)

# checksum.py defines these.
TOKEN = tl.constexpr(0x9E3779B97F4A7C15)
SHARD = tl.constexpr(0xC2B2AE3D27D4EB4F)
SEGMENT = tl.constexpr(0x165667B19E3779F9)
WORD = tl.constexpr(0xD6E8FEB86659FD93)
MIX = tl.constexpr(0xBF58476D1CE4E5B9)


@triton.jit
def _at(table, column):
    """A number of a table in memory at the integer address `table`."""
    return tl.load(table.to(tl.pointer_type(tl.int64)) + column)


@triton.jit
def _over(n, reciprocal):
    """n // d for 0 <= n, d < 2^31, given reciprocal = (2^64 - 1) // d: the high half of (n + 1) * reciprocal."""
    m = (n + 1).to(tl.uint64)
    r = reciprocal.to(tl.uint64, bitcast=True)
    low = (m * (r & 0xFFFFFFFF)) >> 32
    return ((m * (r >> 32) + low) >> 32).to(tl.int32)


@triton.jit
def _fold(x):
    return x ^ (x >> 32)


@triton.jit
def _item(items, bits, n, ok):
    """Entry n of a list of int32 or int64."""
    if bits == 64:
        item = tl.load(items.to(tl.pointer_type(tl.int64)) + n, mask=ok, other=-1)
    else:
        item = tl.load(items.to(tl.pointer_type(tl.int32)) + n, mask=ok, other=-1).to(tl.int64)
    return item


@triton.jit
def _cell(side, base, items, bits, row, shard, seg, ok, SEGS: tl.constexpr, SHARDS: tl.constexpr, LEVELS: tl.constexpr):
    """The address of a run in a pool, and whether it is inside. `row` counts from the first row of the index."""
    n = _over(row, _at(side, PER_ITEM))
    within = row - n * _at(side, ROWS_PER_ITEM).to(tl.int32)
    item = _item(items, bits, n, ok)
    ok = ok & (item >= 0) & (item < _at(side, N_ITEMS))
    address = base + item * _at(side, ITEM_STRIDE)
    if LEVELS:
        outer = _over(within, _at(side, PER_OUTER))
        within -= outer * _at(side, OUTER_ROWS).to(tl.int32)
        address += outer.to(tl.int64) * _at(side, OUTER_STRIDE)
    address += within.to(tl.int64) * _at(side, INNER_STRIDE)
    if SHARDS:
        address += shard.to(tl.int64) * _at(side, SHARD_STRIDE)
    if SEGS:
        address += seg.to(tl.int64) * _at(side, SEG_STRIDE)
    return address, ok


@triton.jit
def _reciprocal(divisor):
    return (0xFFFFFFFFFFFFFFFF // divisor.to(tl.uint64)).to(tl.int64, bitcast=True)


@triton.jit
def _head_major(cell, n_shards, skipped, rows_per_item, per_item, per_page, head, per_head, tail, per_tail, n_whole):
    """Row and shard of a cell that is staged `[item][shard][row]`, with the first and last item cut to `head` and
    `tail`.

    `cell` counts rows times shards. Rows count from the first row of the first item, of which `skipped` are left out.
    `n_whole` items lie between the first and the last.
    """
    past = cell - head * n_shards
    # After the first item all begin as if they were whole.
    item = tl.minimum(_over(tl.maximum(past, 0), per_page), n_whole)
    rest = past - item * rows_per_item * n_shards
    in_tail = item == n_whole
    shard = tl.where(in_tail, _over(rest, per_tail), _over(rest, per_item))
    row = head + item * rows_per_item + rest - shard * tl.where(in_tail, tail, rows_per_item)
    in_head = past < 0
    head_shard = _over(cell, per_head)
    shard = tl.where(in_head, head_shard, shard)
    return skipped + tl.where(in_head, cell - head_shard * head, row), shard


@triton.jit
def _key(seed, token, first_shard, shard, seg, SEGS: tl.constexpr, SHARDS: tl.constexpr):
    place = seed.to(tl.uint64) + token.to(tl.uint64) * TOKEN
    number = first_shard.to(tl.int32)
    if SHARDS:
        number += shard
    place += number.to(tl.uint64) * SHARD
    if SEGS:
        place += seg.to(tl.uint64) * SEGMENT
    return _fold(_fold(place) * MIX)


@triton.jit
def _terms(data, key, unit, ok, UNIT: tl.constexpr, LANES: tl.constexpr, UNITS: tl.constexpr):
    """The checksum's terms of units of whole words; `key` is their run's, `unit` counts within it."""
    WORDS: tl.constexpr = UNIT // 8
    PER_WORD: tl.constexpr = LANES // WORDS
    words = data.to(tl.uint64)
    if PER_WORD > 1:
        words = words << (tl.arange(0, LANES)[None, :] % PER_WORD * (64 // PER_WORD)).to(tl.uint64)
        words = tl.sum(tl.reshape(words, [UNITS, WORDS, PER_WORD]), axis=2)
    word = tl.arange(0, WORDS)[None, :]
    words ^= key + (unit * WORDS + word).to(tl.uint64) * WORD
    terms = words.to(tl.uint32).to(tl.uint64) * (words >> 32)
    return tl.sum(tl.where(ok, terms, 0).to(tl.int64, bitcast=True), axis=1, keep_dims=True)


@triton.jit
def copy_kernel(
    groups, n_groups, staged, views, items, bits, start, stop, first_token, peer_views, peer_items, peer_bits,
    peer_start, sum_ptr,
    WAY: tl.constexpr, HEAD_MAJOR: tl.constexpr, ACCESS: tl.constexpr, SEGS: tl.constexpr, SHARDS: tl.constexpr,
    LEVELS: tl.constexpr, PEER_LEVELS: tl.constexpr, CHECKSUM: tl.constexpr, UNIT: tl.constexpr,
    UNITS: tl.constexpr,
):  # fmt: skip
    """Copies tokens `[start, stop)`, counted from the index's first item, of the groups of one class of one component.

    `groups`, `views`, `items` are addresses on the device; `staged` is that of the component's first view. `bits` is
    the width of an item. ACCESS is the bytes of one load or store. SEGS, SHARDS and LEVELS say whether any group has
    more than one of them. The peer's arguments are used only if WAY is COPY.
    """
    if ACCESS == 8:
        DTYPE: tl.constexpr = tl.uint64
    elif ACCESS == 2:
        DTYPE: tl.constexpr = tl.uint16
    elif ACCESS == 1:
        DTYPE: tl.constexpr = tl.uint8
    else:
        DTYPE: tl.constexpr = tl.uint32
    NBYTES: tl.constexpr = 4 if ACCESS == 16 else ACCESS
    LANES: tl.constexpr = UNIT // NBYTES
    programs = tl.num_programs(0)
    tile = tl.program_id(0)
    lane = tl.arange(0, LANES)[None, :]
    at = staged.to(tl.int64)
    total = tl.zeros([UNITS, 1], tl.int64)
    for g in range(n_groups):
        group = groups + g * (COLUMNS * 8)
        per_row = _at(group, TOKENS_PER_ROW).to(tl.int32)
        first_row = start // per_row
        n_rows = (stop + per_row - 1) // per_row - first_row
        n_views = _at(group, N_VIEWS).to(tl.int32)
        n_shards = _at(group, N_SHARDS).to(tl.int32)
        n_runs = n_rows.to(tl.int64) * n_shards * _at(group, N_SEGS)
        stride = (n_runs * _at(group, WIDTH) + 127) // 128 * 128
        if _at(group, ACCESS_CLASS) == ACCESS:
            n_units = (n_runs * _at(group, UNITS_PER_RUN)).to(tl.int32)
            tiles_per_view = (n_units + UNITS - 1) // UNITS
            n_tiles = n_views * tiles_per_view
            if HEAD_MAJOR:
                rows_per_item = _at(group + SIDE_1 * 8, ROWS_PER_ITEM).to(tl.int32)
                head = tl.minimum(rows_per_item - first_row % rows_per_item, n_rows)
                n_whole = (n_rows - head) // rows_per_item
                tail = n_rows - head - n_whole * rows_per_item
                per_head = _reciprocal(tl.maximum(head, 1))
                per_tail = _reciprocal(tl.maximum(tail, 1))
                per_page = _reciprocal(rows_per_item * n_shards)
            for t in range(tile, n_tiles, programs):
                view = t // tiles_per_view
                # The group's numbers are read again in each tile: they are cached, and registers are scarce.
                unit = (t - view * tiles_per_view) * UNITS + tl.arange(0, UNITS)[:, None]
                ok = unit < n_units
                run = _over(unit, _at(group, PER_RUN))
                byte = (unit - run * _at(group, UNITS_PER_RUN).to(tl.int32)) * UNIT
                cell, seg, shard = run, run, run
                if SEGS:
                    cell = _over(run, _at(group, PER_SEGS))
                    seg = run - cell * _at(group, N_SEGS).to(tl.int32)
                row = first_row + cell
                if HEAD_MAJOR:
                    per_item = _at(group + SIDE_1 * 8, PER_ITEM)
                    row, shard = _head_major(
                        cell, n_shards, first_row, rows_per_item, per_item, per_page, head, per_head, tail, per_tail,
                        n_whole,
                    )  # fmt: skip
                elif SHARDS:
                    row = _over(cell, _at(group, PER_SHARDS))
                    shard = cell - row * _at(group, N_SHARDS).to(tl.int32)
                    row += first_row
                table = views + (_at(group, FIRST_VIEW) + view) * 16
                if CHECKSUM:
                    # Computed here and not at its use, so that row, shard and segment no longer need registers.
                    token = first_token + row.to(tl.int64) * per_row
                    key = _key(_at(table, 1), token, _at(group, FIRST_SHARD), shard, seg, SEGS, SHARDS or HEAD_MAJOR)
                base = _at(table, 0)
                ours, ok = _cell(
                    group + SIDE_1 * 8, base, items, bits, row, shard, seg, ok, SEGS, SHARDS or HEAD_MAJOR, LEVELS
                )
                if WAY == COPY:
                    peer_row = row + (peer_start - start) // per_row
                    peer_base = _at(peer_views + (_at(group, FIRST_VIEW) + view) * 16, 0)
                    theirs, ok = _cell(
                        group + SIDE_2 * 8, peer_base, peer_items, peer_bits, peer_row, shard, seg, ok,
                        SEGS, SHARDS, PEER_LEVELS,
                    )  # fmt: skip
                else:
                    theirs = at + view * stride + run.to(tl.int64) * _at(group, WIDTH)
                ours = (ours + byte).to(tl.pointer_type(DTYPE)) + lane
                theirs = (theirs + byte).to(tl.pointer_type(DTYPE)) + lane
                if ACCESS == 16:
                    # On the pointer, since the cast drops the hint on the integer, and accesses become scalar.
                    ours = tl.max_contiguous(tl.multiple_of(ours, [16, 16]), [1, 4])
                    theirs = tl.max_contiguous(tl.multiple_of(theirs, [16, 16]), [1, 4])
                whole = ok
                if UNIT > ACCESS:
                    whole = ok & (byte + lane * NBYTES < _at(group, WIDTH))
                if WAY == SCATTER:
                    data = tl.load(theirs, mask=whole, other=0)
                    tl.store(ours, data, mask=whole)
                else:
                    data = tl.load(ours, mask=whole, other=0)
                    tl.store(theirs, data, mask=whole)
                if CHECKSUM:
                    total += _terms(data, key, byte // UNIT, ok, UNIT, LANES, UNITS)
            # The next group's tiles continue where these end, so that programs share groups smaller than the grid.
            tile += tl.maximum((n_tiles - tile + programs - 1) // programs, 0) * programs - n_tiles
        at += n_views * stride
    if CHECKSUM:
        one = tl.sum(tl.sum(total, axis=1), axis=0)
        tl.atomic_add(sum_ptr.to(tl.pointer_type(tl.int64)), one, sem="relaxed")
