// Gather that encodes bf16 as fp8, and scatter that decodes: one launch over all views of a chunk, with the tables,
// tiles per warp and persistent grid of copy.cu.
//
// A *unit* here is 16 values of one cell: two 16-byte accesses of the pool, one of staging. A thread issues the
// loads of UNITS units before its first store. Values that share a scale are in neighbouring lanes, which agree on it
// by shuffles: a block of 32 is two lanes, a token's head as many lanes as it has units, up to a power of two.
// (kernels/cuda_convert.py numbers units so that a warp's end cuts none of these.) A scatter has two lanes for a unit:
// half-written sectors cost it more than twice the arithmetic. Copied groups move as in copy.cu, in units of 16 bytes.
//
// PDSTAGE_WAY: 0 pool to staging, 1 staging to pool. PDSTAGE_KINDS: a bit for each kind of the groups, numbered as
// in e4m3.cuh. PDSTAGE_NARROW: converts the groups that need accesses below 16 bytes in the pool or in staging; without
// it all others. PDSTAGE_CELLS: how cells are accessed, which every group of the launch allows. PDSTAGE_THREADS: the
// maximum per CTA; half if the registers must suffice for several kinds. PDSTAGE_UNITS. PDSTAGE_LISTED as in copy.cu.
#include "e4m3.cuh"
#include "extents.cuh"
#include "units.cuh"

namespace pdstage {

constexpr u32 UNITS = PDSTAGE_UNITS, TILE = LANES * UNITS;
constexpr u32 SPLIT = FROM_STAGING ? 2 : 1, VALUES = UNIT / SPLIT;  // lanes of a unit, and the values of each

// How cells are accessed in the pool and in staging. Copied groups are accessed in both as in staging.
constexpr u32 WIDE = 0, WORDS_STAGED = 1, VALUES_AND_BYTES = 2, BYTES = 3, CELLS = PDSTAGE_CELLS;
using InPool = decltype(accessed<CELLS <= WORDS_STAGED ? UNIT : CELLS == VALUES_AND_BYTES ? 2 : 1>());
template <bool COPIED>
using InStaging = decltype(accessed<CELLS == WIDE           ? (COPIED ? UNIT : VALUES)
                                    : CELLS == WORDS_STAGED ? 4
                                                            : 1>());
// Whether all of a thread's loads are issued at once: not if the registers must suffice for many accesses.
constexpr bool TOGETHER = CELLS <= WORDS_STAGED;

// How a group's cells are staged; kernels/cuda_convert.py packs it behind the groups. `units` are those of a cell
// that hold values. If scales are in separate views, those of the group's first view are view number `scales_first` of
// group `scales_group`. A view's single scale is in its table of addresses, where copies have the peer's.
struct Coding {
    u32 kind, holds, n_values, units, scales_group, scales_first;
};

// A lane's bf16 values, two per word.
struct Values {
    u32 words[VALUES / 2];
};

__device__ __forceinline__ Values load_values(u64 address, u32 n) {
    Values values;
#pragma unroll
    for (u32 at = 0; at < VALUES; at += 8) {
        Bytes16 part = {0, 0};
        if (at < n) part = load_unit<InPool>(address + 2 * at, 2 * (n - at));
        u32* words = values.words + at / 2;
        words[0] = u32(part.low), words[1] = u32(part.low >> 32);
        words[2] = u32(part.high), words[3] = u32(part.high >> 32);
    }
    return values;
}

__device__ __forceinline__ void store_values(u64 address, const Values& values, u32 n) {
    const u32* words = values.words;
    store_unit<InPool>(address, {words[0] | u64(words[1]) << 32, words[2] | u64(words[3]) << 32}, 2 * n);
}

// The bits of the largest magnitude.
__device__ __forceinline__ u32 greatest(const Values& values) {
    u32 most = 0;
#pragma unroll
    for (u32 i = 0; i < VALUES / 2; i++)
        most = max(most, max(values.words[i] << 16 & MAGNITUDE, values.words[i] & 0x7FFF0000));
    return most;
}

__device__ __forceinline__ u32 greatest_of_lanes(u32 most, u32 lanes) {
    for (u32 apart = 1; apart < lanes; apart *= 2) most = max(most, __shfl_xor_sync(~0u, most, apart));
    return most;
}

// The divisor or factor of all values of a unit.
template <u32 KIND>
__device__ __forceinline__ Bytes16 encoded(const Values& values, float factor) {
    u32 codes[4] = {0, 0, 0, 0};
#pragma unroll
    for (u32 i = 0; i < 8; i++) {
        float low = float_of(values.words[i] << 16), high = float_of(values.words[i] & 0xFFFF0000);
        if (KIND == TENSOR_DIVIDE) {
            low = low / factor;
            high = high / factor;
        } else {
            low = low * factor;
            high = high * factor;
        }
        if (KIND == TENSOR_BF16) {
            const u32 rounded = to_bf16(low, high);
            low = float_of(rounded << 16);
            high = float_of(rounded & 0xFFFF0000);
        }
        codes[i / 2] |= to_e4m3(low, high) << (i % 2 * 16);
    }
    return {codes[0] | u64(codes[1]) << 32, codes[2] | u64(codes[3]) << 32};
}

__device__ __forceinline__ Values decoded(u64 codes, float scale) {
    Values values;
#pragma unroll
    for (u32 i = 0; i < VALUES / 2; i++) {
        float low, high;
        from_e4m3(u32(codes >> (i * 16)), low, high);
        values.words[i] = to_bf16(low * scale, high * scale);
    }
    return values;
}

// What a lane moves of a unit: `n` values from `offset` on, of a run. `part` counts lanes' parts of units.
struct Part {
    u32 run, offset, n;

