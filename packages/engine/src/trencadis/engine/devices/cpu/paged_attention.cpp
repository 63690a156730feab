// Attention over a paged KV cache, for one layer: writes the new keys and values, then attends.
//
// Compiled for one model: D is the head size (a multiple of 16), G the query heads of each KV head,
// BF16 the type (1: bf16, 0: fp32), CODES that of the cache (0: the same, 1: int8, 2: E4M3, 3: E5M2).
// Softmax and sums are fp32. Layouts are those of `block_attention.py`: the cache of a layer is
// [blocks, K, S, D]; of the pairs (block, sequence), the first are the blocks 0, 1, 2, ... themselves and
// the last `num_extra` name their block. A cache of codes is that of `quantized_cache.py`: the D codes of
// each of the S tokens of a block and head, then a scale in bf16 for each token.
//
// The functions return 0, or 1 where there is no memory: then nothing was written. An exception would
// end the process, so all memory is taken before the first write and before any parallel region.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <vector>

#include "exponential.h"
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if BF16 && defined(__AVX512BF16__)
#define DOT_PRODUCTS (D % 32 == 0)
#endif
// Lanes of a product of bytes are integers of 32 bits: see `WholeQuery`, whose steps are finer than
// those of bf16, not than those of fp32.
#if CODES == 1 && BF16 && defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512BW__) && D <= 1024
#define BYTE_PRODUCTS 1
#endif

