// Gather and scatter between affine views and dense staging, in the staged order of pdstage/plan/staging.py.
//
// A view's item is a list of runs. Their offsets are computed once per plan with adjacent dimensions collapsed, so
// that the innermost copy is as long as the strides allow. A call then walks items x runs. Every index is checked
// before the first byte moves. With a checksum, runs are single cells, summed as they are copied. Must not use Python,
// or know rooms or what the bytes mean.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "pool_copy.hpp"
#include "views.hpp"
#include "walk.hpp"

namespace pdstage {

enum class Wire : int { kToken, kHead };

namespace detail {

struct Dim {
    std::int64_t n;
    std::int64_t stride;
};

// Appends to `runs` the cells of `dims` (innermost first) at `origin`.
inline void append(Runs& runs, std::int64_t origin, const Dim* dims, std::size_t n_dims) {
    if (n_dims == 0) {
        runs.offsets.push_back(origin);
        return;
    }
    const Dim& outer = dims[n_dims - 1];
    for (std::int64_t i = 0; i < outer.n; ++i) append(runs, origin + i * outer.stride, dims, n_dims - 1);
}

// Dimensions innermost first; one that continues the one below it is merged into it.
class Nest {
  public:
    explicit Nest(std::int64_t width) : nbytes_(width) {}
    void around(std::int64_t n, std::int64_t stride) {
        if (n == 1) return;
        if (n_dims_ == 0 && stride == nbytes_) {
            nbytes_ *= n;
        } else if (n_dims_ > 0 && stride == dims_[n_dims_ - 1].n * dims_[n_dims_ - 1].stride) {
            dims_[n_dims_ - 1].n *= n;
        } else {
            dims_[n_dims_++] = {n, stride};
        }
    }
    std::int64_t nbytes() const { return nbytes_; }
    void append_to(Runs& runs, std::int64_t origin) const { append(runs, origin, dims_, n_dims_); }

  private:
    std::int64_t nbytes_;
    Dim dims_[4];
    std::size_t n_dims_ = 0;
};

// A rectangle of rows: `n_outer` steps of the first level, each with `n_inner` rows.
inline Nest nest_of(const View& view, Wire wire, std::int64_t n_outer, std::int64_t n_inner) {
    Nest nest(view.width);
    nest.around(view.segs, view.seg_stride);
    if (wire == Wire::kToken) nest.around(view.shards, view.shard_stride);
    nest.around(n_inner, view.inner_stride);
    nest.around(n_outer, view.outer_stride);
    if (wire == Wire::kHead) nest.around(view.shards, view.shard_stride);
    return nest;
}

// Rows [start, stop) of an item. Rows that do not form a rectangle are listed one by one, since the runs of a list
// have one length.
inline void list_runs(const View& view, Wire wire, std::int64_t start, std::int64_t stop, Runs& runs) {
    runs.offsets.clear();
    const std::int64_t outer = view.outer_rows;
    const bool one_level = start / outer == (stop - 1) / outer;
    if (one_level || (start % outer == 0 && stop % outer == 0)) {
        const Nest nest =
            one_level ? nest_of(view, wire, 1, stop - start) : nest_of(view, wire, (stop - start) / outer, outer);
        runs.nbytes = nest.nbytes();
        nest.append_to(runs, view.row_offset(start));
        return;
    }
    const bool by_shard = wire == Wire::kHead;
    View cell = view;
    if (by_shard) cell.shards = 1;
    const Nest nest = nest_of(cell, wire, 1, 1);
    runs.nbytes = nest.nbytes();
    for (std::int64_t shard = 0; shard < (by_shard ? view.shards : 1); ++shard)
        for (std::int64_t row = start; row < stop; ++row)
            nest.append_to(runs, shard * view.shard_stride + view.row_offset(row));
}

// Rows [start, stop) of an item cell by cell, each with its place.
inline void list_cells(const View& view, Wire wire, std::int64_t start, std::int64_t stop, Runs& cells) {
    cells.nbytes = view.width;
    cells.offsets.clear();
    cells.places.clear();
    const auto add = [&](std::int64_t row, std::int64_t shard) {
        for (std::int64_t seg = 0; seg < view.segs; ++seg) {
            cells.offsets.push_back(view.row_offset(row) + shard * view.shard_stride + seg * view.seg_stride);
            cells.places.push_back(place_of(row * view.tokens_per_row, shard, seg));
        }
    };
    if (wire == Wire::kToken) {
        for (std::int64_t row = start; row < stop; ++row)
            for (std::int64_t shard = 0; shard < view.shards; ++shard) add(row, shard);
    } else {
        for (std::int64_t shard = 0; shard < view.shards; ++shard)
            for (std::int64_t row = start; row < stop; ++row) add(row, shard);
    }
}

}  // namespace detail

// Some shards of some views of one pool, ready for repeated copies. Several threads may use it at once.
class CopyPlan {
  public:
    // `checksum`: whether calls may request checksums.
    CopyPlan(std::vector<View> views, std::vector<Component> components, Wire wire, bool checksum)
        : components_(std::move(components)), wire_(wire) {
        std::map<std::vector<std::int64_t>, std::pair<Shared, Shared>> shapes;
        for (const View& view : views) {
            const std::vector<std::int64_t> shape = {
                view.rows_per_item, view.outer_rows, view.outer_stride, view.inner_stride, view.shards,
                view.shard_stride,  view.segs,       view.seg_stride,   view.width,        view.tokens_per_row};
            auto& [runs, cells] = shapes[shape];
            if (!runs) {
                detail::Runs listed;
                detail::list_runs(view, wire, 0, view.rows_per_item, listed);
                runs = std::make_shared<const detail::Runs>(listed);
                if (checksum) {
                    detail::list_cells(view, wire, 0, view.rows_per_item, listed);
                    cells = std::make_shared<const detail::Runs>(std::move(listed));
                }
            }
            views_.push_back({view, runs, cells, runs->offsets.size() == 1 && runs->nbytes == view.item_stride});
        }
    }

