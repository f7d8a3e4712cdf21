// Which part of a call is whose: views laid out in staging, and cut into tiles that CTAs take in turn.
//
// PDSTAGE_WAY: 0 pool to staging, 1 staging to pool, 2 pool to peer.
#pragma once

#include "copy.cuh"

namespace pdstage {

constexpr bool TO_STAGING = PDSTAGE_WAY == 0, FROM_STAGING = PDSTAGE_WAY == 1, TO_PEER = PDSTAGE_WAY == 2;
constexpr u32 THREADS = PDSTAGE_THREADS;

// Staged bytes and tiles up to the end of each group. One group a thread: the host refuses plans of more than THREADS.
struct Extents {
    u64 nbytes[THREADS];
    u32 tiles[THREADS];
};

__device__ __forceinline__ u32 units_of(const Group& group, u32 rows) {
    return rows * group.shards.by * group.segs.by * group.units_per_run.by;
}

__device__ __forceinline__ u64 padded(const Group& group, u32 rows) {
    const u64 nbytes = u64(rows) * group.shards.by * group.segs.by * group.width;
    return (nbytes + VIEW_ALIGNMENT - 1) / VIEW_ALIGNMENT * VIEW_ALIGNMENT;
}

__device__ __forceinline__ void lay_out(const Params& params, Extents& extents, u32 tile_units) {
    const u32 me = threadIdx.x, n_groups = u32(params.n_groups);
    if (me < n_groups) {
        const Group& group = params.groups[me];
        const u32 rows = rows_of(params.pool[group.pool.component], group.tokens_per_row).n;
        extents.nbytes[me] = group.n_views * padded(group, rows);
        extents.tiles[me] = group.n_views * ((units_of(group, rows) + tile_units - 1) / tile_units);
    }
    __syncthreads();
    for (u32 step = 1; step < n_groups; step *= 2) {
        const bool adds = me >= step && me < n_groups;
        const u64 nbytes = adds ? extents.nbytes[me - step] : 0;
        const u32 tiles = adds ? extents.tiles[me - step] : 0;
        __syncthreads();
        if (adds) {
            extents.nbytes[me] += nbytes;
            extents.tiles[me] += tiles;
        }
        __syncthreads();
    }
}

// A tile's part of one view in one call: units [first, first + tile) of `n_units`, its view's staged bytes and rows.
struct Work {
    const Group* group;
    const View* view;
    u64 staged;
    Rows rows;
    u32 n_units, first;
};

// `index` is the group that holds `tile`.
__device__ __forceinline__ Work work_of(const Params& params, const Extents& extents, u32 tile_units, u32 index,
                                        u32 tile) {
    const Group& group = params.groups[index];
    const Rows rows = rows_of(params.pool[group.pool.component], group.tokens_per_row);
    const u32 n_units = units_of(group, rows.n), tiles_per_view = (n_units + tile_units - 1) / tile_units;
    const u32 local = tile - (index ? extents.tiles[index - 1] : 0), number = local / tiles_per_view;
    const u64 staged = params.staging + (index ? extents.nbytes[index - 1] : 0) + number * padded(group, rows.n);
    const u32 first = (local - number * tiles_per_view) * tile_units;
    return {&group, &params.views[group.first_view + number], staged, rows, n_units, first};
}

}  // namespace pdstage
