// Every version of the conversions that this processor can run gives the bits of the plain one, on every bf16 value.
//
// Ends 0, naming the versions it ran, unless a byte is wrong. Memory is of exact size, for sanitizers to watch.
#include "host/convert.hpp"

#include <cstdio>
#include <random>
#include <vector>

namespace {

using namespace pdstage;

using Encode = decltype(&detail::encode);
using Decode = decltype(&detail::decode);

struct Version {
    const char* name;
    Encode encode;
    Decode decode;
};

std::vector<Version> versions() {
    std::vector<Version> found = {{"chosen", detail::kEncode, detail::kDecode}};
#if defined(__x86_64__) && defined(__GNUC__)
    if (kProcessor.avx2) found.push_back({"avx2", detail::encode_avx2, detail::decode_avx2});
    if (kProcessor.avx512) found.push_back({"avx512", detail::encode_avx512, detail::decode_avx512});
#endif
    return found;
}

bool same(const Version& version, Kind kind, std::int64_t n, const std::vector<Byte>& values) {
    const auto n_cells = static_cast<std::int64_t>(values.size()) / (2 * n);
    for (std::int64_t cell = 0; cell < n_cells; ++cell) {
        const std::vector<Byte> in(values.begin() + cell * 2 * n, values.begin() + (cell + 1) * 2 * n);
        const auto width = static_cast<std::size_t>(n + detail::scales_nbytes(kind, n));
        std::vector<Byte> want(width), found(width), back(in.size()), found_back(in.size());
        detail::encode(kind, Holds::kBoth, 0.1F, in.data(), n, want.data());
        version.encode(kind, Holds::kBoth, 0.1F, in.data(), n, found.data());
        if (want != found) return false;
        detail::decode(kind, 0.1F, want.data(), want.data() + n, n, back.data());
        version.decode(kind, 0.1F, want.data(), want.data() + n, n, found_back.data());
        if (back != found_back) return false;
    }
    return true;
}

}  // namespace

int main() {
    std::vector<Byte> values(4 * 65536);  // in order, then as chance has it
    std::mt19937 random(5);
    for (std::uint32_t i = 0; i < 131072; ++i) {
        const std::uint32_t bits = i < 65536 ? i : random();
        values[2 * i] = static_cast<Byte>(bits);
        values[2 * i + 1] = static_cast<Byte>(bits >> 8);
    }
    for (const Version& version : versions()) {
        for (const Kind kind :
             {Kind::kTensorDivide, Kind::kTensorBf16, Kind::kTokenHead, Kind::kMxFloor, Kind::kMxCeil})
            for (const std::int64_t n : {32, 96, 128})
                if (!same(version, kind, n, values)) {
                    std::printf("wrong: %s, kind %d, cells of %d\n", version.name, static_cast<int>(kind),
                                static_cast<int>(n));
                    return 1;
                }
        std::printf("%s\n", version.name);
    }
    return 0;
}
