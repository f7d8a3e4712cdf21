// One launch of a kernel of csrc/cuda, CTA after CTA. Returns 0, or what went wrong as bits: 1 misaligned, 2 a missed
// barrier.
#include PDSTAGE_SOURCE

namespace {
const pdstage::Params* argument;
}

extern "C" const size_t pdstage_params_nbytes = sizeof(pdstage::Params);

// What a launch moves, as its tables are now.
extern "C" size_t pdstage_nbytes(const void* params) {
    const auto& given = *static_cast<const pdstage::Params*>(params);
    size_t nbytes = 0;
    for (size_t n = 0; n < given.n_groups; n++) {
        const pdstage::Extent extent = pdstage::extent_of(given, given.groups[n], pdstage::LANES);
        nbytes += extent.tiles ? extent.nbytes : 0;
    }
    return nbytes;
}

extern "C" int pdstage_launch(const void* params, unsigned grid, unsigned threads) {
    argument = static_cast<const pdstage::Params*>(params);
    gridDim.x = grid;
    blockDim.x = threads;
    cpu::misaligned = cpu::uneven = cpu::deadlock = false;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) cpu::run_cta(threads, [] { pdstage_copy(*argument); });
    return cpu::misaligned + 2 * cpu::uneven + 4 * cpu::deadlock;
}
