// The parts of csrc/host that threads share, driven by threads and nothing else: what ThreadSanitizer and
// AddressSanitizer watch.
//
//     driver             everything; ends 0 unless a byte is wrong
//     driver BUG         one deliberate bug, made by wrong use and met inside csrc/host: overflow, undefined,
//                        race; the sanitizer that sees its kind must end the program

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "host/copy.hpp"
#include "host/spans.hpp"

namespace {

using pdstage::Byte;
using Ints = std::vector<std::int64_t>;

constexpr std::int64_t kItems = 320, kUsed = 160, kTokens = 16, kShards = 8, kWidth = 256;
constexpr std::int64_t kRow = kShards * kWidth, kItem = kTokens * kRow;
constexpr std::int64_t kStaged = kUsed * kItem;  // 5 MiB

void expect(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "wrong: %s\n", what);
    std::_Exit(1);
}

// Calls `work(0)`, ..., `work(n - 1)`, each on a thread of its own.
template <class Work>
void at_once(std::size_t n, const Work& work) {
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < n; ++i) threads.emplace_back([&, i] { work(i); });
    for (std::thread& thread : threads) thread.join();
}

std::int64_t address(const void* at) {
    return static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(at));
}

// Pages of tokens of shards in memory of its own; `shards_first` turns the two inner axes around.
struct Paged {
    explicit Paged(bool shards_first) : memory(static_cast<std::size_t>(kItems * kItem)) {
        view = {0,
                address(memory.data()),
                kItem,
                kTokens,
                kTokens,
                0,
                shards_first ? kWidth : kRow,
                kShards,
                shards_first ? kTokens * kWidth : kWidth,
                1,
                0,
                kWidth,
                1,
                0,
                7};
        for (std::int64_t i = 0; i < kUsed; ++i) items.push_back(i * 7 % kItems);
        for (std::size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<Byte>(i * 31 + i / 251);
    }
    pdstage::CopyPlan plan(bool checksum) const {
        return {{view}, {{kTokens, kItems}}, pdstage::Wire::kToken, checksum};
    }
    std::vector<pdstage::Part> parts() const { return {{address(items.data()), 64, kUsed, 0, 0, kUsed * kTokens}}; }

    std::vector<Byte> memory;
    Ints items;
    pdstage::View view;
};

// Plans used by several threads at the same time, against one thread alone.
void copies() {
    const Paged src(false);
    const auto alone = src.plan(true);
    std::vector<Byte> expected(kStaged);
    std::uint64_t expected_sum = 0;
    expect(alone.gather(expected.data(), kStaged, src.parts(), &expected_sum).fault == pdstage::Fault::kNone, "gather");
    const auto shared = src.plan(true);
    at_once(3, [&](std::size_t) {
        std::vector<Byte> staged(kStaged);
        std::uint64_t sum = 0;
        shared.gather(staged.data(), kStaged, src.parts(), &sum);
        expect(staged == expected && sum == expected_sum, "a shared gather");
        Paged dst(true);
        const auto back = dst.plan(true);
        std::memset(dst.memory.data(), 0, dst.memory.size());
        sum = 0;
        back.scatter(staged.data(), kStaged, dst.parts(), &sum);
        expect(sum == expected_sum, "a shared scatter");
        std::memset(dst.memory.data(), 0, dst.memory.size());
        shared.copy_to(back, src.parts(), dst.parts());
        std::fill(staged.begin(), staged.end(), Byte{0});
        back.gather(staged.data(), kStaged, dst.parts(), nullptr);
        expect(staged == expected, "what came back");
    });
}

void spans() {
    const Paged src(false), dst(false);
    const pdstage::DirectPlan plan({{src.view, dst.view, false, 0}}, {{kTokens, kItems}}, {{kTokens, kItems}});
    at_once(3, [&](std::size_t) {
        pdstage::Spans found;
        expect(plan.spans(src.parts(), dst.parts(), found).fault == pdstage::Fault::kNone, "spans");
        expect(std::accumulate(found.nbytes.begin(), found.nbytes.end(), std::int64_t{0}) == kStaged, "spans' bytes");
    });
}

// What a caller may never do, and what a sanitizer must see.
int plant(const std::string& bug) {
    const Paged src(false);
    if (bug == "overflow") {  // staging memory shorter than it is said to be
        std::vector<Byte> staged(kStaged - 64);
        src.plan(false).gather(staged.data(), kStaged, src.parts(), nullptr);
    } else if (bug == "undefined") {  // an item's offset past 64 bits
        pdstage::View view = src.view;
        view.item_stride = std::int64_t{1} << 61;
        std::vector<Byte> staged(kStaged);
        pdstage::CopyPlan({view}, {{kTokens, kItems}}, pdstage::Wire::kToken, false)
            .gather(staged.data(), kStaged, src.parts(), nullptr);
    } else if (bug == "race") {  // work that is not made for several threads
        int n = 0;
        for (int round = 0; round < 50; ++round) {
            std::atomic<int> begun{0};
            at_once(2, [&](std::size_t) {  // each waits for the other, so two threads there are
                begun.fetch_add(1, std::memory_order_relaxed);
                while (begun.load(std::memory_order_relaxed) < 2) std::this_thread::yield();
                ++n;
            });
        }
    } else {
        std::fprintf(stderr, "no such bug: %s\n", bug.c_str());
        return 2;
    }
    std::fprintf(stderr, "nobody saw it: %s\n", bug.c_str());
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc > 1) return plant(argv[1]);
    copies();
    spans();
    return 0;
}
