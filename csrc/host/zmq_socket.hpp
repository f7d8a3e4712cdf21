// One libzmq socket beside its pyzmq object: the same library, found where pyzmq loaded it, without headers or
// linking.
//
// Must not use Python or know what frames mean. Nothing here blocks, and two threads must not call at once. The
// constants and the size of zmq_msg_t are those of libzmq's stable interface, 4.1 and later.
#pragma once

#include <dlfcn.h>

#include <cerrno>
#include <cstddef>
#include <stdexcept>
#include <string>

namespace pdstage {

struct ZmqMessage {
    alignas(void*) unsigned char bytes[64];
};

// The functions of the libzmq with which `library`, a loaded shared object, was linked. Throws std::runtime_error if
// they cannot be seen: another build may have linked them in privately.
struct ZmqApi {
    explicit ZmqApi(const std::string& library) {
        void* const loaded = dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);  // never closed: the library stays
        if (loaded == nullptr) throw std::runtime_error(library + " is not loaded");
        find(loaded, "zmq_getsockopt", getsockopt);
        find(loaded, "zmq_disconnect", disconnect);
        find(loaded, "zmq_send", send);
        find(loaded, "zmq_msg_init", msg_init);
        find(loaded, "zmq_msg_recv", msg_recv);
        find(loaded, "zmq_msg_data", msg_data);
        find(loaded, "zmq_msg_size", msg_size);
        find(loaded, "zmq_msg_more", msg_more);
        find(loaded, "zmq_msg_close", msg_close);
        find(loaded, "zmq_errno", last_error);
        void (*version)(int*, int*, int*) = nullptr;
        find(loaded, "zmq_version", version);
        int major = 0;
        int minor = 0;
        int patch = 0;
        version(&major, &minor, &patch);
        if (major != 4 || minor < 1) throw std::runtime_error("libzmq is not of version 4.1 to 4.x");
    }

    int (*getsockopt)(void*, int, void*, std::size_t*) = nullptr;
    int (*disconnect)(void*, const char*) = nullptr;
    int (*send)(void*, const void*, std::size_t, int) = nullptr;
    int (*msg_init)(ZmqMessage*) = nullptr;
    int (*msg_recv)(ZmqMessage*, void*, int) = nullptr;
    void* (*msg_data)(ZmqMessage*) = nullptr;
    std::size_t (*msg_size)(const ZmqMessage*) = nullptr;
    int (*msg_more)(const ZmqMessage*) = nullptr;
    int (*msg_close)(ZmqMessage*) = nullptr;
    int (*last_error)() = nullptr;

  private:
    template <class Function>
    static void find(void* loaded, const char* name, Function& function) {
        function = reinterpret_cast<Function>(dlsym(loaded, name));
        if (function == nullptr) throw std::runtime_error(std::string(name) + " cannot be seen");
    }
};

// A received frame; releases its memory.
class ZmqFrame {
  public:
    explicit ZmqFrame(const ZmqApi& api) : api_(api) { api_.msg_init(&message_); }
    ~ZmqFrame() { api_.msg_close(&message_); }
    ZmqFrame(const ZmqFrame&) = delete;
    ZmqFrame& operator=(const ZmqFrame&) = delete;

    const char* data() { return static_cast<const char*>(api_.msg_data(&message_)); }
    std::size_t size() const { return api_.msg_size(&message_); }
    bool more() const { return api_.msg_more(&message_) != 0; }

  private:
    friend class ZmqSocket;
    const ZmqApi& api_;
    ZmqMessage message_;
};

// Functions that return an int return 0 or the errno.
class ZmqSocket {
  public:
    ZmqSocket(const std::string& library, void* socket) : api_(library), socket_(socket), fd_(option<int>(kFd)) {}

    const ZmqApi& api() const { return api_; }

    // The descriptor to wait on, edge-triggered: it turns readable after `has_message` has returned false.
    int fd() const { return fd_; }

    bool has_message() const { return (option<int>(kEvents) & kPollIn) != 0; }

    // Not between the frames of a message, nor after `has_message`, which takes the first frame of the next: libzmq
    // 4.3 ends the process where the rest of a message is dropped with its connection (src/fq.cpp, `!_more`).
    int disconnect(const char* endpoint) const {
        return retried([&] { return api_.disconnect(socket_, endpoint); });
    }

    int send(const void* data, std::size_t nbytes, bool more) const {
        return retried([&] { return api_.send(socket_, data, nbytes, kDontWait | (more ? kSendMore : 0)); });
    }

    int recv(ZmqFrame& frame) const {
        return retried([&] { return api_.msg_recv(&frame.message_, socket_, kDontWait); });
    }

  private:
    static constexpr int kFd = 14;
    static constexpr int kEvents = 15;
    static constexpr int kPollIn = 1;
    static constexpr int kDontWait = 1;
    static constexpr int kSendMore = 2;

    template <class Value>
    Value option(int name) const {
        Value value{};
        std::size_t nbytes = sizeof(value);
        const int error = retried([&] { return api_.getsockopt(socket_, name, &value, &nbytes); });
        if (error != 0) throw std::runtime_error("zmq_getsockopt failed with errno " + std::to_string(error));
        return value;
    }

    template <class Call>
    int retried(Call call) const {
        for (;;) {
            if (call() >= 0) return 0;
            const int error = api_.last_error();
            if (error != EINTR) return error;
        }
    }

    ZmqApi api_;
    void* socket_;
    int fd_;
};

}  // namespace pdstage