// Several libraries of this source are in one process, for models with other heads. Names that are not
// of this file alone could be shared between them, as a static variable of an inline function is.
namespace {

typedef float Vector __attribute__((vector_size(64)));
typedef int32_t Integers __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr int W = 16;      // lanes of a Vector
constexpr int DV = D / W;  // Vectors of a head
constexpr int STRIP = 64;  // positions that are scored at once

#if BF16
typedef uint16_t Scalar;
static inline Vector load(const Scalar* from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Vector)(__builtin_convertvector(halves, Words) << 16);
}
static inline void store(Scalar* to, Vector x) {
    Words words = (Words)x;
    words = (words + 0x7fff + ((words >> 16) & 1)) >> 16;  // to nearest, ties to even
    Halves halves = __builtin_convertvector(words, Halves);
    std::memcpy(to, &halves, sizeof halves);
}
static inline Scalar bounded(Scalar x) { return (x & 0x7f80) == 0x7f80 ? 0 : x; }
#else
typedef float Scalar;
static inline Vector load(const Scalar* from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
static inline void store(Scalar* to, Vector x) { std::memcpy(to, &x, sizeof x); }
static inline Scalar bounded(Scalar x) { return std::isfinite(x) ? x : 0; }
#endif

static inline Vector loadf(const float* from) {
    Vector x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

static inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

static inline Vector splat(float x) { return x - Vector{}; }

// What the cache holds of a row of D numbers, in units of `Code`, and the numbers of 16 codes.
#if CODES
typedef uint8_t Code;
constexpr int ROW = D + 2;

static inline float scale_of(const Code* scales, int64_t s) {
    uint16_t bits;
    std::memcpy(&bits, scales + 2 * s, sizeof bits);
    return float_of((uint32_t)bits << 16);
}
#else
typedef Scalar Code;
constexpr int ROW = D;

static inline Vector numbers(const Code* from) { return load(from); }
#endif

#if CODES == 1
constexpr float MOST = 127;

static inline Vector numbers(const Code* from) {
#ifdef __AVX512F__
    return (Vector)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#else
    typedef int8_t Bytes __attribute__((vector_size(16)));
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(__builtin_convertvector(bytes, Integers), Vector);
#endif
}

static inline Integers codes_of(Vector x) {
    const Vector shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    return (Integers)(x + shifter) & 0xff;
}
#elif CODES
// FP8: a sign, an exponent and MANTISSA bits.
constexpr int MANTISSA = CODES == 2 ? 3 : 2, BIAS = CODES == 2 ? 7 : 15, SHIFT = 23 - MANTISSA;
constexpr float MOST = CODES == 2 ? 448 : 57344;

static inline Vector numbers(const Code* from) {
    typedef uint8_t Bytes __attribute__((vector_size(16)));
    Bytes bytes;
    std::memcpy(&bytes, from, sizeof bytes);
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    // As fp16, which has an exponent of 5 bits.
    const __m256i signed_words = _mm256_cvtepi8_epi16((__m128i)bytes);
    const __m256i words = _mm256_and_si256(_mm256_slli_epi16(signed_words, 10 - MANTISSA),
                                           _mm256_set1_epi16(CODES == 2 ? (int16_t)0xbfff : -1));
    return (Vector)_mm512_cvtph_ps(words) * (CODES == 2 ? 256.0f : 1.0f);
#else
    const Words words = __builtin_convertvector(bytes, Words);
    const Words magnitude = (words & 0x7f) << SHIFT;
    // The least normal number has the exponent 1, and so have those below: without its leading 1.
    const uint32_t one = (uint32_t)(127 - BIAS) << 23;
    const Vector least = splat(float_of(one + (1u << 23)));
    const Words below = (Words)((Vector)(magnitude + one + (1u << 23)) - least);
    const Words found = magnitude < (1u << 23) ? below : magnitude + one;
    return (Vector)(found | (words & 0x80) << 24);
#endif
}

static inline Integers codes_of(Vector x) {
    const Words bits = (Words)x, magnitude = bits & 0x7fffffff;
    const uint32_t one = (uint32_t)(127 - BIAS) << 23;
    const Words normal = (magnitude + ((1u << (SHIFT - 1)) - 1) + (magnitude >> SHIFT & 1) - one) >> SHIFT;
    // Below the least normal number, to nearest by adding a number whose last bit is that of a code.
    const float shifter = float_of((uint32_t)(127 - BIAS + 1 + SHIFT) << 23);
    const Words below = (Words)((Vector)magnitude + shifter) & 0xff;
    const Words found = magnitude < one + (1u << 23) ? below : normal;
    return (Integers)(found | bits >> 31 << 7);
}
#endif

typedef float Half __attribute__((vector_size(32)));
typedef float Quarter __attribute__((vector_size(16)));

static inline float sum(Vector x) {
    Half halves[2];
    std::memcpy(halves, &x, sizeof x);
    halves[0] += halves[1];
    Quarter quarters[2];
    std::memcpy(quarters, halves, sizeof quarters);
    quarters[0] += quarters[1];
    return (quarters[0][0] + quarters[0][2]) + (quarters[0][1] + quarters[0][3]);
}

static inline float largest(Vector x) {
    Half halves[2];
    std::memcpy(halves, &x, sizeof x);
    halves[0] = halves[0] > halves[1] ? halves[0] : halves[1];
    Quarter quarters[2];
    std::memcpy(quarters, halves, sizeof quarters);
    const Quarter top = quarters[0] > quarters[1] ? quarters[0] : quarters[1];
    return std::max(std::max(top[0], top[2]), std::max(top[1], top[3]));
}

// Where the processor multiplies vectors of bf16, four keys are scored at once: adding up the lanes of
// one score takes longer than its products.
#if DOT_PRODUCTS
constexpr int KEYS = 4;
constexpr int PAIRS = D / 32;  // vectors of pairs of a head

static inline void load_pairs(__m512bh* pairs, const Scalar* from) {
    for (int p = 0; p < PAIRS; ++p) pairs[p] = (__m512bh)_mm512_loadu_si512(from + 32 * p);
}

#if CODES
// Every code is exact in bf16.
static inline void load_pairs(__m512bh* pairs, const Code* from) {
    for (int p = 0; p < PAIRS; ++p)
        pairs[p] = _mm512_cvtne2ps_pbh((__m512)numbers(from + 32 * p + W),
                                       (__m512)numbers(from + 32 * p));
}
#endif

static inline __m512 folded(__m512 x, __m512 y) {
    return _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
}

static inline __m128 scores_of(const __m512bh* query, const __m512bh (*keys)[PAIRS]) {
    __m512 sums[KEYS];
    for (int i = 0; i < KEYS; ++i) {
        sums[i] = _mm512_setzero_ps();
        for (int p = 0; p < PAIRS; ++p) sums[i] = _mm512_dpbf16_ps(sums[i], query[p], keys[i][p]);
    }
    const __m512d a = _mm512_castps_pd(folded(sums[0], sums[1]));
    const __m512d b = _mm512_castps_pd(folded(sums[2], sums[3]));
    // Each quarter has a part of all four.
    const __m512 quarters = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                          _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    const __m256 halves =
        _mm256_add_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}
#endif

#if BYTE_PRODUCTS
constexpr int CHUNKS = (D + 63) / 64;  // vectors of bytes of a head

static inline __m512i load_bytes(const Code* from, int chunk) {
    const int count = std::min(64, D - 64 * chunk);
    return _mm512_maskz_loadu_epi8(~0ull >> (64 - count), from + 64 * chunk);
}

static inline __m512i folded(__m512i x, __m512i y) {
    return _mm512_add_epi32(_mm512_unpacklo_epi32(x, y), _mm512_unpackhi_epi32(x, y));
}

// A query in steps of 1/8191 of its largest number: integers of 14 bits, in two bytes. The instruction
// takes the bytes of a key from 0 on: 128 more than they are, which `offset` takes off again. Sums are
// exact, below 2^31.
struct WholeQuery {
    __m512i high[CHUNKS], low[CHUNKS];
    __m128i offset;
    float step;

    void fill(const Scalar* query) {
        Vector tops = Vector{}, zeros = Vector{};
        for (int v = 0; v < DV; ++v) {
            const Vector x = load(query + v * W), size = x < 0 ? -x : x;
            tops = size > tops ? size : tops;
            zeros += x * 0.0f;  // NaN for what is not finite
        }
        const float top = largest(tops);
        const bool is_finite = sum(zeros) == 0;
        step = is_finite && top > 1e-30f ? top / 8191 : 0;
        alignas(64) int8_t parts[2][64 * CHUNKS] = {};
        int32_t total = 0;
        for (int d = 0; d < D; ++d) {
            const float x = load(query + d / W * W)[d % W];
            const int32_t whole = step == 0 ? 0 : (int32_t)std::nearbyint(x / step);
            parts[0][d] = (int8_t)(whole >> 7);
            parts[1][d] = (int8_t)(whole & 127);
            total += whole;
        }
        std::memcpy(high, parts[0], sizeof high);
        std::memcpy(low, parts[1], sizeof low);
        offset = _mm_set1_epi32(128 * total);
        if (!is_finite) step = NAN;
    }

    // Products with four keys, in units of the steps of both.
    __m128 scores_of(const __m512i (*keys)[CHUNKS]) const {
        __m512i sums[4];
        for (int i = 0; i < 4; ++i) {
            __m512i of_high = _mm512_setzero_si512(), of_low = _mm512_setzero_si512();
            for (int c = 0; c < CHUNKS; ++c) {
                of_high = _mm512_dpbusd_epi32(of_high, keys[i][c], high[c]);
                of_low = _mm512_dpbusd_epi32(of_low, keys[i][c], low[c]);
            }
            sums[i] = _mm512_add_epi32(_mm512_slli_epi32(of_high, 7), of_low);
        }
        const __m512i a = folded(sums[0], sums[1]), b = folded(sums[2], sums[3]);
        const __m512i quarters =
            _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
        const __m256i halves = _mm256_add_epi32(_mm512_castsi512_si256(quarters),
                                                _mm512_extracti64x4_epi64(quarters, 1));
        const __m128i all = _mm_add_epi32(_mm256_castsi256_si128(halves),
                                          _mm256_extracti128_si256(halves, 1));
        return _mm_cvtepi32_ps(_mm_sub_epi32(all, offset));
    }
};
#endif

// A partial softmax: the largest score, the sum of exponentials, the values weighted by them.
struct Partial {
    float peak[G];
    float total[G];
    float weighted[G][D];
};

constexpr int64_t ALONE = 1 << 18;  // products of queries with keys that a thread computes alone

// Attention of one sequence and KV head to some of its blocks.
struct Item {
    int32_t row, head, begin, end;
};

// Where the block of a pair (block, sequence) lies in the cache.
static inline int64_t place_of(int64_t pair, const int64_t* extra, int64_t num_prefix,
                               int64_t block_stride) {
    return (pair < num_prefix ? pair : extra[pair - num_prefix]) * block_stride;
}

// Blocks lie anywhere in memory, and the processor's own prefetch ends with a page of 4 KiB: a key or
// value of the next block is fetched with each one of this block. Into the second cache: the first
// has room for too few requests to memory.
static inline void fetch(const Code* row) {
    for (size_t byte = 0; byte < D * sizeof(Code); byte += 64)
        __builtin_prefetch((const char*)row + byte, 0, 2);
}

// `after`: where the block lies that is read next, from `keys` and from `values`; any place will do.
static void attend_blocks(Partial& partial, const Scalar* query, int64_t query_stride, float scale,
                          const Code* keys, const Code* values, int64_t block_stride,
                          const int32_t* pairs, int32_t num_pairs, const int64_t* extra,
                          int64_t num_prefix, const float* bias, int64_t S, int64_t after) {
    Vector q[G][DV], weighted[G][DV];
    float peak[G], total[G];
    for (int g = 0; g < G; ++g) {
        for (int v = 0; v < DV; ++v) {
            q[g][v] = load(query + g * query_stride + v * W) * (CODES ? 1.0f : scale);
            weighted[g][v] = Vector{};
        }
        peak[g] = -INFINITY;
        total[g] = 0;
    }
#if BYTE_PRODUCTS
    WholeQuery whole[G];
    for (int g = 0; g < G; ++g) whole[g].fill(query + g * query_stride);
#elif DOT_PRODUCTS
    __m512bh q_pairs[G][PAIRS];
    for (int g = 0; g < G; ++g) load_pairs(q_pairs[g], query + g * query_stride);
#endif
    alignas(64) float weights[G][STRIP];
#if CODES
    alignas(64) float key_scales[STRIP] = {}, value_scales[STRIP] = {};
#endif
    int64_t next_place = place_of(pairs[0], extra, num_prefix, block_stride);
    for (int32_t i = 0; i < num_pairs; ++i) {
        const int64_t pair = pairs[i], place = next_place;
        next_place = i + 1 < num_pairs ? place_of(pairs[i + 1], extra, num_prefix, block_stride)
                                       : after;
        for (int64_t from = 0; from < S; from += STRIP) {
            const int count = (int)std::min<int64_t>(STRIP, S - from);
            const int padded = (count + W - 1) / W * W;
            const Code *key = keys + place + from * D, *value = values + place + from * D;
            const Code* next_key = keys + next_place + from * D;
            const Code* next_value = values + next_place + from * D;
            const float* shift = bias + pair * S + from;
            int scored = 0;
#if CODES
            for (int s = 0; s < count; ++s) {
                key_scales[s] = scale_of(keys + place + S * D, from + s) * scale;
                value_scales[s] = scale_of(values + place + S * D, from + s);
            }
            for (int s = 0; s < count; s += 32) {
                __builtin_prefetch(keys + next_place + S * D + 2 * (from + s), 0, 2);
                __builtin_prefetch(values + next_place + S * D + 2 * (from + s), 0, 2);
            }
#endif
#if BYTE_PRODUCTS
            for (; scored + 4 <= count; scored += 4) {
                __m512i k[4][CHUNKS];
                for (int n = 0; n < 4; ++n) {
                    for (int c = 0; c < CHUNKS; ++c)
                        k[n][c] = _mm512_xor_si512(load_bytes(key + (scored + n) * D, c),
                                                   _mm512_set1_epi8(-128));
                    fetch(next_key + (scored + n) * D);
                }
                const __m128 bias_of = _mm_loadu_ps(shift + scored);
                const __m128 scales = _mm_loadu_ps(key_scales + scored);
                for (int g = 0; g < G; ++g)
                    _mm_storeu_ps(weights[g] + scored,
                                  _mm_fmadd_ps(whole[g].scores_of(k),
                                               _mm_mul_ps(scales, _mm_set1_ps(whole[g].step)), bias_of));
            }
#elif DOT_PRODUCTS
            for (; scored + KEYS <= count; scored += KEYS) {
                __m512bh k[KEYS][PAIRS];
                for (int n = 0; n < KEYS; ++n) {
                    load_pairs(k[n], key + (scored + n) * D);
                    fetch(next_key + (scored + n) * D);
                }
                const __m128 bias_of = _mm_loadu_ps(shift + scored);
#if CODES
                const __m128 scales = _mm_loadu_ps(key_scales + scored);
#else
                const __m128 scales = _mm_set1_ps(scale);
#endif
                for (int g = 0; g < G; ++g)
                    _mm_storeu_ps(weights[g] + scored,
                                  _mm_fmadd_ps(scores_of(q_pairs[g], k), scales, bias_of));
            }
#endif
            for (int s = scored; s < count; ++s) {
                Vector k[DV];
                for (int v = 0; v < DV; ++v) k[v] = numbers(key + s * D + v * W);
                fetch(next_key + s * D);
                for (int g = 0; g < G; ++g) {
                    Vector product = q[g][0] * k[0];
                    for (int v = 1; v < DV; ++v) product += q[g][v] * k[v];
#if CODES
                    weights[g][s] = sum(product) * key_scales[s] + shift[s];
#else
                    weights[g][s] = sum(product) + shift[s];
#endif
                }
            }
            for (int g = 0; g < G; ++g) {
                for (int s = count; s < padded; ++s) weights[g][s] = -INFINITY;
                Vector tops = loadf(weights[g]);
                for (int s = W; s < padded; s += W) {
                    Vector next = loadf(weights[g] + s);
                    tops = tops > next ? tops : next;
                }
                const float top = std::max(peak[g], largest(tops));
                const float ratio = top > peak[g] ? std::exp(peak[g] - top) : 1.0f;
                Vector sums = Vector{};
                for (int s = 0; s < padded; s += W) {
                    Vector x = exponential(loadf(weights[g] + s) - top);
                    sums += x;
#if CODES
                    x *= loadf(value_scales + s);
#endif
                    std::memcpy(weights[g] + s, &x, sizeof x);
                }
                peak[g] = top;
                total[g] = total[g] * ratio + sum(sums);
                for (int v = 0; v < DV; ++v) weighted[g][v] *= ratio;
            }
            for (int s = 0; s < count; ++s) {
                Vector x[DV];
                for (int v = 0; v < DV; ++v) x[v] = numbers(value + s * D + v * W);
                fetch(next_value + s * D);
                for (int g = 0; g < G; ++g)
                    for (int v = 0; v < DV; ++v) weighted[g][v] += weights[g][s] * x[v];
            }
        }
    }
    std::memcpy(partial.peak, peak, sizeof peak);
    std::memcpy(partial.total, total, sizeof total);
    std::memcpy(partial.weighted, weighted, sizeof weighted);
}

// The attention of one sequence and KV head, from its partial softmaxes.
static void combine(Scalar* out, const Partial* partials, int64_t count) {
    for (int g = 0; g < G; ++g) {
        float top = partials[0].peak[g];
        for (int64_t i = 1; i < count; ++i) top = std::max(top, partials[i].peak[g]);
        float total = 0;
        Vector sums[DV] = {};
        for (int64_t i = 0; i < count; ++i) {
            const float ratio = std::exp(partials[i].peak[g] - top);
            total += partials[i].total[g] * ratio;
            for (int v = 0; v < DV; ++v) sums[v] += loadf(partials[i].weighted[g] + v * W) * ratio;
        }
        for (int v = 0; v < DV; ++v) store(out + g * D + v * W, sums[v] / total);
    }
}

// The key or value of one token, for all heads, into the cache, at an offset in blocks that begin at `to`.
static void write_row(Code* to, int64_t offset, const Scalar* from, int64_t heads, int64_t from_head,
                      int64_t to_head, int64_t S) {
    // Finite: the next owner of a block adds a bias to what it has not overwritten yet.
    for (int64_t k = 0; k < heads; ++k, from += from_head, to += to_head) {
        Scalar row[D];
        for (int d = 0; d < D; ++d) row[d] = bounded(from[d]);
#if CODES
        Vector tops = Vector{};
        for (int v = 0; v < DV; ++v) {
            const Vector x = load(row + v * W), size = x < 0 ? -x : x;
            tops = size > tops ? size : tops;
        }
        // Up to the next bf16, so that no number is beyond the largest code.
        const float top = largest(tops) / MOST;
        uint32_t bits;
        std::memcpy(&bits, &top, sizeof bits);
        bits = (bits + 0xffff) >> 16;
        const float scale = float_of(bits << 16);
        const bool is_zero = !(scale >= __FLT_MIN__);
        const uint16_t stored = is_zero ? 0 : (uint16_t)bits;
        for (int v = 0; v < DV; ++v) {
            const Integers codes = is_zero ? Integers{} : codes_of(load(row + v * W) / scale);
            for (int i = 0; i < W; ++i) to[offset * D + v * W + i] = (Code)codes[i];
        }
        std::memcpy(to + S * D + 2 * offset, &stored, sizeof stored);
#else
        (void)S;
        std::memcpy(to + offset * D, row, sizeof row);
#endif
    }
}

}  // namespace

// query [K * G, B, D], key and value [K, B, D], each with the strides of its first two axes; out
// [B, K * G, D]; write_blocks, write_offsets [B]; owners [N], bias [N, S], extra [num_extra]. scale_bits: the scale as
// fp32, of which the bits are passed, so that all arguments are integers or addresses.
extern "C" int decode_attention(
    const Scalar* query, int64_t query_head, int64_t query_row, const Scalar* key,
    const Scalar* value, int64_t key_head, int64_t key_row, int64_t value_head, int64_t value_row,
    Scalar* out, Code* keys, Code* values, const int64_t* write_blocks,
    const int64_t* write_offsets, const int64_t* owners, const float* bias, const int64_t* extra,
    int64_t num_extra, int64_t N, int64_t B, int64_t K, int64_t S, int64_t scale_bits,
    int64_t num_threads) try {
    const float scale = float_of((uint32_t)scale_bits);
    const int64_t head_stride = S * ROW, block_stride = K * head_stride;

    // Pairs by owner. Row B takes those without one.
    std::vector<int32_t> first(B + 2, 0), pairs(N);
    for (int64_t i = 0; i < N; ++i) ++first[owners[i] + 1];
    for (int64_t b = 0; b <= B; ++b) first[b + 1] += first[b];
    std::vector<int32_t> next(first.begin(), first.end() - 1);
    for (int64_t i = 0; i < N; ++i) pairs[next[owners[i]]++] = (int32_t)i;

    // Few items where there are many rows, several per row where there are few.
    const int64_t num_items = 4 * num_threads;
    const int32_t per_item =
        (int32_t)std::max<int64_t>(4, (first[B] * K + num_items - 1) / num_items);
    std::vector<Item> items;
    std::vector<int64_t> begins;  // of the items of each row and KV head
    for (int32_t b = 0; b < B; ++b)
        for (int32_t k = 0; k < K && first[b] < first[b + 1]; ++k) {
            begins.push_back((int64_t)items.size());
            for (int32_t i = first[b]; i < first[b + 1]; i += per_item)
                items.push_back({b, k, i, std::min(i + per_item, first[b + 1])});
        }
    const int64_t count = (int64_t)items.size(), num_results = (int64_t)begins.size();
    begins.push_back(count);
    std::vector<Partial> partials(count);
    // A thread takes a few items at once, so that it knows which block it reads after an item.
    const int64_t at_once = std::clamp<int64_t>(count / (16 * num_threads), 1, 4);
    const int64_t num_prefix = N - num_extra;
    // To wait for each other takes threads longer than a short context takes one of them.
    const int64_t team = first[B] * K * S * G * D <= ALONE ? 1 : num_threads;
    const auto place_of_first = [&](const Item& item) {
        return place_of(pairs[item.begin], extra, num_prefix, block_stride) +
               item.head * head_stride;
    };

#pragma omp parallel num_threads(team) if (team > 1)
    {
#pragma omp for schedule(static)
        for (int64_t b = 0; b < B; ++b) {
            const int64_t to = write_blocks[b] * block_stride, offset = write_offsets[b];
            write_row(keys + to, offset, key + b * key_row, K, key_head, head_stride, S);
            write_row(values + to, offset, value + b * value_row, K, value_head, head_stride, S);
            std::memset(out + b * K * G * D, 0, sizeof(Scalar) * K * G * D);
        }
#pragma omp for schedule(dynamic, at_once)
        for (int64_t i = 0; i < count; ++i) {
            const Item& item = items[i];
            const int64_t head = item.head * head_stride;
            const bool is_last = (i + 1) % at_once == 0 || i + 1 == count;
            const int64_t after = is_last ? 0 : place_of_first(items[i + 1]) - head;
            attend_blocks(partials[i], query + item.head * G * query_head + item.row * query_row,
                          query_head, scale, keys + head, values + head, block_stride,
                          &pairs[item.begin], item.end - item.begin, extra, num_prefix, bias, S,
                          after);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_results; ++i) {
            const Item& item = items[begins[i]];
            combine(out + (item.row * K + item.head) * G * D, &partials[begins[i]],
                    begins[i + 1] - begins[i]);
        }
    }
    return 0;
} catch (const std::exception&) {
    return 1;
}

// Prefill, where the processor multiplies vectors of bf16. With tiles of bf16 PyTorch has faster
// products. Keys and values of `TILE` positions are packed into pairs, as the instruction takes them,
// for all queries of an item: both products then are rows of pairs by a packed tile.
#if BF16 && defined(__AVX512BF16__) && !defined(__AMX_BF16__)
namespace {

constexpr int R = 12;        // rows of a product: 24 sums, 2 vectors of a tile, 1 of pairs
constexpr int COLUMNS = 32;  // columns of a product
constexpr int TILE = 64;     // positions that are scored at once; from position 0 on in every chunk
constexpr int QUERIES = std::max(1, 96 / G);  // of an item: packing takes a tenth of its time
constexpr int ROWS = (QUERIES * G + R - 1) / R * R;
constexpr int WIDTH = (D + COLUMNS - 1) / COLUMNS * COLUMNS;

// Queries `start` to `end` of a batch, after `context` tokens that are in the cache already.
struct Chunk {
    int64_t start, end, context;
    const int64_t* blocks;
    int64_t blocks_of_queries() const { return (end - start + QUERIES - 1) / QUERIES; }
};

// Up to `QUERIES` queries of a chunk, with the heads of one KV head.
struct Queries {
    int64_t chunk, head, first;
};

struct Cache {
    const Code *keys, *values;
    int64_t block_stride, head_stride, S;
    const int64_t *write_blocks, *write_offsets;

    // The key and the value of a position of a chunk; `room` is for what is not there as it is used.
    void read(const Chunk& chunk, int64_t head, int64_t position, const Scalar*& key,
              const Scalar*& value, Scalar (&room)[2][D]) const {
        const int64_t token = chunk.start + position - chunk.context;
        const bool is_new = position >= chunk.context;
        const int64_t block = is_new ? write_blocks[token] : chunk.blocks[position / S];
        const int64_t offset = is_new ? write_offsets[token] : position % S;
        const int64_t begin = block * block_stride + head * head_stride;
#if CODES
        key = expand(keys + begin, offset, room[0]);
        value = expand(values + begin, offset, room[1]);
#else
        (void)room;
        key = keys + begin + offset * D;
        value = values + begin + offset * D;
#endif
    }

#if CODES
    const Scalar* expand(const Code* strip, int64_t offset, Scalar* to) const {
        const float scale = scale_of(strip + S * D, offset);
        for (int v = 0; v < DV; ++v) store(to + v * W, numbers(strip + offset * D + v * W) * scale);
        return to;
    }
#endif
};

// Values too small to be normal count as 0, as in the instruction for pairs of bf16: products of fp32
// with them take a hundred times as long.
struct WithoutDenormals {
    const unsigned before = _mm_getcsr();
    WithoutDenormals() { _mm_setcsr(before | 0x8040); }
    ~WithoutDenormals() { _mm_setcsr(before); }
};

// The two ways to multiply: see `tiled_linear.cpp`. A row of a product has units, pairs of bf16 or the
// two floats of each, in `LENGTH` entries.
struct Pairs {
    typedef int32_t Entry;
    static constexpr int OF_UNIT = 1;

    static inline void put(int32_t* entries, __m256i halves) {
        _mm256_storeu_si256((__m256i*)entries, halves);
    }

    template <int LENGTH>
    static inline void add(__m512 (&sums)[R][2], const int32_t* entries, const int32_t* tile) {
        const __m512bh t0 = (__m512bh)_mm512_loadu_si512(tile);
        const __m512bh t1 = (__m512bh)_mm512_loadu_si512(tile + W);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32(entries[r * LENGTH]);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], t0, x);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], t1, x);
        }
    }
};

