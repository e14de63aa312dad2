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

const KernelEntry* const kTables[] = {kElementwiseKernels, kNormKernels,      kMemoryKernels,
                                      kLinearFloatKernels, kLinearA8Kernels,  kAttentionKernels,
                                      kExpertsKernels};

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

// The leader (who called run) opens a command, works on it, closes it and waits for those who joined.
// state_ holds the number of threads at work, whether the command is open, and a count of commands
// that tells a waiting thread that there is a new one.
class Team {
public:
    explicit Team(int size) : size_(size) {
        for (int t = 1; t < size_; ++t) workers_.emplace_back([this] { serve(); });
    }
    ~Team() {
        stop_.store(true);
        state_.fetch_add(kOneCommand);
        state_.notify_all();
        for (std::thread& worker : workers_) worker.join();
        std::free(shared_);
        std::free(leader_.scratch_memory);
    }
    int size() const { return size_; }

    void run(const Job& job) {
        double before = job.times_us ? now_us() : 0.0;
        for (i64 c = 0; c < job.count; ++c) {
            const Command& command = job.commands[c];
            Args args{command.pointers, {}, command.floats};
            for (int i = 0; i < kMaxInts; ++i) {
                const int dim = command.dims[i];
                args.ints[i] = command.offsets[i] + (dim < 0 ? 0 : command.scales[i] * job.dims[dim]);
            }
            run_command(kernels()[static_cast<size_t>(command.kernel)], args);
            if (job.times_us == nullptr) continue;
            const double after = now_us();
            job.times_us[c] = after - before;
            before = after;
        }
    }

    Range next(i64 total, i64 grain) {
        const i64 begin = taken_.fetch_add(grain, std::memory_order_relaxed);
        return {least(begin, total), least(begin + grain, total)};
    }

private:
    static constexpr uint32_t kOpen = 1u << 12, kOneCommand = 1u << 13, kWorking = kOpen - 1;

    void run_command(const KernelEntry& kernel, const Args& args) {
        const bool is_alone = size_ == 1 || (kernel.share == Share::kRows && args.ints[0] <= 1);
        if (kernel.shared_bytes) grow_shared(kernel.shared_bytes(args, size_));
        kernel_ = &kernel;
        args_ = &args;
        for (phase_ = 0; phase_ < kernel.phases; ++phase_) {
            taken_.store(0, std::memory_order_relaxed);
            if (!is_alone) open();
            work(leader_);
            if (!is_alone) close();
        }
    }
    void work(Context& context) {
        context.phase = phase_;
        context.shared = shared_;
        kernel_->function(*args_, context);
    }
    void open() {
        // Nobody is at work between commands, so the leader alone changes the state here.
        const uint32_t count = state_.load(std::memory_order_relaxed) / kOneCommand + 1;
        state_.store(count * kOneCommand | kOpen);
        state_.notify_all();
    }
    void close() {
        uint32_t state = state_.fetch_and(~kOpen) & ~kOpen;
        while (state & kWorking) {
            wait_while_equal(state_, state);
            state = state_.load(std::memory_order_acquire);
        }
    }
    void serve() {
        Context context{*this, size_};
        uint32_t seen = state_.load(std::memory_order_acquire);
        while (!stop_.load()) {
            // Command, arguments and phase stay as they are from joining to leaving.
            const auto join = std::memory_order_acq_rel;
            while (seen & kOpen && !state_.compare_exchange_weak(seen, seen + 1, join)) continue;
            if (seen & kOpen) {
                work(context);
                state_.fetch_sub(1, std::memory_order_acq_rel);
                state_.notify_all();
            }
            // All work of that command is taken: wait for the next.
            const uint32_t command = seen / kOneCommand;
            for (seen = state_.load(std::memory_order_acquire); seen / kOneCommand == command;
                 seen = state_.load(std::memory_order_acquire))
                wait_while_equal(state_, seen);
        }
        std::free(context.scratch_memory);
    }
    void grow_shared(size_t bytes) {
        if (bytes <= shared_bytes_) return;
        std::free(shared_);
        shared_ = aligned(bytes);
        shared_bytes_ = bytes;
    }

    const int size_;
    std::vector<std::thread> workers_;
    Context leader_{*this, size_};
    const KernelEntry* kernel_ = nullptr;
    const Args* args_ = nullptr;
    int phase_ = 0;
    void* shared_ = nullptr;
    size_t shared_bytes_ = 0;
    std::atomic<bool> stop_{false};
    // Each on a cache line of its own, as all threads poll or change them.
    alignas(64) std::atomic<uint32_t> state_{0};
    alignas(64) std::atomic<i64> taken_{0};
};

Range Context::next(i64 total, i64 grain) { return team.next(total, grain); }
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
