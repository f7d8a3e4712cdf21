// A double of csrc/cuda/bulk.cuh: a copy takes place as late as its rules allow, so that whoever reads a slot before
// its barrier, or fills it again before its writes have read it, gets wrong bytes.
#pragma once

#include <deque>
#include <map>

#include "access.cuh"

namespace cpu {

struct Copy {
    void* to;
    const void* from;
    unsigned nbytes;
};

// `pending` counts bytes expected and not yet asked for; the copies are done when a phase's end is waited for.
struct Barrier {
    unsigned phase = 0;
    bool arrived = false;
    long long pending = 0;
    std::vector<Copy> copies;
};
inline std::map<unsigned long long, Barrier> barriers;
inline std::map<unsigned, std::deque<std::vector<Copy>>> groups;  // a lane's, the open one last

inline void check(const void* to, const void* from, unsigned nbytes) {
    misaligned |= (unsigned long long)to % 16 || (unsigned long long)from % 16 || nbytes % 16 || nbytes == 0;
}

inline void run(const std::vector<Copy>& copies) {
    for (const auto& copy : copies) std::memcpy(copy.to, copy.from, copy.nbytes);
}

inline std::deque<std::vector<Copy>>& mine() {
    auto& held = groups[threadIdx.x];
    if (held.empty()) held.emplace_back();
    return held;
}

inline void wait(size_t pending) {
    auto& held = mine();
    for (; held.size() > pending + 1; held.pop_front()) run(held.front());
}

}  // namespace cpu

namespace pdstage {

using SharedAddress = u64;

inline SharedAddress shared_address(const void* at) {
    return reinterpret_cast<u64>(at);
}

inline void warp_sync() {
    cpu::stop(false);
}

inline bool warp_any(bool so) {
    static std::map<unsigned, bool> votes;
    bool& vote = votes[threadIdx.x / 32];
    vote |= so;
    warp_sync();
    const bool any = vote;
    warp_sync();
    vote = false;
    warp_sync();
    return any;
}

inline void barrier_init(SharedAddress barrier) {
    cpu::barriers[barrier] = {};
}
inline void barrier_init_fence() {}
inline void barrier_expect(SharedAddress barrier, u32 nbytes) {
    cpu::barriers[barrier].pending += nbytes;
}

inline void barrier_arrive(SharedAddress barrier) {
    cpu::deadlock |= cpu::barriers[barrier].arrived || cpu::barriers[barrier].pending != 0;
    cpu::barriers[barrier].arrived = true;
}

inline void barrier_wait(SharedAddress barrier, u32 parity) {
    auto& held = cpu::barriers[barrier];
    if (held.phase % 2 != parity) return;
    cpu::deadlock |= !held.arrived || held.pending != 0;
    cpu::run(held.copies);
    held = {held.phase + 1, false, 0, {}};
}

inline void bulk_read(SharedAddress to, u64 from, u32 nbytes, SharedAddress barrier) {
    const cpu::Copy copy{reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes};
    cpu::check(copy.to, copy.from, nbytes);
    cpu::barriers[barrier].copies.push_back(copy);
    cpu::barriers[barrier].pending -= nbytes;
}

inline void bulk_write(u64 to, SharedAddress from, u32 nbytes) {
    const cpu::Copy copy{reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes};
    cpu::check(copy.to, copy.from, nbytes);
    cpu::mine().back().push_back(copy);
}

inline void bulk_commit() {
    cpu::mine().emplace_back();
}

template <u32 PENDING>
void bulk_wait_read() {
    cpu::wait(PENDING);
}

inline void bulk_wait_all() {
    cpu::wait(0);
    cpu::groups.erase(threadIdx.x);
}

}  // namespace pdstage