struct Floats {
    typedef float Entry;
    static constexpr int OF_UNIT = 2;

    static inline void put(float* entries, __m256i halves) {
        _mm512_storeu_si512(entries, _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    }

    template <int LENGTH>
    static inline void add(__m512 (&sums)[R][2], const float* entries, const int32_t* tile) {
        const __m512i t0 = _mm512_loadu_si512(tile), t1 = _mm512_loadu_si512(tile + W);
        add<LENGTH>(sums, entries, (__m512)_mm512_slli_epi32(t0, 16),
                    (__m512)_mm512_slli_epi32(t1, 16));
        add<LENGTH>(sums, entries + 1, (__m512)_mm512_maskz_mov_epi16(0xAAAAAAAA, t0),
                    (__m512)_mm512_maskz_mov_epi16(0xAAAAAAAA, t1));
    }

    template <int LENGTH>
    static inline void add(__m512 (&sums)[R][2], const float* entries, __m512 t0, __m512 t1) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const __m512 x = _mm512_set1_ps(entries[r * LENGTH]);
            sums[r][0] = _mm512_fmadd_ps(t0, x, sums[r][0]);
            sums[r][1] = _mm512_fmadd_ps(t1, x, sums[r][1]);
        }
    }
};

// out [R, 32] = out * ratio + rows [R, LENGTH] by tile [units, 32]. Without a ratio `out` is not read.
template <class Products, int LENGTH>
static inline void multiply(float* out, int64_t stride, const float* ratio,
                            const typename Products::Entry* rows, const int32_t* tile, int units) {
    __m512 sums[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h)
            sums[r][h] = ratio == nullptr ? _mm512_setzero_ps()
                                          : _mm512_mul_ps(_mm512_loadu_ps(out + r * stride + h * W),
                                                          _mm512_set1_ps(ratio[r]));
    for (int u = 0; u < units; ++u, rows += Products::OF_UNIT, tile += COLUMNS)
        Products::template add<LENGTH>(sums, rows, tile);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        for (int h = 0; h < 2; ++h) _mm512_storeu_ps(out + r * stride + h * W, sums[r][h]);
}

