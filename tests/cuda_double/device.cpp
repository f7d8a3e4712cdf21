// What the doubles of access.cuh and bulk.cuh do, compiled once for all kernels.
#include <ucontext.h>

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "bulk.cuh"

namespace cpu {

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[64 << 10]};
    bool done = false;
    bool at_cta_barrier = false;
};
std::vector<Fiber> fibers;
ucontext_t scheduler;
void (*body)();

void enter() {
    body();
    fibers[threadIdx.x].done = true;
    swapcontext(&fibers[threadIdx.x].context, &scheduler);
}

void stop(bool at_cta_barrier) {
    const unsigned me = threadIdx.x;
    fibers[me].at_cta_barrier = at_cta_barrier;
    swapcontext(&fibers[me].context, &scheduler);
    threadIdx.x = me;
}

// Runs a warp until its threads end or are all at a barrier of the CTA; whether they ended.
bool run_warp(unsigned first, unsigned end) {
    for (;;) {
        unsigned ended = 0, waiting = 0;
        for (unsigned i = first; i < end; i++) {
            threadIdx.x = i;
            swapcontext(&scheduler, &fibers[i].context);
            ended += fibers[i].done;
            waiting += !fibers[i].done && fibers[i].at_cta_barrier;
        }
        uneven |= (ended && ended != end - first) || (waiting && waiting != end - first);
        if (ended || waiting) return ended;
    }
}

void run_cta(unsigned n_threads, void (*one)()) {
    body = one;
    fibers = std::vector<Fiber>(n_threads);
    for (auto& fiber : fibers) {
        getcontext(&fiber.context);
        fiber.context.uc_stack = {fiber.stack.get(), 0, 64 << 10};
        makecontext(&fiber.context, enter, 0);
    }
    for (unsigned ended = 0; !ended && !uneven;) {
        for (unsigned first = 0; first < n_threads; first += 32)
            ended += 32 * run_warp(first, pdstage::min(first + 32, n_threads));
        uneven |= ended && ended < n_threads;
    }
}

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
std::map<unsigned long long, Barrier> barriers;
std::map<unsigned, std::deque<std::vector<Copy>>> groups;  // a lane's, the open one last

Copy copy(unsigned long long to, unsigned long long from, unsigned nbytes) {
    misaligned |= to % 16 || from % 16 || nbytes % 16 || nbytes == 0;
    return {reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), nbytes};
}

void run(const std::vector<Copy>& copies) {
    for (const auto& copy : copies) std::memcpy(copy.to, copy.from, copy.nbytes);
}

std::deque<std::vector<Copy>>& mine() {
    auto& held = groups[threadIdx.x];
    if (held.empty()) held.emplace_back();
    return held;
}

void wait(unsigned pending) {
    auto& held = mine();
    for (; held.size() > pending + 1; held.pop_front()) run(held.front());
}

}  // namespace cpu

unsigned __shfl_xor_sync(unsigned, unsigned value, unsigned apart) {
    static unsigned exchanged[1024];
    const unsigned me = threadIdx.x;
    exchanged[me] = value;
    cpu::stop(false);
    const unsigned other = exchanged[me ^ apart];
    cpu::stop(false);
    return other;
}

namespace pdstage {

bool warp_any(bool so) {
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

void barrier_init(SharedAddress barrier) {
    cpu::barriers[barrier] = {};
}

void barrier_expect(SharedAddress barrier, u32 nbytes) {
    cpu::barriers[barrier].pending += nbytes;
}

void barrier_arrive(SharedAddress barrier) {
    cpu::deadlock |= cpu::barriers[barrier].arrived || cpu::barriers[barrier].pending != 0;
    cpu::barriers[barrier].arrived = true;
}

void barrier_wait(SharedAddress barrier, u32 parity) {
    auto& held = cpu::barriers[barrier];
    if (held.phase % 2 != parity) return;
    cpu::deadlock |= !held.arrived || held.pending != 0;
    cpu::run(held.copies);
    held = {held.phase + 1, false, 0, {}};
}

void bulk_read(SharedAddress to, u64 from, u32 nbytes, SharedAddress barrier) {
    cpu::barriers[barrier].copies.push_back(cpu::copy(to, from, nbytes));
    cpu::barriers[barrier].pending -= nbytes;
}

void bulk_write(u64 to, SharedAddress from, u32 nbytes) {
    cpu::mine().back().push_back(cpu::copy(to, from, nbytes));
}

void bulk_commit() {
    cpu::mine().emplace_back();
}

void bulk_wait_all() {
    cpu::wait(0);
    cpu::groups.erase(threadIdx.x);
}

}  // namespace pdstage
