// The sum of a vector of each rank, through memory that all of them map.
//
// A rank writes its vector to a place of its own, tells its number, waits for those of the others,
// and adds all vectors in the order of the ranks, so every rank has the same bits. Two places are
// used in turn: who writes to one again has seen that all ranks have written the other, and so have
// read this one.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int64_t HEAD_BYTES = 4096;
constexpr int64_t MOST_RANKS = 64;
constexpr int64_t BLOCK = 1024;
constexpr long SLICE_NS = 100'000'000;

struct alignas(64) Rank {
    std::atomic<uint32_t> number;
    std::atomic<uint32_t> waiting;
};
static_assert(sizeof(Rank) * MOST_RANKS <= HEAD_BYTES);

double seconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

void tell(Rank& rank, uint32_t number) {
    rank.number.store(number);
    if (rank.waiting.load())
        syscall(SYS_futex, &rank.number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool has_come(uint32_t seen, uint32_t number) { return int32_t(seen - number) >= 0; }

// Looks so many times before it sleeps. False after the limit.
bool await(Rank& rank, uint32_t number, int64_t looks, double limit_s) {
    for (int64_t i = 0; i <= looks; ++i) {
        if (has_come(rank.number.load(std::memory_order_acquire), number)) return true;
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }
    const double deadline = seconds() + limit_s;
    bool came = false;
    rank.waiting.fetch_add(1);
    for (;;) {
        const uint32_t seen = rank.number.load();
        came = has_come(seen, number);
        if (came || seconds() > deadline) break;
        const timespec slice{0, SLICE_NS};
        syscall(SYS_futex, &rank.number, FUTEX_WAIT, seen, &slice, nullptr, 0);
    }
    rank.waiting.fetch_sub(1);
    return came;
}

float widened(uint16_t half) {
    const uint32_t bits = uint32_t(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// To the nearest, of two the even one. A NaN of bf16 has no low bits, and stays one.
uint16_t rounded(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename Number, float widen(Number), Number narrow(float)>
void add(const char* places, int64_t place_bytes, int64_t size, char* result, int64_t count) {
    auto* sums = reinterpret_cast<Number*>(result);
    float total[BLOCK];
    for (int64_t first = 0; first < count; first += BLOCK) {
        const int64_t length = std::min(BLOCK, count - first);
        std::fill(total, total + length, 0.0f);
        for (int64_t rank = 0; rank < size; ++rank) {
            auto* part = reinterpret_cast<const Number*>(places + rank * place_bytes) + first;
            for (int64_t i = 0; i < length; ++i) total[i] += widen(part[i]);
        }
        for (int64_t i = 0; i < length; ++i) sums[first + i] = narrow(total[i]);
    }
}

float same(float value) { return value; }

}  // namespace

// Replaces ``values``, ``count`` numbers of fp32 or bf16, by the sum of those of all ranks. Returns 0,
// or 1 + the rank that has not come within ``limit_s`` seconds.
extern "C" int64_t sum_over_ranks(
    char* shared, int64_t place_bytes, int64_t size, int64_t rank, char* values, int64_t count,
    int64_t is_bf16, int64_t looks, double limit_s) {
    auto* ranks = reinterpret_cast<Rank*>(shared);
    const int64_t width = is_bf16 ? 2 : 4, most = place_bytes / width;
    for (int64_t first = 0; first < count; first += most) {
        const int64_t length = std::min(most, count - first);
        char* part = values + first * width;
        const uint32_t number = ranks[rank].number.load() + 1;
        char* places = shared + HEAD_BYTES + (number & 1) * size * place_bytes;
        std::memcpy(places + rank * place_bytes, part, length * width);
        tell(ranks[rank], number);
        for (int64_t other = 0; other < size; ++other)
            if (!await(ranks[other], number, looks, limit_s)) return 1 + other;
        if (is_bf16)
            add<uint16_t, widened, rounded>(places, place_bytes, size, part, length);
        else
            add<float, same, same>(places, place_bytes, size, part, length);
    }
    return 0;
}
