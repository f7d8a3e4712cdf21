// The end of a thread that Python ends, caught by POSIX' own means.
//
// Catching it as an exception (abi::__forced_unwind) needs the C++ library that belongs to the system's unwinder, which
// the wheel for every Linux does not have. Without __EXCEPTIONS, pthread_cleanup_push jumps back here (longjmp), and no
// C++ frame is unwound.
#undef __EXCEPTIONS
#include "unlocked.hpp"

#include <pthread.h>
#include <unistd.h>

namespace pdstage {

namespace {

void wait_for_the_end(void* /*unused*/) {
    for (;;) ::pause();
}

}  // namespace

void restore_or_wait(PyThreadState* state) {
    pthread_cleanup_push(wait_for_the_end, nullptr);
    PyEval_RestoreThread(state);
    pthread_cleanup_pop(0);
}

}  // namespace pdstage
