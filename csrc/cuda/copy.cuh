// A launch's arguments, and the addresses of its bytes. kernels/cuda_tables.py packs the same structures.
//
// Staged order numbers the *units* of a view: up to 16 bytes of one run of `width` bytes, so that consecutive lanes
// access consecutive staged bytes. A unit's row, shard and segment are found by divisions with prepared multipliers.
// Counts within a view are below 2^31, which the host checks; products with strides are in 64 bits.
#pragma once

#include "access.cuh"

namespace pdstage {

constexpr u32 UNIT = 16;
constexpr u32 MAX_COMPONENTS = 16;
constexpr u64 VIEW_ALIGNMENT = 128;
constexpr u32 NO_ITEM = ~0u;

// Division of n < 2^31 by `by`: multiplier = ceil(2^(31 + shift) / by) with 2^(shift - 1) < by <= 2^shift (Granlund and
// Montgomery, "Division by invariant integers using multiplication", PLDI 1994).
struct Divisor {
    u32 by, multiplier, shift;

    __device__ __forceinline__ u32 quotient(u32 n) const { return __umulhi(n + n, multiplier) >> shift; }
};

// How one pool stores a group's views: a row's place comes from its item, the other fields are strides, in units of
// 16 bytes if the group's access is 16 or 32, else in bytes. A block is `joined_rows` rows that are adjacent in memory;
// they divide an item, 1 if runs are separate.
struct Side {
    i64 item_stride, outer_stride, inner_stride, shard_stride, seg_stride;
    Divisor rows_per_item, outer_rows, joined_rows, units_per_block;
    u32 component, n_items;
};

// Views that differ only in their addresses. `pool` is the plan's own, `peer` the other one if both are pools.
struct Group {
    Side pool, peer;
    Divisor units_per_run, segs, shards, runs_per_item;
    u32 first_view, n_views;
    u32 width, access;
    u32 tokens_per_row, first_shard;
};

struct View {
    u64 pool, peer, seed;
};

// A component's items and tokens [start, stop), counted from the first item's first, whose position is first_token.
struct Span {
    u64 items;
    i64 first_token, start, stop;
    i64 bits;
};

// With PDSTAGE_LISTED, every list of a call is in its parameters, with that many entries in all; a span's `items` is
// the index of its item 0. The host has checked these lists.
struct Params {
    u64 staging, sum;
    const Group* groups;
    const View* views;
    u64 n_groups;
    Span pool[MAX_COMPONENTS];
    Span peer[MAX_COMPONENTS];
#if PDSTAGE_LISTED
    u32 lists[PDSTAGE_LISTED];
#endif
};

// Sizes as kernels/cuda_tables.py computes them.
static_assert(sizeof(Group) == 264 && sizeof(View) == 24 && sizeof(Span) == 40);
static_assert(sizeof(Params) == 1320 + 4 * PDSTAGE_LISTED);

// A group's part of one call: rows [first_row, first_row + n_rows) of each view, `first_row` in the pool's
// numbering. Computed once per CTA, so that no tile divides by a number that the host has not prepared. `nbytes` and
// `tiles` count up to the group's end. `rows_in` are the rows in the first, any other and the last item. If a row is
// one run they are the first block's and the following ones in as many as items hold, in token-major order only the
// first block's.
struct Extent {
    u64 nbytes, view_nbytes;
    u32 tiles, n_units;
    u32 first_row, n_rows, peer_first_row;
    Divisor tiles_per_view, rows_in[3];
};

static_assert(sizeof(Extent) == 88);  // as kernels/cuda_tables.py counts

// One run: a row counted from the first touched row, a shard and a segment of it.
struct Run {
    u32 row, shard, seg;
};

__device__ __forceinline__ Run token_major(const Group& group, u32 run) {
    const u32 cell = group.segs.quotient(run);
    const u32 row = group.shards.quotient(cell);
    return {row, cell - row * group.shards.by, run - cell * group.segs.by};
}

// [item][shard][row][seg]; the first and the last item may hold fewer rows than the others.
__device__ __forceinline__ Run head_major(const Group& group, const Extent& extent, u32 run) {
    const u32 cell = group.segs.quotient(run), first = extent.rows_in[0].by * group.shards.by;
    const bool in_first = cell < first;
    const u32 per_item = extent.rows_in[1].by, item = group.runs_per_item.quotient(cell - first);
    const u32 before = in_first ? 0 : extent.rows_in[0].by + item * per_item;
    const u32 within = in_first ? cell : cell - first - item * group.runs_per_item.by;
    const Divisor& rows = extent.rows_in[in_first ? 0 : before + per_item > extent.n_rows ? 2 : 1];
    const u32 shard = rows.quotient(within);
    return {before + within - shard * rows.by, shard, run - cell * group.segs.by};
}

// Within an item, strides and offsets count bytes, or 16 of them in groups of 16-byte access or wider: in 32 bits, but
// with PDSTAGE_FAR, for groups whose items reach further.
#if PDSTAGE_FAR
using Offset = u64;
#else
using Offset = u32;
#endif
constexpr u32 STEP = PDSTAGE_NARROW ? 1 : UNIT;

// The offset of a run from its row, and of a row from its item.
__device__ __forceinline__ Offset in_row(const Side& side, const Run& run) {
    return PDSTAGE_FLAT ? 0 : run.shard * Offset(side.shard_stride) + run.seg * Offset(side.seg_stride);
}

__device__ __forceinline__ Offset in_item(const Side& side, u32 row) {
    if (PDSTAGE_FLAT) return row * Offset(side.inner_stride);
    const u32 outer = side.outer_rows.quotient(row);
    return outer * Offset(side.outer_stride) + (row - outer * side.outer_rows.by) * Offset(side.inner_stride);
}

// Where a run begins: the entry of its item in the list, and the offset in the item.
struct Place {
    u32 entry;
    Offset offset;
};

// The addresses of one view's runs in one pool, in one call.
struct Cells {
    const Params& params;
    const Side& side;
    u64 items, base;
    u32 first_row;
    bool narrow;

    __device__ __forceinline__ Cells(const Params& params, const Side& side, const Span* spans, u64 base, u32 first_row)
        : params(params), side(side), base(base), first_row(first_row) {
        const Span& span = spans[side.component];
        items = span.items;
        narrow = span.bits == 32;
    }

    __device__ __forceinline__ Place place(const Run& run) const {
        const u32 row = first_row + run.row, entry = side.rows_per_item.quotient(row);
        return {entry, in_row(side, run) + in_item(side, row - entry * side.rows_per_item.by)};
    }

    // The item of an entry; NO_ITEM if it is outside the pool: its list came from the device, unchecked.
    __device__ __forceinline__ u32 item(u32 entry) const {
#if PDSTAGE_LISTED
        return params.lists[u32(items) + entry];
#else
        const i64 item = narrow ? table(reinterpret_cast<const i32*>(items) + entry)
                                : table(reinterpret_cast<const i64*>(items) + entry);
        return u64(item) < side.n_items ? u32(item) : NO_ITEM;
#endif
    }

    __device__ __forceinline__ u64 address(u32 item, Offset offset) const {
        return base + (u64(item) * Offset(side.item_stride) + offset) * STEP;
    }
};

}  // namespace pdstage
