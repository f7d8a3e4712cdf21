// Gather, scatter and pool-to-pool copies as one launch over all views of a chunk, a *unit* of 16 bytes a thread at a
// time.
//
// Why: a copy of scattered runs is bound by memory only if enough bytes are in flight. A thread issues the loads of
// UNITS units before its first store, 32 KiB a CTA, and warps never wait for each other between tiles, so that one CTA
// on a multiprocessor is enough for 25 GB/s and more. The grid is persistent: the host bounds the multiprocessors used.
//
// PDSTAGE_WAY: 0 pool to staging, 1 staging to pool, 2 pool to peer. PDSTAGE_HEAD_MAJOR: the staged order.
// PDSTAGE_NARROW: some groups need accesses below 16 bytes; without it the machine code has none. PDSTAGE_FLAT: every
// row is one run and there is one row level. PDSTAGE_SUM: adds the checksum. PDSTAGE_THREADS: of a CTA. PDSTAGE_LISTED:
// items in the parameters, 0 where lists are in device memory.
#include "checksum.cuh"
#include "extents.cuh"
#include "units.cuh"

namespace pdstage {

constexpr u32 UNITS = PDSTAGE_UNITS, TILE = THREADS * UNITS;

__device__ __forceinline__ Run place(const Group& group, const Rows& rows, u32 run) {
    if (PDSTAGE_FLAT) return {run, 0, 0};
    return PDSTAGE_HEAD_MAJOR ? head_major(group, rows, run) : token_major(group, run);
}

// N units of a view from `first` on, THREADS apart; returns their part of the checksum. T is one access. Each half
// takes what it needs of the tables again, so that both together fit the registers beside the payload.
template <typename T, u32 N>
__device__ __forceinline__ u64 copy_units(const Params& params, const Work& work, u32 first) {
    const Group& group = *work.group;
    const Divisor per_run = group.units_per_run;
    const u32 width = group.width;
    const auto run_of = [&](u32 unit) { return per_run.quotient(unit); };
    const auto offset_of = [&](u32 unit, u32 run) { return (unit - run * per_run.by) * UNIT; };
    const auto length = [&](u32 offset) { return sizeof(T) == UNIT ? UNIT : min(UNIT, width - offset); };
    const auto dense = [&](u32 unit) {
        if (sizeof(T) == UNIT) return work.staged + u64(unit) * UNIT;
        const u32 run = run_of(unit);
        return work.staged + u64(run) * width + offset_of(unit, run);
    };
    const auto items_of = [&](const Cells& cells, u32(&items)[N]) {
#pragma unroll
        for (u32 k = 0; k < N; k++) {
            const u32 unit = min(first + k * THREADS, work.n_units - 1);  // no branch between these loads
            items[k] = cells.item(place(group, work.rows, run_of(unit)));
        }
    };
    Bytes16 bytes[N];
    u32 live = 0;
    {
        const Cells cells(group, group.pool, params, params.pool, work.view->pool);
        u32 items[N];
        if (!FROM_STAGING) items_of(cells, items);
#pragma unroll
        for (u32 k = 0; k < N; k++) {
            const u32 unit = first + k * THREADS, run = run_of(unit), offset = offset_of(unit, run);
            if (unit >= work.n_units || (!FROM_STAGING && items[k] == NO_ITEM)) continue;
            const u64 from =
                FROM_STAGING ? dense(unit) : cells.address(place(group, work.rows, run), items[k]) + offset;
            bytes[k] = load_unit<T>(from, length(offset));
            live |= 1 << k;
        }
    }
    read_again();
    u64 sum = 0;
    const Cells cells = TO_PEER ? Cells(group, group.peer, params, params.peer, work.view->peer)
                                : Cells(group, group.pool, params, params.pool, work.view->pool);
    u32 items[N];
    if (!TO_STAGING) items_of(cells, items);
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        if (!(live >> k & 1) || (!TO_STAGING && items[k] == NO_ITEM)) continue;
        const u32 unit = first + k * THREADS, run = run_of(unit), offset = offset_of(unit, run);
        const u64 to = TO_STAGING ? dense(unit) : cells.address(place(group, work.rows, run), items[k]) + offset;
        store_unit<T>(to, bytes[k], length(offset));
        if (PDSTAGE_SUM) {
            if (PDSTAGE_NARROW) read_again();
            const Run at = place(group, work.rows, run);
            const i64 row = i64(work.rows.first) + at.row;
            const i64 token = params.pool[group.pool.component].first_token + row * group.tokens_per_row;
            sum +=
                terms(work.view->seed, token, group.first_shard + at.shard, at.seg, offset, bytes[k], length(offset));
        }
    }
    return sum;
}

// Where widths are mixed, units go N at a time: a narrow unit alone is several loads in flight, and the registers must
// do for every width.
template <typename T, u32 N>
__device__ __forceinline__ u64 copy_mixed(const Params& params, const Work& work, u32 first) {
    u64 sum = 0;
#pragma unroll 1
    for (u32 k = 0; k < UNITS; k += N) {
        read_again();
        sum += copy_units<T, N>(params, work, first + k * THREADS);
    }
    return sum;
}

__device__ __forceinline__ u64 copy_tile(const Params& params, const Work& work, u32 first) {
#if PDSTAGE_NARROW
    switch (work.group->access) {
        case 1:
            return copy_mixed<u8, 1>(params, work, first);
        case 2:
            return copy_mixed<u16, 1>(params, work, first);
        case 4:
            return copy_mixed<u32, 1>(params, work, first);
        case 8:
            return copy_mixed<u64, 1>(params, work, first);
        default:
            return copy_mixed < Bytes16, PDSTAGE_SUM || PDSTAGE_HEAD_MAJOR || TO_PEER ? 1 : 2 > (params, work, first);
    }
#else
    return copy_units<Bytes16, UNITS>(params, work, first);
#endif
}

}  // namespace pdstage

extern "C" __global__ void __launch_bounds__(PDSTAGE_THREADS, 2)
    pdstage_copy(const __grid_constant__ pdstage::Params params) {
    using namespace pdstage;
    __shared__ Extents extents;
    lay_out(params, extents, TILE);
    const u32 n_tiles = extents.tiles[params.n_groups - 1];
#if PDSTAGE_SUM
    __shared__ u64 sums[THREADS];  // not in registers, which are short
    sums[threadIdx.x] = 0;
#endif
    u32 index = 0;
    for (u32 tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        while (tile >= extents.tiles[index]) index++;
        const Work work = work_of(params, extents, TILE, index, tile);
        [[maybe_unused]] const u64 sum = copy_tile(params, work, work.first + threadIdx.x);
#if PDSTAGE_SUM
        sums[threadIdx.x] += sum;
#endif
    }
#if PDSTAGE_SUM
    add_all(params.sum, sums);
#endif
}
