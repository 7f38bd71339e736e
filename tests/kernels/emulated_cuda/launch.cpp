// Runs the kernels of handoff.cu with the arguments of a launch: addresses of each argument, as the driver takes them.

#include "handoff.cu"

template <typename Type>
static Type at(void** arguments, int i) {
    return *(Type*)arguments[i];
}

template <typename Kernel>
static void run(int blocks, int threads, Kernel kernel) {
    gridDim.x = blocks, blockDim.x = threads;
    for (int b = 0; b < blocks; b++) {
        meeting = std::make_unique<std::barrier<>>(threads);
        std::vector<std::thread> all;
        for (int t = 0; t < threads; t++)
            all.emplace_back([=] {
                blockIdx.x = b, threadIdx.x = t;
                kernel();
                meeting->arrive_and_drop();
            });
        for (auto& one : all) one.join();
    }
}

extern "C" void launch(int wait, int blocks, int threads, void** a) {
    if (wait)
        run(blocks, threads, [=] {
            wait_for_workers(at<const u64*>(a, 0), at<const u64*>(a, 1), at<u64>(a, 2), at<volatile int*>(a, 3),
                             at<volatile int*>(a, 4));
        });
    else
        run(blocks, threads, [=] {
            copy_and_signal(at<const char*>(a, 0), at<long long>(a, 1), at<char*>(a, 2), at<int*>(a, 3), at<u64*>(a, 4),
                            at<const u64*>(a, 5), at<int>(a, 6), at<const int*>(a, 7));
        });
}
