// Copies rows of one view directly into rows of another: runs are joined if both sides are contiguous.
//
// Must not know plans or staging, or use Python.
#pragma once

#include <cstddef>
#include <cstdint>

#include "spans.hpp"
#include "walk.hpp"

namespace pdstage::detail {

// A sink for add_pair: joins a run to the previous one if both sides continue, and copies runs in batches, each while
// later ones are prefetched.
class RunCopier {
  public:
    explicit RunCopier(bool stream) : stream_(stream) {}
    RunCopier(const RunCopier&) = delete;
    RunCopier& operator=(const RunCopier&) = delete;

    void add(std::int64_t src, std::int64_t dst, std::int64_t nbytes) {
        pending_ += nbytes;
        if (n_ > 0) {
            Run& last = runs_[n_ - 1];
            if (src == last.src + last.nbytes && dst == last.dst + last.nbytes) {
                last.nbytes += nbytes;
                return;
            }
        }
        if (n_ == kMost || pending_ >= kBatchNbytes) copy_first();
        runs_[n_++] = {src, dst, nbytes};
    }
    // `n` runs of `nbytes` that need not join; `src(i)` and `dst(i)` are the addresses of the i-th.
    template <class Src, class Dst>
    void add_runs(std::int64_t n, std::int64_t nbytes, const Src& src, const Dst& dst) {
        for (std::int64_t i = 0; i < n;) {
            const std::int64_t stop = i + std::min(n - i, room(nbytes));
            pending_ += (stop - i) * nbytes;
            for (; i < stop; ++i) runs_[n_++] = {src(i), dst(i), nbytes};
        }
    }
    void flush() { copy_until(n_); }

  private:
    struct Run {
        std::int64_t src;
        std::int64_t dst;
        std::int64_t nbytes;
    };
    static constexpr std::size_t kMost = 1024;
    static constexpr std::int64_t kBatchNbytes = 8 * kAheadNbytes;

    static Byte* bytes(std::int64_t address) { return reinterpret_cast<Byte*>(static_cast<std::uintptr_t>(address)); }

    // For how many runs there is room, after a batch was copied if it was time.
    std::int64_t room(std::int64_t nbytes) {
        if (n_ == kMost || pending_ >= kBatchNbytes) copy_first();
        return std::min(static_cast<std::int64_t>(kMost - n_),
                        std::max<std::int64_t>(1, (kBatchNbytes - pending_) / nbytes));
    }

    // All but those that are prefetched for the next batch, and at least but the last, which may still grow.
    void copy_first() {
        std::size_t kept = 1;
        const std::size_t most = std::min(n_, kMost / 2);  // there must be room again, however short the runs
        for (std::int64_t nbytes = 0; kept < most && nbytes < kAheadNbytes; ++kept) nbytes += runs_[n_ - kept].nbytes;
        copy_until(n_ - std::min(kept, n_));
        std::copy(runs_ + first_, runs_ + n_, runs_);
        n_ -= first_;
        n_fetched_ -= std::min(n_fetched_, first_);
        first_ = 0;
    }

    // Runs of one length after another.
    void copy_until(std::size_t end) {
        while (first_ < end) {
            const std::int64_t nbytes = runs_[first_].nbytes;
            std::size_t stop = first_;
            std::int64_t bits = nbytes;
            for (; stop < end && runs_[stop].nbytes == nbytes; ++stop) bits |= runs_[stop].dst;
            if (stream_ && bits % kLine == 0) {
                copy_streamed(stop, nbytes);
            } else if (stream_ && nbytes >= kWideNbytes) {
                copy_each<InnerRun>(stop, nbytes);
            } else if (nbytes % 16 == 0 && nbytes <= 512) {
                copy_each<WideRun>(stop, nbytes);
            } else {
                copy_each<AnyRun>(stop, nbytes);
            }
        }
    }

    void copy_streamed(std::size_t stop, std::int64_t nbytes) {
        switch (nbytes) {
            case 64:
                return copy_each<FixedStreamRun<64>>(stop, nbytes);
            case 128:
                return copy_each<FixedStreamRun<128>>(stop, nbytes);
            case 256:
                return copy_each<FixedStreamRun<256>>(stop, nbytes);
            case 512:
                return copy_each<FixedStreamRun<512>>(stop, nbytes);
            default:
                return copy_each<StreamRun>(stop, nbytes);
        }
    }

    template <class Copy>
    void copy_each(std::size_t stop, std::int64_t nbytes) {
        const std::size_t ahead = static_cast<std::size_t>(std::max<std::int64_t>(1, kAheadNbytes / nbytes));
        for (; first_ < stop; ++first_) {
            for (; n_fetched_ < n_ && n_fetched_ <= first_ + ahead; ++n_fetched_)
                prefetch<true>(bytes(runs_[n_fetched_].src), fetched(runs_[n_fetched_].nbytes));
            pending_ -= nbytes;
            Copy::copy(bytes(runs_[first_].dst), bytes(runs_[first_].src), nbytes);
        }
    }

    bool stream_;
    Run runs_[kMost];
    std::size_t first_ = 0;
    std::size_t n_fetched_ = 0;
    std::size_t n_ = 0;
    std::int64_t pending_ = 0;
};

// Rows that are one run each, and within an item do not continue on both sides.
inline void add_single_runs(const Pair& pair, const Items& from, std::int64_t src_row, const Items& to,
                            std::int64_t dst_row, std::int64_t n_rows, RunCopier& out) {
    const View& a = pair.src;
    const View& b = pair.dst;
    if (a.rows_per_item == 1 && b.rows_per_item == 1) {
        const std::int64_t* const src_items = &from.items[src_row];
        const std::int64_t* const dst_items = &to.items[dst_row];
        return out.add_runs(
            n_rows, a.width, [&](std::int64_t i) { return a.base + src_items[i] * a.item_stride; },
            [&](std::int64_t i) { return b.base + dst_items[i] * b.item_stride; });
    }
    Side src{a, from, src_row};
    Side dst{b, to, dst_row};
    for (std::int64_t left = n_rows; left > 0;) {
        const std::int64_t more = std::min({left, src.left(), dst.left()});
        const std::int64_t src_at = src.address();
        const std::int64_t dst_at = dst.address();
        out.add_runs(
            more, a.width, [&](std::int64_t i) { return src_at + i * a.inner_stride; },
            [&](std::int64_t i) { return dst_at + i * b.inner_stride; });
        src.advance(more);
        dst.advance(more);
        left -= more;
    }
}

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

// Rows [start, stop) of a part, counted as in rows_of.
inline void copy_rows(const View& src, const Items& from, RowRange rows, const View& dst, const Items& to,
                      std::int64_t dst_row, bool stream) {
    const Pair pair = collapsed(src, dst);
    const std::int64_t n = rows.stop - rows.start;
    const bool joins = src.rows_per_item > 1 && dst.rows_per_item > 1 && pair.src.inner_stride == pair.src.width &&
                       pair.dst.inner_stride == pair.src.width;
    const bool single = pair.src.segs == 1 && pair.src.shards == 1 && !joins && pair.src.width >= kLine;
    RunCopier copier(stream);
    if (single) {
        add_single_runs(pair, from, rows.start, to, dst_row, n, copier);
    } else {
        add_pair(pair, {pair.src, from, rows.start}, {pair.dst, to, dst_row}, n, copier);
    }
    copier.flush();
}

}  // namespace pdstage::detail
