// Threads that help with large copies: created on first use, asleep between calls, joined at exit.
//
// Must not know what is copied, or use Python.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace pdstage {

class Workers {
  public:
    // Calls `work(piece)` once for each piece in [0, n), on this thread and on up to n_threads - 1 others; returns
    // when all are done. It never waits for a thread that has not begun, so on a busy machine this thread does all of
    // it. `work` must not throw.
    template <class Work>
    static void run(std::size_t n_threads, std::size_t n, const Work& work) {
        Job job{[](const void* context, std::size_t piece) { (*static_cast<const Work*>(context))(piece); }, &work, n,
                std::min(n_threads, n) - 1};
        shared().share(job);
    }

  private:
    struct Job {
        void (*call)(const void*, std::size_t);
        const void* context;
        std::size_t n;
        std::size_t n_wanted;  // helpers
        std::size_t n_helping = 0;
        std::atomic<std::size_t> next{0};

        void take() {
            for (std::size_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < n;) call(context, piece);
        }
    };

    // After a fork the child has none of the threads and perhaps a locked mutex, so it starts with a new object.
    // Never destroyed: other threads may outlive static destructors.
    static Workers& shared() {
        static const bool kHooked = [] {
            pthread_atfork(nullptr, nullptr, [] { current().store(nullptr); });
            std::atexit([] {
                if (Workers* const workers = current().load()) workers->stop();
            });
            return true;
        }();
        static_cast<void>(kHooked);
        Workers* held = current().load();
        if (held == nullptr) {
            auto* const made = new Workers;
            if (current().compare_exchange_strong(held, made)) return *made;
            delete made;
        }
        return *held;
    }
    static std::atomic<Workers*>& current() {
        static std::atomic<Workers*> workers{nullptr};
        return workers;
    }

    void share(Job& job) {
        {
            const std::lock_guard lock(mutex_);
            grow(job.n_wanted);
            jobs_.push_back(&job);
        }
        for (std::size_t i = 0; i < job.n_wanted; ++i) wake_.notify_one();
        job.take();
        std::unique_lock lock(mutex_);
        jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
        done_.wait(lock, [&] { return job.n_helping == 0; });
    }

    // These threads take no signals: the interpreter's main thread does.
    void grow(std::size_t n) {
        if (stopping_ || threads_.size() >= n) return;
        sigset_t all;
        sigset_t before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            while (threads_.size() < n) threads_.emplace_back([this] { loop(); });
        } catch (const std::system_error&) {
            // No more threads can be created: the existing ones do the work.
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void loop() {
        std::unique_lock lock(mutex_);
        for (;;) {
            Job* job = nullptr;
            wake_.wait(lock, [&] { return stopping_ || (job = wanting()) != nullptr; });
            if (stopping_) return;
            ++job->n_helping;
            lock.unlock();
            job->take();
            lock.lock();
            if (--job->n_helping == 0) done_.notify_all();
        }
    }

    Job* wanting() {
        const auto found = std::find_if(jobs_.begin(), jobs_.end(), [](const Job* job) {
            return job->n_helping < job->n_wanted && job->next.load(std::memory_order_relaxed) < job->n;
        });
        return found == jobs_.end() ? nullptr : *found;
    }

    void stop() {
        {
            const std::lock_guard lock(mutex_);
            stopping_ = true;
        }
        wake_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::condition_variable done_;
    std::vector<Job*> jobs_;
    std::vector<std::thread> threads_;
    bool stopping_ = false;
};

}  // namespace pdstage
