// Releases the GIL for a while.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace pdstage {

// Like pybind11's gil_scoped_release, but safe while the interpreter ends. Before Python 3.14, Python ends a daemon
// thread that then wants the lock back (pthread_exit), which unwinds no destructor: the whole process would be aborted.
// Here the thread waits for the process to end, as it does from Python 3.14 on.
class Unlocked {
  public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    ~Unlocked() {
        try {
            PyEval_RestoreThread(state_);
        } catch (abi::__forced_unwind&) {
            for (;;) ::pause();
        }
    }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

  private:
    PyThreadState* state_;
};

}  // namespace pdstage