    __device__ __forceinline__ Part(const Group& group, const Coding& coding, const Work& work, u32 part) {
        const u32 unit = part / SPLIT, last = work.extent->n_units - 1;
        run = group.units_per_run.quotient(min(unit, last));
        offset = (unit - run * group.units_per_run.by) * UNIT + part % SPLIT * VALUES;
        n = unit <= last && offset < coding.n_values ? min(VALUES, coding.n_values - offset) : 0;
    }
};

// N parts of a view's units from `first` on, LANES apart.
template <u32 KIND, u32 N>
__device__ __forceinline__ void encode_units(const Params& params, const Coding& coding, const Work& work, u32 first) {
    using S = InStaging<false>;
    const Group& group = *work.group;
    const Cells cells(params, group.pool, params.pool, work.view->pool, work.extent->first_row);
    Values values[N];
    u32 items[N];
#pragma unroll
    for (u32 k = 0; k < N; k++)
        items[k] = cells.item(cells.place(token_major(group, Part(group, coding, work, first + k * LANES).run)).entry);
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        const Part part(group, coding, work, first + k * LANES);
        values[k] = {};
        if (!part.n || items[k] == NO_ITEM) continue;
        const Place place = cells.place(token_major(group, part.run));
        values[k] = load_values(cells.address(items[k], place.offset) + 2 * part.offset, part.n);
    }
    const float scale = float_of(u32(work.view->peer));
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        const Part part(group, coding, work, first + k * LANES);
        float factor = KIND == TENSOR_BF16 ? 1.0F / scale : scale;
        u32 word = 0;
        if (KIND == TOKEN_HEAD) {
            u32 most = greatest(values[k]);
            const bool there = first + k * LANES < work.extent->n_units && items[k] != NO_ITEM;
            if (coding.units > LANES && there) {  // a lane then reads more of the head than its unit
                const u64 cell = cells.address(items[k], cells.place(token_major(group, part.run)).offset);
                for (u32 at = part.offset % (LANES * VALUES); at < coding.n_values; at += LANES * VALUES)
                    most = max(most, greatest(load_values(cell + 2 * at, min(VALUES, coding.n_values - at))));
            }
            most = greatest_of_lanes(most, min(group.units_per_run.by, LANES));
            const float own = head_scale(most);
            factor = 1.0F / own;
            word = bits_of(own);
        } else if (KIND >= MX_FLOOR) {
            word = mx_scale<KIND>(greatest_of_lanes(greatest(values[k]), MX_BLOCK / VALUES));
            factor = power_of(word == E8M0_NAN ? E8M0_NAN : 254 - word);
        }
        if (!part.n || items[k] == NO_ITEM) continue;
        const u64 cell = work.staged + u64(part.run) * group.width;
        if (coding.holds != SCALES) store_unit<S>(cell + part.offset, encoded<KIND>(values[k], factor), part.n);
        const u64 scales = coding.holds == SCALES ? cell : cell + coding.n_values;
        if (KIND < TOKEN_HEAD || coding.holds == DATA) continue;
        if (KIND != TOKEN_HEAD) {
            if (part.offset % MX_BLOCK == 0) store<u8>(scales + part.offset / MX_BLOCK, u8(word));
        } else if (part.offset == 0) {
            if (sizeof(S) >= 4)
                store<u32>(scales, word);
            else
                store_unit<u8>(scales, {word, 0}, 4);
        }
    }
}

