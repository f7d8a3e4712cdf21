// libcuda as far as memory of cuMemCreate goes, declared by NVIDIA's own header: files, mapped where addresses are reserved.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>

#undef cuCtxGetDevice
#undef cuMemGetAddressRange

namespace {

struct Allocation {
    int fd;
    size_t size;
};
std::map<CUmemGenericAllocationHandle, Allocation> handles;  // one for each that is to be released
std::map<CUdeviceptr, Allocation> mappings;
CUmemGenericAllocationHandle next = 1ull << 40;  // more than an int, as the driver's are

CUmemGenericAllocationHandle handle_of(Allocation one) {
    handles[++next] = one;
    return next;
}

bool is_as_asked(const CUmemAllocationProp* prop) {
    const CUmemAllocationProp& p = *prop;
    unsigned char rest = 0;
    for (unsigned char byte : p.allocFlags.reserved) rest |= byte;
    return p.type == CU_MEM_ALLOCATION_TYPE_PINNED && p.location.type == CU_MEM_LOCATION_TYPE_DEVICE &&
           p.location.id == 1 && !p.win32HandleMetaData && p.allocFlags.gpuDirectRDMACapable == 1 &&
           p.allocFlags.compressionType == CU_MEM_ALLOCATION_COMP_NONE && !p.allocFlags.usage && !rest;
}

}  // namespace

