// Adds the checksum of staged cells, token-major, for convert.cu, which addresses its cells by values.
//
// PDSTAGE_NARROW: sums the groups that need accesses below 16 bytes; without it all others. PDSTAGE_THREADS: the
// maximum per CTA. PDSTAGE_UNITS.
#include "checksum.cuh"
#include "extents.cuh"
#include "units.cuh"

namespace pdstage {

constexpr u32 UNITS = PDSTAGE_UNITS, TILE = LANES * UNITS;

// N units of a view from `first` on, LANES apart; T is one access.
template <typename T, u32 N>
__device__ __forceinline__ u64 sum_units(const Params& params, const Work& work, u32 first) {
    const Group& group = *work.group;
    const i64 first_token = params.pool[group.pool.component].first_token;
    const Places places(group, work.view->seed, first_token, work.extent->first_row);
    Bytes16 bytes[N];
    u64 sum = 0;
    const auto run_of = [&](u32 unit) { return group.units_per_run.quotient(unit); };
    const auto offset_of = [&](u32 unit, u32 run) { return (unit - run * group.units_per_run.by) * UNIT; };
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        const u32 unit = first + k * LANES;
        if (unit >= work.extent->n_units) continue;
        const u32 run = run_of(unit), offset = offset_of(unit, run);
        bytes[k] = load_unit<T>(work.staged + u64(run) * group.width + offset, min(UNIT, group.width - offset));
    }
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        const u32 unit = first + k * LANES;
        if (unit >= work.extent->n_units) continue;
        const u32 run = run_of(unit), offset = offset_of(unit, run);
        sum += terms(places.key(token_major(group, run), offset), bytes[k], min(UNIT, group.width - offset));
    }
    return sum;
}

__device__ __forceinline__ u64 sum_tile(const Params& params, const Work& work, u32 first) {
#if PDSTAGE_NARROW
    u64 sum = 0;
#pragma unroll 1
    for (u32 k = 0; k < UNITS; k++, first += LANES)
        sum += work.group->access < 4 ? sum_units<u8, 1>(params, work, first) : sum_units<u32, 1>(params, work, first);
    return sum;
#else
    return sum_units<Bytes16, UNITS>(params, work, first);
#endif
}

}  // namespace pdstage

extern "C" __global__ void __launch_bounds__(PDSTAGE_THREADS, 1)
    pdstage_copy(const __grid_constant__ pdstage::Params params) {
    using namespace pdstage;
    __shared__ u64 sums[PDSTAGE_THREADS];
    u64 sum = 0;
    for_tiles(params, reinterpret_cast<Extent*>(dynamic_shared()), TILE,
              [&](const Work& work, u32) { sum += sum_tile(params, work, work.first + threadIdx.x % LANES); });
    sums[threadIdx.x] = sum;
    add_all(params.sum, sums);
}
