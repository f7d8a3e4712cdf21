// What the processor can do beyond the least of its kind. One binary serves them all, so this is asked as it is loaded.
//
// The processor itself is asked: compilers' __builtin_cpu_supports needs a runtime library that not all of them have,
// and says no, without an error, where it is a stub.
#pragma once

#include <initializer_list>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#endif

namespace pdstage {

// Vectors count only if the system saves their registers too.
struct Processor {
    bool amd = false;
    bool avx = false;
};

inline Processor find_processor() {
    Processor found;
#if defined(__x86_64__) && defined(__GNUC__)
    unsigned a = 0;
    unsigned b = 0;
    unsigned c = 0;
    unsigned d = 0;
    const auto has = [](unsigned word, std::initializer_list<int> bits) {
        for (const int bit : bits)
            if ((word >> bit & 1U) == 0) return false;
        return true;
    };
    if (__get_cpuid(0, &a, &b, &c, &d) == 0) return found;
    found.amd = b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || !has(c, {27, 28})) return found;  // XGETBV, AVX
    unsigned saved = 0;
    unsigned high = 0;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    found.avx = has(saved, {1, 2});
#endif
    return found;
}

inline const Processor kProcessor = find_processor();

}  // namespace pdstage
