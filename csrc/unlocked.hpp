// Releases the GIL for a while.
#pragma once

#include <Python.h>

namespace pdstage {

// PyEval_RestoreThread, but a thread that Python ends there waits for the process to end instead.
void restore_or_wait(PyThreadState* state);

// Like pybind11's gil_scoped_release, but safe while the interpreter ends. Before Python 3.14, Python ends a daemon
// thread that then wants the lock back (pthread_exit), which unwinds no destructor: the whole process would be aborted.
// Here the thread waits for the process to end, as it does from Python 3.14 on.
class Unlocked {
  public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    ~Unlocked() { restore_or_wait(state_); }
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;

  private:
    PyThreadState* state_;
};

}  // namespace pdstage
