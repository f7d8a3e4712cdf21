// libcuda as far as batches of copies go, declared by NVIDIA's own header: 12.8's call alone, or 13.0's beside it.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstring>

#undef cuMemcpyBatchAsync

namespace {

CUresult copy(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count, CUmemcpyAttributes* attrs,
              size_t* firsts, size_t n_attrs, CUstream stream) {
    const bool asked = n_attrs == 1 && firsts[0] == 0 && attrs[0].srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM &&
                       attrs[0].flags == CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE && attrs[0].srcLocHint.id == 0 &&
                       attrs[0].dstLocHint.id == 0;
    if (!asked || stream != reinterpret_cast<CUstream>(0x1234)) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        std::memcpy(reinterpret_cast<void*>(dsts[i]), reinterpret_cast<void*>(srcs[i]), sizes[i]);
    return CUDA_SUCCESS;
}

}  // namespace

extern "C" CUresult cuMemcpyBatchAsync(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                                       CUmemcpyAttributes* attrs, size_t* firsts, size_t n_attrs, size_t* fault,
                                       CUstream stream) {
    *fault = ~size_t{0};
    return copy(dsts, srcs, sizes, count, attrs, firsts, n_attrs, stream);
}
[[maybe_unused]] const PFN_cuMemcpyBatchAsync_v12080 kOld = &cuMemcpyBatchAsync;

#ifdef HAS_V13
extern "C" CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* dsts, CUdeviceptr* srcs, size_t* sizes, size_t count,
                                          CUmemcpyAttributes* attrs, size_t* firsts, size_t n_attrs, CUstream stream) {
    return copy(dsts, srcs, sizes, count, attrs, firsts, n_attrs, stream);
}
[[maybe_unused]] const PFN_cuMemcpyBatchAsync_v13000 kNew = &cuMemcpyBatchAsync_v2;
#endif
