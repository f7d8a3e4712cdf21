// The loops over items and their runs, one compiled for each common run length: the hot part of copy.hpp.
//
// Must not know views or indexes' checks, or use Python.
#pragma once

#include <algorithm>
#include <vector>

#include "runs.hpp"
#include "sums.hpp"

namespace pdstage::detail {

// Some runs of an item, in staged order: each `nbytes` long, at `offsets` from the item. With checksums, runs are
// cells, and `places` are theirs, relative to the item's first.
struct Runs {
    std::int64_t nbytes = 0;
    std::vector<std::int64_t> offsets;
    std::vector<std::uint64_t> places;
};

// Items and the runs within each: what one kernel call copies, in staged order.
struct Walk {
    Byte* base;
    std::int64_t item_stride;
    const std::int64_t* items;
    std::int64_t n_items;
    const Runs* runs;
};

// How far ahead the pool is prefetched: enough bytes in flight to hide DRAM latency, few enough to stay in L2.
inline constexpr std::int64_t kAheadNbytes = 8192;

// How much of a run is prefetched. AMD's processors follow a run by themselves only when it is some pages long, others
// after its first lines.
inline std::int64_t fetched(std::int64_t nbytes) {
    return nbytes <= (kInOrder ? 4096 : 512) ? nbytes : 256;
}

// From this many staged bytes on, stores go past the caches, which saves fetching each line. The cost of scattered
// lines falls on the next reader, and a gather's first lines have left a core's own cache before the write reads them.
// That applies to the chunks of a long room; smaller chunks stay in the cache.
inline constexpr std::int64_t kStreamNbytes = 2 << 20;

class Cursor {
  public:
    Cursor(const Walk& walk, std::int64_t at)
        : base_(walk.base),
          item_stride_(walk.item_stride),
          offsets_(walk.runs->offsets.data()),
          n_runs_(static_cast<std::int64_t>(walk.runs->offsets.size())),
          item_(walk.items + at / n_runs_),
          end_(walk.items + walk.n_items),
          run_(at % n_runs_) {
        seek();
    }
    bool done() const { return item_ >= end_; }
    Byte* address() const { return first_ + offsets_[run_]; }
    void next() {
        if (++run_ == n_runs_) {
            run_ = 0;
            ++item_;
            seek();
        }
    }

