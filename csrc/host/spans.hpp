// Runs of consecutive items, and the direct path's descriptors: which source bytes go to which destination address.
//
// Must not know Python, transports or what a descriptor costs.
#pragma once

#include <algorithm>
#include <utility>

#include "views.hpp"

namespace pdstage {

// The positions in [0, n) where a group of items begins that step by one in both lists, written to `starts`, with room
// for n. Returns how many. Has no branch on the data: fragmented lists would mispredict at every item.
template <class Src, class Dst>
std::size_t group_starts(const Src* src, const Dst* dst, std::size_t n, std::size_t* starts) {
    if (n == 0) return 0;
    starts[0] = 0;
    std::size_t groups = 1;
    for (std::size_t i = 1; i < n; ++i) {
        starts[groups] = i;
        groups += (src[i] != static_cast<std::int64_t>(src[i - 1]) + 1) |
                  (dst[i] != static_cast<std::int64_t>(dst[i - 1]) + 1);
    }
    return groups;
}

struct Spans {
    std::vector<std::int64_t> src;
    std::vector<std::int64_t> dst;
    std::vector<std::int64_t> nbytes;
};

// A view of the source and the view of the destination that takes its bytes. Spans of different `allocation` never
// join, however close their addresses: each descriptor must stay inside one registration on both sides.
struct Pair {
    View src;
    View dst;
    bool shards_first;
    std::int64_t allocation;
};

namespace detail {

// Joins each span to the one before it where both sides go on without a gap.
class SpanWriter {
  public:
    explicit SpanWriter(Spans& out) : out_(out) {}
    void open(std::int64_t allocation) {
        joinable_ = joinable_ && allocation == allocation_;
        allocation_ = allocation;
    }
    void add(std::int64_t src, std::int64_t dst, std::int64_t nbytes) {
        if (joinable_ && src == src_end_ && dst == dst_end_) {
            out_.nbytes.back() += nbytes;
        } else {
            out_.src.push_back(src);
            out_.dst.push_back(dst);
            out_.nbytes.push_back(nbytes);
        }
        joinable_ = true;
        src_end_ = src + nbytes;
        dst_end_ = dst + nbytes;
    }

  private:
    Spans& out_;
    bool joinable_ = false;
    std::int64_t allocation_ = 0;
    std::int64_t src_end_ = 0;
    std::int64_t dst_end_ = 0;
};

// Walks one side of a pair: where a row lies, and for how many rows its address goes on by inner_stride.
class Side {
  public:
    Side(const View& view, const Items& items, std::int64_t row) : view_(view), items_(items), row_(row) { seek(); }
    std::int64_t left() const { return left_; }
    std::int64_t address() const { return address_; }
    void advance(std::int64_t n_rows) {
        row_ += n_rows;
        left_ -= n_rows;
        address_ += n_rows * view_.inner_stride;
        if (left_ == 0 && row_ / view_.rows_per_item < static_cast<std::int64_t>(items_.items.size())) seek();
    }

