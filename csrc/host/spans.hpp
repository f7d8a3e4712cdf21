// The direct path's descriptors: which source bytes go to which destination address.
//
// Must not use Python, or know transports or what a descriptor costs.
#pragma once

#include <algorithm>
#include <utility>

#include "views.hpp"

namespace pdstage {

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

// Joins each span to the one before it if both sides continue without a gap.
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

// Walks one side of a pair: the address of a row, and for how many rows it continues by inner_stride.
class Side {
  public:
    Side(const View& view, const Items& items, std::int64_t row)
        : view_(view),
          items_(items),
          item_(static_cast<std::size_t>(row / view.rows_per_item)),
          row_(row % view.rows_per_item) {
        seek();
    }
    std::int64_t left() const { return left_; }
    std::int64_t address() const { return address_; }
    void advance(std::int64_t n_rows) {
        row_ += n_rows;
        left_ -= n_rows;
        address_ += n_rows * view_.inner_stride;
        if (left_ > 0) return;
        if (row_ == view_.rows_per_item) {
            ++item_;
            row_ = 0;
        }
        if (item_ < items_.items.size()) seek();
    }

  private:
    // Most seeks are to an item's first row, and divide nothing.
    void seek() {
        address_ = view_.base + items_.items[item_] * view_.item_stride;
        left_ = std::min(view_.outer_rows, view_.rows_per_item);
        if (row_ == 0) return;
        address_ += view_.row_offset(row_);
        left_ = std::min(view_.outer_rows - row_ % view_.outer_rows, view_.rows_per_item - row_);
    }
    const View& view_;
    const Items& items_;
    std::size_t item_;
    std::int64_t row_;  // within the item
    std::int64_t left_ = 0;
    std::int64_t address_ = 0;
};

template <class Writer>
void add_cell(const Pair& pair, std::int64_t src, std::int64_t dst, Writer& out) {
    for (std::int64_t seg = 0; seg < pair.src.segs; ++seg)
        out.add(src + seg * pair.src.seg_stride, dst + seg * pair.dst.seg_stride, pair.src.width);
}

// Rows that are inner_stride apart on both sides.
template <class Writer>
void add_rows(const Pair& pair, std::int64_t src, std::int64_t dst, std::int64_t n_rows, Writer& out) {
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

// `n_rows` rows from each side's first. Rows that continue by inner_stride on both sides are taken together, across
// items too: written shard by shard they make one span per shard.
template <class Writer>
void add_pair(const Pair& pair, Side src_side, Side dst_side, std::int64_t n_rows, Writer& out) {
    for (std::int64_t left = n_rows; left > 0;) {
        const std::int64_t src = src_side.address();
        const std::int64_t dst = dst_side.address();
        std::int64_t n_joined = 0;
        do {
            const std::int64_t more = std::min({left, src_side.left(), dst_side.left()});
            src_side.advance(more);
            dst_side.advance(more);
            n_joined += more;
            left -= more;
        } while (left > 0 && src_side.address() == src + n_joined * pair.src.inner_stride &&
                 dst_side.address() == dst + n_joined * pair.dst.inner_stride);
        add_rows(pair, src, dst, n_joined, out);
    }
}

// The items of both sides of a call, checked; a verdict on the destination numbers its component from src.size() on.
inline Verdict resolve_both(const std::vector<Part>& src, const std::vector<Component>& src_sizes,
                            const std::vector<Part>& dst, const std::vector<Component>& dst_sizes,
                            std::vector<Items>& from, std::vector<Items>& to) {
    from.resize(std::max(from.size(), src.size()));
    to.resize(std::max(to.size(), src.size()));
    const auto n = static_cast<std::int64_t>(src.size());
    for (std::int64_t i = 0; i < n; ++i) {
        Verdict verdict = resolve(src[i], i, src_sizes[i], false, from[i]);
        if (verdict.fault == Fault::kNone) verdict = resolve(dst[i], i + n, dst_sizes[i], true, to[i]);
        if (verdict.fault != Fault::kNone) return verdict;
    }
    return {};
}

// Whether both sides' indexes begin at a row of these views.
inline Verdict check_rows(const View& view, const std::vector<Part>& src, const std::vector<Part>& dst) {
    const std::int64_t i = view.component;
    const std::int64_t tokens = view.tokens_per_row;
    if (src[i].start == src[i].stop) return {};
    if (src[i].first_token % tokens != 0) return {Fault::kFirstToken, i, tokens, src[i].first_token};
    if (dst[i].first_token % tokens == 0) return {};
    return {Fault::kFirstToken, i + static_cast<std::int64_t>(src.size()), tokens, dst[i].first_token};
}

}  // namespace detail

// The direct path between selected views of two pools, for repeated use. Thread safe.
class DirectPlan {
  public:
    DirectPlan(std::vector<Pair> pairs, std::vector<Component> src, std::vector<Component> dst)
        : pairs_(std::move(pairs)), src_(std::move(src)), dst_(std::move(dst)) {}

    std::size_t n_components() const { return src_.size(); }

    // Appends to `out`. `src` and `dst`: one part per component, of equal token ranges. A verdict on the destination
    // numbers its component from n_components() on.
    Verdict spans(const std::vector<Part>& src, const std::vector<Part>& dst, Spans& out) const {
        std::vector<Items> from;
        std::vector<Items> to;
        Verdict verdict = detail::resolve_both(src, src_, dst, dst_, from, to);
        for (const Pair& pair : pairs_)
            if (verdict.fault == Fault::kNone) verdict = detail::check_rows(pair.src, src, dst);
        if (verdict.fault != Fault::kNone) return verdict;
        detail::SpanWriter writer(out);
        for (const Pair& pair : pairs_) {
            const std::int64_t i = pair.src.component;
            if (src[i].start == src[i].stop) continue;
            const RowRange rows = rows_of(src[i], pair.src, from[i].first);
            writer.open(pair.allocation);
            detail::add_pair(pair, {pair.src, from[i], rows.start},
                             {pair.dst, to[i], rows_of(dst[i], pair.dst, to[i].first).start}, rows.stop - rows.start,
                             writer);
        }
        return {};
    }

  private:
    std::vector<Pair> pairs_;
    std::vector<Component> src_;
    std::vector<Component> dst_;
};

}  // namespace pdstage
