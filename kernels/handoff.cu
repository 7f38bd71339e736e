// The device's side of a handoff for Tritons without atomic_store and atomic_poll: see handoff_triton.py, whose two
// kernels these are, for what is promised and why. Needs no headers, so that NVRTC compiles it as it is.

typedef unsigned long long u64;
constexpr int WORDS = 8;  // u64 of a cache line

__device__ inline void store_release_system(u64* flag, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ inline u64 load_acquire_system(const u64* flag) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}
__device__ inline int take_ticket(int* ticket) {
    int taken;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(taken) : "l"(ticket) : "memory");
    return taken;
}
__device__ inline u64 now_ns() {
    u64 at;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(at)::"memory");
    return at;
}

// Copies `bytes` (a multiple of 4: whole rows of x lie at even places) and then raises the workers' flags.
extern "C" __global__ void copy_and_signal(const unsigned* x, long long bytes, unsigned* target, int* ticket,
                                           u64* command_flags, const u64* values, int workers) {
    const long long words = bytes / 4;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += step) target[i] = x[i];
    __syncthreads();
    if (threadIdx.x == 0 && take_ticket(ticket) == int(gridDim.x) - 1) {
        *ticket = 0;
        for (int w = 0; w < workers; w++)
            if (values[w * WORDS]) store_release_system(command_flags + w * WORDS, values[w * WORDS]);
    }
}

// One block of one thread per worker.
extern "C" __global__ void wait_for_workers(const u64* done_flags, const u64* values, u64 timeout_ns, int* poisoned) {
    const int at = blockIdx.x * WORDS;
    const u64 value = values[at];
    if (!value) return;
    const u64 begin = now_ns();
    while (load_acquire_system(done_flags + at) != value) {
        if (now_ns() - begin >= timeout_ns) {
            *poisoned = 1;
            return;
        }
        __nanosleep(100);
    }
}
