// The functions of csrc/host as the module pdstage._native. Only this file and control_port.hpp use Python.
//
// Sizes and ranges of Python's own objects are checked here; csrc/host checks what the numbers mean.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "control_port.hpp"
#include "host/copy.hpp"
#include "host/peer_memory.hpp"
#include "host/spans.hpp"
#include "unlocked.hpp"

namespace py = pybind11;

namespace {

using Int64s = py::array_t<std::int64_t, py::array::c_style | py::array::forcecast>;
using VerdictTuple = std::tuple<int, std::int64_t, std::int64_t, std::int64_t>;

// Releases the GIL for larger work only. Beside a busy thread it comes back only after a switch interval, 100 us or
// more, so calls of a few microseconds keep it.
class UnlockedFor {
  public:
    explicit UnlockedFor(std::int64_t nbytes) {
        if (nbytes >= kWorthIt) released_.emplace();
    }

  private:
    static constexpr std::int64_t kWorthIt = 64 << 10;
    std::optional<pdstage::Unlocked> released_;
};

static_assert(sizeof(pdstage::View) == 15 * sizeof(std::int64_t));
static_assert(sizeof(pdstage::Component) == 2 * sizeof(std::int64_t));

// The rows of a two-dimensional array with as many columns as Row has fields.
template <class Row>
std::vector<Row> rows(const Int64s& table, const char* name) {
    constexpr auto kColumns = static_cast<py::ssize_t>(sizeof(Row) / sizeof(std::int64_t));
    if (table.ndim() != 2 || table.shape(1) != kColumns)
        throw std::invalid_argument(std::string(name) + " is not a table of " + std::to_string(kColumns) + " columns");
    const auto* first = reinterpret_cast<const Row*>(table.data());
    return {first, first + table.shape(0)};
}

void check_components(const std::vector<pdstage::View>& views, std::size_t n_components) {
    for (const pdstage::View& view : views)
        if (view.component < 0 || static_cast<std::size_t>(view.component) >= n_components)
            throw std::invalid_argument("a view names a component that is not in the table");
}

std::vector<pdstage::Part> parts_of(const py::sequence& given, std::size_t n_components) {
    if (given.size() != n_components) throw std::invalid_argument("there must be one part for each component");
    std::vector<pdstage::Part> parts;
    parts.reserve(n_components);
    for (const py::handle part : given) {
        const auto fields = py::reinterpret_borrow<py::tuple>(part);
        const auto field = [&](std::size_t i) { return fields[i].cast<std::int64_t>(); };
        parts.push_back({field(0), field(1), field(2), field(3), field(4), field(5)});
    }
    return parts;
}

VerdictTuple to_tuple(const pdstage::Verdict& verdict) {
    return {static_cast<int>(verdict.fault), verdict.component, verdict.position, verdict.value};
}

// Three lists of n in one allocation: three separate ones of this size would each be returned to the system when
// freed, and fault in again.
struct Columns {
    explicit Columns(std::size_t n)
        : n(static_cast<py::ssize_t>(n)),
          all({py::ssize_t{3}, static_cast<py::ssize_t>(n)}),
          data(all.mutable_data()) {}
    std::int64_t* column(std::size_t i) { return data + static_cast<py::ssize_t>(i) * n; }
    Int64s list(std::size_t i) { return Int64s(n, column(i), all); }

