// Threads that share the work of a call, a hundred phases in a millisecond.
//
// A call is a sequence of phases. A phase is cut into pieces, which any thread may take, and ends
// when all are done, so that no thread waits for one that the system has suspended, unless that one
// holds a piece or the call ends: a busy machine costs the time that others take, not a time slice
// in each phase. Threads wait by spinning, as to sleep and wake takes longer than a phase; between
// calls they spin for a moment, then sleep.

#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

template <class Done> static inline void spin_until(Done done) {
    for (unsigned i = 1; !done(); i++) {
        if (i % 256 == 0) std::this_thread::yield();
#if defined(__x86_64__)
        else _mm_pause();
#endif
    }
}

class Team {
    friend struct Member;
    std::atomic<uint64_t> next{0};  // the phase in the upper half, its next piece in the lower
    std::atomic<uint32_t> done{0};  // pieces of this phase
    std::atomic<uint32_t> calls{0};
    std::atomic<int> asleep{0}, inside{0};  // threads that sleep; that are in the call
    std::atomic<bool> open{false};
    std::mutex one_call, sleeping;
    std::condition_variable wake;
    void (*work)(void*, int, uint32_t) = nullptr;
    void* on = nullptr;
    uint32_t first = 0;  // phase of the call

    void stand_by(int number) {
        for (uint32_t seen = 0;;) {
            int turns = 0;
            spin_until([&] { return calls != seen || ++turns == 20000; });
            if (calls == seen) {
                std::unique_lock<std::mutex> lock(sleeping);
                asleep++;
                wake.wait(lock, [&] { return calls != seen; });
                asleep--;
            }
            inside++;
            seen = calls;
            if (open) work(on, number, first);
            inside--;
        }
    }

  public:
    int size = 1;  // fewer than asked for where the system gives no more threads
    explicit Team(int n) {
        try {
            for (; size < n; size++) std::thread(&Team::stand_by, this, size).detach();
        } catch (const std::system_error&) {
        }
    }

    // f(number, phase) on all who are there; one call at a time
    template <class F> void run(F f) {
        std::lock_guard<std::mutex> alone(one_call);
        work = [](void* f, int number, uint32_t phase) { (*(F*)f)(number, phase); };
        on = &f;
        first = next >> 32;
        open = true;
        {
            std::lock_guard<std::mutex> lock(sleeping);  // one might be on its way to sleep
            calls++;
        }
        if (asleep) wake.notify_all();
        f(0, first);
        open = false;
        spin_until([&] { return inside == 0; });  // f is gone after this
    }
};

struct Member {
    Team& team;
    const int number;
    uint32_t phase;

    // f(i) for all i of 0..n-1, shared by the threads; then the next phase
    template <class F> void each(int64_t n, F f) {
        const int64_t most = team.size == 1 ? 1 : 2 * team.size;
        const int64_t pieces = std::max<int64_t>(1, std::min(n, most));
        for (uint64_t now = team.next; now >> 32 == phase; now = team.next) {
            const int64_t piece = uint32_t(now);
            if (piece == pieces) {  // all are taken
                spin_until([&] { return team.next >> 32 != phase; });
            } else if (team.next.compare_exchange_weak(now, now + 1)) {
                const int64_t end = n * (piece + 1) / pieces;
                for (int64_t i = n * piece / pieces; i < end; i++) f(i);
                if (team.done.fetch_add(1) + 1 == pieces) {
                    team.done = 0;
                    team.next = uint64_t(phase + 1) << 32;
                }
            }
        }
        phase++;
    }
};
