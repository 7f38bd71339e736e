// Flag words of a handoff: 64-bit words in shared memory, in a cache line each, with one writer. See handoff.py.

#include <atomic>
#include <cstdint>
#include <ctime>
#include <sched.h>

#if !defined(__x86_64__)
#error "handoffs are tested on x86-64 only"
#endif

namespace {

using Word = std::atomic<uint64_t>;
static_assert(sizeof(Word) == 8 && Word::is_always_lock_free, "a flag must be a plain word that processes can share");

constexpr int WORDS_PER_LINE = 8;
constexpr int POLLS_PER_LOOK = 64;          // polls between two looks at the clock
// Time for which a poll spins before it yields its core. It is well above any slice of work, because a yield to a busy
// process costs that process's time slice, which is milliseconds.
constexpr int64_t UNSHARED_NS = 5'000'000;

int64_t now_ns() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return int64_t(at.tv_sec) * 1'000'000'000 + at.tv_nsec;
}

// Calls `found` at least once, until it returns true; returns false after `timeout_ns`.
template <typename Found>
bool poll(int64_t timeout_ns, Found found) {
    int64_t begin = 0;
    for (;;) {
        for (int i = 0; i < POLLS_PER_LOOK; i++) {
            if (found()) return true;
            __builtin_ia32_pause();
        }
        const int64_t now = now_ns();
        if (!begin) begin = now;
        if (now - begin >= timeout_ns) return found();
        if (now - begin >= UNSHARED_NS) sched_yield();
    }
}

}  // namespace

extern "C" {

void handoff_post(Word* flag, uint64_t value) { flag->store(value, std::memory_order_release); }

int handoff_wait(const Word* flag, uint64_t value, int64_t timeout_ns) {
    return poll(timeout_ns, [=] { return flag->load(std::memory_order_acquire) == value; });
}

// Returns the first slot, from `start` on in a circle, whose flag differs from `seen`; -1: none, and disarmed; -2:
// time-out. `flags` are `stride` lines apart. `armed` is read before the flags, so that a flag posted before the
// disarming is not missed.
int handoff_next(const Word* flags, int64_t stride, const uint64_t* seen, int slots, int start, const Word* armed,
                 int64_t timeout_ns) {
    int slot = -2;
    poll(timeout_ns, [&] {
        const bool spin = armed->load(std::memory_order_acquire);
        for (int i = 0; i < slots; i++) {
            const int at = start + i < slots ? start + i : start + i - slots;
            if (flags[at * stride * WORDS_PER_LINE].load(std::memory_order_acquire) != seen[at]) {
                slot = at;
                return true;
            }
        }
        if (!spin) slot = -1;
        return !spin;
    });
    return slot;
}
}
