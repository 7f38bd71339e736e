// The device's side of a handoff. handoff_device.py has the contract and the memory order.

#include "handoff_order.h"

constexpr int WORDS = 8;  // u64 of a cache line
constexpr unsigned REST_NS = 100;

// target[0..bytes) = x[0..bytes), then command_flags[w] = values[w] for each w whose value is not 0. Does nothing in a
// poisoned pass. ticket is 0 before and after.
extern "C" __global__ void copy_and_signal(const char* __restrict__ x, long long bytes, char* __restrict__ target,
                                           int* ticket, u64* command_flags, const u64* values, int workers,
                                           const int* poisoned) {
    __shared__ int last;
    if (*poisoned) return;  // kernels before this one wrote it: all threads see the same
    const long long first = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long step = (long long)gridDim.x * blockDim.x;
    const bool aligned = ((u64)x | (u64)target) % sizeof(uint4) == 0;
    const long long wide = aligned ? bytes / (long long)sizeof(uint4) : 0;
    for (long long i = first; i < wide; i += step) ((uint4*)target)[i] = ((const uint4*)x)[i];
    for (long long i = wide * (long long)sizeof(uint4) + first; i < bytes; i += step) target[i] = x[i];
    __syncthreads();
    if (threadIdx.x == 0) last = take_ticket(ticket) == (int)gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    if (threadIdx.x == 0) *ticket = 0;
    for (int w = threadIdx.x; w < workers; w += blockDim.x) {
        const u64 value = values[w * WORDS];
        if (value) store_release_system(command_flags + w * WORDS, value);
    }
}

// One block of one thread per worker. After a time-out `poisoned` (for later kernels) and `failed` (for the host) become
// 1.
extern "C" __global__ void wait_for_workers(const u64* done_flags, const u64* values, u64 timeout_ns,
                                            volatile int* poisoned, volatile int* failed) {
    const int at = blockIdx.x * WORDS;
    const u64 value = values[at];
    if (!value || *poisoned) return;
    const u64 begin = now_ns();
    while (load_acquire_system(done_flags + at) != value) {
        if (now_ns() - begin >= timeout_ns) {
            *poisoned = 1;
            *failed = 1;
            return;
        }
        rest_ns(REST_NS);
    }
}
