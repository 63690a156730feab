// What adapters add to the results of a linear layer: y = z + (x D^T) U for each row, with the matrices
// of the row's slot. Everything but sums is bf16; sums are fp32, and rounded once when they are added.
// y may be z.
//
// A row reads the matrices of its own slot alone, so that its result does not depend on other rows. D is
// [slots * most_rank, K] and U is [slots * most_rank, N], of which a slot has as many rows as its rank.
// Slot 0 has none. `order` has the rows sorted by their slots, `slots` and `ranks` have those of these
// rows: rows of the same slot are computed together, and its matrices are read from memory once. `scratch`
// has MOST * (K + 2 * most_rank) floats for each thread: nothing here allocates memory.

#include <cstdint>
#include <cstring>
#include <omp.h>
// A test defines WIDENS, to compute what processors without these instructions do.
#if defined(__AVX512BF16__) && !defined(WIDENS)
#define MULTIPLIES_PAIRS
#include <immintrin.h>
#endif

namespace {

constexpr int64_t LANES = 16;
constexpr int64_t MOST = 4;      // rows that are computed together
constexpr int64_t TOGETHER = 4;  // dot products, or vectors of results, that share what they read
constexpr int64_t LINE = 64;     // bytes that memory gives at once

typedef uint16_t Half;  // bf16

// A matrix that is read next, fetched while another is multiplied: where each row has an adapter of its
// own, all of them come from memory in each step, and processors wait for it longer than they compute.
struct Fetch {
    const char* next;
    const char* end;
    int64_t lines;  // at each call

    // `calls`: how often it is called until the matrix is needed.
    Fetch(const Half* matrix, int64_t size, int64_t calls)
        : next((const char*)matrix),
          end((const char*)(matrix + size)),
          lines((int64_t)sizeof(Half) * size / LINE / (calls ? calls : 1) + 1) {}

    inline void some() {
        for (int64_t i = 0; i < lines && next < end; i++, next += LINE) __builtin_prefetch(next, 0, 2);
    }
};

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

#ifdef MULTIPLIES_PAIRS
typedef Half Input;
constexpr int64_t STEP = 2 * LANES;
constexpr int64_t RANKS = 2;  // rows of U that `add` multiplies at once
#else
typedef float Input;
constexpr int64_t STEP = LANES;
constexpr int64_t RANKS = 1;
#endif

constexpr int64_t COLUMNS = TOGETHER * LANES;  // results that `add` computes at once

// Rows that are computed together: their inputs, what is added to, and where their results are.
template <int64_t ROWS>
struct Rows {
    const Input* x[ROWS];
    const Half* z[ROWS];
    Half* y[ROWS];
};

#ifdef MULTIPLIES_PAIRS

static inline __mmask32 first(int64_t count) { return (__mmask32)(((uint64_t)1 << count) - 1); }

static inline __m512i halves(const Half* from, int64_t count) {
    return count >= STEP ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16(first(count), from);
}

// The sums of four vectors.
static inline __m128 sums_of(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(
        _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
        _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
    const __m256 half =
        _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// `inner[i * most_rank + j]` is the product of row i and row j of D, for COUNT of these.
template <int64_t ROWS, int64_t COUNT>
static void dot(
    const Rows<ROWS>& rows, const Half* down, int64_t K, int64_t most_rank, float* inner,
    Fetch& fetch) {
    __m512 sums[ROWS][TOGETHER] = {};
    for (int64_t k = 0; k < K; k += STEP) {
        fetch.some();
        __m512bh weights[COUNT];
        for (int64_t j = 0; j < COUNT; j++) weights[j] = (__m512bh)halves(down + j * K + k, K - k);
        for (int64_t i = 0; i < ROWS; i++) {
            const __m512bh row = (__m512bh)halves(rows.x[i] + k, K - k);
            for (int64_t j = 0; j < COUNT; j++)
                sums[i][j] = _mm512_dpbf16_ps(sums[i][j], row, weights[j]);
        }
    }
    for (int64_t i = 0; i < ROWS; i++) {
        float found[TOGETHER];
        _mm_storeu_ps(found, sums_of(sums[i][0], sums[i][1], sums[i][2], sums[i][3]));
        std::memcpy(inner + i * most_rank, found, COUNT * sizeof(float));
    }
}

static inline __m512i narrowed(__m512 values) {
    const __m512i bits = _mm512_castps_si512(values);
    const __m512i is_odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), is_odd);
    return _mm512_srli_epi32(rounded, 16);
}

// Results of STEP columns are kept as two vectors, of the halves that `unpack` takes of each 128 bits.
// It gives pairs of the weights of two rows of U, too.
template <int64_t ROWS>
static void add(
    const Rows<ROWS>& rows, float* inner, const Half* up, int64_t rank, int64_t N, int64_t most_rank,
    Fetch& fetch) {
    constexpr int64_t BLOCKS = COLUMNS / STEP;
    const int64_t num_pairs = (rank + 1) / 2;
    uint32_t* pairs = (uint32_t*)(inner + ROWS * most_rank);
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t p = 0; p < num_pairs; p++) {
            const float* two = inner + i * most_rank + 2 * p;
            const uint32_t second = 2 * p + 1 < rank ? narrowed(two[1]) : 0;
            pairs[i * num_pairs + p] = narrowed(two[0]) | second << 16;
        }
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t n = 0; n < N; n += BLOCKS * STEP) {
        __m512 low[ROWS][BLOCKS] = {}, high[ROWS][BLOCKS] = {};
        for (int64_t p = 0; p < num_pairs; p++) {
            fetch.some();
            for (int64_t b = 0; b < BLOCKS && n + b * STEP < N; b++) {
                const Half* from = up + 2 * p * N + n + b * STEP;
                const int64_t left = N - n - b * STEP;
                const __m512i one = halves(from, left);
                const __m512i two = 2 * p + 1 < rank ? halves(from + N, left) : zero;
                const __m512bh lower = (__m512bh)_mm512_unpacklo_epi16(one, two);
                const __m512bh upper = (__m512bh)_mm512_unpackhi_epi16(one, two);
                for (int64_t i = 0; i < ROWS; i++) {
                    const __m512bh pair = (__m512bh)_mm512_set1_epi32(pairs[i * num_pairs + p]);
                    low[i][b] = _mm512_dpbf16_ps(low[i][b], lower, pair);
                    high[i][b] = _mm512_dpbf16_ps(high[i][b], upper, pair);
                }
            }
        }
        for (int64_t i = 0; i < ROWS; i++)
            for (int64_t b = 0; b < BLOCKS && n + b * STEP < N; b++) {
                Half* to = rows.y[i] + n + b * STEP;
                const int64_t left = N - n - b * STEP;
                const __m512i before = halves(rows.z[i] + n + b * STEP, left);
                const __m512 lower = (__m512)_mm512_unpacklo_epi16(zero, before);
                const __m512 upper = (__m512)_mm512_unpackhi_epi16(zero, before);
                const __m512i after = _mm512_packus_epi32(
                    narrowed(_mm512_add_ps(lower, low[i][b])),
                    narrowed(_mm512_add_ps(upper, high[i][b])));
                _mm512_mask_storeu_epi16(to, first(left < STEP ? left : STEP), after);
            }
    }
}

