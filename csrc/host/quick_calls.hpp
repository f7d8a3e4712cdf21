// System calls that never block, each retried when a signal interrupts it.
//
// Must not use Python: its standard library releases the GIL around each of these, which beside a busy thread costs
// a switch interval, while the call itself takes a microsecond.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace pdstage {

template <class Call>
auto retry(Call call) {
    for (;;) {
        const auto result = call();
        if (result >= 0 || errno != EINTR) return result;
    }
}

inline bool is_readable(int fd) {
    pollfd one{fd, POLLIN, 0};
    return retry([&] { return ::poll(&one, 1, 0); }) > 0;
}

// Eventfds, which must be non-blocking.
inline void raise_event(int fd) {
    const std::uint64_t once = 1;
    static_cast<void>(retry([&] { return ::write(fd, &once, sizeof(once)); }));
}
inline void lower_event(int fd) {
    std::uint64_t count;
    static_cast<void>(retry([&] { return ::read(fd, &count, sizeof(count)); }));
}

// Sends one datagram on a connected socket; 0 or the errno, EAGAIN while the receiver has no room.
inline int send_datagram(int fd, const void* data, std::size_t nbytes) {
    return retry([&] { return ::send(fd, data, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL); }) >= 0 ? 0 : errno;
}

// Connects a datagram socket to an abstract name, which fails if nobody holds it; 0 or the errno.
inline int connect_abstract(int fd, const char* name, std::size_t nbytes) {
    sockaddr_un address{};
    if (nbytes + 1 > sizeof(address.sun_path)) return ENAMETOOLONG;
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name, nbytes);
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + nbytes);
    return retry([&] { return ::connect(fd, reinterpret_cast<const sockaddr*>(&address), size); }) >= 0 ? 0 : errno;
}

struct Datagram {
    std::ptrdiff_t nbytes;  // negative: nothing arrived
    std::int64_t uid;       // the sender's, from the kernel; -1 if it gave none
    bool whole;
};

// Receives one datagram on a socket with SO_PASSCRED.
inline Datagram recv_datagram(int fd, void* data, std::size_t nbytes) {
    iovec room{data, nbytes};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(ucred))];
    msghdr message{};
    message.msg_iov = &room;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    const ssize_t got = retry([&] { return ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC); });
    if (got < 0) return {got, -1, false};
    std::int64_t uid = -1;
    const cmsghdr* const head = CMSG_FIRSTHDR(&message);
    if (head != nullptr && head->cmsg_level == SOL_SOCKET && head->cmsg_type == SCM_CREDENTIALS) {
        ucred sender;
        std::memcpy(&sender, CMSG_DATA(head), sizeof(sender));
        uid = sender.uid;
    }
    return {got, uid, (message.msg_flags & MSG_TRUNC) == 0};
}

}  // namespace pdstage
