// The copies of copy.cu for long runs, by the bulk copy engine: a warp moves runs through a ring in shared memory, and
// no payload passes its registers.
//
// Why: one warp keeps 48 KiB in flight, so a few multiprocessors are enough for a link and the others stay the model's.
// Staged bytes come or go in stages of STAGE_NBYTES; on the side of a pool each stage is as many copies as it has
// pieces, issued by the lanes side by side. Rows that follow each other in memory are one piece.
//
// Groups here have 16-byte access and runs as `run_nbytes` in kernels/cuda_tables.py allows. Macros as in copy.cu.
#include "bulk.cuh"
#include "extents.cuh"

namespace pdstage {

constexpr u32 STAGE_NBYTES = PDSTAGE_STAGE_NBYTES, STAGES = PDSTAGE_STAGES, STAGE_UNITS = STAGE_NBYTES / UNIT;
constexpr u32 SLICE = STAGE_UNITS / LANES;
// Stages that writes may still be reading from; all others are being read into.
constexpr u32 BEHIND = 2, AHEAD = STAGES - BEHIND;

// From a unit to the end of its run: an address, 0 if the item is outside the pool.
struct Piece {
    u64 address;
    u32 units;
    bool starts;
};

__device__ __forceinline__ Piece piece_at(const Params& params, const Work& work, bool peer, u32 unit) {
    const Group& group = *work.group;
    const Side& side = peer ? group.peer : group.pool;
    const Cells cells(group, side, params, peer ? params.peer : params.pool, peer ? work.view->peer : work.view->pool);
    // Blocks are cut at both ends of the call. Token-major staging has no blocks where a row is several runs.
    const u32 joined = side.joined_rows.by, row_units = group.units_per_run.by;
    const u32 runs = PDSTAGE_FLAT ? 1 : group.shards.by * group.segs.by;
    const u32 skipped = cells.first_row - side.joined_rows.quotient(cells.first_row) * joined;
    u32 row = 0, here = min(work.rows.n, joined - skipped), within = unit;
    if (unit >= here * runs * row_units) {
        within -= here * runs * row_units;
        const u32 block = side.units_per_block.quotient(within);
        within -= block * side.units_per_block.by;
        row = here + block * joined;
        here = min(work.rows.n - row, joined);
    }
    u32 run = 0;
    if (!PDSTAGE_FLAT && here == joined) {
        run = side.joined_rows.quotient(group.units_per_run.quotient(within));
        within -= run * here * row_units;
    } else if (!PDSTAGE_FLAT) {
        for (; within >= here * row_units; run++) within -= here * row_units;  // few shards, two blocks of a call
    }
    const u32 shard = PDSTAGE_FLAT ? 0 : group.segs.quotient(run);
    const Run at{row, shard, run - shard * group.segs.by};
    const u32 item = cells.item(at);
    const u64 address = item == NO_ITEM ? 0 : cells.address(at, item) + u64(within) * UNIT;
    return {address, here * row_units - within, within == 0};
}

// One turn of a slot: what fills it, and whether some of that was left out.
struct Turn {
    Work work;
    bool left_out;
};

// Calls f(unit, n_units, address) for the pieces of a turn that start in this lane's slice of it.
template <typename F>
__device__ __forceinline__ void each_piece(const Params& params, const Work& work, bool peer, const F& f) {
    const u32 end = min(work.first + STAGE_UNITS, work.n_units);
    u32 unit = work.first + threadIdx.x * SLICE;
    for (const u32 to = min(unit + SLICE, end); unit < to;) {
        const Piece piece = piece_at(params, work, peer, unit);
        const u32 units = min(piece.units, end - unit);
        if (piece.starts || unit == work.first) f(unit, units, piece.address);
        unit += units;
    }
}

// Starts to fill a slot.
__device__ __forceinline__ void start_reads(const Params& params, Turn& turn, SharedAddress slot,
                                            SharedAddress barrier) {
    const Work& work = turn.work;
    if (!FROM_STAGING) {
        each_piece(params, work, false, [&](u32 unit, u32 units, u64 address) {
            if (address) {
                barrier_expect(barrier, units * UNIT);
                bulk_read(slot + (unit - work.first) * UNIT, address, units * UNIT, barrier);
            } else {
                turn.left_out = true;
            }
        });
    } else if (threadIdx.x == 0) {
        const u32 nbytes = min(STAGE_UNITS, work.n_units - work.first) * UNIT;
        barrier_expect(barrier, nbytes);
        bulk_read(slot, work.staged + u64(work.first) * UNIT, nbytes, barrier);
    }
    warp_sync();
    if (threadIdx.x == 0) barrier_arrive(barrier);
}

// Starts to empty a full slot.
__device__ __forceinline__ void start_writes(const Params& params, const Turn& turn, SharedAddress slot) {
    const Work& work = turn.work;
    if (!FROM_STAGING && turn.left_out) {
        // Only lists from the device get here: the slot has gaps, so its units go one by one.
        const u32 end = min(work.first + STAGE_UNITS, work.n_units);
        for (u32 unit = work.first + threadIdx.x; unit < end; unit += LANES) {
            if (!piece_at(params, work, false, unit).address) continue;
            const u64 to = TO_STAGING ? work.staged + u64(unit) * UNIT : piece_at(params, work, true, unit).address;
            if (to) bulk_write(to, slot + (unit - work.first) * UNIT, UNIT);
        }
    } else if (TO_STAGING) {
        const u32 nbytes = min(STAGE_UNITS, work.n_units - work.first) * UNIT;
        if (threadIdx.x == 0) bulk_write(work.staged + u64(work.first) * UNIT, slot, nbytes);
    } else {
        each_piece(params, work, TO_PEER, [&](u32 unit, u32 units, u64 address) {
            if (address) bulk_write(address, slot + (unit - work.first) * UNIT, units * UNIT);
        });
    }
}

}  // namespace pdstage