    std::size_t n_components() const { return components_.size(); }

    // Whether bytes of this plan's cells can become bytes of the peer's.
    bool fits(const CopyPlan& peer) const {
        const auto same = [](const Selected& a, const Selected& b) {
            return a.view.component == b.view.component && a.view.shards == b.view.shards &&
                   a.view.segs == b.view.segs && a.view.width == b.view.width &&
                   a.view.tokens_per_row == b.view.tokens_per_row;
        };
        return n_components() == peer.n_components() &&
               std::equal(views_.begin(), views_.end(), peer.views_.begin(), peer.views_.end(), same);
    }

    // `parts`: one per component. `sum`, if given, gets the checksum of the cells added. Nothing is written unless
    // the verdict is kNone.
    Verdict gather(Byte* dst, std::int64_t nbytes, const std::vector<Part>& parts, std::uint64_t* sum) const {
        return run<true>(dst, nbytes, parts, sum);
    }
    Verdict scatter(const Byte* src, std::int64_t nbytes, const std::vector<Part>& parts, std::uint64_t* sum) const {
        return run<false>(const_cast<Byte*>(src), nbytes, parts, sum);  // only ever read: kGather is false
    }

    // `peer` fits. A verdict on the peer's side numbers its component from n_components() on.
    Verdict copy_to(const CopyPlan& peer, const std::vector<Part>& parts, const std::vector<Part>& peer_parts) const {
        thread_local std::vector<Items> from;
        thread_local std::vector<Items> to;
        Verdict verdict = detail::resolve_both(parts, components_, peer_parts, peer.components_, from, to);
        for (const Selected& selected : views_)
            if (verdict.fault == Fault::kNone) verdict = detail::check_rows(selected.view, parts, peer_parts);
        if (verdict.fault != Fault::kNone) return verdict;
        std::int64_t nbytes = 0;
        for (const Selected& selected : views_) {
            const View& view = selected.view;
            const RowRange rows = rows_of(parts[view.component], view, from[view.component].first);
            nbytes += (rows.stop - rows.start) * view.row_nbytes();
        }
        const bool stream = nbytes >= detail::kStreamNbytes;
        for (std::size_t i = 0; i < views_.size(); ++i) {
            const View& src = views_[i].view;
            const View& dst = peer.views_[i].view;
            const auto c = static_cast<std::size_t>(src.component);
            const RowRange rows = rows_of(parts[c], src, from[c].first);
            const std::int64_t dst_row = rows_of(peer_parts[c], dst, to[c].first).start;
            if (rows.start < rows.stop) detail::copy_rows(src, from[c], rows, dst, to[c], dst_row, stream);
        }
        if (stream) detail::stream_fence();
        return {};
    }

