// Operations in PTX on which the memory order of a handoff rests; handoff_device.py explains it. No other headers are
// included, so that NVRTC compiles this as it is.

#pragma once

typedef unsigned long long u64;

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
__device__ inline void rest_ns(unsigned ns) { __nanosleep(ns); }
