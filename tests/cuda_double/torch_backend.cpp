// A double of torch's CUDA backend, for a torch without one: tensors on "cuda:N" whose bytes are the driver's double's.
//
// An operator runs on the CPU over the same bytes. One that only writes to its arguments runs late, in the device's
// current stream, as on a GPU; any other waits for that stream, since its result must have a shape. Tensors of two
// devices meet as little as on a GPU.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cuda.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <string>

extern "C" {
void cuda_double_put(CUstream stream, void (*call)(void*), void* argument);
void cuda_double_drain(CUstream stream);
}

namespace {

using namespace c10;
using torch::jit::Stack;

void check(CUresult status, const char* call) { TORCH_CHECK(status == CUDA_SUCCESS, call, " failed with ", int(status)); }
#define CALL(name, ...) check(name(__VA_ARGS__), #name)

thread_local int current = 0;
thread_local CUstream streams[16];

CUcontext context_of(int device) {
    CUcontext context;
    CALL(cuDevicePrimaryCtxRetain, &context, device);
    return context;
}

struct On {  // the device's context, as the runtime binds it
    explicit On(int device) {
        cuCtxGetCurrent(&before);
        cuCtxSetCurrent(context_of(device));
    }
    ~On() {
        if (before) cuCtxSetCurrent(before);
    }
    CUcontext before = nullptr;
};

// Memory, in blocks of which torch hands out parts: 2 MiB for small tensors, else as many as it takes.
constexpr size_t SMALL = 1 << 20, BLOCK = 2 << 20, UNIT = 512;

struct Pool {
    std::mutex mutex;
    std::multimap<size_t, std::pair<void*, int>> unused;
    std::map<void*, std::pair<size_t, int>> used;
    std::map<int, std::pair<CUdeviceptr, size_t>> open;  // by device: the block that small tensors come from, and its rest

    void* take(size_t nbytes, int device) {
        std::lock_guard<std::mutex> guard(mutex);
        const size_t unit = nbytes <= SMALL ? UNIT : BLOCK;
        nbytes = (nbytes + unit - 1) / unit * unit;
        for (auto [at, end] = unused.equal_range(nbytes); at != end; ++at)
            if (at->second.second == device) {
                void* address = at->second.first;
                unused.erase(at);
                used[address] = {nbytes, device};
                return address;
            }
        On on(device);
        CUdeviceptr address;
        if (nbytes > SMALL) {
            CALL(cuMemAlloc, &address, nbytes);
        } else {
            auto& [next, left] = open[device];
            if (left < nbytes) {
                CALL(cuMemAlloc, &next, BLOCK);
                left = BLOCK;
            }
            address = next;
            next += nbytes, left -= nbytes;
        }
        void* taken = reinterpret_cast<void*>(address);
        used[taken] = {nbytes, device};
        return taken;
    }

