// A double of libcuda.so.1: what pdstage, UCX and the double of torch's CUDA call of the driver, where no GPU is.
//
// A device's memory is files that processes share. Work in a stream runs late: when somebody asks for an event behind it,
// from its source as it is then; in timed mode, when its time has come. The documented rules of cuda.h hold. What the
// driver refuses is refused with its number. What it does not define is noted, for the test to read: `cuda_double_broken`.
//
// It shows that the rules are kept as the documents say. It cannot show that CUDA does what they say.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

extern char** environ;

namespace {

using std::string;

// Settings, calls and broken rules.

const std::map<string, long> DEFAULTS{
    {"apart", 0},        // no device can access another
    {"held", 0},         // streams stand still
    {"timed", 0},        // work takes the time below; else it takes a question
    {"copy_us", 10},     // of a copy or kernel, before its first byte
    {"copy_gbps", 283},
    {"moves", 1L << 60},  // copies and kernels of more bytes move none
    {"broken", 0},       // the status that a failed device gives to everything
    {"strict", 0},       // a call that breaks another thread's recording is a broken rule whether one records or not
    {"batch_status", 0}, // what cuMemcpyBatchAsync answers to a batch of which it began the first copy
    {"breaks_in_batch", 0},
    {"memory", 1L << 40},
    {"has_virtual", 1},
    {"has_fabric", 1},
    {"fabric_status", 0},
    {"has_ranges", 1},   // attributes of the mapping at an address
    {"rdma", 1},
    {"rdma_flush_options", 1},
    {"rdma_ordering", 100},
    {"n_waits", 0},      // calls that waited for a stream
    {"n_copies", 0},     // that read a device's memory
    {"n_kernels", 0},
};

// As CUDA_DOUBLE in the environment changes them: "timed=1,us:cuLaunchKernel=25".
std::map<string, long> settings_at_start() {
    std::map<string, long> made = DEFAULTS;
    const char* given = getenv("CUDA_DOUBLE");
    for (std::istringstream all(given ? given : ""); !all.eof();) {
        string one;
        std::getline(all, one, ',');
        if (const auto at = one.find('='); at != string::npos) made[one.substr(0, at)] = std::stol(one.substr(at + 1));
    }
    return made;
}

struct State {
    std::recursive_mutex mutex;
    std::map<string, long> settings = settings_at_start();
    std::map<string, long> calls;
    std::map<string, std::pair<long, int>> fails;  // by call: which one of them, and its status
    std::map<uintptr_t, long> copies_of;           // by the base of the memory that was read
    string broken;
    std::vector<int> visible;
};

State& state() {
    static State* made = new State;  // for good: others call until the process has ended
    return *made;
}

struct Locked {
    std::lock_guard<std::recursive_mutex> guard{state().mutex};
};

long& setting(const string& name) { return state().settings[name]; }

void broke(const string& what) {
    state().broken += what + "\n";
    fprintf(stderr, "the double of CUDA: %s\n", what.c_str());
}

double now() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return double(at.tv_sec) + 1e-9 * double(at.tv_nsec);
}

void spin(double us) {
    for (const double until = now() + us * 1e-6; now() < until;) {
    }
}

string plain(const char* call) {  // cuMemAlloc_v2 is cuMemAlloc
    string name(call);
    const auto at = name.rfind("_v");
    return at != string::npos && at + 3 == name.size() ? name.substr(0, at) : name;
}

thread_local CUcontext bound = nullptr;
thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

// Every call begins with it. `Unsafe`: a call that CUDA forbids while a thread records, but in relaxed mode.
enum Care { FREE, NEEDS_DEVICE = 1, UNSAFE = 2, NEEDS_CONTEXT = 4 };
bool is_recorded_globally();
void spoil_recordings();