#else
typedef float Vector __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

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

template <int64_t ROWS, int64_t COUNT>
static void dot(
    const Rows<ROWS>& rows, const Half* down, int64_t K, int64_t most_rank, float* inner,
    Fetch& fetch) {
    Vector sums[ROWS][COUNT] = {};
    int64_t end = 0;
    for (; end + STEP <= K; end += STEP) {
        fetch.some();
        Vector weights[COUNT];
        for (int64_t j = 0; j < COUNT; j++) weights[j] = widened(down + j * K + end);
        for (int64_t i = 0; i < ROWS; i++) {
            const Vector row = loaded(rows.x[i] + end);
            for (int64_t j = 0; j < COUNT; j++) sums[i][j] += row * weights[j];
        }
    }
    for (int64_t i = 0; i < ROWS; i++)
        for (int64_t j = 0; j < COUNT; j++) {
            float sum = sum_of(sums[i][j]);
            for (int64_t k = end; k < K; k++) sum += rows.x[i][k] * widened(down[j * K + k]);
            inner[i * most_rank + j] = sum;
        }
}

template <int64_t ROWS>
static void add(
    const Rows<ROWS>& rows, const float* inner, const Half* up, int64_t rank, int64_t N,
    int64_t most_rank, Fetch& fetch) {
    int64_t n = 0;
    for (; n + COLUMNS <= N; n += COLUMNS) {
        Vector sums[ROWS][TOGETHER] = {};
        for (int64_t r = 0; r < rank; r++) {
            fetch.some();
            for (int64_t j = 0; j < TOGETHER; j++) {
                const Vector weights = widened(up + r * N + n + j * LANES);
                for (int64_t i = 0; i < ROWS; i++) sums[i][j] += inner[i * most_rank + r] * weights;
            }
        }
        for (int64_t i = 0; i < ROWS; i++)
            for (int64_t j = 0; j < TOGETHER; j++) {
                const int64_t place = n + j * LANES;
                store(rows.y[i] + place, widened(rows.z[i] + place) + sums[i][j]);
            }
    }
    for (; n < N; n++)
        for (int64_t i = 0; i < ROWS; i++) {
            float sum = 0;
            for (int64_t r = 0; r < rank; r++) sum += inner[i * most_rank + r] * widened(up[r * N + n]);
            rows.y[i][n] = narrowed(widened(rows.z[i][n]) + sum);
        }
}
#endif

