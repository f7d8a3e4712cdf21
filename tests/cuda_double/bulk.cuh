// A double of csrc/cuda/bulk.cuh: a copy takes place as late as its rules allow, so that whoever reads a slot before
// its barrier, or fills it again before its writes have read it, gets wrong bytes.
#pragma once

#include "access.cuh"

namespace cpu {

// Does a lane's groups of copies, but for the last so many.
void wait(unsigned pending);

}  // namespace cpu

namespace pdstage {

using SharedAddress = u64;

inline SharedAddress shared_address(const void* at) {
    return reinterpret_cast<u64>(at);
}

inline void warp_sync() {
    cpu::stop(false);
}

bool warp_any(bool so);

void barrier_init(SharedAddress barrier);
inline void barrier_init_fence() {}
void barrier_expect(SharedAddress barrier, u32 nbytes);
void barrier_arrive(SharedAddress barrier);
void barrier_wait(SharedAddress barrier, u32 parity);

void bulk_read(SharedAddress to, u64 from, u32 nbytes, SharedAddress barrier);
void bulk_write(u64 to, SharedAddress from, u32 nbytes);
void bulk_commit();
void bulk_wait_all();

template <u32 PENDING>
void bulk_wait_read() {
    cpu::wait(PENDING);
}

}  // namespace pdstage