    void give(void* address) {
        std::lock_guard<std::mutex> guard(mutex);
        const auto [nbytes, device] = used.at(address);
        used.erase(address);
        unused.emplace(nbytes, std::make_pair(address, device));
    }
};

Pool& pool() {
    static Pool* made = new Pool;
    return *made;
}

struct Memory final : Allocator {
    DataPtr allocate(size_t nbytes) override {
        void* at = nbytes ? pool().take(nbytes, current) : nullptr;
        return {at, at, &give, Device(kCUDA, DeviceIndex(current))};
    }
    static void give(void* at) {
        if (at) pool().give(at);
    }
    DeleterFnPtr raw_deleter() const override { return &give; }
    void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
} memory;

// What device guards ask for. Streams and events are torch_cuda.py's.
struct Guard final : impl::DeviceGuardImplInterface {
    DeviceType type() const override { return kCUDA; }
    Device exchangeDevice(Device device) const override {
        const int before = current;
        uncheckedSetDevice(device);
        return Device(kCUDA, DeviceIndex(before));
    }
    Device getDevice() const override { return Device(kCUDA, DeviceIndex(current)); }
    void setDevice(Device device) const override { uncheckedSetDevice(device); }
    void uncheckedSetDevice(Device device) const noexcept override {
        if (device.index() >= 0) current = device.index();
    }
    Stream getStream(Device device) const override {
        const int index = device.index() < 0 ? current : device.index();
        return Stream(Stream::UNSAFE, Device(kCUDA, DeviceIndex(index)), StreamId(intptr_t(streams[index])));
    }
    Stream exchangeStream(Stream) const override { TORCH_CHECK(false, "streams are torch_cuda.py's"); }
    DeviceIndex deviceCount() const noexcept override {
        int n = 0;
        return cuDeviceGetCount(&n) ? DeviceIndex(0) : DeviceIndex(n);
    }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
    explicit Hooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool hasCUDA() const override { return true; }
    Device getDeviceFromPtr(void* at) const override {
        int ordinal = -1;
        CALL(cuPointerGetAttribute, &ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CUdeviceptr(at));
        return Device(kCUDA, DeviceIndex(ordinal));
    }
    DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
    DeviceIndex getCurrentDevice() const override { return DeviceIndex(current); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(Hooks)

at::Tensor empty(IntArrayRef sizes, std::optional<ScalarType> type, std::optional<Layout>, std::optional<Device> device,
                 std::optional<bool>, std::optional<MemoryFormat> format) {
    OptionalDeviceGuard guard(device);
    return at::detail::empty_generic(sizes, &memory, DispatchKeySet(DispatchKey::CUDA), type.value_or(kFloat), format);
}

at::Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<ScalarType> type, std::optional<Layout>,
                         std::optional<Device> device, std::optional<bool>) {
    OptionalDeviceGuard guard(device);
    return at::detail::empty_strided_generic(sizes, strides, &memory, DispatchKeySet(DispatchKey::CUDA), type.value_or(kFloat));
}

// A device's tensor as the CPU's, of the same bytes.
at::Tensor alias_of(const at::Tensor& tensor) {
    void* at = tensor.numel() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
    return at::from_blob(at, tensor.sizes(), tensor.strides(), [tensor](void*) {}, tensor.options().device(kCPU));
}

// Operators that take host memory beside a device's.
bool takes_both(const std::string& name) {
    return name == "aten::copy_" || name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_" ||
           name == "aten::set_" || name == "aten::_to_copy";
}

struct Late {
    OperatorHandle op;
    Stack stack;
};

// What has run. It is not freed inside the driver, whose lock others wait for with the GIL, which freeing may need.
struct Done {
    std::mutex mutex;
    std::vector<std::unique_ptr<Late>> held;

    void free() {
        std::vector<std::unique_ptr<Late>> freed;  // after the lock
        {
            std::lock_guard<std::mutex> guard(mutex);
            freed.swap(held);
        }
    }
};

Done& done() {
    static Done* made = new Done;
    return *made;
}

void run_late(void* argument) {
    std::unique_ptr<Late> late(static_cast<Late*>(argument));
    at::AutoDispatchBelowADInplaceOrView below;
    Stack taken = late->stack;  // which the operator empties
    late->op.callBoxed(&taken);
    std::lock_guard<std::mutex> guard(done().mutex);
    done().held.push_back(std::move(late));
}

void run_on_cpu(const OperatorHandle& op, DispatchKeySet, Stack* stack) {
    done().free();
    const auto& schema = op.schema();
    const size_t n = schema.arguments().size(), base = stack->size() - n;
    std::vector<std::pair<at::Tensor, at::Tensor>> aliases;  // the CPU's, the device's
    std::vector<std::pair<at::Tensor, at::Tensor>> outs;     // an empty result that the operator will resize
    std::optional<Device> device, target;
    std::vector<IValue*> on_host;
    bool writes_host = false;
    const auto of_device = [&](at::Tensor tensor, bool is_out) {
        if (device && *device != tensor.device() && schema.name() != "aten::copy_")
            TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device,
                        " and ", tensor.device(), "! (", schema.name(), ")");
        if (!device || schema.name() != "aten::copy_") device = tensor.device();
        if (is_out && tensor.numel() == 0) {
            at::Tensor held = at::detail::empty_cpu({0}, tensor.scalar_type());
            outs.emplace_back(held, tensor);
            return held;
        }
        aliases.emplace_back(alias_of(tensor), tensor);
        return aliases.back().first;
    };
    const auto taken = [&](const at::Tensor& tensor, bool is_out) {
        return tensor.defined() && tensor.is_cuda() ? of_device(tensor, is_out) : tensor;
    };
    for (size_t i = 0; i < n; i++) {
        IValue& value = (*stack)[base + i];
        const auto* info = schema.arguments()[i].alias_info();
        const bool is_written = info && info->isWrite();
        if (value.isTensor()) {
            const at::Tensor tensor = value.toTensor();
            if (tensor.defined() && tensor.is_cpu() && tensor.dim() > 0) on_host.push_back(&value);
            writes_host |= is_written && tensor.defined() && tensor.is_cpu();
            value = taken(tensor, is_written && schema.arguments()[i].kwarg_only());
        } else if (value.isTensorList()) {
            auto held = value.toTensorVector();
            for (auto& tensor : held) tensor = taken(tensor, false);
            value = held;
        } else if (value.isOptionalTensorList()) {
            List<std::optional<at::Tensor>> held;
            for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
                held.push_back(tensor ? std::optional<at::Tensor>(taken(*tensor, false)) : tensor);
            value = held;
        } else if (value.isDevice() && value.toDevice().is_cuda()) {
            target = value.toDevice();
            value = Device(kCPU);
        }
    }
    if (!on_host.empty() && device && !takes_both(schema.name()))
        TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *device,
                    " and cpu! (", schema.name(), ")");
    if (!target) target = device;
    const int where = target && target->index() >= 0 ? target->index() : current;

