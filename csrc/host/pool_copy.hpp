// Copies rows of one view directly into rows of another: runs are joined if both sides are contiguous.
//
// Must not know plans or staging, or use Python.
#pragma once

#include <cstddef>
#include <cstdint>

#include "spans.hpp"
#include "walk.hpp"

namespace pdstage::detail {

// A sink for add_pair: copies each run, joined to the previous one if both sides continue, once it has prefetched
// enough of the following ones.
class RunCopier {
  public:
    RunCopier(bool stream, bool fetch) : stream_(stream), fetch_(fetch) {}
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
        if (fetch_) prefetch<true>(bytes(src), fetched<true>(nbytes));
        runs_[(first_ + n_) % kMost] = {src, dst, nbytes};
        ++n_;
        pending_ += nbytes;
        // The last run may still grow, so it is kept.
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
    bool fetch_;
    Run runs_[kMost];
    std::size_t first_ = 0;
    std::size_t n_ = 0;
    std::int64_t pending_ = 0;
};

// Merges segments, then shards, that are contiguous on both sides into width.
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

// Sums the rows of a view in order, prefetching later ones into the caches.
class RowSummer {
  public:
    RowSummer(const View& view, const Items& items, RowRange rows)
        : view_(view), at_(view, items, rows.start), ahead_(at_), n_unfetched_(rows.stop - rows.start) {}

    // The terms of the next `n_rows` rows; the first begins at `token`.
    std::uint64_t sum(std::int64_t n_rows, std::int64_t token) {
        std::uint64_t total = 0;
        const auto seed = static_cast<std::uint64_t>(view_.seed);
        for (; n_rows > 0; --n_rows, token += view_.tokens_per_row, at_.advance(1)) {
            --n_fetched_;
            for (; n_unfetched_ > 0 && n_fetched_ * view_.row_nbytes() <= kAheadNbytes; --n_unfetched_, ++n_fetched_) {
                each(ahead_, [&](const Byte* cell, std::int64_t, std::int64_t) {
                    prefetch<true>(cell, fetched<true>(view_.width));
                });
                ahead_.advance(1);
            }
            each(at_, [&](const Byte* cell, std::int64_t shard, std::int64_t seg) {
                total += kSumWords(cell, view_.width, mix(seed + place_of(token, view_.first_shard + shard, seg)));
            });
        }
        return total;
    }

  private:
    template <class Visit>
    void each(const Side& row, const Visit& visit) const {
        for (std::int64_t shard = 0; shard < view_.shards; ++shard)
            for (std::int64_t seg = 0; seg < view_.segs; ++seg) {
                const std::int64_t at = row.address() + shard * view_.shard_stride + seg * view_.seg_stride;
                visit(reinterpret_cast<const Byte*>(static_cast<std::uintptr_t>(at)), shard, seg);
            }
    }

    const View& view_;
    Side at_;
    Side ahead_;
    std::int64_t n_fetched_ = 0;  // rows between the two
    std::int64_t n_unfetched_;
};

// Rows [start, stop) of a part, counted as in rows_of. Returns the sum of their terms if `summed`.
inline std::uint64_t copy_rows(const View& src, const Items& from, RowRange rows, const View& dst, const Items& to,
                               std::int64_t dst_row, std::int64_t token, bool summed, bool stream) {
    constexpr std::int64_t kBlockNbytes = 16384;
    const Pair pair = collapsed(src, dst);
    const std::int64_t n = rows.stop - rows.start;
    const std::int64_t block = summed ? std::max<std::int64_t>(1, kBlockNbytes / src.row_nbytes()) : n;
    RunCopier copier(stream, !summed);
    RowSummer summer(src, from, rows);
    std::uint64_t sum = 0;
    for (std::int64_t at = 0; at < n; at += block) {
        const std::int64_t n_rows = std::min(block, n - at);
        if (summed) sum += summer.sum(n_rows, token + at * src.tokens_per_row);
        add_pair(pair, {pair.src, from, rows.start + at}, {pair.dst, to, dst_row + at}, n_rows, copier);
    }
    copier.flush();
    return sum;
}

}  // namespace pdstage::detail
