// What a launch is given, and where its bytes are. kernels/cuda_tables.py packs the same structures.
//
// Staged order numbers the *units* of a view: up to 16 bytes of one run of `width` bytes, so that consecutive lanes
// touch consecutive staged bytes. From a unit come its row, shard and segment by divisions with prepared multipliers:
// counts within a view are below 2^31, which the host checks; products with strides are in 64 bits.
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

// How one pool stores a group's views: a row's place comes from its item, the others are strides in bytes.
// A block is `joined_rows` rows that follow each other in memory; they divide an item, 1 where runs stand alone.
struct Side {
    i64 item_stride, outer_stride, inner_stride, shard_stride, seg_stride;
    Divisor rows_per_item, outer_rows, joined_rows, units_per_block;
    u32 component, n_items;
};

// Views that differ in their addresses only. `pool` is the plan's own, `peer` the other one where both are pools.
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

// With PDSTAGE_LISTED, every list of a call lies in its parameters, in that many places; a span's `items` is the place of
// its item 0. The host has checked these lists.
struct Params {
    u64 staging, sum;
    const Group* groups;
    const View* views;
    u64 n_groups;
    Span pool[MAX_COMPONENTS], peer[MAX_COMPONENTS];
#if PDSTAGE_LISTED
    u32 lists[PDSTAGE_LISTED];
#endif
};

// As kernels/cuda_tables.py counts them.
static_assert(sizeof(Group) == 264 && sizeof(View) == 24 && sizeof(Span) == 40);
static_assert(sizeof(Params) == 1320 + 4 * PDSTAGE_LISTED);

// Rows that a span touches.
struct Rows {
    u32 first, n;
};

__device__ __forceinline__ Rows rows_of(const Span& span, u32 tokens_per_row) {
    if (span.start == span.stop) return {0, 0};
    const i64 first = span.start / tokens_per_row;
    return {u32(first), u32((span.stop + tokens_per_row - 1) / tokens_per_row - first)};
}

// One run: a row counted from the first touched, a shard and a segment of it.
struct Run {
    u32 row, shard, seg;
};

__device__ __forceinline__ Run token_major(const Group& group, u32 run) {
    const u32 cell = group.segs.quotient(run);
    const u32 row = group.shards.quotient(cell);
    return {row, cell - row * group.shards.by, run - cell * group.segs.by};
}

// [item][shard][row][seg], where the first and the last item may hold fewer rows than the others.
__device__ __forceinline__ Run head_major(const Group& group, const Rows& rows, u32 run) {
    const u32 cell = group.segs.quotient(run);
    const u32 seg = run - cell * group.segs.by;
    const u32 per_item = group.pool.rows_per_item.by;
    const u32 skipped = rows.first - group.pool.rows_per_item.quotient(rows.first) * per_item;
    const u32 in_first = min(rows.n, per_item - skipped);
    if (cell < in_first * group.shards.by) return {cell % in_first, cell / in_first, seg};
    const u32 later = cell - in_first * group.shards.by;
    const u32 item = group.runs_per_item.quotient(later);
    const u32 within = later - item * group.runs_per_item.by;
    const u32 before = in_first + item * per_item;
    const u32 here = min(rows.n - before, per_item);
    const u32 shard = here == per_item ? group.pool.rows_per_item.quotient(within) : within / here;
    return {before + within - shard * here, shard, seg};
}

// A flat group's strides of one pool fit the registers beside the payload; others are read again, from L1, for every
// unit.
#if PDSTAGE_FLAT && PDSTAGE_WAY != 2 && !PDSTAGE_NARROW && PDSTAGE_THREADS > 32
using HeldSide = Side;
#else
using HeldSide = const Side&;
#endif

// Where runs of one view lie in one pool, in one call.
struct Cells {
    HeldSide side;
    const Params& params;
    u64 items, base;
    u32 first_row;
    bool narrow;

    __device__ __forceinline__ Cells(const Group& group, const Side& side, const Params& params, const Span* spans,
                                     u64 base)
        : side(side), params(params), base(base) {
        const Span& span = spans[side.component];
        items = span.items;
        narrow = span.bits == 32;
        first_row = u32(span.start / group.tokens_per_row);
    }

    // The item that holds the run; NO_ITEM if that is outside the pool: its list came from the device, unchecked.
    __device__ __forceinline__ u32 item(const Run& run) const {
        const u32 at = side.rows_per_item.quotient(first_row + run.row);
#if PDSTAGE_LISTED
        return params.lists[u32(items) + at];
#else
        const i64 item =
            narrow ? table(reinterpret_cast<const i32*>(items) + at) : table(reinterpret_cast<const i64*>(items) + at);
        return u64(item) < side.n_items ? u32(item) : NO_ITEM;
#endif
    }

    __device__ __forceinline__ u64 address(const Run& run, u32 item) const {
        const u32 row = first_row + run.row;
        const u32 within = row - side.rows_per_item.quotient(row) * side.rows_per_item.by;
        const u64 address = base + item * side.item_stride;
        if (PDSTAGE_FLAT) return address + within * side.inner_stride;
        const u32 outer = side.outer_rows.quotient(within);
        return address + outer * side.outer_stride + (within - outer * side.outer_rows.by) * side.inner_stride +
               run.shard * side.shard_stride + run.seg * side.seg_stride;
    }
};

}  // namespace pdstage