static inline __m512i widened(const Scalar* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}

// Which positions a query attends to: `window` of the last, and those of its own `chunk` of positions; 0 for
// all.
struct Limits {
    int64_t window, chunk;
    int64_t oldest(int64_t position) const {
        const int64_t of_window = window > 0 ? position - window + 1 : 0;
        return std::max<int64_t>({0, of_window, chunk > 0 ? position / chunk * chunk : 0});
    }
};

// 16 rows of 16 integers as columns.
static inline void transpose(__m512i (&rows)[16]) {
    __m512i twos[16], fours[16];
    for (int i = 0; i < 16; i += 2) {
        twos[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        twos[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            fours[i + 2 * j] = _mm512_unpacklo_epi64(twos[i + j], twos[i + 2 + j]);
            fours[i + 2 * j + 1] = _mm512_unpackhi_epi64(twos[i + j], twos[i + 2 + j]);
        }
    // A quarter of fours[4 i + j] has column 4 * quarter + j of rows 4 i to 4 i + 3.
    for (int j = 0; j < 4; ++j) {
        const __m512i even[2] = {_mm512_shuffle_i32x4(fours[j], fours[4 + j], 0x88),
                                 _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0x88)};
        const __m512i odd[2] = {_mm512_shuffle_i32x4(fours[j], fours[4 + j], 0xdd),
                                _mm512_shuffle_i32x4(fours[8 + j], fours[12 + j], 0xdd)};
        rows[j] = _mm512_shuffle_i32x4(even[0], even[1], 0x88);
        rows[4 + j] = _mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
        rows[8 + j] = _mm512_shuffle_i32x4(even[0], even[1], 0xdd);
        rows[12 + j] = _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
    }
}

// Keys as [TILE / 32, D / 2, 32]: pairs of a key's values. Values as [WIDTH / 32, TILE / 2, 32]: pairs
// of two positions. Positions before `begin` and from `count` on are 0, and so are a head's values from D on.
struct Packed {
    alignas(64) int32_t keys[TILE * D / 2];
    alignas(64) int32_t values[WIDTH * TILE / 2];

    void fill(const Cache& cache, const Chunk& chunk, int64_t head, int64_t first, int64_t begin,
              int count) {
        static const Scalar none[D] = {};
        for (int s = 0; s < TILE; s += W) {
            const Scalar *of_keys[W], *of_values[W];
            Scalar room[W][2][D];
            for (int i = 0; i < W; ++i) {
                of_keys[i] = of_values[i] = none;
                if (s + i >= begin && s + i < count)
                    cache.read(chunk, head, first + s + i, of_keys[i], of_values[i], room[i]);
            }
            for (int u = 0; u < D / 2; u += 16) put_keys(of_keys, s, u);
            for (int i = 0; i < W; i += 2)
                for (int d = 0; d < D; d += W)
                    _mm512_store_si512(
                        values + (d / COLUMNS * TILE + s + i) / 2 * COLUMNS + d % COLUMNS,
                        _mm512_or_si512(widened(of_values[i] + d),
                                        _mm512_slli_epi32(widened(of_values[i + 1] + d), 16)));
        }
    }

    // Pairs `u` to `u` + 16 of 16 keys, of which the first is that of position `s` of the tile.
    void put_keys(const Scalar* const (&of_keys)[W], int s, int u) {
        const int used = std::min(16, D / 2 - u);  // 8 in the end of some heads
        __m512i rows[16];
        for (int i = 0; i < W; ++i)
            rows[i] = _mm512_maskz_loadu_epi32((__mmask16)((1u << used) - 1), of_keys[i] + 2 * u);
        transpose(rows);
        int32_t* to = keys + s / COLUMNS * COLUMNS * D / 2 + s % COLUMNS + u * COLUMNS;
        for (int i = 0; i < used; ++i) _mm512_storeu_si512(to + i * COLUMNS, rows[i]);
    }
};

// One row's scores of a tile: softmax so far, and the weights as a row of a product. `totals`: of the
// positions of each lane.
struct Softmax {
    float peak = -INFINITY;
    Vector totals = Vector{};

    // Takes the positions from `begin` up to `last`; returns the ratio of the old sums to the new ones.
    template <class Products>
    float add(const float* scores, float scale, int begin, int last,
              typename Products::Entry* weights) {
        const Integers lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const bool takes_all = begin <= 0 && last >= TILE - 1;
        Vector x[TILE / W], tops = splat(-INFINITY);
        for (int v = 0; v < TILE / W; ++v) {
            x[v] = loadf(scores + v * W) * scale;
            if (!takes_all) {
                const Integers masked = (lanes + v * W > last) | (lanes + v * W < begin);
                x[v] = masked ? splat(-INFINITY) : x[v];
            }
            tops = tops > x[v] ? tops : x[v];
        }
        float ratio = 1;
        if (_mm512_cmp_ps_mask((__m512)tops, _mm512_set1_ps(peak), _CMP_GT_OQ) != 0) {
            const float highest = std::max(peak, largest(tops));
            ratio = std::exp(peak - highest);
            peak = highest;
            totals *= ratio;
        }
        const float top = peak == -INFINITY ? 0.0f : peak;  // no position so far: weights are 0
        for (int v = 0; v < TILE / W; ++v) {
            x[v] = exponential(x[v] - top);
            totals += x[v];
            Products::put(weights + v * W / 2 * Products::OF_UNIT,
                          (__m256i)_mm512_cvtneps_pbh((__m512)x[v]));
        }
        return ratio;
    }
};

template <class Products>
static void attend_queries(const Queries& item, const Chunk& chunk, const Cache& cache,
                           const Scalar* query, int64_t query_head, int64_t query_row, Scalar* out,
                           int64_t K, float scale, const Limits& limits) {
    const int64_t count = std::min<int64_t>(QUERIES, chunk.end - chunk.start - item.first);
    const int64_t rows = count * G, start = chunk.start + item.first;
    typedef typename Products::Entry Entry;
    constexpr int OF_UNIT = Products::OF_UNIT, OF_ROW = D / 2 * OF_UNIT;
    constexpr int OF_TILE = TILE / 2 * OF_UNIT;
    alignas(64) Entry queries[ROWS * OF_ROW] = {};             // [ROWS, OF_ROW]
    alignas(64) float sums[ROWS * WIDTH] = {};                 // [ROWS, WIDTH]
    alignas(64) float scores[R * TILE] = {};                   // [R, TILE]
    alignas(64) Entry weights[R * OF_TILE] = {};               // [R, OF_TILE]
    Softmax softmax[ROWS];
    Packed packed;
    const Scalar* of_head = query + item.head * G * query_head + start * query_row;
    for (int64_t row = 0; row < rows; ++row) {
        const Scalar* from = of_head + row % G * query_head + row / G * query_row;
        for (int d = 0; d < D; d += W)
            Products::put(queries + row * OF_ROW + d / 2 * OF_UNIT,
                          _mm256_loadu_si256((const __m256i*)(from + d)));
    }
    std::memset(packed.values, 0, sizeof packed.values);
    const int64_t first = chunk.context + item.first, visible = first + count;
    const int64_t oldest = limits.oldest(first);
    for (int64_t tile = oldest / TILE * TILE; tile < visible; tile += TILE) {
        const int seen = (int)std::min<int64_t>(TILE, visible - tile);
        const int products = (seen + COLUMNS - 1) / COLUMNS;
        packed.fill(cache, chunk, item.head, tile, oldest - tile, seen);
        for (int64_t begin = 0; begin < rows; begin += R) {
            for (int h = 0; h < products; ++h)
                multiply<Products, OF_ROW>(scores + h * COLUMNS, TILE, nullptr,
                                           queries + begin * OF_ROW,
                                           packed.keys + h * COLUMNS * D / 2, D / 2);
            float ratio[R] = {};
            for (int64_t r = 0; r < std::min<int64_t>(R, rows - begin); ++r) {
                const int64_t position = first + (begin + r) / G;
                const int64_t from = std::max<int64_t>(0, limits.oldest(position) - tile);
                const int64_t last = std::min<int64_t>(TILE, position - tile);
                ratio[r] = softmax[begin + r].template add<Products>(
                    scores + r * TILE, scale, (int)std::min<int64_t>(TILE, from), (int)last,
                    weights + r * OF_TILE);
            }
            for (int c = 0; c < WIDTH / COLUMNS; ++c)
                multiply<Products, OF_TILE>(sums + begin * WIDTH + c * COLUMNS, WIDTH, ratio,
                                            weights, packed.values + c * COLUMNS * TILE / 2,
                                            products * COLUMNS / 2);
        }
    }
    for (int64_t row = 0; row < rows; ++row) {
        Scalar* to = out + (start + row / G) * K * G * D + (item.head * G + row % G) * D;
        const float total = sum(softmax[row].totals);
        for (int v = 0; v < DV; ++v)
            store(to + v * W, loadf(sums + row * WIDTH + v * W) / total);
    }
}

}  // namespace