// The inverse. `scales` is where those of the view's first cell are staged, `apart` bytes from those of the next.
template <u32 KIND, u32 N>
__device__ __forceinline__ void decode_units(const Params& params, const Coding& coding, const Work& work, u64 scales,
                                             u32 apart, u32 first) {
    using S = InStaging<false>;
    const Group& group = *work.group;
    u64 codes[N];
    float factors[N];
    u32 live = 0;
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        const Part part(group, coding, work, first + k * LANES);
        if (!part.n) continue;
        live |= 1 << k;
        codes[k] = load_unit<S, VALUES>(work.staged + u64(part.run) * group.width + part.offset, part.n).low;
        const u64 beside = scales + u64(part.run) * apart;
        if (KIND == TOKEN_HEAD)
            factors[k] = float_of(sizeof(S) >= 4 ? load<u32>(beside) : u32(load_unit<u8>(beside, 4).low));
        else if (KIND >= MX_FLOOR)
            factors[k] = power_of(load<u8>(beside + part.offset / MX_BLOCK));
        else
            factors[k] = float_of(u32(work.view->peer));
    }
    const Cells cells(params, group.pool, params.pool, work.view->pool, work.extent->first_row);
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        const Part part(group, coding, work, first + k * LANES);
        if (!(live >> k & 1)) continue;
        const Place place = cells.place(token_major(group, part.run));
        const u32 item = cells.item(place.entry);
        if (item == NO_ITEM) continue;
        store_values(cells.address(item, place.offset) + 2 * part.offset, decoded(codes[k], factors[k]), part.n);
    }
}

// Units whose bytes are equal on both sides.
template <u32 N>
__device__ __forceinline__ void copy_units(const Params& params, const Work& work, u32 first) {
    using T = InStaging<true>;
    const Group& group = *work.group;
    const Cells cells(params, group.pool, params.pool, work.view->pool, work.extent->first_row);
    Bytes16 bytes[N];
    u64 to[N];
    u32 nbytes[N];
#pragma unroll
    for (u32 k = 0; k < N; k++) {
        const u32 unit = first + k * LANES, at = group.units_per_run.quotient(min(unit, work.extent->n_units - 1));
        const u32 offset = (unit - at * group.units_per_run.by) * UNIT;
        const Place place = cells.place(token_major(group, at));
        const u32 item = unit < work.extent->n_units ? cells.item(place.entry) : NO_ITEM;
        nbytes[k] = 0;
        if (item == NO_ITEM) continue;
        nbytes[k] = min(UNIT, group.width - offset);
        const u64 own = cells.address(item, place.offset) + offset;
        const u64 staged = work.staged + u64(at) * group.width + offset;
        bytes[k] = load_unit<T>(TO_STAGING ? own : staged, nbytes[k]);
        to[k] = TO_STAGING ? staged : own;
    }
#pragma unroll
    for (u32 k = 0; k < N; k++)
        if (nbytes[k]) store_unit<T>(to[k], bytes[k], nbytes[k]);
}