  private:
    void seek() {
        if (!done()) first_ = base_ + *item_ * item_stride_;
    }
    Byte* base_;
    std::int64_t item_stride_;
    const std::int64_t* offsets_;
    std::int64_t n_runs_;
    const std::int64_t* item_;
    const std::int64_t* end_;
    std::int64_t run_;
    Byte* first_ = nullptr;
};

template <class Run, bool kGather, bool kFetch>
void copy_runs(const Walk& walk, Byte* wire) {
    const std::int64_t nbytes = walk.runs->nbytes;
    Cursor ahead(walk, std::max<std::int64_t>(1, kAheadNbytes / nbytes));
    for (Cursor at(walk, 0); !at.done(); at.next(), wire += nbytes) {
        if (kFetch && !ahead.done()) {
            prefetch<kGather>(ahead.address(), fetched(nbytes));
            ahead.next();
        }
        if constexpr (kGather) {
            Run::copy(wire, at.address(), nbytes);
        } else {
            Run::copy(at.address(), wire, nbytes);
        }
    }
}

// How many runs are gathered past the caches at a time: those of some sizes end before the processor follows one at
// full speed. Of long runs StreamRun takes several pages at a time where the processor likes that.
inline int abreast(std::int64_t nbytes) {
    if (!kCanStream || nbytes % kLine != 0) return 1;
    if (kInOrder) return nbytes < 4096 ? 1 : 4;
    return nbytes < 256 || nbytes >= 16384 ? 1 : 2;
}

template <int kRuns>
void stream_abreast(Byte* dst, const Byte* const* runs, std::int64_t nbytes) {
    if (goes_wide(dst, nbytes)) return stream_wide<kRuns>(dst, runs, nbytes);
    for (std::int64_t line = 0; line < nbytes; line += kLine) stream_lines<kRuns>(dst, nbytes, runs, line);
}

template <int kRuns>
void gather_abreast(const Walk& walk, Byte* wire) {
    const std::int64_t nbytes = walk.runs->nbytes;
    Cursor at(walk, 0);
    Cursor ahead(walk, std::max<std::int64_t>(kRuns, kAheadNbytes / nbytes));
    const Byte* runs[kRuns];
    while (!at.done()) {
        int n = 0;
        for (; n < kRuns && !at.done(); ++n) {
            runs[n] = at.address();
            at.next();
            if (!ahead.done()) {
                prefetch<true>(ahead.address(), fetched(nbytes));
                ahead.next();
            }
        }
        if (n < kRuns) {
            for (int k = 0; k < n; ++k) StreamRun::copy(wire + k * nbytes, runs[k], nbytes);
            return;
        }
        stream_abreast<kRuns>(wire, runs, nbytes);
        wire += kRuns * nbytes;
    }
}

using Kernel = void (*)(const Walk&, Byte*);

template <bool kGather, template <std::int64_t> class Fixed, class Any, bool kFetch>
Kernel pick(std::int64_t nbytes) {
    switch (nbytes) {
        case 64:
            return copy_runs<Fixed<64>, kGather, kFetch>;
        case 128:
            return copy_runs<Fixed<128>, kGather, kFetch>;
        case 256:
            return copy_runs<Fixed<256>, kGather, kFetch>;
        case 512:
            return copy_runs<Fixed<512>, kGather, kFetch>;
        case 1024:
            return copy_runs<Fixed<1024>, kGather, kFetch>;
        default:
            return copy_runs<Any, kGather, kFetch>;
    }
}

template <bool kGather>
Kernel pick_cached(std::int64_t nbytes) {
    switch (nbytes) {
        case 1:
            return copy_runs<FixedRun<1>, kGather, true>;
        case 2:
            return copy_runs<FixedRun<2>, kGather, true>;
        case 4:
            return copy_runs<FixedRun<4>, kGather, true>;
        case 8:
            return copy_runs<FixedRun<8>, kGather, true>;
        case 16:
            return copy_runs<FixedRun<16>, kGather, true>;
        case 32:
            return copy_runs<FixedRun<32>, kGather, true>;
        default:
            break;
    }
    if (nbytes % 16 == 0 && nbytes <= 512) return pick<kGather, FixedRun, WideRun, true>(nbytes);
    return copy_runs<AnyRun, kGather, true>;
}

template <bool kGather>
Kernel pick_streamed(std::int64_t nbytes) {
    if (kGather && abreast(nbytes) == 2) return gather_abreast<2>;
    if (kGather && abreast(nbytes) == 4) return gather_abreast<4>;
    return pick<kGather, FixedStreamRun, StreamRun, kGather>(nbytes);
}

// Copies cells and returns the sum of their terms; each block of a cell is read while the caches hold it. `place` is
// the first item's, the next one's is `place_step` further.
template <bool kGather>
std::uint64_t copy_cells(const Walk& walk, std::uint64_t place, std::uint64_t place_step, bool stream, Byte* wire) {
    constexpr std::int64_t kBlock = 4096;
    const std::int64_t nbytes = walk.runs->nbytes;
    const auto copy = stream ? StreamRun::copy : nbytes % 16 == 0 && nbytes <= kBlock ? WideRun::copy : AnyRun::copy;
    std::uint64_t sum = 0;
    Cursor ahead(walk, std::max<std::int64_t>(1, kAheadNbytes / nbytes));
    for (std::int64_t item = 0; item < walk.n_items; ++item, place += place_step) {
        Byte* const base = walk.base + walk.items[item] * walk.item_stride;
        for (std::size_t run = 0; run < walk.runs->offsets.size(); ++run, wire += nbytes) {
            if ((kGather || !stream) && !ahead.done()) {
                prefetch<kGather>(ahead.address(), fetched(nbytes));
                ahead.next();
            }
            Byte* const cell = base + walk.runs->offsets[run];
            const Byte* const src = kGather ? cell : wire;
            Byte* const dst = kGather ? wire : cell;
            std::uint64_t key = key_of(place + walk.runs->places[run]);
            for (std::int64_t at = 0; at < nbytes; at += kBlock, key += kBlock / 8 * kWordPlace) {
                const std::int64_t n = std::min(kBlock, nbytes - at);
                sum += sum_words(src + at, n, key);
                copy(dst + at, src + at, n);
            }
        }
    }
    return sum;
}

}  // namespace pdstage::detail
