// Divides a call among warps: views laid out in staging, and cut into tiles that warps take in turn.
//
// PDSTAGE_WAY: 0 pool to staging, 1 staging to pool, 2 pool to peer. A launch copies the groups of 16-byte access,
// or the narrower ones (PDSTAGE_NARROW); both lay out all of them.
#pragma once

#include "copy.cuh"

namespace pdstage {

constexpr bool TO_STAGING = PDSTAGE_WAY == 0, FROM_STAGING = PDSTAGE_WAY == 1, TO_PEER = PDSTAGE_WAY == 2;
constexpr u32 LANES = 32;

__device__ __forceinline__ Divisor divisor(u32 by) {
    const u32 shift = 32 - __clz(by - 1);
    return {by, u32(((u64(1) << (31 + shift)) + by - 1) / by), shift};
}

// The host keeps tokens and units below 2^31.
__device__ __forceinline__ Extent extent_of(const Params& params, const Group& group, u32 tile_units) {
    const Span& span = params.pool[group.pool.component];
    const u32 per_row = group.tokens_per_row, first = u32(span.start) / per_row;
    const u32 n_rows = span.start == span.stop ? 0 : (u32(span.stop) + per_row - 1) / per_row - first;
    const u32 runs_per_row = group.shards.by * group.segs.by, runs = n_rows * runs_per_row;
    const u32 n_units = runs * group.units_per_run.by;
    const u64 view_nbytes = (u64(runs) * group.width + VIEW_ALIGNMENT - 1) / VIEW_ALIGNMENT * VIEW_ALIGNMENT;
    const u32 per_view = (n_units + tile_units - 1) / tile_units;
    const bool mine = (group.access < UNIT) == bool(PDSTAGE_NARROW);
    const u32 peer_first = TO_PEER ? u32(params.peer[group.peer.component].start) / per_row : 0;
    // A row of one run has the same place in either order, and its block need not be an item.
    const u32 per_item = group.pool.rows_per_item.by;
    const u32 block = PDSTAGE_HEAD_MAJOR && runs_per_row > 1 ? per_item : group.pool.joined_rows.by;
    const u32 in_first = min(n_rows, block - first % block), in_last = (n_rows - in_first) % per_item;
    Extent extent{group.n_views * view_nbytes,
                  view_nbytes,
                  mine ? group.n_views * per_view : 0,
                  n_units,
                  first,
                  n_rows,
                  peer_first,
                  divisor(max(per_view, 1u)),
                  {{in_first}}};
    if (PDSTAGE_HEAD_MAJOR) {
        extent.rows_in[0] = divisor(max(in_first, 1u));
        extent.rows_in[1] = group.pool.rows_per_item;
        extent.rows_in[2] = divisor(in_last ? in_last : per_item);
    }
    return extent;
}

// One group per thread: the host refuses plans with more groups than a CTA has threads.
__device__ __forceinline__ void lay_out(const Params& params, Extent* extents, u32 tile_units) {
    const u32 me = threadIdx.x, n_groups = u32(params.n_groups);
    if (me < n_groups) extents[me] = extent_of(params, params.groups[me], tile_units);
    __syncthreads();
    for (u32 step = 1; step < n_groups; step *= 2) {
        const bool adds = me >= step && me < n_groups;
        const u64 nbytes = adds ? extents[me - step].nbytes : 0;
        const u32 tiles = adds ? extents[me - step].tiles : 0;
        __syncthreads();
        if (adds) {
            extents[me].nbytes += nbytes;
            extents[me].tiles += tiles;
        }
        __syncthreads();
    }
}

// A tile's part of one view in one call: units [first, first + tile) of its view, whose staged bytes begin at
// `staged`.
struct Work {
    const Group* group;
    const View* view;
    const Extent* extent;
    u64 staged;
    u32 first;
};

// `index` is the group that holds `tile`.
__device__ __forceinline__ Work work_of(const Params& params, const Extent* extents, u32 tile_units, u32 index,
                                        u32 tile) {
    const Group& group = params.groups[index];
    const Extent& extent = extents[index];
    const u32 local = tile - (index ? extents[index - 1].tiles : 0), number = extent.tiles_per_view.quotient(local);
    const u64 before = index ? extents[index - 1].nbytes : 0;
    return {&group, &params.views[group.first_view + number], &extent,
            params.staging + before + number * extent.view_nbytes,
            (local - number * extent.tiles_per_view.by) * tile_units};
}

// Lays out a call's views in `extents`, and passes a warp's tiles to `take` one after the other: the work, and the
// number of its group.
template <typename Take>
__device__ __forceinline__ void for_tiles(const Params& params, Extent* extents, u32 tile_units, const Take& take) {
    lay_out(params, extents, tile_units);
    const u32 n_tiles = extents[params.n_groups - 1].tiles, warps = blockDim.x / LANES;
    u32 index = 0;
    for (u32 tile = blockIdx.x * warps + threadIdx.x / LANES; tile < n_tiles; tile += gridDim.x * warps) {
        while (tile >= extents[index].tiles) index++;
        take(work_of(params, extents, tile_units, index, tile), index);
    }
}

}  // namespace pdstage