  private:
    using Shared = std::shared_ptr<const detail::Runs>;
    struct Selected {
        View view;
        Shared runs;   // of a whole item; equal shapes share them
        Shared cells;  // of a whole item, if calls may request checksums
        bool dense;    // consecutive items are consecutive memory, in staged order
    };
    struct Call {
        bool stream;
        bool summed;
    };
    static constexpr std::int64_t kViewAlignment = 128;
    template <bool kGather>
    Verdict run(Byte* wire, std::int64_t nbytes, const std::vector<Part>& parts, std::uint64_t* sum) const {
        thread_local std::vector<Items> resolved;
        if (resolved.size() < components_.size()) resolved.resize(components_.size());
        for (std::size_t i = 0; i < components_.size(); ++i) {
            const Verdict verdict =
                resolve(parts[i], static_cast<std::int64_t>(i), components_[i], !kGather, resolved[i]);
            if (verdict.fault != Fault::kNone) return verdict;
        }
        std::vector<Byte*> starts;
        std::int64_t needed = 0;
        for (const Selected& selected : views_) {
            const View& view = selected.view;
            const Part& part = parts[view.component];
            if (part.start != part.stop && part.first_token % view.tokens_per_row != 0)
                return {Fault::kFirstToken, view.component, view.tokens_per_row, part.first_token};
            const RowRange rows = rows_of(part, view, resolved[view.component].first);
            starts.push_back(wire + needed);
            const std::int64_t exact = (rows.stop - rows.start) * view.row_nbytes();
            needed += (exact + kViewAlignment - 1) / kViewAlignment * kViewAlignment;
        }
        if (needed > nbytes) return {Fault::kTooSmall, 0, needed, nbytes};
        const Call call{needed >= detail::kStreamNbytes, sum != nullptr};
        std::uint64_t total = 0;
        for (std::size_t i = 0; i < views_.size(); ++i) {
            const View& view = views_[i].view;
            const auto c = static_cast<std::size_t>(view.component);
            const std::int64_t first_token = parts[c].first_token + resolved[c].first * components_[c].tokens_per_item;
            const RowRange rows = rows_of(parts[c], view, resolved[c].first);
            total += copy_view<kGather>(views_[i], rows, resolved[c], first_token, call, starts[i]);
        }
        if (call.stream) detail::stream_fence();
        // Concurrent calls may share a sum.
        if (sum != nullptr) std::atomic_ref(*sum).fetch_add(total, std::memory_order_relaxed);
        return {};
    }

