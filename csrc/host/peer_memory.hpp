// Writes into another process's memory on the same host: with process_vm_writev(2), or by a plain copy if it is
// mapped.
//
// The kernel takes at most IOV_MAX spans per call, cuts a call at about 2 GiB, and may stop early at a page it
// cannot write: it then returns the bytes it did copy and the cause only on the next call. write_peer() hides all
// three. Must not use Python or know what descriptors mean: the caller proves the peer's identity.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pdstage {

// Bytes that landed, in span order, and the errno that stopped the write (0: all landed).
struct WriteResult {
    std::int64_t written;
    int error;
};

namespace detail {

// UIO_MAXIOV of the kernel; <climits> has IOV_MAX only under some feature macros.
inline constexpr std::size_t kMaxSpans = 1024;

inline ssize_t write_spans([[maybe_unused]] pid_t pid, [[maybe_unused]] const iovec* local,
                           [[maybe_unused]] const iovec* remote, [[maybe_unused]] std::size_t n) {
#ifdef __linux__
    for (;;) {
        const ssize_t copied = process_vm_writev(pid, local, n, remote, n, 0);
        if (copied >= 0 || errno != EINTR) return copied;
    }
#else
    errno = ENOSYS;
    return -1;
#endif
}

}  // namespace detail

// Copies span i of this process, [src[i], src[i] + nbytes[i]), to address dst[i] of process `pid`, for i in [0, n)
// in order. Spans with nbytes <= 0 are skipped. Stops at the first byte that cannot be copied. Spans that are adjacent
// on both sides are joined, since the kernel pins the peer's pages anew for each span.
inline WriteResult write_peer(pid_t pid, const std::int64_t* src, const std::int64_t* dst, const std::int64_t* nbytes,
                              std::size_t n) {
    std::array<iovec, detail::kMaxSpans> local;
    std::array<iovec, detail::kMaxSpans> remote;
    std::int64_t written = 0;
    std::size_t next = 0;
    while (next < n) {
        std::size_t count = 0;
        std::int64_t local_end = 0;
        std::int64_t remote_end = 0;
        for (; next < n; ++next) {
            if (nbytes[next] <= 0) continue;
            const auto length = static_cast<std::size_t>(nbytes[next]);
            if (count > 0 && src[next] == local_end && dst[next] == remote_end) {
                local[count - 1].iov_len += length;
                remote[count - 1].iov_len += length;
            } else {
                if (count == detail::kMaxSpans) break;
                local[count] = {reinterpret_cast<void*>(static_cast<std::uintptr_t>(src[next])), length};
                remote[count] = {reinterpret_cast<void*>(static_cast<std::uintptr_t>(dst[next])), length};
                ++count;
            }
            local_end = src[next] + nbytes[next];
            remote_end = dst[next] + nbytes[next];
        }

        std::size_t first = 0;
        while (first < count) {
            const ssize_t copied = detail::write_spans(pid, &local[first], &remote[first], count - first);
            if (copied < 0) return {written, errno};
            if (copied == 0)
                return {written, EFAULT};  // cannot happen by the manual page; must not become an endless loop
            written += copied;
            auto rest = static_cast<std::size_t>(copied);
            while (first < count && rest >= local[first].iov_len) rest -= local[first++].iov_len;
            if (rest > 0) {
                for (iovec* span : {&local[first], &remote[first]}) {
                    span->iov_base = static_cast<char*>(span->iov_base) + rest;
                    span->iov_len -= rest;
                }
            }
        }
    }
    return {written, 0};
}

// Copies span i, [src[i], src[i] + nbytes[i]), to dst[i] of this same process, for i in [0, n) in order.
inline void copy_spans(const std::int64_t* src, const std::int64_t* dst, const std::int64_t* nbytes, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        if (nbytes[i] <= 0) continue;
        std::memmove(reinterpret_cast<void*>(static_cast<std::uintptr_t>(dst[i])),
                     reinterpret_cast<const void*>(static_cast<std::uintptr_t>(src[i])),
                     static_cast<std::size_t>(nbytes[i]));
    }
}

}  // namespace pdstage
