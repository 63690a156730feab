// What adapters add to the results of a linear layer: y += (x D^T) U for each row, with the matrices of
// the row's slot. Everything but sums is bf16; sums are fp32, and rounded once when they are added.
//
// A row reads the matrices of its own slot alone, so that its result does not depend on other rows. D is
// [slots * most_rank, K] and U is [slots * most_rank, N], of which a slot has `ranks[slot]` rows. Slot 0
// has none. `scratch` has MOST * (K + most_rank) floats for each thread: nothing here allocates memory.

#include <cstdint>
#include <cstring>
#include <omp.h>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LANES = 16;
constexpr int64_t MOST = 4;      // rows that are computed together
constexpr int64_t TOGETHER = 4;  // dot products, or vectors of results, that share what they read

typedef uint16_t Half;  // bf16
typedef float Vector __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

static inline float widened(Half half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// To nearest, ties to even.
static inline Half narrowed(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return (Half)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline Vector widened(const Half* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    const Bits bits = __builtin_convertvector(halves, Bits) << 16;
    return (Vector)bits;
}

static inline void store(Half* to, Vector values) {
    const Bits bits = (Bits)values;
    const Halves halves = __builtin_convertvector((bits + 0x7fff + ((bits >> 16) & 1)) >> 16, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

static inline Vector loaded(const float* from) {
    Vector vector;
    std::memcpy(&vector, from, sizeof vector);
    return vector;
}

static inline float sum_of(Vector vector) {
    float sums[LANES];
    std::memcpy(sums, &vector, sizeof sums);
    for (int64_t half = LANES / 2; half; half /= 2)
        for (int64_t i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

// `inner[i * most_rank + j]` is the product of row i and row j of D.
#ifdef __AVX512BF16__
typedef Half Input;
constexpr int64_t STEP = 2 * LANES;

template <int64_t ROWS, int64_t COUNT>
static int64_t dot_vectors(const Half* x, const Half* down, int64_t K, Vector sums[ROWS][COUNT]) {
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP) {
        __m512bh weights[COUNT];
        for (int64_t j = 0; j < COUNT; j++)
            weights[j] = (__m512bh)_mm512_loadu_si512(down + j * K + k);
        for (int64_t i = 0; i < ROWS; i++) {
            const __m512bh row = (__m512bh)_mm512_loadu_si512(x + i * K + k);
            for (int64_t j = 0; j < COUNT; j++)
                sums[i][j] = (Vector)_mm512_dpbf16_ps((__m512)sums[i][j], row, weights[j]);
        }
    }
    return k;
}
#else
typedef float Input;
constexpr int64_t STEP = LANES;

template <int64_t ROWS, int64_t COUNT>
static int64_t dot_vectors(const float* x, const Half* down, int64_t K, Vector sums[ROWS][COUNT]) {
    int64_t k = 0;
    for (; k + STEP <= K; k += STEP) {
        Vector weights[COUNT];
        for (int64_t j = 0; j < COUNT; j++) weights[j] = widened(down + j * K + k);
        for (int64_t i = 0; i < ROWS; i++) {
            const Vector row = loaded(x + i * K + k);
            for (int64_t j = 0; j < COUNT; j++) sums[i][j] += row * weights[j];
        }
    }
    return k;
}
#endif

static inline float as_float(float value) { return value; }
static inline float as_float(Half value) { return widened(value); }

template <int64_t ROWS, int64_t COUNT>
static void dot(const Input* x, const Half* down, int64_t K, int64_t most_rank, float* inner) {
    Vector sums[ROWS][COUNT] = {};
    const int64_t end = dot_vectors<ROWS, COUNT>(x, down, K, sums);
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t j = 0; j < COUNT; j++) {
            float sum = sum_of(sums[i][j]);
            for (int64_t k = end; k < K; k++)
                sum += as_float(x[i * K + k]) * widened(down[j * K + k]);
            inner[i * most_rank + j] = sum;
        }
}

template <int64_t ROWS>
static void add(
    const float* inner, const Half* up, int64_t rank, int64_t N, int64_t most_rank, Half* y) {
    int64_t n = 0;
    for (; n + TOGETHER * LANES <= N; n += TOGETHER * LANES) {
        Vector sums[ROWS][TOGETHER] = {};
        for (int64_t r = 0; r < rank; r++)
            for (int64_t j = 0; j < TOGETHER; j++) {
                const Vector weights = widened(up + r * N + n + j * LANES);
                for (int64_t i = 0; i < ROWS; i++) sums[i][j] += inner[i * most_rank + r] * weights;
            }
        for (int64_t i = 0; i < ROWS; i++)
            for (int64_t j = 0; j < TOGETHER; j++) {
                Half* to = y + i * N + n + j * LANES;
                store(to, widened(to) + sums[i][j]);
            }
    }
    for (; n < N; n++)
        for (int64_t i = 0; i < ROWS; i++) {
            float sum = 0;
            for (int64_t r = 0; r < rank; r++) sum += inner[i * most_rank + r] * widened(up[r * N + n]);
            y[i * N + n] = narrowed(widened(y[i * N + n]) + sum);
        }
}

// Rows that follow each other and have the same slot read its matrices once.
template <int64_t ROWS>
static void compute(
    const Half* x, Half* y, const Half* down, const Half* up, int64_t K, int64_t N, int64_t rank,
    int64_t most_rank, float* scratch) {
    float* inner = scratch + ROWS * K;
#ifdef __AVX512BF16__
    const Input* rows = x;
#else
    const Input* rows = scratch;
    for (int64_t k = 0; k < ROWS * K; k++) scratch[k] = widened(x[k]);
#endif
    int64_t r = 0;
    for (; r + TOGETHER <= rank; r += TOGETHER)
        dot<ROWS, TOGETHER>(rows, down + r * K, K, most_rank, inner + r);
    for (; r < rank; r++) dot<ROWS, 1>(rows, down + r * K, K, most_rank, inner + r);
    add<ROWS>(inner, up, rank, N, most_rank, y);
}

}  // namespace

extern "C" void add_adapters(
    const Half* x, Half* y, const int32_t* slots, const int32_t* ranks, const Half* down,
    const Half* up, float* scratch, int64_t num_rows, int64_t K, int64_t N, int64_t most_rank,
    int64_t num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(static)
    for (int64_t first = 0; first < num_rows; first += MOST) {
        float* own = scratch + omp_get_thread_num() * MOST * (K + most_rank);
        const int64_t count = num_rows - first < MOST ? num_rows - first : MOST;
        bool is_one = count == MOST;
        for (int64_t t = first; t < first + count; t++) is_one &= slots[t] == slots[first];
        for (int64_t t = first; t < first + count; t += is_one ? MOST : 1) {
            const int32_t slot = slots[t];
            if (slot == 0) continue;
            const int64_t row = (slot - 1) * most_rank;
            const Half *of_down = down + row * K, *of_up = up + row * N;
            const auto run = is_one ? compute<MOST> : compute<1>;
            run(x + t * K, y + t * N, of_down, of_up, K, N, ranks[slot], most_rank, own);
        }
    }
}
