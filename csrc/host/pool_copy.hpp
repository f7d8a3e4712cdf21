// Copying rows of one view straight into the rows of another: runs joined where both sides are contiguous.
//
// Must not know plans, staging or Python.
#pragma once

#include <cstddef>
#include <cstdint>

#include "spans.hpp"
#include "walk.hpp"

namespace pdstage::detail {

// A sink for add_pair: copies each run, joined to the one before where both sides go on, once it has fetched enough of
// those behind it.
class RunCopier {
  public:
    explicit RunCopier(bool stream) : stream_(stream) {}
    RunCopier(const RunCopier&) = delete;
    RunCopier& operator=(const RunCopier&) = delete;

    void add(std::int64_t src, std::int64_t dst, std::int64_t nbytes) {
        if (n_ > 0) {
            Run& last = runs_[(first_ + n_ - 1) % kMost];
            if (src == last.src + last.nbytes && dst == last.dst + last.nbytes) {
                last.nbytes += nbytes;
                pending_ += nbytes;
                return;
            }
        }
        prefetch<true>(bytes(src), fetched<true>(nbytes));
        runs_[(first_ + n_) % kMost] = {src, dst, nbytes};
        ++n_;
        pending_ += nbytes;
        // The last run may still grow, so it stays.
        while (n_ > 1 && (n_ == kMost || pending_ > kAheadNbytes)) copy_first();
    }
    void flush() {
        while (n_ > 0) copy_first();
    }

  private:
    struct Run {
        std::int64_t src;
        std::int64_t dst;
        std::int64_t nbytes;
    };
    static constexpr std::size_t kMost = 64;

    static Byte* bytes(std::int64_t address) { return reinterpret_cast<Byte*>(static_cast<std::uintptr_t>(address)); }

    void copy_first() {
        const Run run = runs_[first_];
        first_ = (first_ + 1) % kMost;
        --n_;
        pending_ -= run.nbytes;
        Byte* const dst = bytes(run.dst);
        const Byte* const src = bytes(run.src);
        if (stream_ && (run.dst | run.nbytes) % kLine == 0) {
            StreamRun::copy(dst, src, run.nbytes);
        } else if (run.nbytes % 16 == 0 && run.nbytes <= 512) {
            WideRun::copy(dst, src, run.nbytes);
        } else {
            AnyRun::copy(dst, src, run.nbytes);
        }
    }

    bool stream_;
    Run runs_[kMost];
    std::size_t first_ = 0;
    std::size_t n_ = 0;
    std::int64_t pending_ = 0;
};

// Segments, then shards, that are contiguous on both sides become width.
inline Pair collapsed(View src, View dst) {
    if (src.segs > 1 && src.seg_stride == src.width && dst.seg_stride == src.width) {
        src.width = dst.width = src.width * src.segs;
        src.segs = dst.segs = 1;
    }
    if (src.segs == 1 && src.shards > 1 && src.shard_stride == src.width && dst.shard_stride == src.width) {
        src.width = dst.width = src.width * src.shards;
        src.shards = dst.shards = 1;
    }
    const bool shards_first =
        src.segs == 1 && src.shards > 1 && src.inner_stride == src.width && dst.inner_stride == src.width;
    return {src, dst, shards_first, 0};
}

// The sum of the terms of `n_rows` rows, the first of which begins at `token`. Leaves them in the caches.
inline std::uint64_t sum_rows(const View& view, const Side& from, std::int64_t n_rows, std::int64_t token) {
    const auto each = [&](auto&& visit) {
        Side side = from;
        for (std::int64_t row = 0; row < n_rows; ++row, side.advance(1))
            for (std::int64_t shard = 0; shard < view.shards; ++shard)
                for (std::int64_t seg = 0; seg < view.segs; ++seg) {
                    const std::int64_t at = side.address() + shard * view.shard_stride + seg * view.seg_stride;
                    visit(reinterpret_cast<const Byte*>(static_cast<std::uintptr_t>(at)), row, shard, seg);
                }
    };
    each([&](const Byte* cell, std::int64_t, std::int64_t, std::int64_t) {
        prefetch<true>(cell, fetched<true>(view.width));
    });
    std::uint64_t sum = 0;
    const std::uint64_t seed = static_cast<std::uint64_t>(view.seed);
    each([&](const Byte* cell, std::int64_t row, std::int64_t shard, std::int64_t seg) {
        const std::uint64_t place = place_of(token + row * view.tokens_per_row, view.first_shard + shard, seg);
        sum += kSumWords(cell, view.width, mix(seed + place));
    });
    return sum;
}

// Rows [start, stop) of a part, counted as rows_of does. Returns the sum of their terms if `summed`.
inline std::uint64_t copy_rows(const View& src, const Items& from, RowRange rows, const View& dst, const Items& to,
                               std::int64_t dst_row, std::int64_t token, bool summed, bool stream) {
    constexpr std::int64_t kBlockNbytes = 16384;
    const Pair pair = collapsed(src, dst);
    const std::int64_t n = rows.stop - rows.start;
    const std::int64_t block = summed ? std::max<std::int64_t>(1, kBlockNbytes / src.row_nbytes()) : n;
    RunCopier copier(stream);
    std::uint64_t sum = 0;
    for (std::int64_t at = 0; at < n; at += block) {
        const std::int64_t n_rows = std::min(block, n - at);
        if (summed) sum += sum_rows(src, {src, from, rows.start + at}, n_rows, token + at * src.tokens_per_row);
        add_pair(pair, {pair.src, from, rows.start + at}, {pair.dst, to, dst_row + at}, n_rows, copier);
    }
    copier.flush();
    return sum;
}

}  // namespace pdstage::detail