CUresult entered(const char* call, int care) {
    const string name = plain(call);
    const long n = ++state().calls[name];
    if (const auto cost = state().settings.find("us:" + name); cost != state().settings.end()) spin(double(cost->second));
    if (const auto fault = state().fails.find(name); fault != state().fails.end() && fault->second.first == n)
        return CUresult(fault->second.second);
    if (care & UNSAFE && mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
        if (setting("strict") && !setting("broken")) broke(name + ": a call that breaks another thread's recording");
        if (is_recorded_globally()) {
            spoil_recordings();
            return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    if (care & NEEDS_DEVICE && setting("broken")) return CUresult(setting("broken"));
    if (care & NEEDS_CONTEXT && bound == nullptr) return CUDA_ERROR_INVALID_CONTEXT;
    return CUDA_SUCCESS;
}

#define ENTER(care)                                                   \
    const Locked locked;                                              \
    if (const CUresult refused = entered(__func__, care)) return refused

// Devices and contexts.

std::vector<int>& visible() {
    auto& numbers = state().visible;
    if (numbers.empty()) numbers = {0, 1};  // the machine has two
    return numbers;
}

}  // namespace

struct CUctx_st {
    int ordinal = 0;
    bool is_active = false;
    std::set<int> peers;  // whose memory its kernels may access
    std::shared_ptr<struct CUstream_st> legacy;
};

namespace {

CUctx_st* contexts() {
    static CUctx_st* made = [] {
        auto* all = new CUctx_st[16];
        for (int n = 0; n < 16; n++) all[n].ordinal = n;
        return all;
    }();
    return made;
}

bool is_device(int ordinal) { return ordinal >= 0 && ordinal < int(visible().size()); }

#define DEVICE(ordinal) \
    if (!is_device(ordinal)) return CUDA_ERROR_INVALID_DEVICE

int ordinal_of(int physical) {
    for (size_t at = 0; at < visible().size(); at++)
        if (visible()[at] == physical) return int(at);
    return 0;
}

// Memory.

enum Kind { MALLOC, VIRTUAL, MANAGED, POOL, PINNED, LOCKED };

struct Allocation {  // of cuMemCreate
    int fd;
    size_t nbytes;
    int device, types;
    bool is_imported;
};

struct Memory {
    Kind kind;
    uintptr_t base;
    size_t nbytes;
    int device;  // the machine's number
    int fd = -1;
    bool is_imported = false;
    CUipcMemHandle handle{};
    CUcontext opener = nullptr;
    std::map<uintptr_t, Allocation> mappings;  // of a reservation
    std::set<int> allowed;
};

// For good, as all state here: UCX calls after this library's end.
auto& memories = *new std::map<uintptr_t, Memory>;
auto& reservations = *new std::map<uintptr_t, Memory>;
auto& handles = *new std::map<CUmemGenericAllocationHandle, Allocation>;
CUmemGenericAllocationHandle last_handle = 1ull << 40;  // more than an int, as the driver's are

Memory* within(std::map<uintptr_t, Memory>& all, uintptr_t address, size_t nbytes) {
    auto after = all.upper_bound(address);
    if (after == all.begin()) return nullptr;
    Memory& one = std::prev(after)->second;
    return address + nbytes <= one.base + one.nbytes ? &one : nullptr;
}

std::pair<const uintptr_t, Allocation>* mapping_at(Memory& reserved, uintptr_t address) {
    auto after = reserved.mappings.upper_bound(address);
    if (after == reserved.mappings.begin()) return nullptr;
    auto& one = *std::prev(after);
    return address < one.first + one.second.nbytes ? &one : nullptr;
}

// The memory that holds all these bytes, or null.
Memory* of(uintptr_t address, size_t nbytes = 1) {
    if (Memory* one = within(memories, address, nbytes)) return one;
    Memory* reserved = within(reservations, address, nbytes);
    if (reserved == nullptr || reserved->allowed.empty()) return nullptr;
    for (uintptr_t at = address; at < address + nbytes;) {
        const auto* mapped = mapping_at(*reserved, at);
        if (mapped == nullptr) return nullptr;
        at = mapped->first + mapped->second.nbytes;
    }
    return reserved;
}

int new_file(size_t nbytes) {
    const int fd = memfd_create("cuda-double", MFD_CLOEXEC);
    return fd < 0 || ftruncate(fd, off_t(nbytes)) ? -1 : fd;
}

uintptr_t map_file(int fd, size_t nbytes) {
    void* at = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? 0 : uintptr_t(at);
}

size_t n_used() {
    size_t n = 0;
    for (const auto& [_, one] : memories)
        if (!one.is_imported && one.kind != LOCKED) n += one.nbytes;
    for (const auto& [_, one] : handles) n += one.nbytes;
    return n;
}

uintptr_t allocate(size_t nbytes, int device, Kind kind) {
    if (nbytes == 0 || n_used() + nbytes > size_t(setting("memory"))) return 0;
    const int fd = new_file(nbytes);
    const uintptr_t base = fd < 0 ? 0 : map_file(fd, nbytes);
    if (base) memories[base] = Memory{kind, base, nbytes, device, fd};
    return base;
}

bool is_open_elsewhere(int held) {
    const int fd = open(("/proc/self/fd/" + std::to_string(held)).c_str(), O_RDWR | O_CLOEXEC);
    const bool busy = flock(fd, LOCK_EX | LOCK_NB) != 0;
    close(fd);
    return busy;
}

void unmap_file(Memory& one) {
    munmap(reinterpret_cast<void*>(one.base), one.nbytes);
    if (one.fd >= 0) close(one.fd);
}

}  // namespace

// Streams and events.

struct CUevent_st {
    CUcontext context;
    unsigned long recorded = 0, done = 0;
    struct CUstream_st* in = nullptr;
    double due = 0;
};

namespace {

struct Work {
    enum What { COPY, CALL, RECORD, WAIT } what;
    uintptr_t dst = 0, src = 0;
    size_t nbytes = 0;
    bool is_known[2] = {false, false};
    std::function<void()> call{};
    std::shared_ptr<CUevent_st> event{};
    unsigned long version = 0;
    double due = 0;
};

struct Recording {
    CUstreamCaptureMode mode;
    bool is_spoilt = false;
};

}  // namespace

struct CUstream_st {
    CUcontext context;
    std::deque<Work> work{};
    double end = 0;
    std::unique_ptr<Recording> recording{};
};

namespace {

auto& streams = *new std::map<CUstream, std::shared_ptr<CUstream_st>>;
auto& events = *new std::map<CUevent, std::shared_ptr<CUevent_st>>;

#define FIND(all, handle, or_else)         \
    const auto found = (all).find(handle); \
    if (found == (all).end()) return or_else
#define EVENT(handle)                                \
    FIND(events, handle, CUDA_ERROR_INVALID_HANDLE); \
    CUevent_st& asked = *found->second
#define HANDLE(handle) FIND(handles, handle, CUDA_ERROR_INVALID_VALUE)

bool is_recorded_globally() {
    for (const auto& [_, one] : streams)
        if (one->recording && one->recording->mode == CU_STREAM_CAPTURE_MODE_GLOBAL) return true;
    return false;
}

#define STREAM(handle)                        \
    CUstream_st* stream = stream_of(handle);  \
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE

void spoil_recordings() {
    for (const auto& [_, one] : streams)
        if (one->recording) one->recording->is_spoilt = true;
}

CUstream_st* stream_of(CUstream handle) {
    if (handle == nullptr || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD) {
        if (bound == nullptr) return nullptr;
        if (!bound->legacy) bound->legacy = std::make_shared<CUstream_st>(CUstream_st{bound});
        return bound->legacy.get();
    }
    const auto found = streams.find(handle);
    return found == streams.end() ? nullptr : found->second.get();
}

std::vector<CUstream_st*> all_streams() {
    std::vector<CUstream_st*> all;
    for (const auto& [_, one] : streams) all.push_back(one.get());
    for (int n = 0; n < 16; n++)
        if (contexts()[n].legacy) all.push_back(contexts()[n].legacy.get());
    return all;
}

void run(Work& work) {
    switch (work.what) {
        case Work::COPY:
            if ((work.is_known[0] && !of(work.dst, work.nbytes)) || (work.is_known[1] && !of(work.src, work.nbytes))) {
                broke("a copy of memory that is gone");
                return;
            }
            if (work.nbytes <= size_t(setting("moves"))) memmove(reinterpret_cast<void*>(work.dst), reinterpret_cast<void*>(work.src), work.nbytes);
            if (Memory* read = of(work.src); read && read->kind <= POOL) setting("n_copies")++, state().copies_of[read->base]++;
            return;
        case Work::CALL:
            work.call();
            return;
        case Work::RECORD:
            work.event->done = work.version;
            return;
        case Work::WAIT:
            return;
    }
}

// Runs the stream's next work if its time has come. `now_all`: whatever holds it.
bool step(CUstream_st& stream, bool now_all = false) {
    if (stream.work.empty() || (!now_all && setting("held"))) return false;
    Work& first = stream.work.front();
    if (setting("timed") && !now_all && first.due > now()) return false;
    if (first.what == Work::WAIT && first.event->done < first.version) {
        CUstream_st* other = first.event->in;
        while (other != nullptr && other != &stream && first.event->done < first.version && step(*other, now_all)) {
        }
        if (first.event->done < first.version) return false;
    }
    Work work = std::move(first);
    stream.work.pop_front();
    run(work);
    return true;
}

void drain(CUstream_st& stream) {
    setting("n_waits")++;
    if (setting("timed") && !stream.work.empty()) {
        const double left = stream.end - now();
        if (left > 0) usleep(useconds_t(left * 1e6));
    }
    while (!stream.work.empty()) {
        if (step(stream, true)) continue;
        broke("a wait without end");
        stream.work.clear();
    }
}

void put(CUstream_st& stream, Work work, double us = 0) {
    if (stream.recording) return;
    if (setting("timed")) {
        if (work.what == Work::WAIT && work.event->due > stream.end) stream.end = work.event->due;
        if (us > 0) stream.end = std::max(now(), stream.end) + us * 1e-6;
        work.due = stream.end;
        if (work.what == Work::RECORD) work.event->due = stream.end;
    }
    stream.work.push_back(std::move(work));
}

double us_of(size_t nbytes) { return double(setting("copy_us")) + double(nbytes) / (1e3 * double(setting("copy_gbps"))); }

CUresult copy(uintptr_t dst, uintptr_t src, size_t nbytes, CUstream handle) {
    STREAM(handle);
    if (nbytes == 0) return CUDA_SUCCESS;
    Work work{Work::COPY, dst, src, nbytes};
    for (const int side : {0, 1}) {
        const uintptr_t at = side ? src : dst;
        if (!of(at)) continue;  // pageable host memory
        if (!of(at, nbytes)) return CUDA_ERROR_INVALID_VALUE;
        work.is_known[side] = true;
    }
    if (Memory* to = of(dst); !work.is_known[1] && to && to->kind <= POOL) {  // of pageable memory: read before it returns
        auto held = std::make_shared<std::vector<char>>(reinterpret_cast<char*>(src), reinterpret_cast<char*>(src) + nbytes);
        work.what = Work::CALL;
        work.call = [dst, held] { memcpy(reinterpret_cast<void*>(dst), held->data(), held->size()); };
    }
    put(*stream, std::move(work), us_of(nbytes));
    return CUDA_SUCCESS;
}

bool touches(const Work& work, const Memory& memory, bool writes) {
    if (work.what != Work::COPY) return false;
    const auto is_in = [&](uintptr_t at) { return at >= memory.base && at < memory.base + memory.nbytes; };
    return is_in(work.dst) || (!writes && is_in(work.src));
}

bool is_touched(const Memory& memory, bool writes = false) {
    for (CUstream_st* stream : all_streams())
        for (const Work& work : stream->work)
            if (touches(work, memory, writes)) return true;
    return false;
}

}  // namespace

// Modules: an image names a library of the kernel's source, compiled for the CPU, and the command that makes it.

struct CUmod_st {
    string target, command;
    CUcontext context;
    int (*launch)(const void*, unsigned, unsigned) = nullptr;
    size_t (*nbytes)(const void*) = nullptr;
    size_t params_nbytes = 0;
};

struct CUfunc_st {
    CUmod_st* module;
};

namespace {

const char MAGIC[] = "kernels of the double of CUDA";
const size_t HEAD_NBYTES = 64;

bool load(CUmod_st& module) {
    if (module.launch) return true;
    if (access(module.target.c_str(), R_OK)) {
        const char* arguments[] = {"sh", "-c", module.command.c_str(), nullptr};
        pid_t pid;
        int status = 1;
        if (posix_spawn(&pid, "/bin/sh", nullptr, nullptr, const_cast<char**>(arguments), environ)) return false;
        waitpid(pid, &status, 0);
        if (status) return false;
    }
    void* library = dlopen(module.target.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return false;
    module.params_nbytes = *static_cast<size_t*>(dlsym(library, "pdstage_params_nbytes"));
    module.nbytes = reinterpret_cast<size_t (*)(const void*)>(dlsym(library, "pdstage_nbytes"));
    module.launch = reinterpret_cast<int (*)(const void*, unsigned, unsigned)>(dlsym(library, "pdstage_launch"));
    return true;
}

void launch(CUmod_st* module, const std::vector<char>& params, unsigned grid, unsigned threads) {
    const int fault = module->launch(params.data(), grid, threads);
    setting("n_kernels")++;
    if (fault)
        broke("a kernel ended with fault " + std::to_string(fault) + ": 1 misaligned, 2 a missed barrier, 4 a wait without end");
}

int attribute(CUdevice_attribute which, int ordinal) {
    switch (which) {
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 4;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return 9;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return 232448;
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: return 1;
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return 0x10 + visible()[size_t(ordinal)];
        case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: return int(setting("has_virtual"));
        case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: return int(setting("has_fabric"));
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: return int(setting("rdma"));
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: return int(setting("rdma_flush_options"));
        case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: return int(setting("rdma_ordering"));
        default: return 0;
    }
}

// A pointer's attribute as an integer; whether the driver knows it.
bool attribute(CUpointer_attribute which, uintptr_t address, uint64_t* value, size_t* nbytes) {
    Memory* one = of(address);
    if (one == nullptr) return false;
    const auto* mapped = one->kind == VIRTUAL ? mapping_at(*one, address) : nullptr;
    const bool on_host = one->kind >= PINNED;
    *nbytes = 4;
    switch (which) {
        case CU_POINTER_ATTRIBUTE_CONTEXT: *nbytes = 8, *value = uint64_t(&contexts()[ordinal_of(one->device)]); break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *value = on_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; break;
        case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *nbytes = 8, *value = address; break;
        case CU_POINTER_ATTRIBUTE_HOST_POINTER:
            if (!on_host && one->kind != MANAGED) return false;
            *nbytes = 8, *value = address;
            break;
        case CU_POINTER_ATTRIBUTE_BUFFER_ID: *nbytes = 8, *value = one->base; break;
        case CU_POINTER_ATTRIBUTE_IS_MANAGED: *value = one->kind == MANAGED; break;
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *value = uint64_t(ordinal_of(one->device)); break;
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: *value = one->kind == MALLOC; break;
        case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: *nbytes = 8, *value = one->base; break;
        case CU_POINTER_ATTRIBUTE_RANGE_SIZE: *nbytes = 8, *value = one->nbytes; break;
        case CU_POINTER_ATTRIBUTE_MAPPED: *value = 1; break;
        case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
            if (!setting("has_ranges")) return false;
            *nbytes = 8, *value = mapped ? uint64_t(mapped->second.types) : 0;
            break;
        case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: *value = !on_host; break;
        case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: *nbytes = 8, *value = one->kind == POOL; break;
        case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
            if (!setting("has_ranges")) return false;
            *nbytes = 8, *value = mapped ? mapped->second.nbytes : one->nbytes;
            break;
        case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
            if (!setting("has_ranges")) return false;
            *nbytes = 8, *value = mapped ? mapped->first : one->base;
            break;
        default: return false;
    }
    return true;
}

struct Name {  // of memory in another process
    int32_t pid, fd;
    uint64_t inode, nbytes;
    int32_t device;
};

int taken_over(const Name& name) {
    const string path = "/proc/" + std::to_string(name.pid) + "/fd/" + std::to_string(name.fd);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat found;
    if (fd >= 0 && (fstat(fd, &found) || found.st_ino != name.inode)) {
        close(fd);
        return -1;
    }
    return fd;
}

CUmemGenericAllocationHandle handle_of(Allocation one) {
    handles[++last_handle] = one;
    return last_handle;
}

}  // namespace

// What tests set and read, and what the double of torch's CUDA puts into streams.
extern "C" {

long cuda_double_get(const char* name) {
    const Locked locked;
    const string what(name);
    if (what == "n_open") {
        long n = 0;
        for (const auto& [_, one] : memories) n += one.is_imported;
        for (const auto& [_, one] : reservations) n += one.is_imported && !one.allowed.empty();
        return n;
    }
    if (what == "n_streams") return long(streams.size());
    if (what == "n_handles") return long(handles.size());
    if (what == "n_reserved") return long(reservations.size());
    if (what == "n_locked") {
        long n = 0;
        for (const auto& [_, one] : memories) n += one.kind == LOCKED;
        return n;
    }
    if (what == "n_mapped") {
        long n = 0;
        for (const auto& [_, one] : reservations) n += long(one.mappings.size());
        return n;
    }
    if (what == "contexts") {  // as bits
        long bits = 0;
        for (int n = 0; n < 16; n++) bits |= long(contexts()[n].is_active) << n;
        return bits;
    }
    return setting(what);
}

void cuda_double_set(const char* name, long value) {
    const Locked locked;
    setting(name) = value;
}

// Devices that this process sees from now on, by the machine's numbers: as CUDA_VISIBLE_DEVICES.
void cuda_double_see(const int* numbers, int n) {
    const Locked locked;
    state().visible.assign(numbers, numbers + n);
}

// All but memory, streams and events is as at the start. Work that waits is done first, while what it touches is there.
void cuda_double_reset() {
    const Locked locked;
    State& all = state();
    for (CUstream_st* stream : all_streams()) drain(*stream);
    all.settings = DEFAULTS;
    all.calls.clear(), all.fails.clear(), all.copies_of.clear(), all.broken.clear(), all.visible.clear();
    for (int n = 0; n < 16; n++) contexts()[n].is_active = false, contexts()[n].peers.clear();
}

long cuda_double_calls(const char* name) { return state().calls[name]; }
void cuda_double_forget_calls() {
    state().calls.clear();
    state().copies_of.clear();
}
void cuda_double_fail(const char* name, long nth, int status) {
    state().calls.erase(name);
    if (nth) state().fails[name] = {nth, status};
    else state().fails.erase(name);
}
long cuda_double_copies_of(uintptr_t base) { return state().copies_of[base]; }

// The rules that were broken, a line each, until the next call.
const char* cuda_double_broken() {
    static string said;
    const Locked locked;
    said = state().broken;
    state().broken.clear();
    return said.c_str();
}

uintptr_t cuda_double_allocate(size_t nbytes, int ordinal, int kind) {
    const Locked locked;
    return is_device(ordinal) ? allocate(nbytes, visible()[size_t(ordinal)], Kind(kind)) : 0;
}

int cuda_double_is_allowed(uintptr_t address, int ordinal) {
    const Locked locked;
    Memory* one = of(address);
    return one && one->allowed.count(visible()[size_t(ordinal)]);
}

// Whether another process has the memory open, or work that waits in a stream touches it.
int cuda_double_is_used(uintptr_t address) {
    const Locked locked;
    Memory* one = of(address);
    return one && ((one->fd >= 0 && is_open_elsewhere(one->fd)) || is_touched(*one));
}

int cuda_double_has_peer(int ordinal, int peer) { return int(contexts()[ordinal].peers.count(peer)); }

void cuda_double_put(CUstream handle, void (*call)(void*), void* argument) {
    const Locked locked;
    Work work{Work::CALL};
    work.call = [call, argument] { call(argument); };
    put(*stream_of(handle), std::move(work), us_of(0));
}

void cuda_double_drain(CUstream handle) {
    const Locked locked;
    if (CUstream_st* stream = stream_of(handle)) drain(*stream);
}

// All work goes, as of a device that has failed.
void cuda_double_drop_work() {
    const Locked locked;
    for (CUstream_st* stream : all_streams()) stream->work.clear();
}

// Devices.

// Not after a fork of a process that has called it.
CUresult cuInit(unsigned flags) {
    ENTER(FREE);
    static const pid_t first = getpid();
    return first != getpid() ? CUDA_ERROR_NOT_INITIALIZED : flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int* version) {
    ENTER(FREE);
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** said) {
    ENTER(FREE);
    static thread_local string text;
    text = "error " + std::to_string(error) + " of the double of CUDA";
    *said = text.c_str();
    return CUDA_SUCCESS;
}

CUresult cuGetProcAddress(const char* symbol, void** found, int, cuuint64_t, CUdriverProcAddressQueryResult* status) {
    ENTER(FREE);
    for (const char* suffix : {"_v3", "_v2", ""})
        if ((*found = dlsym(RTLD_DEFAULT, (string(symbol) + suffix).c_str())) != nullptr) break;
    if (status) *status = *found ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *found ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CUresult cuDeviceGetCount(int* n) {
    ENTER(FREE);
    *n = int(visible().size());
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    ENTER(FREE);
    DEVICE(ordinal);
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetName(char* name, int length, CUdevice device) {
    ENTER(FREE);
    DEVICE(device);
    snprintf(name, size_t(length), "double of a GPU");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
    ENTER(FREE);
    DEVICE(device);
    memcpy(uuid->bytes, "double-of-GPU\0\0", 15);
    uuid->bytes[15] = char(visible()[size_t(device)]);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char* name, int length, CUdevice device) {
    ENTER(FREE);
    DEVICE(device);
    snprintf(name, size_t(length), "0000:%02x:00.0", 0x10 + visible()[size_t(device)]);
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t* nbytes, CUdevice device) {
    ENTER(FREE);
    DEVICE(device);
    *nbytes = size_t(setting("memory"));
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
    ENTER(FREE);
    DEVICE(device);
    *value = attribute(which, device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
    ENTER(FREE);
    if (device == peer) broke("a device is asked for access to itself: the answer is no");
    *can = device != peer && !setting("apart");
    return CUDA_SUCCESS;
}

// Contexts.

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
    ENTER(NEEDS_DEVICE);
    DEVICE(device);
    *context = &contexts()[device];
    (*context)->is_active = true;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice) {
    ENTER(FREE);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
    ENTER(FREE);
    DEVICE(device);
    *flags = 0, *active = contexts()[device].is_active;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
    ENTER(FREE);
    *context = bound;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context) {
    ENTER(FREE);
    bound = context;
    return CUDA_SUCCESS;
}

static thread_local std::vector<CUcontext> pushed;

CUresult cuCtxPushCurrent(CUcontext context) {
    ENTER(FREE);
    pushed.push_back(bound);
    bound = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext* context) {
    ENTER(FREE);
    if (context) *context = bound;
    bound = pushed.empty() ? nullptr : pushed.back();
    if (!pushed.empty()) pushed.pop_back();
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
    ENTER(NEEDS_CONTEXT);
    *device = bound->ordinal;
    return CUDA_SUCCESS;
}

CUresult cuCtxGetFlags(unsigned* flags) {
    ENTER(NEEDS_CONTEXT);
    *flags = 0;
    return CUDA_SUCCESS;
}

// UCX asks cuGetProcAddress for it.
CUresult cuCtxSetFlags(unsigned) {
    ENTER(NEEDS_CONTEXT);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext context, unsigned long long* id) {
    ENTER(FREE);
    *id = 1 + static_cast<unsigned long long>((context ? context : bound)->ordinal);
    return CUDA_SUCCESS;
}

CUresult cuCtxSynchronize() {
    ENTER(UNSAFE | NEEDS_CONTEXT | NEEDS_DEVICE);
    for (CUstream_st* stream : all_streams())
        if (stream->context == bound) drain(*stream);
    return CUDA_SUCCESS;
}

CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
    ENTER(UNSAFE | NEEDS_CONTEXT);
    if (flags) return CUDA_ERROR_INVALID_VALUE;
    if (setting("apart")) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    return bound->peers.insert(peer->ordinal).second ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* wanted) {
    ENTER(FREE);
    if (setting("broken")) return CUresult(setting("broken"));
    std::swap(mode, *wanted);
    return CUDA_SUCCESS;
}

CUresult cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope) {
    ENTER(NEEDS_CONTEXT);
    setting("flushed") = target ? -1 : long(scope);
    return CUDA_SUCCESS;
}

// Memory.

CUresult cuMemAlloc(CUdeviceptr* address, size_t nbytes) {
    ENTER(UNSAFE | NEEDS_CONTEXT | NEEDS_DEVICE);
    *address = allocate(nbytes, visible()[size_t(bound->ordinal)], MALLOC);
    return *address ? CUDA_SUCCESS : nbytes ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemFree(CUdeviceptr address) {
    ENTER(UNSAFE);
    const auto found = memories.find(address);
    if (found == memories.end() || found->second.kind > POOL) return CUDA_ERROR_INVALID_VALUE;
    if (found->second.is_imported) broke("freed what another process allocated");
    else if (is_open_elsewhere(found->second.fd)) broke("exported memory was freed while another process has it open");
    if (is_touched(found->second))  // the driver waits
        for (CUstream_st* stream : all_streams()) drain(*stream);
    unmap_file(found->second);
    memories.erase(found);
    return CUDA_SUCCESS;
}

CUresult cuMemHostAlloc(void** address, size_t nbytes, unsigned) {
    ENTER(UNSAFE | NEEDS_CONTEXT | NEEDS_DEVICE);
    *address = reinterpret_cast<void*>(allocate(nbytes, visible()[size_t(bound->ordinal)], PINNED));
    return *address ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemHostRegister(void* address, size_t nbytes, unsigned) {
    ENTER(UNSAFE | NEEDS_CONTEXT);
    const uintptr_t base = uintptr_t(address);
    const auto after = memories.lower_bound(base + nbytes);
    if (after != memories.begin()) {
        const Memory& one = std::prev(after)->second;
        if (one.base + one.nbytes > base) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    }
    memories[base] = Memory{LOCKED, base, nbytes, visible()[size_t(bound->ordinal)]};
    return CUDA_SUCCESS;
}

CUresult cuMemHostUnregister(void* address) {
    ENTER(UNSAFE);
    const auto found = memories.find(uintptr_t(address));
    if (found == memories.end() || found->second.kind != LOCKED) return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    memories.erase(found);
    return CUDA_SUCCESS;
}

CUresult cuMemHostGetDevicePointer(CUdeviceptr* seen, void* address, unsigned flags) {
    ENTER(FREE);
    Memory* one = of(uintptr_t(address));
    if (flags || one == nullptr || one->kind < PINNED) return CUDA_ERROR_INVALID_VALUE;
    *seen = uintptr_t(address);
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr* base, size_t* nbytes, CUdeviceptr address) {
    ENTER(FREE);
    Memory* one = of(address);
    if (one == nullptr) return CUDA_ERROR_NOT_FOUND;
    const auto* mapped = one->kind == VIRTUAL ? mapping_at(*one, address) : nullptr;
    if (base) *base = mapped ? mapped->first : one->base;
    if (nbytes) *nbytes = mapped ? mapped->second.nbytes : one->nbytes;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute which, CUdeviceptr address) {
    ENTER(FREE);
    uint64_t value = 0;
    size_t nbytes = 0;
    if (!attribute(which, address, &value, &nbytes)) return CUDA_ERROR_INVALID_VALUE;
    memcpy(data, &value, nbytes);
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttributes(unsigned n, CUpointer_attribute* which, void** data, CUdeviceptr address) {
    ENTER(FREE);
    for (unsigned at = 0; at < n; at++) {
        uint64_t value = 0;
        size_t nbytes = 4;
        if (!attribute(which[at], address, &value, &nbytes)) value = 0;
        memcpy(data[at], &value, nbytes);
    }
    return CUDA_SUCCESS;
}

CUresult cuPointerSetAttribute(const void*, CUpointer_attribute, CUdeviceptr) {
    ENTER(FREE);
    return CUDA_SUCCESS;
}

CUresult cuMemRangeGetAttribute(void*, size_t, CUmem_range_attribute, CUdeviceptr, size_t) {
    ENTER(FREE);
    return CUDA_ERROR_NOT_SUPPORTED;
}

// Memory of other processes.

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
    ENTER(FREE);
    const Memory* found = within(memories, address, 1);  // its handle opens as the base, wherever the address is
    if (found == nullptr) return CUDA_ERROR_INVALID_VALUE;
    const Memory& one = *found;
    if (one.is_imported) broke("a handle is taken of memory that another process exported");
    if (one.kind != MALLOC) return CUDA_ERROR_INVALID_VALUE;
    struct stat file;
    fstat(one.fd, &file);
    const Name name{getpid(), one.fd, file.st_ino, one.nbytes, one.device};
    memset(handle, 0, sizeof *handle);
    memcpy(handle, &name, sizeof name);
    return CUDA_SUCCESS;
}

CUresult cuIpcOpenMemHandle(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
    ENTER(UNSAFE | NEEDS_CONTEXT | NEEDS_DEVICE);
    if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
    Name name;
    memcpy(&name, &handle, sizeof name);
    if (name.pid == getpid()) {
        broke("a process opens a handle of its own");
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    for (const auto& [_, one] : memories)
        if (one.is_imported && one.opener == bound && !memcmp(&one.handle, &handle, sizeof handle)) {
            broke("a handle is opened a second time");
            return CUDA_ERROR_ALREADY_MAPPED;
        }
    if (setting("apart") && visible()[size_t(bound->ordinal)] != name.device) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    const int fd = taken_over(name);
    if (fd < 0) return CUDA_ERROR_INVALID_HANDLE;  // its owner has ended, or freed it
    flock(fd, LOCK_SH);
    const uintptr_t base = map_file(fd, name.nbytes);
    if (!base) return CUDA_ERROR_INVALID_HANDLE;
    Memory one{MALLOC, base, name.nbytes, name.device, fd, true, handle, bound};
    memories[base] = one;
    *address = base;
    return CUDA_SUCCESS;
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address) {
    ENTER(UNSAFE);
    const auto found = memories.find(address);
    if (found == memories.end() || !found->second.is_imported) return CUDA_ERROR_INVALID_VALUE;
    if (found->second.opener != bound) broke("closed in another context than it was opened in");
    if (is_touched(found->second, true)) broke("closed while a copy writes it");
    unmap_file(found->second);
    memories.erase(found);
    return CUDA_SUCCESS;
}

// Memory of cuMemCreate.

CUresult cuMemGetAllocationGranularity(size_t* unit, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
    ENTER(FREE);
    *unit = 2 << 20;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t nbytes, const CUmemAllocationProp* prop, unsigned long long) {
    ENTER(UNSAFE | NEEDS_DEVICE);
    unsigned char rest = 0;
    for (unsigned char byte : prop->allocFlags.reserved) rest |= byte;
    if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        !is_device(prop->location.id) || prop->win32HandleMetaData || prop->allocFlags.usage || rest)
        return CUDA_ERROR_INVALID_VALUE;
    const int types = prop->requestedHandleTypes;
    if (types & CU_MEM_HANDLE_TYPE_FABRIC && setting("fabric_status")) return CUresult(setting("fabric_status"));
    if (n_used() + nbytes > size_t(setting("memory"))) return CUDA_ERROR_OUT_OF_MEMORY;
    const int fd = new_file(nbytes);
    if (fd < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    setting("handle_types") = types;
    *handle = handle_of({fd, nbytes, visible()[size_t(prop->location.id)], types, false});
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* prop, CUmemGenericAllocationHandle handle) {
    ENTER(FREE);
    HANDLE(handle);
    memset(prop, 0, sizeof *prop);
    prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop->requestedHandleTypes = CUmemAllocationHandleType(found->second.types);
    prop->location = {CU_MEM_LOCATION_TYPE_DEVICE, {ordinal_of(found->second.device)}};
    prop->allocFlags.gpuDirectRDMACapable = 1;
    return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
    ENTER(UNSAFE);
    Memory* reserved = within(reservations, uintptr_t(address), 1);
    const auto* mapped = reserved ? mapping_at(*reserved, uintptr_t(address)) : nullptr;
    if (mapped == nullptr) return CUDA_ERROR_INVALID_VALUE;
    Allocation one = mapped->second;
    one.fd = dup(one.fd);
    *handle = handle_of(one);
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    ENTER(UNSAFE);
    HANDLE(handle);
    close(found->second.fd);
    handles.erase(found);
    return CUDA_SUCCESS;
}

CUresult cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type, unsigned long long) {
    ENTER(UNSAFE);
    HANDLE(handle);
    if (!(found->second.types & type)) return CUDA_ERROR_INVALID_VALUE;
    const int fd = dup(found->second.fd);
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        *static_cast<int*>(out) = fd;
        return fd < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    }
    struct stat file;
    fstat(fd, &file);
    const Name name{getpid(), fd, file.st_ino, found->second.nbytes, found->second.device};  // `fd` for good
    memset(out, 0, 64);
    memcpy(out, &name, sizeof name);
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* what, CUmemAllocationHandleType type) {
    ENTER(UNSAFE);
    Name name{};
    int fd;
    if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
        memcpy(&name, what, sizeof name);
        fd = taken_over(name);
    } else {
        fd = dup(int(intptr_t(what)));
    }
    char link[64] = "";
    if (fd >= 0) (void)!readlink(("/proc/self/fd/" + std::to_string(fd)).c_str(), link, sizeof link - 1);
    if (strncmp(link, "/memfd:cuda-double", 18)) {
        if (fd >= 0) close(fd);
        return CUDA_ERROR_INVALID_VALUE;
    }
    struct stat file;
    fstat(fd, &file);
    *handle = handle_of({fd, size_t(file.st_size), name.device, 0, true});
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* address, size_t nbytes, size_t, CUdeviceptr, unsigned long long) {
    ENTER(UNSAFE);
    void* at = mmap(nullptr, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = uintptr_t(at);
    reservations[*address] = Memory{VIRTUAL, uintptr_t(at), nbytes, 0};
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
    ENTER(UNSAFE);
    const auto found = reservations.find(address);
    if (found == reservations.end() || found->second.nbytes != nbytes) return CUDA_ERROR_INVALID_VALUE;
    if (!found->second.mappings.empty()) broke("addresses are freed that are mapped");
    munmap(reinterpret_cast<void*>(address), nbytes);
    reservations.erase(found);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
    ENTER(UNSAFE);
    Memory* reserved = within(reservations, address, nbytes);
    const auto found = handles.find(handle);
    if (reserved == nullptr || found == handles.end() || nbytes > found->second.nbytes) return CUDA_ERROR_INVALID_VALUE;
    for (const auto& [at, one] : reserved->mappings)
        if (at < address + nbytes && address < at + one.nbytes) return CUDA_ERROR_ALREADY_MAPPED;
    mmap(reinterpret_cast<void*>(address), nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, found->second.fd, 0);
    Allocation one = found->second;
    one.fd = dup(one.fd), one.nbytes = nbytes;
    reserved->mappings[address] = one;
    reserved->is_imported = one.is_imported, reserved->device = one.device;
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t nbytes) {
    ENTER(UNSAFE);
    Memory* reserved = within(reservations, address, nbytes);
    const auto found = reserved ? reserved->mappings.find(address) : decltype(reserved->mappings.end()){};
    if (reserved == nullptr || found == reserved->mappings.end() || found->second.nbytes != nbytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (is_touched(*reserved, true)) broke("unmapped while a copy writes it");
    mmap(reinterpret_cast<void*>(address), nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    close(found->second.fd);
    reserved->mappings.erase(found);
    reserved->allowed.clear();
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t nbytes, const CUmemAccessDesc* access, size_t n) {
    ENTER(UNSAFE);
    Memory* reserved = within(reservations, address, nbytes);
    if (reserved == nullptr) return CUDA_ERROR_INVALID_VALUE;
    size_t held = 0;
    for (const auto& [at, one] : reserved->mappings)
        if (at >= address && at < address + nbytes) held += one.nbytes;
    if (held != nbytes) return CUDA_ERROR_INVALID_VALUE;
    for (size_t at = 0; at < n; at++) {
        const int device = visible()[size_t(access[at].location.id)];
        if (setting("apart") && device != reserved->device) return CUDA_ERROR_NOT_SUPPORTED;
        reserved->allowed.insert(device);
    }
    return CUDA_SUCCESS;
}

// Streams.

CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) {
    ENTER(UNSAFE | NEEDS_CONTEXT | NEEDS_DEVICE);
    if (setting("strict") && flags != CU_STREAM_NON_BLOCKING) broke("a stream that waits for the default one");
    auto made = std::make_shared<CUstream_st>(CUstream_st{bound});
    *stream = made.get();
    streams[*stream] = std::move(made);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned flags) { return cuStreamCreateWithPriority(stream, flags, 0); }

CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    ENTER(NEEDS_CONTEXT);
    *least = 0, *greatest = -5;
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream handle) {
    ENTER(UNSAFE);
    FIND(streams, handle, CUDA_ERROR_INVALID_HANDLE);
    if (!found->second->work.empty()) {
        if (setting("strict")) broke("a stream is given back with work in it");
        drain(*found->second);
    }
    streams.erase(found);
    return CUDA_SUCCESS;
}

CUresult cuStreamSynchronize(CUstream handle) {
    ENTER(UNSAFE | NEEDS_DEVICE);
    STREAM(handle);
    drain(*stream);
    return CUDA_SUCCESS;
}

CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned) {
    ENTER(NEEDS_DEVICE);
    STREAM(handle);
    EVENT(event);
    Work work{Work::WAIT};
    work.event = found->second, work.version = asked.recorded;
    put(*stream, std::move(work));
    return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned) {
    ENTER(NEEDS_CONTEXT | NEEDS_DEVICE);
    auto made = std::make_shared<CUevent_st>(CUevent_st{bound});
    *event = made.get();
    events[*event] = std::move(made);
    return CUDA_SUCCESS;
}

CUresult cuEventDestroy(CUevent event) {
    ENTER(UNSAFE);
    return events.erase(event) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CUresult cuEventRecord(CUevent event, CUstream handle) {
    ENTER(NEEDS_DEVICE);
    STREAM(handle);
    EVENT(event);
    if (asked.context != stream->context) {
        broke("an event is recorded in a stream of another device");
        return CUDA_ERROR_INVALID_HANDLE;
    }
    Work work{Work::RECORD};
    work.event = found->second;
    if (!stream->recording) asked.in = stream;
    work.version = stream->recording ? asked.done : ++asked.recorded;
    put(*stream, std::move(work));
    return CUDA_SUCCESS;
}

// As it was before the question, which moves the stream on.
CUresult cuEventQuery(CUevent event) {
    ENTER(UNSAFE | NEEDS_DEVICE);
    EVENT(event);
    const bool was = asked.done >= asked.recorded;
    if (!was)
        while (asked.done < asked.recorded && step(*asked.in)) {
        }
    return was || (setting("timed") && asked.done >= asked.recorded) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event) {
    ENTER(UNSAFE | NEEDS_DEVICE);
    EVENT(event);
    setting("n_waits")++;
    if (setting("timed") && asked.due > now()) usleep(useconds_t((asked.due - now()) * 1e6));
    while (asked.done < asked.recorded && step(*asked.in, true)) {
    }
    return CUDA_SUCCESS;
}

// Copies.

CUresult cuMemcpyAsync(CUdeviceptr dst, CUdeviceptr src, size_t nbytes, CUstream stream) {
    ENTER(NEEDS_DEVICE | NEEDS_CONTEXT);
    return copy(dst, src, nbytes, stream);
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr dst, const void* src, size_t nbytes, CUstream stream) {
    ENTER(NEEDS_DEVICE | NEEDS_CONTEXT);
    return copy(dst, uintptr_t(src), nbytes, stream);
}

CUresult cuMemcpyDtoDAsync(CUdeviceptr dst, CUdeviceptr src, size_t nbytes, CUstream stream) {
    ENTER(NEEDS_DEVICE | NEEDS_CONTEXT);
    return copy(dst, src, nbytes, stream);
}

CUresult cuMemcpyHtoD(CUdeviceptr dst, const void* src, size_t nbytes) {
    ENTER(UNSAFE | NEEDS_DEVICE | NEEDS_CONTEXT);
    const CUresult status = copy(dst, uintptr_t(src), nbytes, nullptr);
    if (!status) drain(*stream_of(nullptr));
    return status;
}

// In no order, and with a NULL stream not at all. CUDA 12.8 had it under this name with one argument more.
#undef cuMemcpyBatchAsync
CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* dst, CUdeviceptr* src, size_t* nbytes, size_t n, CUmemcpyAttributes* attributes, size_t* firsts, size_t n_attributes, CUstream stream) {
    ENTER(NEEDS_DEVICE | NEEDS_CONTEXT);
    if (stream == nullptr || n_attributes != 1 || firsts[0] != 0) return CUDA_ERROR_INVALID_VALUE;
    if (attributes->srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM || attributes->srcLocHint.id || attributes->dstLocHint.id)
        return CUDA_ERROR_INVALID_VALUE;
    if (CUstream_st* to = stream_of(stream); to == nullptr || to->context != bound) {
        broke("a batch in another device's stream");
        return CUDA_ERROR_INVALID_HANDLE;
    }
    for (size_t at = n; at-- > 0;) {
        if (nbytes[at] == 0) broke("a copy of no bytes");
        if (const CUresult status = copy(dst[at], src[at], nbytes[at], stream)) return status;
        if (setting("breaks_in_batch")) setting("broken") = setting("breaks_in_batch");
        if (setting("batch_status")) return CUresult(setting("batch_status"));
    }
    return CUDA_SUCCESS;
}

CUresult cuMemcpyBatchAsync(CUdeviceptr* dst, CUdeviceptr* src, size_t* nbytes, size_t n, CUmemcpyAttributes* attributes, size_t* firsts, size_t n_attributes, size_t* fault, CUstream stream) {
    *fault = ~size_t{0};
    return cuMemcpyBatchAsync_v2(dst, src, nbytes, n, attributes, firsts, n_attributes, stream);
}
[[maybe_unused]] const PFN_cuMemcpyBatchAsync_v12080 OLD = &cuMemcpyBatchAsync;

// Kernels.

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
    ENTER(UNSAFE | NEEDS_DEVICE | NEEDS_CONTEXT);
    const char* text = static_cast<const char*>(image);
    if (strcmp(text, MAGIC)) return CUDA_ERROR_INVALID_IMAGE;
    const string target = text + HEAD_NBYTES;
    *module = new CUmod_st{target, text + HEAD_NBYTES + target.size() + 1, bound};
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    ENTER(NEEDS_DEVICE | NEEDS_CONTEXT);
    if (strcmp(name, "pdstage_copy")) return CUDA_ERROR_NOT_FOUND;
    *function = new CUfunc_st{module};
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute, int) {
    ENTER(NEEDS_DEVICE | NEEDS_CONTEXT);
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned, CUstream handle, void** params, void**) {
    ENTER(NEEDS_DEVICE | NEEDS_CONTEXT);
    STREAM(handle);
    CUmod_st* module = function->module;
    if (module->context != stream->context || bound != stream->context) {
        broke("a kernel is launched in a stream of another device");
        return CUDA_ERROR_INVALID_HANDLE;
    }
    if (!load(*module)) return CUDA_ERROR_INVALID_IMAGE;
    const char* from = static_cast<const char*>(params[0]);
    std::vector<char> held(from, from + module->params_nbytes);
    const size_t nbytes = setting("timed") ? module->nbytes(from) : 0;
    Work work{Work::CALL};
    work.call = [module, grid, threads, nbytes, held = std::move(held)] {
        if (nbytes <= size_t(setting("moves"))) launch(module, held, grid, threads);
    };
    put(*stream, std::move(work), us_of(nbytes));
    return CUDA_SUCCESS;
}

// Recordings, of which nothing is kept.

CUresult cuStreamBeginCapture(CUstream handle, CUstreamCaptureMode asked) {
    ENTER(NEEDS_DEVICE);
    CUstream_st* stream = handle ? stream_of(handle) : nullptr;
    if (stream == nullptr || stream->recording) return CUDA_ERROR_ILLEGAL_STATE;
    stream->recording = std::make_unique<Recording>(Recording{asked});
    return CUDA_SUCCESS;
}

CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus* status) {
    ENTER(FREE);
    STREAM(handle);
    *status = stream->recording ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

CUresult cuStreamEndCapture(CUstream handle, CUgraph* graph) {
    ENTER(FREE);
    CUstream_st* stream = stream_of(handle);
    if (stream == nullptr || !stream->recording) return CUDA_ERROR_ILLEGAL_STATE;
    const auto recording = std::move(stream->recording);
    if (recording->is_spoilt) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    *graph = nullptr;
    return CUDA_SUCCESS;
}

}  // extern "C"