extern "C" {

// What a test sets and reads.
int fabric_status = 0, has_fabric = 1, has_any = 1, handle_types = -1, n_reserved = 0, has_attributes = 1;
int n_handles() { return static_cast<int>(handles.size()); }
int n_mapped() { return static_cast<int>(mappings.size()); }

CUresult cuCtxGetDevice(CUdevice* device) {
    *device = 1;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice device) {
    *value = device == 1 && (which == CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED ||
                             which == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED ||
                             (which == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED && has_any) ||
                             (which == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED && has_fabric));
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t* unit, const CUmemAllocationProp* prop,
                                       CUmemAllocationGranularity_flags which) {
    *unit = 2 << 20;
    return is_as_asked(prop) && which == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* prop,
                     unsigned long long flags) {
    if (flags || size % (2 << 20) || !is_as_asked(prop)) return CUDA_ERROR_INVALID_VALUE;
    if (prop->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC && fabric_status) return CUresult(fabric_status);
    handle_types = prop->requestedHandleTypes;
    int fd = memfd_create("virtual-memory", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size)) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = handle_of({fd, size});
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    if (!handles.count(handle)) return CUDA_ERROR_INVALID_VALUE;
    close(handles[handle].fd);
    handles.erase(handle);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment, CUdeviceptr address,
                             unsigned long long flags) {
    void* found = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (alignment || address || flags || found == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
    *ptr = reinterpret_cast<CUdeviceptr>(found);
    n_reserved++;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) {
    n_reserved--;
    return munmap(reinterpret_cast<void*>(ptr), size) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
    if (offset || flags || !handles.count(handle) || size != handles[handle].size) return CUDA_ERROR_INVALID_VALUE;
    void* at = reinterpret_cast<void*>(ptr);
    if (mmap(at, size, PROT_NONE, MAP_SHARED | MAP_FIXED, handles[handle].fd, 0) != at) return CUDA_ERROR_INVALID_VALUE;
    mappings[ptr] = {dup(handles[handle].fd), size};
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
    if (!mappings.count(ptr) || mappings[ptr].size != size) return CUDA_ERROR_INVALID_VALUE;
    close(mappings[ptr].fd);
    mappings.erase(ptr);
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc, size_t count) {
    const bool asked = count == 1 && desc->location.type == CU_MEM_LOCATION_TYPE_DEVICE && desc->location.id == 1 &&
                       desc->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    if (!asked || mprotect(reinterpret_cast<void*>(ptr), size, PROT_READ | PROT_WRITE)) return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* start, size_t* size, CUdeviceptr at) {
    for (const auto& [base, one] : mappings) {
        if (base <= at && at < base + one.size) {
            *start = base, *size = one.size;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_NOT_FOUND;
}

CUresult cuPointerGetAttribute(void* data, CUpointer_attribute which, CUdeviceptr at) {
    CUdeviceptr start;
    size_t size;
    const CUresult found = cuMemGetAddressRange_v2(&start, &size, at);
    if (found != CUDA_SUCCESS || !has_attributes) return CUDA_ERROR_INVALID_VALUE;
    if (which == CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR) *static_cast<CUdeviceptr*>(data) = start;
    else if (which == CU_POINTER_ATTRIBUTE_MAPPING_SIZE) *static_cast<size_t*>(data) = size;
    else if (which == CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES) *static_cast<unsigned*>(data) = handle_types;
    else return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
    const auto at = reinterpret_cast<CUdeviceptr>(address);
    for (const auto& [base, one] : mappings) {
        if (base <= at && at < base + one.size) {
            *handle = handle_of({dup(one.fd), one.size});
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemExportToShareableHandle(void* shared, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
    if (flags || !handles.count(handle)) return CUDA_ERROR_INVALID_VALUE;
    int fd = dup(handles[handle].fd);
    if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
        *static_cast<int*>(shared) = fd;
    } else if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
        auto* fabric = static_cast<CUmemFabricHandle*>(shared);
        std::memset(fabric->data, 0xa5, sizeof fabric->data);
        fabric->data[0] = 0;
        std::memcpy(fabric->data + sizeof fabric->data - sizeof fd, &fd, sizeof fd);
    } else {
        return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* shared,
                                        CUmemAllocationHandleType type) {
    int fd = static_cast<int>(reinterpret_cast<intptr_t>(shared));
    if (type == CU_MEM_HANDLE_TYPE_FABRIC) {
        const auto* fabric = static_cast<const CUmemFabricHandle*>(shared);
        if (fabric->data[0] || fabric->data[1] != 0xa5) return CUDA_ERROR_INVALID_VALUE;
        std::memcpy(&fd, fabric->data + sizeof fabric->data - sizeof fd, sizeof fd);
    }
    const off_t size = lseek(fd, 0, SEEK_END);
    if (size < 0) return CUDA_ERROR_INVALID_VALUE;
    *handle = handle_of({dup(fd), static_cast<size_t>(size)});
    return CUDA_SUCCESS;
}

}  // extern "C"

[[maybe_unused]] const PFN_cuCtxGetDevice_v2000 kDevice = &cuCtxGetDevice;
[[maybe_unused]] const PFN_cuDeviceGetAttribute_v2000 kAttribute = &cuDeviceGetAttribute;
[[maybe_unused]] const PFN_cuMemGetAllocationGranularity_v10020 kGranularity = &cuMemGetAllocationGranularity;
[[maybe_unused]] const PFN_cuMemCreate_v10020 kCreate = &cuMemCreate;
[[maybe_unused]] const PFN_cuMemRelease_v10020 kRelease = &cuMemRelease;
[[maybe_unused]] const PFN_cuMemAddressReserve_v10020 kReserve = &cuMemAddressReserve;
[[maybe_unused]] const PFN_cuMemAddressFree_v10020 kFree = &cuMemAddressFree;
[[maybe_unused]] const PFN_cuMemMap_v10020 kMap = &cuMemMap;
[[maybe_unused]] const PFN_cuMemUnmap_v10020 kUnmap = &cuMemUnmap;
[[maybe_unused]] const PFN_cuMemSetAccess_v10020 kAccess = &cuMemSetAccess;
[[maybe_unused]] const PFN_cuMemGetAddressRange_v3020 kRange = &cuMemGetAddressRange_v2;
[[maybe_unused]] const PFN_cuPointerGetAttribute_v4000 kPointer = &cuPointerGetAttribute;
[[maybe_unused]] const PFN_cuMemRetainAllocationHandle_v11000 kRetain = &cuMemRetainAllocationHandle;
[[maybe_unused]] const PFN_cuMemExportToShareableHandle_v10020 kExport = &cuMemExportToShareableHandle;
[[maybe_unused]] const PFN_cuMemImportFromShareableHandle_v10020 kImport = &cuMemImportFromShareableHandle;