    bool only_writes = !writes_host && outs.empty() && device && !schema.returns().empty();
    for (const auto& one : schema.returns()) only_writes &= one.alias_info() && one.alias_info()->isWrite();
    if (only_writes) {
        // Host memory is read before the call returns.
        for (IValue* value : on_host) *value = value->toTensor().clone();
        auto* late = new Late{op, Stack(stack->begin() + long(base), stack->end())};
        std::vector<at::Tensor> results;
        for (size_t i = 0; i < n; i++) {
            const auto* info = schema.arguments()[i].alias_info();
            if (info && info->isWrite() && (*stack)[base + i].isTensor())
                for (const auto& [ours, theirs] : aliases)
                    if (ours.is_same((*stack)[base + i].toTensor())) results.push_back(theirs);
        }
        stack->resize(base);
        for (auto& one : results) stack->push_back(one);
        On on(where);
        cuda_double_put(streams[where], run_late, late);
        return;
    }
    if (device) {
        On on(where);
        cuda_double_drain(streams[where]);
    }
    op.callBoxed(stack);

    const auto given_back = [&](const at::Tensor& tensor) -> at::Tensor {
        if (!tensor.defined() || !tensor.is_cpu()) return tensor;
        for (const auto& [ours, theirs] : aliases)
            if (ours.is_same(tensor)) return theirs;
        for (const auto& [ours, theirs] : outs)
            if (ours.is_same(tensor)) return theirs;
        if (schema.name() == "aten::_to_copy" || writes_host) return tensor;
        at::Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(*target));
        alias_of(made).copy_(tensor);
        return made;
    };
    for (const auto& [ours, theirs] : outs) {
        OptionalDeviceGuard guard(theirs.device());
        at::Tensor made = at::empty_strided(ours.sizes(), ours.strides(), ours.options().device(theirs.device()));
        alias_of(made).copy_(ours);
        theirs.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
        theirs.unsafeGetTensorImpl()->set_sizes_and_strides(ours.sizes(), ours.strides(), 0);
    }
    for (size_t i = base; i < stack->size(); i++) {
        IValue& value = (*stack)[i];
        if (value.isTensor()) {
            value = given_back(value.toTensor());
        } else if (value.isTensorList()) {
            auto held = value.toTensorVector();
            for (auto& tensor : held) tensor = given_back(tensor);
            value = held;
        }
    }
}

}  // namespace

// A thread's current stream of a device.
extern "C" void torch_double_set_stream(int device, CUstream stream) { streams[device] = stream; }
extern "C" CUstream torch_double_stream(int device) { return streams[device]; }
extern "C" int torch_double_device() { return current; }
extern "C" void torch_double_set_device(int device) { current = device; }

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_strided);
    library.impl("as_strided", [](const at::Tensor& of, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
        return at::native::as_strided_tensorimpl(of, sizes, strides, offset);
    });
    library.impl("view", [](const at::Tensor& of, IntArrayRef sizes) { return at::native::view(of, sizes); });
    library.impl("_reshape_alias", [](const at::Tensor& of, IntArrayRef sizes, IntArrayRef strides) {
        return at::native::_reshape_alias(of, sizes, strides);
    });
    library.impl("unfold", &at::native::unfold);
    library.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
    library.impl("set_.source_Storage", [](at::Tensor& of, c10::Storage source) -> at::Tensor& {
        const int64_t n = int64_t(source.nbytes() / of.itemsize());
        return at::native::set_storage_cpu_(of, std::move(source), 0, {n}, {1});
    });
    // Those that torch itself composes of parts which only a CUDA build has.
    for (const char* name : {"copy_", "fill_.Scalar", "fill_.Tensor", "zero_", "_local_scalar_dense"})
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
}
