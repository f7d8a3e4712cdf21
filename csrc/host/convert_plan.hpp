// Gather that encodes and scatter that decodes: copy.hpp's plan if staged bytes differ from the pool's.
//
// Token-major, one cell at a time: a selected view's bf16 cells are in the pool, its encoded ones in staging. Every
// index is checked before the first byte moves. Checksums cover the staged cells. Must not use Python or know rooms.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>
#include <vector>

#include "convert.hpp"
#include "sums.hpp"
#include "views.hpp"

namespace pdstage {

// How one selected view is staged; the columns of kernels/host_convert.py. `width` is that of a staged cell,
// `scales` the index of the view with this one's scales, or -1. `scale_bits` are those of a float32.
struct Coding {
    std::int64_t kind;
    std::int64_t holds;
    std::int64_t scale_bits;
    std::int64_t width;
    std::int64_t scales;
};

class ConvertPlan {
  public:
    // `codings`: one per view.
    ConvertPlan(std::vector<View> views, std::vector<Component> components, std::vector<Coding> codings)
        : components_(std::move(components)) {
        for (std::size_t i = 0; i < views.size(); ++i) coded_.push_back({views[i], codings[i]});
    }

    std::size_t n_components() const { return components_.size(); }

    // As CopyPlan's.
    Verdict gather(Byte* dst, std::int64_t nbytes, const std::vector<Part>& parts, std::uint64_t* sum) const {
        return run<true>(dst, nbytes, parts, sum);
    }
    Verdict scatter(const Byte* src, std::int64_t nbytes, const std::vector<Part>& parts, std::uint64_t* sum) const {
        return run<false>(const_cast<Byte*>(src), nbytes, parts, sum);  // only ever read
    }

  private:
    struct Coded {
        View view;
        Coding how;

        Kind kind() const { return static_cast<Kind>(how.kind); }
        Holds holds() const { return static_cast<Holds>(how.holds); }
        float scale() const { return detail::float_of(static_cast<std::uint32_t>(how.scale_bits)); }
        std::int64_t segs() const { return kind() == Kind::kCopy ? view.segs : 1; }
        std::int64_t row_nbytes() const { return view.shards * segs() * how.width; }
        std::int64_t n_values() const { return view.width / 2; }
    };
    // Rows [start, stop) of a view, and where the view and its scales are staged.
    struct Piece {
        const Coded* coded;
        const Items* items;
        RowRange rows;
        std::int64_t origin;  // the row at which the view's staging begins
        std::int64_t token;   // of that row
        Byte* wire;
        const Byte* scales;
    };
    static constexpr std::int64_t kViewAlignment = 128;
    static constexpr std::int64_t kPieceNbytes = 1 << 18;

    template <bool kGather>
    Verdict run(Byte* wire, std::int64_t nbytes, const std::vector<Part>& parts, std::uint64_t* sum) const {
        std::vector<Items> resolved(components_.size());
        for (std::size_t i = 0; i < components_.size(); ++i) {
            const Verdict verdict =
                resolve(parts[i], static_cast<std::int64_t>(i), components_[i], !kGather, resolved[i]);
            if (verdict.fault != Fault::kNone) return verdict;
        }
        std::vector<Byte*> starts;
        std::int64_t needed = 0;
        for (const Coded& coded : coded_) {
            const Part& part = parts[static_cast<std::size_t>(coded.view.component)];
            if (part.start != part.stop && part.first_token % coded.view.tokens_per_row != 0)
                return {Fault::kFirstToken, coded.view.component, coded.view.tokens_per_row, part.first_token};
            const RowRange rows = rows_of(part, coded.view, 0);
            starts.push_back(wire + needed);
            needed +=
                ((rows.stop - rows.start) * coded.row_nbytes() + kViewAlignment - 1) / kViewAlignment * kViewAlignment;
        }
        if (needed > nbytes) return {Fault::kTooSmall, 0, needed, nbytes};
        std::uint64_t total = 0;
        for (std::size_t i = 0; i < coded_.size(); ++i) {
            const Coded& coded = coded_[i];
            const auto c = static_cast<std::size_t>(coded.view.component);
            const RowRange rows = rows_of(parts[c], coded.view, resolved[c].first);
            const Byte* const scales =
                coded.how.scales < 0 ? nullptr : starts[static_cast<std::size_t>(coded.how.scales)];
            const std::int64_t token = parts[c].start / coded.view.tokens_per_row * coded.view.tokens_per_row;
            const std::int64_t step = std::max<std::int64_t>(1, kPieceNbytes / coded.row_nbytes());
            for (std::int64_t at = rows.start; at < rows.stop; at += step) {
                const Piece piece{&coded,    &resolved[c], {at, std::min(rows.stop, at + step)}, rows.start, token,
                                  starts[i], scales};
                carry_out<kGather>(piece);
                if (sum != nullptr) total += sum_of(piece);
            }
        }
        if (sum != nullptr) std::atomic_ref(*sum).fetch_add(total, std::memory_order_relaxed);
        return {};
    }

