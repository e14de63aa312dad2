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

// One thread's view of the team that runs a command. A kernel is called by the leader and by every
// other thread that is awake; each takes parts of the work until none is left. Nobody waits for a
// thread that has not begun, so a thread that the system put aside costs its help, not its time slice.
struct Context {
    Team& team;
    // Size of the team: a hint for the size of parts. Fewer threads may take part.
    int num_threads;
    // Counts up when a kernel has several phases; a phase begins when the one before is done.
    int phase = 0;
    // Memory of the whole team for one command, of the size the kernel's entry asked for.
    void* shared = nullptr;
    void* scratch_memory = nullptr;
    size_t scratch_bytes = 0;

    // The next untaken part of [0, total); empty when all is taken. One loop a phase.
    Range next(i64 total, i64 grain);
    // This thread's own memory, 64-byte aligned, kept between calls; the last request is valid.
    void* scratch(size_t bytes);

    // Call work(begin, end) on parts of at least `grain`, a few for each thread.
    template <class Work>
    void share(i64 total, i64 grain, Work work) {
        const i64 part = most(grain, ceil_div(total, 4 * num_threads));
        for (Range r = next(total, part); !r.empty(); r = next(total, part)) work(r.begin, r.end);
    }
};

// Call work(t) for this thread's share of the rows (ints[0]).
template <class Work>
inline void each_row(const Args& args, Context& context, Work work) {
    context.share(args.ints[0], 1, [&](i64 begin, i64 end) {
        for (i64 t = begin; t < end; ++t) work(t);
    });
}

using KernelFunction = void (*)(const Args&, Context&);

// How far a kernel's work divides: rows (ints[0]; a single row is done by the leader alone, which is
// quicker than telling the others), or finer.
enum class Share { kRows, kParts };

struct KernelEntry {
    const char* name;
    KernelFunction function;
    Share share = Share::kParts;
    int phases = 1;
    // Bytes of Context::shared for a call on a team of a size.
    size_t (*shared_bytes)(const Args&, int num_threads) = nullptr;
};

// Each source file of kernels exports one table that ends with a null name.
extern const KernelEntry kElementwiseKernels[];
extern const KernelEntry kNormKernels[];
extern const KernelEntry kMemoryKernels[];
extern const KernelEntry kLinearFloatKernels[];
extern const KernelEntry kLinearA8Kernels[];
extern const KernelEntry kAttentionKernels[];
extern const KernelEntry kExpertsKernels[];

}  // namespace mi