    // A first or last item that is only partly in the range has separate runs; those between share the plan's.
    // `first_token` is that of `items`. Returns the checksum if `call` requests it.
    template <bool kGather>
    std::uint64_t copy_view(const Selected& selected, RowRange rows, const Items& items, std::int64_t first_token,
                            Call call, Byte* wire) const {
        const View& view = selected.view;
        const std::int64_t per_item = view.rows_per_item;
        std::uint64_t sum = 0;
        for (std::int64_t at = rows.start / per_item; rows.start < rows.stop;) {
            const std::int64_t start = rows.start - at * per_item;
            const bool whole = start == 0 && rows.stop - rows.start >= per_item;
            const std::int64_t n = whole ? (rows.stop - rows.start) / per_item : 1;
            const std::int64_t end = whole ? per_item : std::min(rows.stop - at * per_item, per_item);
            detail::Walk walk{base(view), view.item_stride, &items.items[at], n, nullptr};
            thread_local detail::Runs part;
            if (call.summed) {
                if (!whole) detail::list_cells(view, wire_, start, end, part);
                walk.runs = whole ? selected.cells.get() : &part;
                const std::int64_t token = first_token + at * per_item * view.tokens_per_row;
                sum += copy_summed<kGather>(view, walk, token, call.stream, wire);
            } else if (whole) {
                walk.runs = selected.runs.get();
                copy_items<kGather>(selected, walk, items, call.stream, wire);
            } else {
                detail::list_runs(view, wire_, start, end, part);
                walk.runs = &part;
                copy_walk<kGather>(walk, call.stream, wire);
            }
            const std::int64_t n_rows = n * (end - start);
            wire += n_rows * view.row_nbytes();
            rows.start += n_rows;
            at += n;
        }
        return sum;
    }

    template <bool kGather>
    static std::uint64_t copy_summed(const View& view, const detail::Walk& walk, std::int64_t token, bool stream,
                                     Byte* wire) {
        const std::uint64_t place =
            static_cast<std::uint64_t>(view.seed) + detail::place_of(token, view.first_shard, 0);
        const std::uint64_t step = detail::place_of(view.rows_per_item * view.tokens_per_row, 0, 0);
        return detail::copy_cells<kGather>(walk, place, step, stream && can_stream<kGather>(walk, wire), wire);
    }

    // Whole items; adjacent items of a dense view are copied as one run, if there are enough.
    template <bool kGather>
    static void copy_items(const Selected& selected, const detail::Walk& walk, const Items& items, bool stream,
                           Byte* wire) {
        if (!selected.dense || items.n_runs * 2 > items.items.size()) {
            copy_walk<kGather>(walk, stream, wire);
            return;
        }
        detail::Runs joined{0, {0}, {}};
        const std::int64_t* item = walk.items;
        for (const std::int64_t* const end = item + walk.n_items; item < end;) {
            const std::int64_t* next = item + 1;
            while (next < end && *next == next[-1] + 1) ++next;
            joined.nbytes = (next - item) * walk.item_stride;
            copy_walk<kGather>({walk.base, walk.item_stride, item, 1, &joined}, stream, wire);
            wire += joined.nbytes;
            item = next;
        }
    }

    template <bool kGather>
    static void copy_walk(const detail::Walk& walk, bool stream, Byte* wire) {
        const std::int64_t nbytes = walk.runs->nbytes;
        const bool streams = stream && can_stream<kGather>(walk, wire);
        const bool inner = stream && !kGather && nbytes >= detail::kWideNbytes;
        const detail::Kernel kernel = streams ? detail::pick_streamed<kGather>(nbytes)
                                      : inner ? detail::copy_runs<detail::InnerRun, kGather, kGather>
                                              : detail::pick_cached<kGather>(nbytes);
        kernel(walk, wire);
    }

    template <bool kGather>
    static bool can_stream(const detail::Walk& walk, const Byte* wire) {
        const std::int64_t nbytes = walk.runs->nbytes;
        return kGather ? reinterpret_cast<std::uintptr_t>(wire) % 16 == 0 && nbytes % 16 == 0
                       : nbytes % detail::kLine == 0 && lines_only(walk);
    }

    // Whether every run of the walk begins a cache line: writing half a line past the caches costs a read of it.
    static bool lines_only(const detail::Walk& walk) {
        std::uintptr_t bits =
            reinterpret_cast<std::uintptr_t>(walk.base) | static_cast<std::uintptr_t>(walk.item_stride);
        for (const std::int64_t offset : walk.runs->offsets) bits |= static_cast<std::uintptr_t>(offset);
        return bits % detail::kLine == 0;
    }

    static Byte* base(const View& view) { return reinterpret_cast<Byte*>(static_cast<std::uintptr_t>(view.base)); }

    std::vector<Component> components_;
    Wire wire_;
    std::vector<Selected> views_;
};

}  // namespace pdstage
