// Gather and scatter between affine views and dense staging, in the staged order of pdstage/plan.py.
//
// A view's item is a list of runs, the offsets of which are worked out once a plan with adjacent dimensions collapsed,
// so that the innermost copy is as long as the strides allow. A call then walks items x runs. Every index is checked
// before the first byte moves. Must not know Python, rooms or what the bytes mean.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

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

// Dimensions innermost first; one that continues the one below it becomes part of it.
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

// A rectangle of rows: `n_outer` steps of the first level, `n_inner` rows in each.
inline Nest nest_of(const View& view, Wire wire, std::int64_t n_outer, std::int64_t n_inner) {
    Nest nest(view.width);
    nest.around(view.segs, view.seg_stride);
    if (wire == Wire::kToken) nest.around(view.shards, view.shard_stride);
    nest.around(n_inner, view.inner_stride);
    nest.around(n_outer, view.outer_stride);
    if (wire == Wire::kHead) nest.around(view.shards, view.shard_stride);
    return nest;
}

// Rows [start, stop) of an item. Rows that do not form a rectangle are listed one by one: runs of a list are of one
// length.
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

}  // namespace detail

// Some shards of some views of one pool, ready to be copied many times. Safe to use from several threads at once.
class CopyPlan {
  public:
    CopyPlan(std::vector<View> views, std::vector<Component> components, Wire wire)
        : components_(std::move(components)), wire_(wire) {
        std::map<std::vector<std::int64_t>, std::shared_ptr<const detail::Runs>> shapes;
        for (const View& view : views) {
            const std::vector<std::int64_t> shape = {view.rows_per_item, view.outer_rows, view.outer_stride,
                                                     view.inner_stride,  view.shards,     view.shard_stride,
                                                     view.segs,          view.seg_stride, view.width};
            auto& runs = shapes[shape];
            if (!runs) {
                auto listed = std::make_shared<detail::Runs>();
                detail::list_runs(view, wire, 0, view.rows_per_item, *listed);
                runs = std::move(listed);
            }
            views_.push_back({view, runs, runs->offsets.size() == 1 && runs->nbytes == view.item_stride});
        }
    }

    std::size_t n_components() const { return components_.size(); }

    // `parts`: one for each component. Nothing is written unless the verdict is kNone.
    Verdict gather(Byte* dst, std::int64_t nbytes, const std::vector<Part>& parts) const {
        return run<true>(dst, nbytes, parts);
    }
    Verdict scatter(const Byte* src, std::int64_t nbytes, const std::vector<Part>& parts) const {
        return run<false>(const_cast<Byte*>(src), nbytes, parts);  // only ever read: kGather is false
    }

  private:
    struct Selected {
        View view;
        std::shared_ptr<const detail::Runs> runs;  // of a whole item; equal shapes share them
        bool dense;                                // consecutive items are consecutive memory, in staged order
    };
    static constexpr std::int64_t kViewAlignment = 128;

    template <bool kGather>
    Verdict run(Byte* wire, std::int64_t nbytes, const std::vector<Part>& parts) const {
        thread_local std::vector<Items> resolved;
        if (resolved.size() < components_.size()) resolved.resize(components_.size());
        for (std::size_t i = 0; i < components_.size(); ++i) {
            const Verdict verdict =
                resolve(parts[i], static_cast<std::int64_t>(i), components_[i], !kGather, resolved[i]);
            if (verdict.fault != Fault::kNone) return verdict;
        }
        std::int64_t needed = 0;
        for (const Selected& selected : views_) {
            const Part& part = parts[selected.view.component];
            if (part.start != part.stop && part.first_token % selected.view.tokens_per_row != 0)
                return {Fault::kFirstToken, selected.view.component, selected.view.tokens_per_row, part.first_token};
            needed += staged_nbytes(selected, part, resolved[selected.view.component]);
        }
        if (needed > nbytes) return {Fault::kTooSmall, 0, needed, nbytes};
        const bool stream = needed >= (kGather ? detail::kGatherStreamNbytes : detail::kScatterStreamNbytes);
        for (const Selected& selected : views_) {
            const Items& items = resolved[selected.view.component];
            const Part& part = parts[selected.view.component];
            if (!items.items.empty())
                copy_view<kGather>(selected, rows_of(part, selected.view, items.first), items, stream, wire);
            wire += staged_nbytes(selected, part, items);
        }
        if (stream) detail::stream_fence();
        return {};
    }

    static std::int64_t staged_nbytes(const Selected& selected, const Part& part, const Items& items) {
        const RowRange rows = rows_of(part, selected.view, items.first);
        const std::int64_t exact = (rows.stop - rows.start) * selected.view.row_nbytes();
        return (exact + kViewAlignment - 1) / kViewAlignment * kViewAlignment;
    }

    // A first or last item that is only partly in the range has runs of its own; those between share the plan's.
    template <bool kGather>
    void copy_view(const Selected& selected, RowRange rows, const Items& items, bool stream, Byte* wire) const {
        const View& view = selected.view;
        const std::int64_t per_item = view.rows_per_item;
        std::int64_t at = 0;
        while (rows.start < rows.stop) {
            const std::int64_t end = std::min(rows.stop - at * per_item, per_item);
            const std::int64_t start = rows.start - at * per_item;
            if (start == 0 && end == per_item) {
                const std::int64_t n = (rows.stop - rows.start) / per_item;
                copy_items<kGather>(selected, items, at, n, stream, wire);
                wire += n * per_item * view.row_nbytes();
                rows.start += n * per_item;
                at += n;
                continue;
            }
            thread_local detail::Runs runs;
            detail::list_runs(view, wire_, start, end, runs);
            copy_walk<kGather>({base(view), view.item_stride, &items.items[at], 1, &runs}, stream, wire);
            wire += (end - start) * view.row_nbytes();
            rows.start += end - start;
            ++at;
        }
    }

    template <bool kGather>
    static void copy_items(const Selected& selected, const Items& items, std::int64_t at, std::int64_t n, bool stream,
                           Byte* wire) {
        const View& view = selected.view;
        const std::int64_t* item = &items.items[at];
        if (!selected.dense || items.n_runs * 2 > items.items.size()) {
            copy_walk<kGather>({base(view), view.item_stride, item, n, selected.runs.get()}, stream, wire);
            return;
        }
        detail::Runs joined{0, {0}};
        for (const std::int64_t* const end = item + n; item < end;) {
            const std::int64_t* next = item + 1;
            while (next < end && *next == next[-1] + 1) ++next;
            joined.nbytes = (next - item) * view.item_stride;
            copy_walk<kGather>({base(view), view.item_stride, item, 1, &joined}, stream, wire);
            wire += joined.nbytes;
            item = next;
        }
    }

    template <bool kGather>
    static void copy_walk(const detail::Walk& walk, bool stream, Byte* wire) {
        const std::int64_t nbytes = walk.runs->nbytes;
        const bool aligned = kGather ? reinterpret_cast<std::uintptr_t>(wire) % 16 == 0 && nbytes % 16 == 0
                                     : nbytes % detail::kLine == 0 && lines_only(walk);
        const detail::Kernel kernel =
            stream && aligned ? detail::pick_streamed<kGather>(nbytes) : detail::pick_cached<kGather>(nbytes);
        kernel(walk, wire);
    }

    // Whether every run of the walk begins a cache line: half a line written past the caches costs a read of it.
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
