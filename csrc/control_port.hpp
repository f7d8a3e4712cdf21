// The hot calls of the control socket and of the local transport's tags, for Python.
//
// Included by bindings.cpp, the other file that uses Python. Only a wait releases the GIL here.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <deque>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "host/quick_calls.hpp"
#include "host/zmq_socket.hpp"
#include "unlocked.hpp"

namespace pdstage {

namespace py = pybind11;

inline py::tuple recv_datagrams(int fd, const std::vector<std::int64_t>& uids, int limit, std::size_t max_nbytes) {
    thread_local std::vector<char> room;
    room.resize(max_nbytes);
    py::list taken;
    int n_foreign = 0;
    for (int i = 0; i < limit; ++i) {
        const Datagram one = recv_datagram(fd, room.data(), room.size());
        if (one.nbytes < 0) break;
        if (one.whole && std::find(uids.begin(), uids.end(), one.uid) != uids.end())
            taken.append(py::bytes(room.data(), static_cast<std::size_t>(one.nbytes)));
        else
            ++n_foreign;
    }
    return py::make_tuple(taken, n_foreign);
}

// The counterpart of pdstage.control.port.ControlPort. It releases the GIL only while there is nothing to do. The
// GIL is also the lock: every call that touches the socket holds it from its first to its last instruction.
class ControlPort {
  public:
    ControlPort(const std::string& library, std::uintptr_t socket, int wake_fd, std::size_t max_frames)
        : socket_(library, reinterpret_cast<void*>(socket)), wake_fd_(wake_fd), max_frames_(max_frames) {}

    int send(const py::bytes& route, const py::sequence& frames) {
        check_open();
        std::vector<std::string_view> parts{view(route)};
        for (const py::handle frame : frames) parts.push_back(view(frame));  // all checked before the first is sent
        int error = 0;
        for (std::size_t i = 0; i < parts.size() && error == 0; ++i)
            error = socket_.send(parts[i].data(), parts[i].size(), i + 1 < parts.size());
        look_again();
        return error;
    }

    py::tuple recv(int max_messages, std::size_t enough_nbytes) {
        check_open();
        Received received = std::exchange(aside_, Received());
        for (int i = 0; i < max_messages && received.nbytes < enough_nbytes; ++i)
            if (!take(received)) break;
        return py::make_tuple(received.messages, received.n_malformed);
    }

    // Ends a connection of this socket; 0 or the errno. What `has_message` has begun to take is taken whole before.
    int disconnect(const std::string& endpoint) {
        check_open();
        if (take(aside_)) wake();
        return socket_.disconnect(endpoint.c_str());
    }

    py::tuple wait(double timeout_s, const std::vector<int>& fds) {
        using Clock = std::chrono::steady_clock;
        using Duration = std::chrono::nanoseconds;
        check_open();
        std::vector<pollfd> watched{{socket_.fd(), POLLIN, 0}, {wake_fd_, POLLIN, 0}};
        for (const int fd : fds) watched.push_back({fd, POLLIN, 0});
        const auto until = Clock::now() + std::chrono::duration_cast<Duration>(
                                              std::chrono::duration<double>(std::min(timeout_s, kLongest_s)));
        const Waiting waiting(n_waiting_);
        for (;;) {
            bool messages = has_message();
            const auto left = messages ? Duration(0) : std::max<Duration>(until - Clock::now(), Duration(0));
            const int n_ready = poll(watched, left, timeout_s < 0 && !messages);
            if (n_ready < 0 && PyErr_CheckSignals() != 0) throw py::error_already_set();
            if (closed_) return py::make_tuple(false, true, py::tuple());
            if (n_ready < 0) continue;
            const bool woken = watched[1].revents != 0;
            if (woken) {
                lower_event(wake_fd_);
                wake_pending_ = false;
            }
            if (!messages && watched[0].revents != 0) messages = has_message();
            py::list ready;
            for (std::size_t i = 0; i < fds.size(); ++i)
                if (watched[i + 2].revents != 0) ready.append(fds[i]);
            if (messages || woken || !ready.empty() || n_ready == 0)
                return py::make_tuple(messages, woken, py::tuple(ready));
        }
    }

    void wake() {
        if (wake_pending_ || closed_) return;
        wake_pending_ = true;
        raise_event(wake_fd_);
    }

    void look_again() {
        if (n_waiting_ > 0 && !closed_ && has_message()) wake();
    }

    void close() {
        wake();
        closed_ = true;
    }

  private:
    static constexpr double kLongest_s = 1e6;  // its nanoseconds fit

    struct Waiting {
        explicit Waiting(int& n) : n(n) { ++n; }
        ~Waiting() { --n; }
        int& n;
    };

    struct Received {
        py::list messages;
        int n_malformed = 0;
        std::size_t nbytes = 0;
    };

    // Adds the next message; false if there is none. All of its frames are read before Python may run another thread.
    bool take(Received& received) {
        std::deque<ZmqFrame> frames;
        do {
            const int error = socket_.recv(frames.emplace_back(socket_.api()));
            if (error == EAGAIN && frames.size() == 1) return false;
            if (error != 0) throw std::runtime_error("zmq_msg_recv failed with errno " + std::to_string(error));
        } while (frames.back().more());
        for (std::size_t i = 1; i < frames.size(); ++i) received.nbytes += frames[i].size();
        if (frames.size() < 2 || frames.size() > max_frames_ + 1) {
            ++received.n_malformed;
            return true;
        }
        py::list parts;
        for (std::size_t i = 1; i < frames.size(); ++i) parts.append(py::bytes(frames[i].data(), frames[i].size()));
        received.messages.append(py::make_tuple(py::bytes(frames[0].data(), frames[0].size()), parts));
        return true;
    }

    bool has_message() const { return !aside_.messages.empty() || socket_.has_message(); }

    void check_open() const {
        if (closed_) throw std::runtime_error("the control socket is closed");
    }

    static std::string_view view(const py::handle& frame) {
        char* data = nullptr;
        Py_ssize_t nbytes = 0;
        if (PyBytes_AsStringAndSize(frame.ptr(), &data, &nbytes) != 0) throw py::error_already_set();
        return {data, static_cast<std::size_t>(nbytes)};
    }

    // ppoll(2), but -1 only for an interrupt.
    static int poll(std::vector<pollfd>& watched, std::chrono::nanoseconds timeout, bool endless) {
        const auto n = static_cast<nfds_t>(watched.size());
        const auto seconds = std::chrono::floor<std::chrono::seconds>(timeout);
        const timespec longest{static_cast<time_t>(seconds.count()), static_cast<long>((timeout - seconds).count())};
        if (timeout.count() == 0 && !endless)
            return retry([&] { return ::ppoll(watched.data(), n, &longest, nullptr); });
        const Unlocked unlocked;
        return ::ppoll(watched.data(), n, endless ? nullptr : &longest, nullptr);
    }

    ZmqSocket socket_;
    int wake_fd_;
    std::size_t max_frames_;
    Received aside_;  // taken before a connection was ended, for the next `recv`
    int n_waiting_ = 0;
    bool wake_pending_ = false;
    bool closed_ = false;
};

}  // namespace pdstage
