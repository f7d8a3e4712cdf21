// One-dimensional bulk copies between global and shared memory, and the barriers they complete on (sm_90 and later).
//
// PTX ISA, "cp.async.bulk": addresses and sizes are multiples of 16; reads complete on an mbarrier's transaction
// count, writes in the issuing thread's bulk groups. Both run in the async proxy, so bytes that one writes and another
// reads need no proxy fence between them: only the barrier's initialisation is an ordinary store. Tests without a GPU
// replace this file by a double.
#pragma once

#include "access.cuh"

namespace pdstage {

// Shared memory as the copy engine addresses it.
using SharedAddress = u32;

__device__ __forceinline__ SharedAddress shared_address(const void* at) {
    return u32(__cvta_generic_to_shared(at));
}

__device__ __forceinline__ void warp_sync() {
    __syncwarp();
}

// Whether it is true in any lane.
__device__ __forceinline__ bool warp_any(bool so) {
    return __any_sync(~0u, so);
}

// For one arrival per phase; called by one thread, visible to all after the fence and a warp_sync().
__device__ __forceinline__ void barrier_init(SharedAddress barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}

// The phase ends once `nbytes` more have arrived. The barrier's arrival in this phase must still be pending.
__device__ __forceinline__ void barrier_expect(SharedAddress barrier, u32 nbytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(nbytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(SharedAddress barrier) {
    asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared::cta.b64 state, [%0];\n\t}" ::"r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(SharedAddress barrier, u32 parity) {
    asm volatile(
        "{\n\t"
        ".reg .pred done;\n"
        "again:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra again;\n\t"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void bulk_read(SharedAddress to, u64 from, u32 nbytes, SharedAddress barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(nbytes), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void bulk_write(u64 to, SharedAddress from, u32 nbytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(nbytes)
                 : "memory");
}

// Closes the thread's group of the writes since the last call, even if there were none.
__device__ __forceinline__ void bulk_commit() {
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until all but the last PENDING groups of this thread have read their shared memory.
template <u32 PENDING>
__device__ __forceinline__ void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until everything this thread wrote is in global memory.
__device__ __forceinline__ void bulk_wait_all() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace pdstage
