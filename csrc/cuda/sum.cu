// Adds the checksum of staged cells, token-major: of what convert.cu brings or takes, which knows its cells by values.
//
// PDSTAGE_NARROW: some groups need accesses below 16 bytes. PDSTAGE_THREADS: of a CTA. PDSTAGE_CTAS: of a
// multiprocessor. PDSTAGE_UNITS.
#include "checksum.cuh"
#include "extents.cuh"
#include "units.cuh"

namespace pdstage {

constexpr u32 UNITS = PDSTAGE_UNITS, TILE = THREADS * UNITS;

// N units of a view from `first` on, THREADS apart; T is one access.
template <typename T, u32 N>
__device__ __forceinline__ u64 sum_units(const Params& params, const Work& work, u32 first) {
    const Group& group = *work.group;
    Bytes16 bytes[N];
    u64 sum = 0;
    const auto run_of = [&](u32 unit) { return group.units_per_run.quotient(unit); };
    const auto offset_of = [&](u32 unit, u32 run) { return (unit - run * group.units_per_run.by) * UNIT; };
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        const u32 unit = first + k * THREADS;
        if (unit >= work.n_units) continue;
        const u32 run = run_of(unit), offset = offset_of(unit, run);
        bytes[k] = load_unit<T>(work.staged + u64(run) * group.width + offset, min(UNIT, group.width - offset));
    }
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        const u32 unit = first + k * THREADS;
        if (unit >= work.n_units) continue;
        const u32 run = run_of(unit), offset = offset_of(unit, run);
        const Run at = token_major(group, run);
        const i64 row = i64(work.rows.first) + at.row;
        const i64 token = params.pool[group.pool.component].first_token + row * group.tokens_per_row;
        sum += terms(work.view->seed, token, group.first_shard + at.shard, at.seg, offset, bytes[k],
                     min(UNIT, group.width - offset));
    }
    return sum;
}

__device__ __forceinline__ u64 sum_tile(const Params& params, const Work& work, u32 first) {
#if PDSTAGE_NARROW
    if (work.group->access < UNIT) {
        u64 sum = 0;
#pragma unroll 1
        for (u32 k = 0; k < UNITS; k++, first += THREADS)
            sum +=
                work.group->access < 4 ? sum_units<u8, 1>(params, work, first) : sum_units<u32, 1>(params, work, first);
        return sum;
    }
#endif
    return sum_units<Bytes16, UNITS>(params, work, first);
}

}  // namespace pdstage

extern "C" __global__ void __launch_bounds__(PDSTAGE_THREADS, PDSTAGE_CTAS)
    pdstage_copy(const __grid_constant__ pdstage::Params params) {
    using namespace pdstage;
    __shared__ Extents extents;
    __shared__ u64 sums[THREADS];
    lay_out(params, extents, TILE);
    const u32 n_tiles = extents.tiles[params.n_groups - 1];
    u64 sum = 0;
    u32 index = 0;
    for (u32 tile = blockIdx.x; tile < n_tiles; tile += gridDim.x) {
        while (tile >= extents.tiles[index]) index++;
        const Work work = work_of(params, extents, TILE, index, tile);
        sum += sum_tile(params, work, work.first + threadIdx.x);
    }
    sums[threadIdx.x] = sum;
    add_all(params.sum, sums);
}