// The matrices of a slot, or none of them. `rank`: 0 for none.
struct Matrices {
    const Half* down;
    const Half* up;
    int64_t rank;
};

// What all rows of a call have in common.
struct Layer {
    const Half* x;
    const Half* z;
    Half* y;
    const int32_t* order;
    const int32_t* slots;
    const int32_t* ranks;
    const Half* down;
    const Half* up;
    int64_t K, N, most_rank;

    Matrices none() const { return {down, up, 0}; }

    // Those of the row at place `t`.
    Matrices of(int64_t t) const {
        if (slots[t] == 0) return none();
        const int64_t row = (slots[t] - 1) * most_rank;
        return {down + row * K, up + row * N, ranks[t]};
    }

    // ROWS rows from place `t` on, which have the same slot. `is_new`: its matrices were not read just
    // before. `next`: those that are read afterwards.
    template <int64_t ROWS>
    void compute(int64_t t, bool is_new, Matrices next, float* scratch) const {
        const Matrices own = of(t);
        Rows<ROWS> rows;
        for (int64_t i = 0; i < ROWS; i++) {
            const Half* from = x + order[t + i] * K;
#ifdef MULTIPLIES_PAIRS
            rows.x[i] = from;
#else
            float* wide = scratch + i * K;
            for (int64_t k = 0; k < K; k++) wide[k] = widened(from[k]);
            rows.x[i] = wide;
#endif
            rows.z[i] = z + order[t + i] * N;
            rows.y[i] = y + order[t + i] * N;
        }
        float* inner = scratch + ROWS * K;
        const int64_t num_dots = (own.rank / TOGETHER + own.rank % TOGETHER) * (K / STEP);
        Fetch fetch(own.up, is_new ? own.rank * N : 0, num_dots);
        int64_t r = 0;
        for (; r + TOGETHER <= own.rank; r += TOGETHER)
            dot<ROWS, TOGETHER>(rows, own.down + r * K, K, most_rank, inner + r, fetch);
        for (; r < own.rank; r++) dot<ROWS, 1>(rows, own.down + r * K, K, most_rank, inner + r, fetch);
        fetch = Fetch(next.down, next.rank * K, own.rank / RANKS * (N / COLUMNS));
        add<ROWS>(rows, inner, own.up, own.rank, N, most_rank, fetch);
    }

    void compute(int64_t t, int64_t count, bool is_new, Matrices next, float* scratch) const {
        if (count == 4) compute<4>(t, is_new, next, scratch);
        if (count == 3) compute<3>(t, is_new, next, scratch);
        if (count == 2) compute<2>(t, is_new, next, scratch);
        if (count == 1) compute<1>(t, is_new, next, scratch);
    }
};

}  // namespace

extern "C" void add_adapters(
    const Half* x, const Half* z, Half* y, const int32_t* order, const int32_t* slots,
    const int32_t* ranks, const Half* down, const Half* up, float* scratch, int64_t num_rows, int64_t K,
    int64_t N, int64_t most_rank, int64_t num_threads) {
    const Layer layer = {x, z, y, order, slots, ranks, down, up, K, N, most_rank};
    int64_t start = 0;
    for (; start < num_rows && slots[start] == 0; start++)
        if (y != z) std::memcpy(y + order[start] * N, z + order[start] * N, N * sizeof(Half));
#pragma omp parallel for num_threads(num_threads) if (num_threads > 1) schedule(static)
    for (int64_t first = start; first < num_rows; first += MOST) {
        float* own = scratch + omp_get_thread_num() * MOST * (K + 2 * most_rank);
        const int64_t end = first + MOST < num_rows ? first + MOST : num_rows;
        for (int64_t t = first; t < end;) {
            int64_t after = t + 1;
            while (after < end && slots[after] == slots[t]) after++;
            const bool is_new = t == start || slots[t] != slots[t - 1];
            const bool ends = after < num_rows && slots[after] != slots[t];
            layer.compute(t, after - t, is_new, ends ? layer.of(after) : layer.none(), own);
            t = after;
        }
    }
}
