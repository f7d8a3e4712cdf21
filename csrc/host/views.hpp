// Affine views of registered memory, the items a call names, and the checks every call passes before a byte moves.
//
// The columns of View are those of pdstage/plan/tables.py, in its order. Row r of an item lies at
// (r / outer_rows) * outer_stride + (r % outer_rows) * inner_stride. Must not know Python.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

namespace pdstage {

using Byte = unsigned char;

// One selected view: `base` is the address of item 0, row 0 of the first selected shard.
struct View {
    std::int64_t component;
    std::int64_t base;
    std::int64_t item_stride;
    std::int64_t rows_per_item;
    std::int64_t outer_rows;
    std::int64_t outer_stride;
    std::int64_t inner_stride;
    std::int64_t shards;
    std::int64_t shard_stride;
    std::int64_t segs;
    std::int64_t seg_stride;
    std::int64_t width;
    std::int64_t tokens_per_row;
    std::int64_t first_shard;
    std::int64_t seed;

    std::int64_t row_nbytes() const { return shards * segs * width; }
    std::int64_t row_offset(std::int64_t row) const {
        return row / outer_rows * outer_stride + row % outer_rows * inner_stride;
    }
};

struct Component {
    std::int64_t tokens_per_item;
    std::int64_t n_items;
};

// One component's part in a call: its index list, item 0 of which covers `first_token`, and tokens [start, stop).
struct Part {
    std::int64_t items;  // address of n integers of `bits` bits
    std::int64_t bits;
    std::int64_t n;
    std::int64_t first_token;
    std::int64_t start;
    std::int64_t stop;
};

// Numbered as in pdstage/plan/tables.py, which has the error texts.
enum class Fault : int { kNone, kRange, kFirstToken, kTooFew, kItem, kRepeated, kTooSmall };

struct Verdict {
    Fault fault = Fault::kNone;
    std::int64_t component = 0;
    std::int64_t position = 0;
    std::int64_t value = 0;
};

// The items a part touches, widened to 64 bits: `items[0]` is at position `first` of the index list.
struct Items {
    std::int64_t first = 0;
    std::vector<std::int64_t> items;
    std::size_t n_runs = 0;  // maximal runs of items that step by one
};

namespace detail {

// A bit for each item of the largest pool seen, up to kMostMarked, all zero between calls.
class ItemSet {
  public:
    explicit ItemSet(std::int64_t n_items) : words_(scratch()) {
        const auto needed = static_cast<std::size_t>(n_items / 64 + 1);
        if (words_.size() < needed) words_.resize(needed);
    }
    bool add(std::int64_t item) {
        std::uint64_t& word = words_[static_cast<std::size_t>(item / 64)];
        const std::uint64_t bit = std::uint64_t{1} << (item % 64);
        const bool fresh = (word & bit) == 0;
        word |= bit;
        return fresh;
    }
    void forget(std::int64_t item) { words_[static_cast<std::size_t>(item / 64)] = 0; }

  private:
    static std::vector<std::uint64_t>& scratch() {
        thread_local std::vector<std::uint64_t> words;
        return words;
    }
    std::vector<std::uint64_t>& words_;
};

// Larger pools have no bits: a peer may have stated the number of items, or each piece of a page may count as one.
inline constexpr std::int64_t kMostMarked = std::int64_t{1} << 26;

inline std::size_t first_repeat_by_order(const std::vector<std::int64_t>& items) {
    std::vector<std::size_t> order(items.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return std::pair(items[a], a) < std::pair(items[b], b); });
    std::size_t at = items.size();
    for (std::size_t i = 1; i < order.size(); ++i) {
        if (items[order[i - 1]] == items[order[i]]) at = std::min(at, order[i]);
    }
    return at;
}

// The position within `items` of the first repeated item, or the size.
inline std::size_t first_repeat(const std::vector<std::int64_t>& items, std::int64_t n_items) {
    if (n_items > kMostMarked) return first_repeat_by_order(items);
    ItemSet seen(n_items);
    std::size_t at = 0;
    while (at < items.size() && seen.add(items[at])) ++at;
    for (std::size_t i = 0; i < at; ++i) seen.forget(items[i]);
    return at;
}

template <class Int>
std::size_t widen(const Part& part, std::int64_t n_items, Items& out) {
    const Int* from = reinterpret_cast<const Int*>(static_cast<std::uintptr_t>(part.items)) + out.first;
    const std::size_t n = out.items.size();
    std::size_t breaks = 0;
    bool outside = false;
    std::int64_t expected = -1;
    for (std::size_t i = 0; i < n; ++i) {
        const std::int64_t item = from[i];
        outside |= item < 0 || item >= n_items;
        breaks += item != expected;
        expected = item + 1;
        out.items[i] = item;
    }
    out.n_runs = breaks;
    if (!outside) return n;
    std::size_t at = 0;
    while (out.items[at] >= 0 && out.items[at] < n_items) ++at;
    return at;
}

}  // namespace detail

// Fills `out` with the items that `part` touches; `unique` refuses repeated ones, as two writes would race.
inline Verdict resolve(const Part& part, std::int64_t number, const Component& component, bool unique, Items& out) {
    out.items.clear();
    out.first = 0;
    out.n_runs = 0;
    if (part.start == part.stop) return {};
    if (part.first_token < 0) return {Fault::kFirstToken, number, 1, part.first_token};
    if (part.start < part.first_token || part.start > part.stop) return {Fault::kRange, number, part.start, part.stop};
    const std::int64_t tokens = component.tokens_per_item;
    const std::int64_t needed = (part.stop - part.first_token - 1) / tokens + 1;
    if (needed > part.n) return {Fault::kTooFew, number, needed, part.n};
    out.first = (part.start - part.first_token) / tokens;
    out.items.resize(static_cast<std::size_t>(needed - out.first));
    const std::size_t good = part.bits == 32 ? detail::widen<std::int32_t>(part, component.n_items, out)
                                             : detail::widen<std::int64_t>(part, component.n_items, out);
    const auto position = [&](std::size_t at) { return out.first + static_cast<std::int64_t>(at); };
    if (good < out.items.size()) return {Fault::kItem, number, position(good), out.items[good]};
    if (unique) {
        const std::size_t repeat = detail::first_repeat(out.items, component.n_items);
        if (repeat < out.items.size()) return {Fault::kRepeated, number, position(repeat), out.items[repeat]};
    }
    return {};
}

// Rows [start, stop) that a part touches in a view, counted from the first row of the item at position `Items::first`.
struct RowRange {
    std::int64_t start;
    std::int64_t stop;
};

inline RowRange rows_of(const Part& part, const View& view, std::int64_t first_item) {
    if (part.start == part.stop) return {0, 0};
    const std::int64_t origin = part.first_token / view.tokens_per_row + first_item * view.rows_per_item;
    return {part.start / view.tokens_per_row - origin, (part.stop - 1) / view.tokens_per_row + 1 - origin};
}

}  // namespace pdstage
