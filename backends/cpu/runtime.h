// What a kernel sees: its arguments, its place among the threads, and shared services.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "simd.h"

namespace mi {

constexpr int kMaxPointers = 16, kMaxInts = 16, kMaxFloats = 4;

// Arguments of one call, integers already evaluated at the run's dims.
struct Args {
    void* const* pointers;
    i64 ints[kMaxInts];
    const float* floats;

    template <class T>
    T* ptr(int i) const {
        return static_cast<T*>(pointers[i]);
    }
};

struct Range {
    i64 begin, end;
    bool empty() const { return begin >= end; }
};

class Team;

// One thread's view of the team that runs a command. Every thread calls every kernel; a kernel
// takes its share by split (equal parts) or next (parts as they are free).
struct Context {
    Team& team;
    int thread, num_threads;
    void* scratch_memory = nullptr;
    size_t scratch_bytes = 0;

    // This thread's equal part of [0, total), in whole grains.
    Range split(i64 total, i64 grain = 1) const {
        const i64 parts = ceil_div(total, grain);
        return {least(total, parts * thread / num_threads * grain),
                least(total, parts * (thread + 1) / num_threads * grain)};
    }
    // The next untaken part of [0, total); empty when all is taken. One loop per command or
    // between two barriers.
    Range next(i64 total, i64 grain);
    // Wait for all threads; what they wrote before is visible after.
    void barrier();
    // This thread's own memory, 64-byte aligned, kept between calls; the last request is valid.
    void* scratch(size_t bytes);
    // Memory of the whole team; every thread must call with the same size (holds a barrier).
    void* shared(size_t bytes);
};

using KernelFunction = void (*)(const Args&, Context&);

struct KernelEntry {
    const char* name;
    KernelFunction function;
};

// Each source file of kernels exports one table that ends with a null name.
extern const KernelEntry kElementwiseKernels[];
extern const KernelEntry kNormKernels[];
extern const KernelEntry kMemoryKernels[];
extern const KernelEntry kLinearFloatKernels[];
extern const KernelEntry kLinearA8Kernels[];
extern const KernelEntry kAttentionKernels[];

}  // namespace mi
