// Gather, scatter and pool-to-pool copies as one launch over all views of a chunk. A thread moves a *unit* of 16
// bytes, or two, at a time.
//
// Why: a copy of scattered runs is bound by memory only if enough bytes are in flight. A thread issues the loads of
// UNITS units before its first store, 2 KiB per warp. Warps never wait for each other: each takes separate tiles, so a
// CTA may be as large as the call allows. The grid is persistent: the host limits the multiprocessors used.
//
// PDSTAGE_WAY: 0 pool to staging, 1 staging to pool, 2 pool to peer. PDSTAGE_HEAD_MAJOR: the staged order.
// PDSTAGE_NARROW: copies the groups that need accesses below 16 bytes; without it all others. PDSTAGE_FLAT: every row
// is one run and there is one row level. PDSTAGE_SUM: adds the checksum. PDSTAGE_ACCESS: the bytes of an access, which
// every group allows, from 16 on staging too. PDSTAGE_LONGEST: the bytes of the longest unit. PDSTAGE_THREADS: the
// maximum per CTA. PDSTAGE_LISTED: items in the parameters, 0 if lists are in device memory. PDSTAGE_FAR as in
// copy.cuh.
#include "checksum.cuh"
#include "extents.cuh"
#include "units.cuh"

namespace pdstage {

constexpr u32 UNITS = PDSTAGE_UNITS, TILE = LANES * UNITS, LONGEST = PDSTAGE_LONGEST;
// Units of one access. Narrow groups have one access or several for one unit.
constexpr u32 WIDE = PDSTAGE_NARROW ? 1 : PDSTAGE_ACCESS / UNIT;
using Access = decltype(accessed<PDSTAGE_ACCESS>());

__device__ __forceinline__ Run run_at(const Group& group, const Extent& extent, u32 run) {
    if (PDSTAGE_FLAT) return {run, 0, 0};
    return PDSTAGE_HEAD_MAJOR ? head_major(group, extent, run) : token_major(group, run);
}

// The rows that hold N accesses of a view from unit `first` on, LANES apart, their offsets in the rows, and the keys of
// their sums.
template <u32 N>
__device__ __forceinline__ void find_rows(const Params& params, const Work& work, u32 first, u32 (&rows)[N],
                                          Offset (&pool)[N], [[maybe_unused]] Offset (&peer)[N],
                                          [[maybe_unused]] u64 (&keys)[N]) {
    const Group& group = *work.group;
    [[maybe_unused]] const Places places(group, work.view->seed, params.pool[group.pool.component].first_token,
                                         work.extent->first_row);
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        const u32 unit = min(first + k * LANES * WIDE, work.extent->n_units - 1);
        const u32 run = group.units_per_run.quotient(unit);
        const Offset into = (unit - run * group.units_per_run.by) * (UNIT / STEP);
        const Run at = run_at(group, *work.extent, run);
        rows[k] = at.row;
        pool[k] = into + in_row(group.pool, at);
        if (TO_PEER) peer[k] = into + in_row(group.peer, at);
        if (PDSTAGE_SUM) keys[k] = places.key(at, into * STEP);
    }
}

// Their addresses in one pool; 0 if the item is outside it. No branch is between the loads of the items.
template <u32 N>
__device__ __forceinline__ void find_units(const Cells& cells, const u32 (&rows)[N], Offset (&offsets)[N],
                                           u64 (&addresses)[N]) {
    u32 items[N];
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        const u32 row = cells.first_row + rows[k], entry = cells.side.rows_per_item.quotient(row);
        offsets[k] += in_item(cells.side, row - entry * cells.side.rows_per_item.by);
        items[k] = cells.item(entry);
    }
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        const u64 address = cells.address(items[k], offsets[k]);
        addresses[k] = items[k] == NO_ITEM ? 0 : address;
    }
}

// N accesses of a view from unit `first` on; returns their part of the checksum. T is one access.
template <typename T, u32 N>
__device__ __forceinline__ u64 copy_units(const Params& params, const Work& work, u32 first) {
    const Group& group = *work.group;
    const Extent& extent = *work.extent;
    const auto run_of = [&](u32 unit) { return group.units_per_run.quotient(unit); };
    const auto offset_of = [&](u32 unit) { return (unit - run_of(unit) * group.units_per_run.by) * UNIT; };
    const auto unit_of = [&](u32 k) { return first + k * LANES * WIDE; };
    const auto length = [&](u32 unit) { return sizeof(T) >= UNIT ? UNIT : min(UNIT, group.width - offset_of(unit)); };
    const auto dense = [&](u32 k) {
        if (sizeof(T) >= UNIT) return work.staged + u64(first) * UNIT + k * LANES * WIDE * UNIT;
        const u32 unit = unit_of(k);
        return work.staged + u64(run_of(unit)) * group.width + offset_of(unit);
    };
    // Step by step for all units, so that only one step's part of the tables needs registers.
    u32 rows[N];
    Offset in_pool[N], in_peer[N];
    u64 pool[N], peer[N];
    u64 keys[N];
    find_rows(params, work, first, rows, in_pool, in_peer, keys);
    if (PDSTAGE_SUM) read_again();
    find_units(Cells(params, group.pool, params.pool, work.view->pool, extent.first_row), rows, in_pool, pool);
    if (TO_PEER)
        find_units(Cells(params, group.peer, params.peer, work.view->peer, extent.peer_first_row), rows, in_peer, peer);
    typename Held<T>::Bytes bytes[N];
    u32 live = 0;
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        if (unit_of(k) >= extent.n_units || !pool[k] || (TO_PEER && !peer[k])) continue;
        bytes[k] = load_unit<T, LONGEST>(FROM_STAGING ? dense(k) : pool[k], length(unit_of(k)));
        live |= 1 << k;
    }
    u64 sum = 0;
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        if (!(live >> k & 1)) continue;
        const u32 unit = unit_of(k);
        store_unit<T, LONGEST>(TO_STAGING ? dense(k) : TO_PEER ? peer[k] : pool[k], bytes[k], length(unit));
        if (PDSTAGE_SUM) sum += terms(keys[k], bytes[k], length(unit));
    }
    return sum;
}

}  // namespace pdstage

extern "C" __global__ void __launch_bounds__(PDSTAGE_THREADS, 1)
    pdstage_copy(const __grid_constant__ pdstage::Params params) {
    using namespace pdstage;
    Extent* const extents = reinterpret_cast<Extent*>(dynamic_shared());
    lay_out(params, extents, TILE);
    const u32 n_tiles = extents[params.n_groups - 1].tiles;
#if PDSTAGE_SUM
    __shared__ u64 sums[PDSTAGE_THREADS];  // not in registers, which are scarce
    sums[threadIdx.x] = 0;
#endif
    const u32 warps = blockDim.x / LANES, lane = threadIdx.x % LANES;
    u32 index = 0;
    for (u32 tile = blockIdx.x * warps + threadIdx.x / LANES; tile < n_tiles; tile += gridDim.x * warps) {
        while (tile >= extents[index].tiles) index++;
        const Work work = work_of(params, extents, TILE, index, tile);
        [[maybe_unused]] const u64 sum = copy_units<Access, UNITS / WIDE>(params, work, work.first + lane * WIDE);
#if PDSTAGE_SUM
        sums[threadIdx.x] += sum;
#endif
    }
#if PDSTAGE_SUM
    add_all(params.sum, sums);
#endif
}
