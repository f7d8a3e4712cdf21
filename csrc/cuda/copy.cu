// Gather, scatter and pool-to-pool copies as one launch over all views of a chunk, a *unit* of 16 bytes a thread at a
// time.
//
// Why: a copy of scattered runs is bound by memory only if enough bytes are in flight. A thread issues the loads of
// UNITS units before its first store, 32 KiB a CTA, and warps never wait for each other between tiles, so that one CTA
// on a multiprocessor is enough for 25 GB/s and more. The grid is persistent: the host bounds the multiprocessors used.
//
// PDSTAGE_WAY: 0 pool to staging, 1 staging to pool, 2 pool to peer. PDSTAGE_HEAD_MAJOR: the staged order.
// PDSTAGE_NARROW: some groups need accesses below 16 bytes; without it the machine code has none. PDSTAGE_FLAT: every
// row is one run and there is one row level. PDSTAGE_SUM: adds the checksum. PDSTAGE_THREADS: of a CTA.
#include "checksum.cuh"
#include "copy.cuh"

namespace pdstage {

constexpr bool TO_STAGING = PDSTAGE_WAY == 0, FROM_STAGING = PDSTAGE_WAY == 1, TO_PEER = PDSTAGE_WAY == 2;
constexpr u32 THREADS = PDSTAGE_THREADS, UNITS = PDSTAGE_UNITS, TILE = THREADS * UNITS;

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

__device__ __forceinline__ void lay_out(const Params& params, Extents& extents) {
    const u32 me = threadIdx.x, n_groups = u32(params.n_groups);
    if (me < n_groups) {
        const Group& group = params.groups[me];
        const u32 rows = rows_of(params.pool[group.pool.component], group.tokens_per_row).n;
        extents.nbytes[me] = group.n_views * padded(group, rows);
        extents.tiles[me] = group.n_views * ((units_of(group, rows) + TILE - 1) / TILE);
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

// `nbytes` bytes, 1 to 16, in accesses of T. Bytes beyond them are zeros.
template <typename T>
__device__ __forceinline__ Bytes16 load_unit(u64 address, u32 nbytes) {
    u64 words[2] = {0, 0};
#pragma unroll
    for (u32 at = 0; at < UNIT; at += sizeof(T))
        if (at < nbytes) words[at / 8] |= u64(load<T>(address + at)) << (at % 8 * 8);
    return {words[0], words[1]};
}

template <>
__device__ __forceinline__ Bytes16 load_unit<Bytes16>(u64 address, u32) {
    return load16(address);
}

template <typename T>
__device__ __forceinline__ void store_unit(u64 address, Bytes16 bytes, u32 nbytes) {
#pragma unroll
    for (u32 at = 0; at < UNIT; at += sizeof(T))
        if (at < nbytes) store<T>(address + at, T((at < 8 ? bytes.low : bytes.high) >> (at % 8 * 8)));
}

template <>
__device__ __forceinline__ void store_unit<Bytes16>(u64 address, Bytes16 bytes, u32) {
    store16(address, bytes);
}

// One view of one call: its staged bytes, its rows in either pool.
struct Work {
    const Params& params;
    const Group& group;
    const View& view;
    u64 staged;
    Rows rows;
    u32 n_units;
};

__device__ __forceinline__ Run place(const Group& group, const Rows& rows, u32 run) {
    if (PDSTAGE_FLAT) return {run, 0, 0};
    return PDSTAGE_HEAD_MAJOR ? head_major(group, rows, run) : token_major(group, run);
}

// UNITS units of a view from `first` on, THREADS apart; returns their part of the checksum. T is one access. Each half
// takes what it needs of the tables again, so that both together fit the registers beside the payload.
template <typename T>
__device__ __forceinline__ u64 copy_units(const Work& work, u32 first) {
    const Divisor per_run = work.group.units_per_run;
    const u32 width = work.group.width;
    const auto run_of = [&](u32 unit) { return per_run.quotient(unit); };
    const auto offset_of = [&](u32 unit, u32 run) { return (unit - run * per_run.by) * UNIT; };
    const auto length = [&](u32 offset) { return sizeof(T) == UNIT ? UNIT : min(UNIT, width - offset); };
    const auto dense = [&](u32 unit) {
        if (sizeof(T) == UNIT) return work.staged + u64(unit) * UNIT;
        const u32 run = run_of(unit);
        return work.staged + u64(run) * width + offset_of(unit, run);
    };
    const auto items_of = [&](const Cells& cells, u32(&items)[UNITS]) {
#pragma unroll
        for (u32 k = 0; k < UNITS; k++) {
            const u32 unit = min(first + k * THREADS, work.n_units - 1);  // no branch between these loads
            items[k] = cells.item(place(work.group, work.rows, run_of(unit)));
        }
    };
    Bytes16 bytes[UNITS];
    u32 live = 0;
    {
        const Cells cells(work.group, work.group.pool, work.params.pool, work.view.pool);
        u32 items[UNITS];
        if (!FROM_STAGING) items_of(cells, items);
#pragma unroll
        for (u32 k = 0; k < UNITS; k++) {
            const u32 unit = first + k * THREADS, run = run_of(unit), offset = offset_of(unit, run);
            if (unit >= work.n_units || (!FROM_STAGING && items[k] == NO_ITEM)) continue;
            const u64 from =
                FROM_STAGING ? dense(unit) : cells.address(place(work.group, work.rows, run), items[k]) + offset;
            bytes[k] = load_unit<T>(from, length(offset));
            live |= 1 << k;
        }
    }
    read_again();
    u64 sum = 0;
    const Cells cells = TO_PEER ? Cells(work.group, work.group.peer, work.params.peer, work.view.peer)
                                : Cells(work.group, work.group.pool, work.params.pool, work.view.pool);
    u32 items[UNITS];
    if (!TO_STAGING) items_of(cells, items);
#pragma unroll
    for (u32 k = 0; k < UNITS; k++) {
        if (!(live >> k & 1) || (!TO_STAGING && items[k] == NO_ITEM)) continue;
        const u32 unit = first + k * THREADS, run = run_of(unit), offset = offset_of(unit, run);
        const u64 to = TO_STAGING ? dense(unit) : cells.address(place(work.group, work.rows, run), items[k]) + offset;
        store_unit<T>(to, bytes[k], length(offset));
        if (PDSTAGE_SUM) {
            const Run at = place(work.group, work.rows, run);
            const i64 row = i64(work.rows.first) + at.row;
            const i64 token = work.params.pool[work.group.pool.component].first_token + row * work.group.tokens_per_row;
            sum += terms(work.view.seed, token, work.group.first_shard + at.shard, at.seg, offset, bytes[k],
                         length(offset));
        }
    }
    return sum;
}

__device__ __forceinline__ u64 copy_tile(const Work& work, u32 first) {
#if PDSTAGE_NARROW
    switch (work.group.access) {
        case 1:
            return copy_units<u8>(work, first);
        case 2:
            return copy_units<u16>(work, first);
        case 4:
            return copy_units<u32>(work, first);
        case 8:
            return copy_units<u64>(work, first);
    }
#endif
    return copy_units<Bytes16>(work, first);
}

__device__ __forceinline__ void add_all(u64 address, u64 mine) {
    __shared__ u64 sums[THREADS];
    sums[threadIdx.x] = mine;
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0 && sums[0]) add(address, sums[0]);
}

}  // namespace pdstage

extern "C" __global__ void __launch_bounds__(PDSTAGE_THREADS, 2)
    pdstage_copy(const __grid_constant__ pdstage::Params params) {
    using namespace pdstage;
    __shared__ Extents extents;
    lay_out(params, extents);
    const u32 n_tiles = extents.tiles[params.n_groups - 1];
    u64 sum = 0, staged_before = 0;
    u32 index = 0, tiles_before = 0;
    for (u32 tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        for (; tile >= extents.tiles[index]; index++) {
            staged_before = extents.nbytes[index];
            tiles_before = extents.tiles[index];
        }
        const Group& group = params.groups[index];
        const Rows rows = rows_of(params.pool[group.pool.component], group.tokens_per_row);
        const u32 n_units = units_of(group, rows.n), tiles_per_view = (n_units + TILE - 1) / TILE;
        const u32 number = (tile - tiles_before) / tiles_per_view;
        const u32 first = (tile - tiles_before - number * tiles_per_view) * TILE + threadIdx.x;
        const u64 staged = params.staging + staged_before + number * padded(group, rows.n);
        const Work work{params, group, params.views[group.first_view + number], staged, rows, n_units};
        sum += copy_tile(work, first);
    }
    if (PDSTAGE_SUM) add_all(params.sum, sum);
}