    template <bool kGather>
    static void carry_out(const Piece& piece) {
        const Coded& coded = *piece.coded;
        const View& view = coded.view;
        // Elementwise kinds treat a row of adjacent cells as one.
        const bool whole = coded.how.width * 2 == view.width && view.segs == 1 && view.shard_stride == view.width &&
                           (coded.kind() == Kind::kTensorDivide || coded.kind() == Kind::kTensorBf16);
        const std::int64_t n_cells = whole ? 1 : view.shards;
        const std::int64_t n_values = coded.n_values() * (whole ? view.shards : 1);
        const std::int64_t scales_nbytes = detail::scales_nbytes(coded.kind(), coded.n_values());
        for (std::int64_t row = piece.rows.start; row < piece.rows.stop; ++row) {
            Byte* const address = row_of(view, *piece.items, row);
            Byte* const staged = piece.wire + (row - piece.origin) * coded.row_nbytes();
            const Byte* const scales =
                piece.scales == nullptr ? nullptr : piece.scales + (row - piece.origin) * view.shards * scales_nbytes;
            for (std::int64_t cell = 0; cell < n_cells; ++cell) {
                Byte* const values = address + cell * view.shard_stride;
                Byte* const at = staged + cell * coded.segs() * coded.how.width;
                if (coded.kind() == Kind::kCopy) {
                    copy<kGather>(view, values, at);
                } else if constexpr (kGather) {
                    detail::kEncode(coded.kind(), coded.holds(), coded.scale(), values, n_values, at);
                } else if (coded.holds() != Holds::kScales) {
                    detail::kDecode(coded.kind(), coded.scale(), at,
                                    coded.holds() == Holds::kBoth ? at + n_values : scales + cell * scales_nbytes,
                                    n_values, values);
                }
            }
        }
    }

    template <bool kGather>
    static void copy(const View& view, Byte* cell, Byte* staged) {
        for (std::int64_t seg = 0; seg < view.segs; ++seg, cell += view.seg_stride, staged += view.width)
            std::memcpy(kGather ? staged : cell, kGather ? cell : staged, static_cast<std::size_t>(view.width));
    }

    static Byte* row_of(const View& view, const Items& items, std::int64_t row) {
        const std::int64_t item = items.items[static_cast<std::size_t>(row / view.rows_per_item)];
        const std::int64_t at = view.base + item * view.item_stride + view.row_offset(row % view.rows_per_item);
        return reinterpret_cast<Byte*>(static_cast<std::uintptr_t>(at));
    }

    static std::uint64_t sum_of(const Piece& piece) {
        const Coded& coded = *piece.coded;
        const Byte* cell = piece.wire + (piece.rows.start - piece.origin) * coded.row_nbytes();
        std::uint64_t sum = 0;
        for (std::int64_t row = piece.rows.start; row < piece.rows.stop; ++row) {
            const std::int64_t token = piece.token + (row - piece.origin) * coded.view.tokens_per_row;
            for (std::int64_t shard = 0; shard < coded.view.shards; ++shard)
                for (std::int64_t seg = 0; seg < coded.segs(); ++seg, cell += coded.how.width) {
                    const std::uint64_t place = detail::place_of(token, coded.view.first_shard + shard, seg);
                    sum += detail::kSumWords(cell, coded.how.width,
                                             detail::mix(static_cast<std::uint64_t>(coded.view.seed) + place));
                }
        }
        return sum;
    }

    std::vector<Component> components_;
    std::vector<Coded> coded_;
};

}  // namespace pdstage
