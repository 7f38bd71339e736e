// handoff_order.h for a CPU: the same operations in C++, a thread for each of a block's, blocks one after the other.

#pragma once

#include <atomic>
#include <barrier>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

typedef unsigned long long u64;
struct uint4 {
    unsigned x, y, z, w;
};
struct Place {
    unsigned x;
};
static thread_local Place blockIdx, threadIdx;
static Place blockDim, gridDim;
static std::unique_ptr<std::barrier<>> meeting;

#define __device__
#define __global__
#define __shared__ static

static void __syncthreads() { meeting->arrive_and_wait(); }
static void store_release_system(u64* flag, u64 value) {
    std::atomic_ref<u64>(*flag).store(value, std::memory_order_release);
}
static u64 load_acquire_system(const u64* flag) {
    return std::atomic_ref<u64>(*const_cast<u64*>(flag)).load(std::memory_order_acquire);
}
static int take_ticket(int* ticket) { return std::atomic_ref<int>(*ticket).fetch_add(1); }
static u64 now_ns() { return std::chrono::steady_clock::now().time_since_epoch().count(); }
static void rest_ns(unsigned) { std::this_thread::yield(); }