    py::ssize_t n;
    Int64s all;
    std::int64_t* data;
};

pdstage::CopyPlan make_copy_plan(const Int64s& views, const Int64s& components, bool head_major, bool checksum) {
    auto view_rows = rows<pdstage::View>(views, "views");
    auto component_rows = rows<pdstage::Component>(components, "components");
    check_components(view_rows, component_rows.size());
    return {std::move(view_rows), std::move(component_rows), head_major ? pdstage::Wire::kHead : pdstage::Wire::kToken,
            checksum};
}

std::uint64_t* sum_at(std::uintptr_t address) {
    return reinterpret_cast<std::uint64_t*>(address);
}

VerdictTuple gather(const pdstage::CopyPlan& plan, std::uintptr_t dst, std::int64_t nbytes, const py::sequence& given,
                    std::uintptr_t sum) {
    const auto parts = parts_of(given, plan.n_components());
    const UnlockedFor unlocked(nbytes);
    return to_tuple(plan.gather(reinterpret_cast<pdstage::Byte*>(dst), nbytes, parts, sum_at(sum)));
}

VerdictTuple scatter(const pdstage::CopyPlan& plan, std::uintptr_t src, std::int64_t nbytes, const py::sequence& given,
                     std::uintptr_t sum) {
    const auto parts = parts_of(given, plan.n_components());
    const UnlockedFor unlocked(nbytes);
    return to_tuple(plan.scatter(reinterpret_cast<const pdstage::Byte*>(src), nbytes, parts, sum_at(sum)));
}

VerdictTuple copy_to(const pdstage::CopyPlan& plan, const pdstage::CopyPlan& peer, const py::sequence& given,
                     const py::sequence& peer_given) {
    if (!plan.fits(peer)) throw std::invalid_argument("the two plans are of different cells");
    const auto parts = parts_of(given, plan.n_components());
    const auto peer_parts = parts_of(peer_given, plan.n_components());
    const pdstage::Unlocked unlocked;
    return to_tuple(plan.copy_to(peer, parts, peer_parts));
}

pdstage::DirectPlan make_direct_plan(const Int64s& src, const Int64s& dst, const Int64s& pairs,
                                     const Int64s& src_components, const Int64s& dst_components) {
    struct PairRow {
        std::int64_t shards_first;
        std::int64_t allocation;
    };
    const auto from = rows<pdstage::View>(src, "src");
    const auto to = rows<pdstage::View>(dst, "dst");
    const auto how = rows<PairRow>(pairs, "pairs");
    auto src_sizes = rows<pdstage::Component>(src_components, "src_components");
    auto dst_sizes = rows<pdstage::Component>(dst_components, "dst_components");
    if (from.size() != to.size() || from.size() != how.size() || src_sizes.size() != dst_sizes.size())
        throw std::invalid_argument("both sides must have as many views and components");
    check_components(from, src_sizes.size());
    std::vector<pdstage::Pair> joined;
    for (std::size_t i = 0; i < from.size(); ++i)
        joined.push_back({from[i], to[i], how[i].shards_first != 0, how[i].allocation});
    return {std::move(joined), std::move(src_sizes), std::move(dst_sizes)};
}

py::tuple direct_spans(const pdstage::DirectPlan& plan, const py::sequence& src, const py::sequence& dst) {
    const auto src_parts = parts_of(src, plan.n_components());
    const auto dst_parts = parts_of(dst, plan.n_components());
    thread_local pdstage::Spans spans;
    spans.src.clear();
    spans.dst.clear();
    spans.nbytes.clear();
    pdstage::Verdict verdict;
    {
        std::int64_t n_items = 0;
        for (const pdstage::Part& part : src_parts) n_items += part.n;
        const UnlockedFor unlocked(n_items * static_cast<std::int64_t>(sizeof(std::int64_t)));
        verdict = plan.spans(src_parts, dst_parts, spans);
    }
    Columns found(spans.src.size());
    std::size_t i = 0;
    for (const auto* column : {&spans.src, &spans.dst, &spans.nbytes})
        std::copy(column->begin(), column->end(), found.column(i++));
    return py::make_tuple(to_tuple(verdict), found.list(0), found.list(1), found.list(2));
}

std::size_t one_length(const Int64s& src, const Int64s& dst, const Int64s& nbytes) {
    if (src.size() != dst.size() || src.size() != nbytes.size())
        throw std::invalid_argument("src, dst and nbytes must be of one length");
    return static_cast<std::size_t>(src.size());
}

std::pair<std::int64_t, int> write_peer(int pid, const Int64s& src, const Int64s& dst, const Int64s& nbytes) {
    const std::size_t n = one_length(src, dst, nbytes);
    const UnlockedFor unlocked(std::accumulate(nbytes.data(), nbytes.data() + n, std::int64_t{0}));
    const pdstage::WriteResult result = pdstage::write_peer(pid, src.data(), dst.data(), nbytes.data(), n);
    return {result.written, result.error};
}

std::uintptr_t address_of(const py::array& array) {
    return reinterpret_cast<std::uintptr_t>(array.data());
}

void copy_spans(const Int64s& src, const Int64s& dst, const Int64s& nbytes) {
    const std::size_t n = one_length(src, dst, nbytes);
    const UnlockedFor unlocked(std::accumulate(nbytes.data(), nbytes.data() + n, std::int64_t{0}));
    pdstage::copy_spans(src.data(), dst.data(), nbytes.data(), n);
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() =
        "Host kernels of pdstage in C++; pdstage.kernels, pdstage.plan.spans and pdstage.transport are the faces to "
        "use.";
    // pybind11 looks numpy up at its first use, and for that releases the GIL in the way that unlocked.hpp replaces.
    py::dtype::of<std::int64_t>();
    module.attr("processor") =
        py::dict(py::arg("amd") = pdstage::kProcessor.amd, py::arg("avx") = pdstage::kProcessor.avx);

    py::class_<pdstage::CopyPlan>(module, "CopyPlan", "Gather and scatter between affine views and staging.")
        .def(py::init(&make_copy_plan), py::arg("views"), py::arg("components"), py::arg("head_major"),
             py::arg("checksum"))
        .def("gather", &gather, py::arg("dst"), py::arg("nbytes"), py::arg("parts"), py::arg("sum"),
             "Returns (fault, component, position, value); fault 0 means done, any other that nothing was written. "
             "`sum`: address of a uint64 to add the checksum to, or 0.")
        .def("scatter", &scatter, py::arg("src"), py::arg("nbytes"), py::arg("parts"), py::arg("sum"),
             "As gather, the other way.")
        .def("copy_to", &copy_to, py::arg("peer"), py::arg("parts"), py::arg("peer_parts"),
             "As gather, into the peer's cells; faults on the peer's side count components from this plan's on.");

    py::class_<pdstage::DirectPlan>(module, "DirectPlan", "Descriptors between selected views of two pools.")
        .def(py::init(&make_direct_plan), py::arg("src"), py::arg("dst"), py::arg("pairs"), py::arg("src_components"),
             py::arg("dst_components"))
        .def("spans", &direct_spans, py::arg("src"), py::arg("dst"),
             "Returns ((fault, component, position, value), src, dst, nbytes).");

    module.def("write_peer", &write_peer, py::arg("pid"), py::arg("src"), py::arg("dst"), py::arg("nbytes"),
               "Writes spans of this process into process `pid`; returns (bytes written, errno).");
    module.def("copy_spans", &copy_spans, py::arg("src"), py::arg("dst"), py::arg("nbytes"),
               "Copies spans of this process to other addresses of it.");

    module.def("address_of", &address_of, py::arg("array"), "Where a numpy array's first byte lies.");

    // Calls that never block, and so keep the GIL.
    module.def("is_readable", &pdstage::is_readable, py::arg("fd"), "Whether a descriptor is readable now.");
    module.def("raise_event", &pdstage::raise_event, py::arg("fd"), "Adds one to a non-blocking eventfd.");
    module.def("lower_event", &pdstage::lower_event, py::arg("fd"), "Takes all from a non-blocking eventfd.");
    module.def(
        "connect_abstract",
        [](int fd, const std::string& name) { return pdstage::connect_abstract(fd, name.data(), name.size()); },
        py::arg("fd"), py::arg("name"), "Connects a datagram socket to an abstract name; returns 0 or the errno.");
    module.def(
        "send_datagram",
        [](int fd, std::string_view data) { return pdstage::send_datagram(fd, data.data(), data.size()); },
        py::arg("fd"), py::arg("data"), "Sends on a connected datagram socket; returns 0 or the errno.");
    module.def("recv_datagrams", &pdstage::recv_datagrams, py::arg("fd"), py::arg("uids"), py::arg("limit"),
               py::arg("max_nbytes"), "Returns (datagrams of these users, how many others were dropped).");

    py::class_<pdstage::ControlPort>(module, "ControlPort", "The socket of a node; see pdstage.control.port.")
        .def(py::init<const std::string&, std::uintptr_t, int, std::size_t>(), py::arg("library"), py::arg("socket"),
             py::arg("wake_fd"), py::arg("max_frames"))
        .def("send", &pdstage::ControlPort::send, py::arg("route"), py::arg("frames"))
        .def("recv", &pdstage::ControlPort::recv, py::arg("max_messages"), py::arg("enough_nbytes"))
        .def("wait", &pdstage::ControlPort::wait, py::arg("timeout_s"), py::arg("fds"))
        .def("wake", &pdstage::ControlPort::wake)
        .def("disconnect", &pdstage::ControlPort::disconnect)
        .def("look_again", &pdstage::ControlPort::look_again)
        .def("close", &pdstage::ControlPort::close);
}
