// The copies of copy.cu for long runs, by the bulk copy engine: a warp moves runs through a ring in shared memory,
// and no payload passes through its registers.
//
// Why: a warp keeps most of its ring in flight, and four warps fill a multiprocessor's shared memory. So a few
// multiprocessors suffice for a link, and the model keeps the others. Staged bytes are moved in stages of STAGE_NBYTES,
// each warp's own. On a pool's side each stage is as many copies as it has pieces, issued by the lanes side by side.
// Rows that are adjacent in memory are one piece.
//
// Groups here have 16-byte access and runs as `run_nbytes` in kernels/cuda_tables.py allows. Macros as in copy.cu.
#include "bulk.cuh"
#include "extents.cuh"

namespace pdstage {

constexpr u32 STAGE_NBYTES = PDSTAGE_STAGE_NBYTES, STAGES = PDSTAGE_STAGES, STAGE_UNITS = STAGE_NBYTES / UNIT;
constexpr u32 WARPS = PDSTAGE_THREADS / LANES, RING_NBYTES = STAGES * STAGE_NBYTES, SLICE = STAGE_UNITS / LANES;
// Stages that writes may still be reading from; all others are being filled.
constexpr u32 BEHIND = 2, AHEAD = STAGES - BEHIND;

__device__ __forceinline__ u32 lane() {
    return threadIdx.x % LANES;
}

// The address from a unit to the end of its run; 0 if the item is outside the pool.
struct Piece {
    u64 address;
    u32 units;
    bool starts;
};

__device__ __forceinline__ Piece piece_at(const Params& params, const Work& work, bool peer, u32 unit) {
    const Group& group = *work.group;
    const Extent& extent = *work.extent;
    const Side& side = peer ? group.peer : group.pool;
    const Cells cells(params, side, peer ? params.peer : params.pool, peer ? work.view->peer : work.view->pool,
                      peer ? extent.peer_first_row : extent.first_row);
    // Blocks are cut at both ends of the call. Token-major staging has no blocks if a row is several runs.
    const u32 joined = side.joined_rows.by, row_units = group.units_per_run.by;
    const u32 runs = PDSTAGE_FLAT ? 1 : group.shards.by * group.segs.by;
    const u32 skipped = peer ? cells.first_row - side.joined_rows.quotient(cells.first_row) * joined : 0;
    const u32 in_first = peer ? min(extent.n_rows, joined - skipped) : extent.rows_in[0].by;
    const u32 first = in_first * runs * row_units;
    const bool later = unit >= first;
    const u32 block = side.units_per_block.quotient(unit - first);
    const u32 row = later ? in_first + block * joined : 0, here = later ? min(extent.n_rows - row, joined) : in_first;
    u32 within = later ? unit - first - block * side.units_per_block.by : unit;
    Run at{row, 0, 0};
    if (!PDSTAGE_FLAT) {
        // Head-major blocks are items; token-major ones are cut nowhere.
        const Divisor& rows = !PDSTAGE_HEAD_MAJOR ? side.joined_rows
                                                  : extent.rows_in[!later          ? 0
                                                                   : here < joined ? 2
                                                                                   : 1];
        const u32 run = rows.quotient(group.units_per_run.quotient(within));
        within -= run * here * row_units;
        at.shard = group.segs.quotient(run);
        at.seg = run - at.shard * group.segs.by;
    }
    const Place place = cells.place(at);
    const u32 item = cells.item(place.entry);
    return {item == NO_ITEM ? 0 : cells.address(item, place.offset + within), here * row_units - within, within == 0};
}

// Calls f(unit, n_units, address) for the pieces of a stage that start in this lane's slice of it.
template <typename F>
__device__ __forceinline__ void each_piece(const Params& params, const Work& work, bool peer, const F& f) {
    const u32 end = min(work.first + STAGE_UNITS, work.extent->n_units);
    u32 unit = work.first + lane() * SLICE;
    for (const u32 to = min(unit + SLICE, end); unit < to;) {
        const Piece piece = piece_at(params, work, peer, unit);
        const u32 units = min(piece.units, end - unit);
        if (piece.starts || unit == work.first) f(unit, units, piece.address);
        unit += units;
    }
}

__device__ __forceinline__ u32 nbytes_of(const Work& work) {
    return min(STAGE_UNITS, work.extent->n_units - work.first) * UNIT;
}

// Starts to fill a slot; returns whether part of it was skipped.
__device__ __forceinline__ bool start_reads(const Params& params, const Work& work, SharedAddress slot,
                                            SharedAddress barrier) {
    bool left_out = false;
    if (!FROM_STAGING) {
        each_piece(params, work, false, [&](u32 unit, u32 units, u64 address) {
            if (address) {
                barrier_expect(barrier, units * UNIT);
                bulk_read(slot + (unit - work.first) * UNIT, address, units * UNIT, barrier);
            } else {
                left_out = true;
            }
        });
    } else if (lane() == 0) {
        barrier_expect(barrier, nbytes_of(work));
        bulk_read(slot, work.staged + u64(work.first) * UNIT, nbytes_of(work), barrier);
    }
    if (!FROM_STAGING) {
        left_out = warp_any(left_out);
        warp_sync();  // every lane has expected its bytes
    }
    if (lane() == 0) barrier_arrive(barrier);
    return left_out;
}

// Starts to empty a full slot.
__device__ __forceinline__ void start_writes(const Params& params, const Work& work, SharedAddress slot,
                                             bool left_out) {
    if (!FROM_STAGING && left_out) {
        // Only lists from the device get here: the slot has gaps, so its units are moved one by one.
        const u32 end = min(work.first + STAGE_UNITS, work.extent->n_units);
        for (u32 unit = work.first + lane(); unit < end; unit += LANES) {
            if (!piece_at(params, work, false, unit).address) continue;
            const u64 to = TO_STAGING ? work.staged + u64(unit) * UNIT : piece_at(params, work, true, unit).address;
            const u32 nth = unit - work.first;
            if (to) bulk_write(to, slot + nth * UNIT, UNIT);
        }
    } else if (TO_STAGING) {
        if (lane() == 0) bulk_write(work.staged + u64(work.first) * UNIT, slot, nbytes_of(work));
    } else {
        each_piece(params, work, TO_PEER, [&](u32 unit, u32 units, u64 address) {
            if (address) bulk_write(address, slot + (unit - work.first) * UNIT, units * UNIT);
        });
    }
}

// One tile after the other: every `step`th of these warps' tiles.
struct Tiles {
    u32 tile, index;