template <u32 KIND, u32 N>
__device__ __forceinline__ void convert_units(const Params& params, const Extent* extents, const Coding& coding,
                                              const Work& work, u32 first) {
    if constexpr (KIND == COPY) {
        copy_units<N>(params, work, first);
    } else if constexpr (TO_STAGING) {
        encode_units<KIND, N>(params, coding, work, first);
    } else {
        u64 scales = work.staged + coding.n_values;
        u32 apart = work.group->width;
        if (coding.holds == DATA) {
            const u32 number = u32(work.view - params.views) - work.group->first_view + coding.scales_first;
            apart = params.groups[coding.scales_group].width;
            scales = params.staging + (coding.scales_group ? extents[coding.scales_group - 1].nbytes : 0) +
                     number * extents[coding.scales_group].view_nbytes;
        }
        decode_units<KIND, N>(params, coding, work, scales, apart, first);
    }
}

template <u32 KIND>
__device__ __forceinline__ void convert_tile(const Params& params, const Extent* extents, const Coding& coding,
                                             const Work& work) {
    constexpr u32 LANES_EACH = KIND == COPY ? 1 : SPLIT, PARTS = UNITS * LANES_EACH, N = TOGETHER ? PARTS : 1;
    u32 first = work.first * LANES_EACH + threadIdx.x % LANES;
#pragma unroll 1
    for (u32 k = 0; k < PARTS; k += N, first += N * LANES) convert_units<KIND, N>(params, extents, coding, work, first);
}

// For groups of the kinds in ALIKE's bits.
template <u32 KIND, u32 ALIKE = 1 << KIND>
__device__ __forceinline__ void convert_if(const Params& params, const Extent* extents, const Coding& coding,
                                           const Work& work) {
    if constexpr ((PDSTAGE_KINDS & ALIKE) != 0)
        if ((PDSTAGE_KINDS & ~ALIKE) == 0 || ALIKE >> coding.kind & 1)
            convert_tile<KIND>(params, extents, coding, work);
}

}  // namespace pdstage

extern "C" __global__ void __launch_bounds__(PDSTAGE_THREADS, 1)
    pdstage_copy(const __grid_constant__ pdstage::Params params) {
    using namespace pdstage;
    Extent* const extents = reinterpret_cast<Extent*>(dynamic_shared());
    const Coding* codings = reinterpret_cast<const Coding*>(params.groups + params.n_groups);
    for_tiles(params, extents, TILE, [&](const Work& work, u32 index) {
        const Coding& coding = codings[index];
        if (FROM_STAGING && coding.kind != COPY && coding.holds == SCALES) return;  // read with their data
        convert_if<COPY>(params, extents, coding, work);
        convert_if<TOKEN_HEAD>(params, extents, coding, work);
        if constexpr (TO_STAGING) {
            convert_if<TENSOR_DIVIDE>(params, extents, coding, work);
            convert_if<TENSOR_BF16>(params, extents, coding, work);
            convert_if<MX_FLOOR>(params, extents, coding, work);
            convert_if<MX_CEIL>(params, extents, coding, work);
        } else {
            convert_if<TENSOR_DIVIDE, 1 << TENSOR_DIVIDE | 1 << TENSOR_BF16>(params, extents, coding, work);
            convert_if<MX_FLOOR, 1 << MX_FLOOR | 1 << MX_CEIL>(params, extents, coding, work);
        }
    });
}