  private:
    void seek() {
        const std::int64_t item = row_ / view_.rows_per_item;
        const std::int64_t row = row_ % view_.rows_per_item;
        left_ = std::min(view_.outer_rows - row % view_.outer_rows, view_.rows_per_item - row);
        address_ =
            view_.base + items_.items[static_cast<std::size_t>(item)] * view_.item_stride + view_.row_offset(row);
    }
    const View& view_;
    const Items& items_;
    std::int64_t row_;
    std::int64_t left_ = 0;
    std::int64_t address_ = 0;
};

inline void add_cell(const Pair& pair, std::int64_t src, std::int64_t dst, SpanWriter& out) {
    for (std::int64_t seg = 0; seg < pair.src.segs; ++seg)
        out.add(src + seg * pair.src.seg_stride, dst + seg * pair.dst.seg_stride, pair.src.width);
}

// Rows that lie inner_stride apart on both sides.
inline void add_rows(const Pair& pair, std::int64_t src, std::int64_t dst, std::int64_t n_rows, SpanWriter& out) {
    const View& from = pair.src;
    const View& to = pair.dst;
    const bool join = from.segs == 1 && from.inner_stride == from.width && to.inner_stride == from.width;
    if (join && (pair.shards_first || from.shards == 1)) {
        for (std::int64_t shard = 0; shard < from.shards; ++shard)
            out.add(src + shard * from.shard_stride, dst + shard * to.shard_stride, n_rows * from.width);
        return;
    }
    if (pair.shards_first) {
        for (std::int64_t shard = 0; shard < from.shards; ++shard)
            for (std::int64_t row = 0; row < n_rows; ++row)
                add_cell(pair, src + shard * from.shard_stride + row * from.inner_stride,
                         dst + shard * to.shard_stride + row * to.inner_stride, out);
        return;
    }
    for (std::int64_t row = 0; row < n_rows; ++row)
        for (std::int64_t shard = 0; shard < from.shards; ++shard)
            add_cell(pair, src + row * from.inner_stride + shard * from.shard_stride,
                     dst + row * to.inner_stride + shard * to.shard_stride, out);
}

}  // namespace detail

// The direct path between selected views of two pools, ready to be asked many times. Thread safe.
class DirectPlan {
  public:
    DirectPlan(std::vector<Pair> pairs, std::vector<Component> src, std::vector<Component> dst)
        : pairs_(std::move(pairs)), src_(std::move(src)), dst_(std::move(dst)) {}

    std::size_t n_components() const { return src_.size(); }

    // Appends to `out`. `src` and `dst`: one part for each component, of equal token ranges. A verdict on the
    // destination numbers its component from n_components() on.
    Verdict spans(const std::vector<Part>& src, const std::vector<Part>& dst, Spans& out) const {
        std::vector<Items> from(src_.size());
        std::vector<Items> to(src_.size());
        const auto n = static_cast<std::int64_t>(src_.size());
        for (std::int64_t i = 0; i < n; ++i) {
            Verdict verdict = resolve(src[i], i, src_[i], false, from[i]);
            if (verdict.fault == Fault::kNone) verdict = resolve(dst[i], i + n, dst_[i], true, to[i]);
            if (verdict.fault != Fault::kNone) return verdict;
        }
        for (const Pair& pair : pairs_) {
            const std::int64_t i = pair.src.component;
            if (src[i].start == src[i].stop) continue;
            const std::int64_t tokens = pair.src.tokens_per_row;
            if (src[i].first_token % tokens != 0) return {Fault::kFirstToken, i, tokens, src[i].first_token};
            if (dst[i].first_token % tokens != 0) return {Fault::kFirstToken, i + n, tokens, dst[i].first_token};
        }
        detail::SpanWriter writer(out);
        for (const Pair& pair : pairs_) {
            const std::int64_t i = pair.src.component;
            if (src[i].start != src[i].stop) add_pair(pair, src[i], dst[i], from[i], to[i], writer);
        }
        return {};
    }

  private:
    static void add_pair(const Pair& pair, const Part& src, const Part& dst, const Items& from, const Items& to,
                         detail::SpanWriter& out) {
        const RowRange rows = rows_of(src, pair.src, from.first);
        detail::Side src_side(pair.src, from, rows.start);
        detail::Side dst_side(pair.dst, to, rows_of(dst, pair.dst, to.first).start);
        out.open(pair.allocation);
        // Rows that go on by inner_stride on both sides are taken together, across items too: written shard by shard
        // they make one span a shard.
        for (std::int64_t left = rows.stop - rows.start; left > 0;) {
            const std::int64_t from_address = src_side.address();
            const std::int64_t to_address = dst_side.address();
            std::int64_t n_rows = 0;
            do {
                const std::int64_t more = std::min({left, src_side.left(), dst_side.left()});
                src_side.advance(more);
                dst_side.advance(more);
                n_rows += more;
                left -= more;
            } while (left > 0 && src_side.address() == from_address + n_rows * pair.src.inner_stride &&
                     dst_side.address() == to_address + n_rows * pair.dst.inner_stride);
            detail::add_rows(pair, from_address, to_address, n_rows, out);
        }
    }

    std::vector<Pair> pairs_;
    std::vector<Component> src_;
    std::vector<Component> dst_;
};

}  // namespace pdstage
