// Threads that work on one thing together, a hundred times a millisecond.
//
// Waiting is spinning: a sleep and a wake would take longer than the work between two meetings, and
// on a busy machine a thread that sleeps waits for somebody else's time slice. Between two calls
// they spin for a moment, then sleep.

#pragma once
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

static inline void pause_() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

class Team {
    std::atomic<int> arrived{0}, meetings{0}, calls{0}, asleep{0};
    std::mutex one_call, sleeping;
    std::condition_variable wake;
    void (*work)(void*, int) = nullptr;
    void* on = nullptr;

    void stand_by(int number) {
        for (int seen = 0;; seen++) {
            for (int i = 0; i < 20000 && calls.load() == seen; i++) pause_();
            if (calls.load() == seen) {
                std::unique_lock<std::mutex> lock(sleeping);
                asleep++;
                wake.wait(lock, [&] { return calls.load() != seen; });
                asleep--;
            }
            work(on, number);
            meet();
        }
    }

  public:
    const int size;
    explicit Team(int n) : size(n) {
        for (int i = 1; i < n; i++) std::thread(&Team::stand_by, this, i).detach();
    }

    void meet() {  // nobody goes on before all are here
        const int now = meetings.load();
        if (arrived.fetch_add(1) + 1 == size) {
            arrived.store(0);
            meetings.store(now + 1);
        }
        for (int i = 1; meetings.load() == now; i++)
            i % 4096 ? pause_() : std::this_thread::yield();
    }

    template <class F> void run(F f) {  // f(number) on every thread, one call at a time
        std::lock_guard<std::mutex> alone(one_call);
        work = [](void* f, int number) { (*(F*)f)(number); };
        on = &f;
        {
            std::lock_guard<std::mutex> lock(sleeping);  // or one could miss it on its way to sleep
            calls++;
        }
        if (asleep.load()) wake.notify_all();
        f(0);
        meet();
    }
};

struct Member {
    Team& team;
    const int number;
    // f(i) for this thread's share of 0..n-1, then a meeting
    template <class F> void each(int64_t n, F f) {
        for (int i = n * number / team.size; i < n * (number + 1) / team.size; i++) f(i);
        team.meet();
    }
};