extern "C" __global__ void __maxnreg__(32) pdstage_copy(const __grid_constant__ pdstage::Params params) {
    using namespace pdstage;
    static_assert(THREADS == LANES && STAGES <= 32 && STAGE_UNITS % LANES == 0);
    __shared__ Extents extents;
    __shared__ u64 barriers[STAGES];
    __shared__ Turn turns[STAGES];
    const SharedAddress ring = dynamic_shared();
    if (threadIdx.x == 0) {
        for (u32 i = 0; i < STAGES; i++) barrier_init(shared_address(&barriers[i]));
        barrier_init_fence();
    }
    lay_out(params, extents, STAGE_UNITS);
    const u32 n_tiles = extents.tiles[params.n_groups - 1];
    const u32 mine = blockIdx.x < n_tiles ? (n_tiles - 1 - blockIdx.x) / gridDim.x + 1 : 0;
    for (u32 i = 0; i < mine + AHEAD; i++) {
        if (i < mine) {
            const u32 slot = i % STAGES;
            // The slot's last writes were BEHIND turns ago, one group a lane and turn; then every lane's are through.
            bulk_wait_read<BEHIND - 1>();
            warp_sync();
            if (threadIdx.x == 0) {
                const u32 tile = blockIdx.x + i * gridDim.x;
                u32 index = 0;
                while (tile >= extents.tiles[index]) index++;
                turns[slot] = {work_of(params, extents, STAGE_UNITS, index, tile), false};
            }
            warp_sync();
            start_reads(params, turns[slot], ring + slot * STAGE_NBYTES, shared_address(&barriers[slot]));
        }
        warp_sync();
        if (i >= AHEAD) {
            const u32 slot = (i - AHEAD) % STAGES;
            barrier_wait(shared_address(&barriers[slot]), (i - AHEAD) / STAGES % 2);
            start_writes(params, turns[slot], ring + slot * STAGE_NBYTES);
            bulk_commit();
        }
    }
    bulk_wait_all();
}
