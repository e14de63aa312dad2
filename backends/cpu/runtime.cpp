// The thread team, command lists, and the C interface that Python loads.
#include "runtime.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

namespace mi {
namespace {

// Pauses before the time slice is given away: some microseconds, the length of a short kernel.
// Longer would burn the core that the awaited thread needs on a machine with more threads than cores.
constexpr int kSpins = 300;
// Times the slice is given away before the thread sleeps in the kernel: about 50 us.
constexpr int kYields = 100;

void wait_while_equal(std::atomic<uint32_t>& word, uint32_t old) {
    for (int i = 0; i < kSpins; ++i) {
        if (word.load(std::memory_order_acquire) != old) return;
        MI_PAUSE();
    }
    for (int i = 0; i < kYields; ++i) {
        if (word.load(std::memory_order_acquire) != old) return;
        sched_yield();
    }
    while (word.load(std::memory_order_acquire) == old) word.wait(old);
}

void* aligned(size_t bytes) {
    void* memory = std::aligned_alloc(64, static_cast<size_t>(round_up(static_cast<i64>(bytes), 64)));
    if (memory == nullptr) std::abort();
    return memory;
}

}  // namespace

// Laid out for ctypes: program.py has the same fields.
struct Command {
    int32_t kernel;
    int32_t reserved;
    void* pointers[kMaxPointers];
    i64 offsets[kMaxInts];
    i64 scales[kMaxInts];
    int32_t dims[kMaxInts];
    float floats[kMaxFloats];
};

struct Job {
    const Command* commands;
    i64 count;
    const i64* dims;
    double* times_us;
};

namespace {

const KernelEntry* const kTables[] = {kElementwiseKernels,  kNormKernels,     kMemoryKernels,
                                      kLinearFloatKernels, kLinearA8Kernels, kAttentionKernels};

const std::vector<KernelEntry>& kernels() {
    static const std::vector<KernelEntry> all = [] {
        std::vector<KernelEntry> list;
        for (const KernelEntry* table : kTables)
            for (; table->name != nullptr; ++table) list.push_back(*table);
        return list;
    }();
    return all;
}

double now_us() {
    using namespace std::chrono;
    return duration<double, std::micro>(steady_clock::now().time_since_epoch()).count();
}

}  // namespace

class Team {
public:
    explicit Team(int size) : size_(size) {
        for (int t = 1; t < size_; ++t) workers_.emplace_back([this, t] { serve(t); });
    }
    ~Team() {
        stop_ = true;
        release(epoch_);
        for (std::thread& worker : workers_) worker.join();
        std::free(shared_);
        std::free(first_.scratch_memory);
    }
    int size() const { return size_; }

    void run(const Job& job) {
        job_ = job;
        if (size_ > 1) release(epoch_);
        execute(job, first_);
    }

    Range next(i64 total, i64 grain) {
        const i64 begin = taken_.fetch_add(grain, std::memory_order_relaxed);
        return {least(begin, total), least(begin + grain, total)};
    }
    void barrier() {
        if (size_ == 1) {
            taken_.store(0, std::memory_order_relaxed);
            return;
        }
        const uint32_t phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 != size_) {
            wait_while_equal(phase_, phase);
            return;
        }
        arrived_.store(0, std::memory_order_relaxed);
        taken_.store(0, std::memory_order_relaxed);
        release(phase_);
    }
    void* shared(size_t bytes, Context& context) {
        if (context.thread == 0 && bytes > shared_bytes_) {
            std::free(shared_);
            shared_ = aligned(bytes);
            shared_bytes_ = bytes;
        }
        barrier();
        return shared_;
    }

private:
    static void release(std::atomic<uint32_t>& word) {
        word.fetch_add(1, std::memory_order_seq_cst);
        word.notify_all();
    }
    void serve(int thread) {
        Context context{*this, thread, size_};
        uint32_t seen = 0;
        for (;;) {
            wait_while_equal(epoch_, seen);
            ++seen;
            if (stop_) break;
            execute(job_, context);
        }
        std::free(context.scratch_memory);
    }
    // The job is copied: its owner may go once the last barrier is passed.
    static void execute(const Job job, Context& context) {
        const std::vector<KernelEntry>& table = kernels();
        double before = job.times_us ? now_us() : 0.0;
        for (i64 c = 0; c < job.count; ++c) {
            const Command& command = job.commands[c];
            Args args{command.pointers, {}, command.floats};
            for (int i = 0; i < kMaxInts; ++i) {
                const int dim = command.dims[i];
                args.ints[i] = command.offsets[i] + (dim < 0 ? 0 : command.scales[i] * job.dims[dim]);
            }
            table[static_cast<size_t>(command.kernel)].function(args, context);
            context.barrier();
            if (job.times_us == nullptr || context.thread != 0) continue;
            const double after = now_us();
            job.times_us[c] = after - before;
            before = after;
        }
    }

    const int size_;
    std::vector<std::thread> workers_;
    Job job_{};
    bool stop_ = false;
    Context first_{*this, 0, size_};
    void* shared_ = nullptr;
    size_t shared_bytes_ = 0;
    // Each on a cache line of its own, as all threads poll or change them.
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<i64> taken_{0};
};

Range Context::next(i64 total, i64 grain) { return team.next(total, grain); }
void Context::barrier() { team.barrier(); }
void* Context::shared(size_t bytes) { return team.shared(bytes, *this); }
void* Context::scratch(size_t bytes) {
    if (bytes > scratch_bytes) {
        std::free(scratch_memory);
        scratch_memory = aligned(bytes);
        scratch_bytes = bytes;
    }
    return scratch_memory;
}

namespace {

// One team a process. A fork leaves the parent's lock and team as they were; the child makes its
// own of both and lets the old ones lie.
struct Host {
    pid_t process = getpid();
    std::mutex lock;
    Team* team = nullptr;
};
std::atomic<Host*> host{nullptr};
std::atomic<int> wanted_threads{0};

Host& this_host() {
    Host* current = host.load();
    while (current == nullptr || current->process != getpid()) {
        Host* fresh = new Host();
        if (host.compare_exchange_strong(current, fresh)) return *fresh;
        delete fresh;
    }
    return *current;
}

int thread_count() {
    const int wanted = wanted_threads.load();
    if (wanted > 0) return wanted;
    const unsigned cores = std::thread::hardware_concurrency();
    return cores == 0 ? 1 : static_cast<int>(cores);
}

}  // namespace
}  // namespace mi

extern "C" {

int mi_kernel_count() { return static_cast<int>(mi::kernels().size()); }
const char* mi_kernel_name(int index) { return mi::kernels()[static_cast<size_t>(index)].name; }
int mi_command_bytes() { return static_cast<int>(sizeof(mi::Command)); }

// 0: as many as the machine has processors for us.
void mi_set_num_threads(int count) { mi::wanted_threads.store(count < 0 ? 0 : count); }
int mi_num_threads() { return mi::thread_count(); }

const char* mi_instruction_set() {
#if defined(MI_SCALAR)
    return "scalar";
#elif defined(MI_VNNI)
    return "avx512-vnni";
#elif defined(MI_AVX512)
    return "avx512";
#else
    return "avx2";
#endif
}

void mi_run(const mi::Command* commands, int64_t count, const int64_t* dims, double* times_us) {
    mi::Host& host = mi::this_host();
    const std::lock_guard<std::mutex> guard(host.lock);
    const int wanted = mi::thread_count();
    if (host.team == nullptr || host.team->size() != wanted) {
        delete host.team;
        host.team = new mi::Team(wanted);
    }
    host.team->run({commands, count, dims, times_us});
}

}  // extern "C"