// query [K * G, T, D], key and value [K, T, D], each with the strides of its first two axes; out
// [T, K * G, D]; write_blocks, write_offsets [T]. The chunks follow each other from token 0 on. Tokens
// after the last one are padding: nothing is written for them, and their rows of `out` are 0. window, chunk: see
// `Limits`. widens: by `Floats`, otherwise by `Pairs`.
extern "C" int prefill_attention(
    const Scalar* query, int64_t query_head, int64_t query_row, const Scalar* key,
    const Scalar* value, int64_t key_head, int64_t key_row, int64_t value_head, int64_t value_row,
    Scalar* out, Code* keys, Code* values, const int64_t* write_blocks,
    const int64_t* write_offsets, const Chunk* chunks, int64_t num_chunks, int64_t T, int64_t K,
    int64_t S, float scale, int64_t window, int64_t chunk, int64_t num_threads, int64_t widens) try {
    const Cache cache{keys, values, K * S * ROW, S * ROW, S, write_blocks, write_offsets};
    int64_t count = 0;
    for (int64_t i = 0; i < num_chunks; ++i) count += chunks[i].blocks_of_queries() * K;
    std::vector<Queries> items;
    items.reserve(count);
    // The last queries of a chunk see the most positions, and start first.
    for (int64_t i = 0; i < num_chunks; ++i)
        for (int64_t b = chunks[i].blocks_of_queries() - 1; b >= 0; --b)
            for (int64_t k = 0; k < K; ++k) items.push_back({i, k, b * QUERIES});
    const auto attend = widens ? attend_queries<Floats> : attend_queries<Pairs>;
    const int64_t end = num_chunks == 0 ? 0 : chunks[num_chunks - 1].end;

#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        const WithoutDenormals flushing;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < end; ++t) {
            const int64_t to = write_blocks[t] * cache.block_stride, offset = write_offsets[t];
            write_row(keys + to, offset, key + t * key_row, K, key_head, cache.head_stride, S);
            write_row(values + to, offset, value + t * value_row, K, value_head, cache.head_stride, S);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < count; ++i)
            attend(items[i], chunks[items[i].chunk], cache, query, query_head, query_row, out, K,
                   scale, {window, chunk});
    }
    std::memset(out + end * K * G * D, 0, sizeof(Scalar) * (T - end) * K * G * D);
    return 0;
} catch (const std::exception&) {
    return 1;
}
#endif