    __device__ __forceinline__ Work next(const Params& params, const Extent* extents, u32 step) {
        while (tile >= extents[index].tiles) index++;
        const Work work = work_of(params, extents, STAGE_UNITS, index, tile);
        tile += step;
        return work;
    }
};

}  // namespace pdstage

extern "C" __global__ void __launch_bounds__(PDSTAGE_THREADS, 1)
    pdstage_copy(const __grid_constant__ pdstage::Params params) {
    using namespace pdstage;
    static_assert(STAGES <= 32 && STAGE_UNITS % LANES == 0);
    __shared__ u64 all_barriers[WARPS * STAGES];
    const u32 warp = threadIdx.x / LANES, warps = gridDim.x * WARPS, me = blockIdx.x * WARPS + warp;
    const SharedAddress ring = shared_address(dynamic_shared()) + warp * RING_NBYTES;
    Extent* const extents = reinterpret_cast<Extent*>(dynamic_shared() + WARPS * RING_NBYTES);
    const SharedAddress barriers = shared_address(&all_barriers[warp * STAGES]);
    if (lane() == 0) {
        for (u32 i = 0; i < STAGES; i++) barrier_init(barriers + i * 8);
        barrier_init_fence();
    }
    lay_out(params, extents, STAGE_UNITS);
    const u32 n_tiles = extents[params.n_groups - 1].tiles, mine = me < n_tiles ? (n_tiles - 1 - me) / warps + 1 : 0;
    Tiles reads{me, 0}, writes{me, 0};
    u32 left_out = 0;  // one bit per slot
    for (u32 i = 0, slot = 0; i < mine + AHEAD; i++, slot = slot + 1 < STAGES ? slot + 1 : 0) {
        if (i < mine) {
            // The slot's last writes were BEHIND turns ago, one group per lane and turn; after this all lanes are
            // done.
            bulk_wait_read<BEHIND - 1>();
            warp_sync();
            const Work work = reads.next(params, extents, warps);
            const bool gaps = start_reads(params, work, ring + slot * STAGE_NBYTES, barriers + slot * 8);
            left_out = (left_out & ~(1u << slot)) | u32(gaps) << slot;
        }
        if (i >= AHEAD) {
            const u32 full = slot < AHEAD ? slot + BEHIND : slot - AHEAD;
            barrier_wait(barriers + full * 8, (i - AHEAD) / STAGES % 2);
            const Work work = writes.next(params, extents, warps);
            start_writes(params, work, ring + full * STAGE_NBYTES, left_out >> full & 1);
            bulk_commit();
        }
    }
    bulk_wait_all();
}
