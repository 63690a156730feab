// Products of bf16 rows, rounded to int8, with packed weights of 8 or 4 bits: y = x W^T + bias, for all
// layers that have the same rows as input. The products are of integers (AVX512-VNNI), and their sums
// exact.
//
// Rows are rounded in parts of so many inputs (`part`), each in steps of 1/127 of its largest value: the
// numbers of a part are integers from -127 to 127. Each group of inputs, one or more parts, has a scale
// for each output, and perhaps a shift, as in `tiled_linear.cpp`. The instruction takes four unsigned
// bytes of a weight by four signed ones of a row: a weight of 8 bits is 128 more than it is, one of 4 bits
// 8 more. So the sum of a part begins with so many times the negated sum of its inputs.
//
// A weight is [tiles, K / 4, 2, LANES, 4] bytes: two vectors of outputs, of four inputs each. Of 4 bits
// it is [tiles, K / 8, 2, LANES, 4]: the lower bits are those of the first four of eight inputs. Rows are
// computed in blocks whose sums fill the registers; a row's result does not depend on the other rows.
// Nothing here allocates memory, so that nothing throws.

#if !defined(__AVX512VNNI__) || !defined(__AVX512BW__) || !defined(__AVX512VL__)
#error "this processor has no products of bytes in vectors of 512 bits (AVX512-VNNI)"
#endif

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <omp.h>
#include <utility>

namespace {

typedef uint16_t Half;  // bf16

constexpr int MOST = 12;           // rows of a block: the sums of a part, and of all, of a vector
constexpr int64_t LANES = 16;      // outputs of a vector
constexpr int64_t COLUMNS = 2 * LANES;
constexpr int64_t AHEAD = 4096;    // bytes between what is read and what is fetched
constexpr int64_t UNIT = 32 / BITS;  // inputs of 64 bytes of a vector
constexpr int QUADS = UNIT / 4;
constexpr int32_t OFFSET = BITS == 8 ? 128 : 8;

static inline __m512 widened(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// To nearest, ties to even; what is not a number stays one.
static inline void store(Half* to, __m512 floats, int64_t used) {
    const __m512i bits = _mm512_castps_si512(floats);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(floats, floats, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(1 << 22));
    const __m512i rounded = _mm512_mask_mov_epi32(sum, is_nan, quiet);
    _mm256_mask_storeu_epi16(to, (__mmask16)((1u << used) - 1),
                             _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

struct Scales {
    const char* values;   // [groups, COLUMNS] of a tile
    int64_t type;         // 0: fp32, 1: fp16, 2: bf16
    const float* shifts;  // the same, or null

    __m512 scale(int64_t place) const {
        if (type == 0) return _mm512_loadu_ps((const float*)values + place);
        const __m256i halves = _mm256_loadu_si256((const __m256i*)((const Half*)values + place));
        return type == 1 ? _mm512_cvtph_ps(halves) : widened(halves);
    }
};

struct Block {
    const int32_t* inputs;  // four bytes of each row: [K / 4, rows]
    const int32_t* starts;  // of the sums, [parts, rows]
    const float* steps;     // the same
    int64_t units, parts;   // units of inputs of a part
    int64_t of_group;       // parts of a group
    const uint8_t* weight;
    const char* ahead;  // what is fetched meanwhile, `step` bytes for each unit of inputs
    int64_t step;
    Scales scales;
    __m512 bias[2];
    Half* out;
    int64_t num_outputs;
    int64_t used[2];  // outputs of each vector
};

template <int V>
static inline void load(__m512i (&weights)[QUADS][V], const uint8_t* from) {
    for (int v = 0; v < V; ++v) {
        const __m512i bytes = _mm512_loadu_si512(from + 64 * v);
#if BITS == 8
        weights[0][v] = _mm512_xor_si512(bytes, _mm512_set1_epi8((char)128));
#else
        const __m512i low = _mm512_set1_epi8(15);
        weights[0][v] = _mm512_and_si512(bytes, low);
        weights[1][v] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), low);
#endif
    }
}

// The sums of a part. Few rows have two for each output: an addition waits for the one before.
template <int R, int V>
static inline void sum_part(__m512i (&sums)[R][V], const Block& block, const uint8_t*& weight,
                            const int32_t*& inputs, const char*& ahead, int64_t part) {
    constexpr int TWICE = R * V <= 6 ? 2 : 1;
    const int64_t step = block.step;
    __m512i others[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) {
            sums[r][v] = _mm512_set1_epi32(block.starts[part * R + r]);
            others[r][v] = _mm512_setzero_si512();
        }
    for (int64_t u = 0; u < block.units; u += TWICE)
#pragma GCC unroll 2
        for (int i = 0; i < TWICE; ++i) {
            _mm_prefetch(ahead, _MM_HINT_T0);
            if (step > 64) _mm_prefetch(ahead + 64, _MM_HINT_T0);
            __m512i weights[QUADS][V];
            load(weights, weight);
#pragma GCC unroll 2
            for (int q = 0; q < QUADS; ++q, inputs += R)
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r) {
                    // The compiler would read all rows first, and have no registers for them.
                    if (R > MOST / 2) asm volatile("" ::: "memory");
                    const __m512i x = _mm512_set1_epi32(inputs[r]);
                    for (int v = 0; v < V; ++v) {
                        __m512i& sum = i == 0 ? sums[r][v] : others[r][v];
                        sum = _mm512_dpbusd_epi32(sum, weights[q][v], x);
                    }
                }
            weight += 128, ahead += step;
        }
    if (TWICE == 1) return;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sums[r][v] = _mm512_add_epi32(sums[r][v], others[r][v]);
}

// Of `V` vectors of a tile, from `first` on. Sums are scaled once where all inputs have one scale.
template <int R, int V, bool GROUPS>
static inline void compute_vectors(const Block& block, int first) {
    const int32_t* inputs = block.inputs;
    const uint8_t* weight = block.weight + 64 * first;
    const char* ahead = block.ahead;
    __m512 totals[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) totals[r][v] = _mm512_setzero_ps();
    for (int64_t part = 0; part < block.parts; ++part) {
        __m512i sums[R][V];
        sum_part(sums, block, weight, inputs, ahead, part);
        const float* steps = block.steps + part * R;
        const int64_t place = (GROUPS ? part / block.of_group : 0) * COLUMNS + LANES * first;
        for (int v = 0; v < V; ++v) {
            const __m512 scale = GROUPS ? block.scales.scale(place + LANES * v) : __m512{};
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                const __m512 sum = _mm512_cvtepi32_ps(sums[r][v]), size = _mm512_set1_ps(steps[r]);
                totals[r][v] = GROUPS ? _mm512_fmadd_ps(_mm512_mul_ps(sum, size), scale, totals[r][v])
                                      : _mm512_fmadd_ps(sum, size, totals[r][v]);
            }
        }
        if (!GROUPS || block.scales.shifts == nullptr) continue;
        for (int v = 0; v < V; ++v) {
            const __m512 shift = _mm512_loadu_ps(block.scales.shifts + place + LANES * v);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                // The sum of the inputs.
                const float size = (float)block.starts[part * R + r] * (-1.0f / OFFSET) * steps[r];
                totals[r][v] = _mm512_fmadd_ps(_mm512_set1_ps(size), shift, totals[r][v]);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) {
            const __m512 bias = block.bias[first + v];
            const __m512 out =
                GROUPS ? _mm512_add_ps(totals[r][v], bias)
                       : _mm512_fmadd_ps(totals[r][v],
                                         block.scales.scale(LANES * (first + v)), bias);
            store(block.out + r * block.num_outputs + LANES * (first + v), out,
                  block.used[first + v]);
        }
}

template <int R, bool GROUPS>
static inline void compute_tile_of(const Block& block) {
    // The sums of a part and those of all must both fit the registers.
    if (R <= MOST / 2) {
        compute_vectors<R, 2, GROUPS>(block, 0);
    } else {
        compute_vectors<R, 1, GROUPS>(block, 0);
        compute_vectors<R, 1, GROUPS>(block, 1);
    }
}

template <int R>
static void compute(const Block& block) {
    // With shifts, sums are scaled as those of several groups.
    if (block.of_group < block.parts || block.scales.shifts != nullptr) {
        compute_tile_of<R, true>(block);
    } else {
        compute_tile_of<R, false>(block);
    }
}

template <int... R>
static void compute(const Block& block, int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr void (*all[])(const Block&) = {compute<R + 1>...};
    all[rows - 1](block);
}

// What blocks read: bytes of rows, [K / 4, rows, 4]; how sums begin, [parts, rows]; steps, the same.
struct Inputs {
    int32_t* data;
    int32_t* starts;
    float* steps;
    int64_t M, K, part;
    int64_t parts() const { return K / part; }
    int64_t blocks() const { return (M + MOST - 1) / MOST; }
    int64_t begin(int64_t block) const { return M * block / blocks(); }
    int64_t rows(int64_t block) const { return begin(block + 1) - begin(block); }
    int32_t* of(int64_t block) const { return data + begin(block) * (K / 4); }
    int32_t* starts_of(int64_t block) const { return starts + begin(block) * parts(); }
    float* steps_of(int64_t block) const { return steps + begin(block) * parts(); }
    int64_t words() const { return M * (K / 4 + 2 * parts()); }
};

constexpr float TINY = 1e-30f;  // a smaller step counts as 0

// A part of a row: `inputs`, a multiple of 32. Returns its step, NaN where it is not finite; writes its
// numbers, rounded to nearest, ties to even, for every `rows`-th of `out`.
static inline float round_part(const Half* row, int64_t inputs, int32_t* out, int64_t rows) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t k = 0; k < inputs; k += 32)
        most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(row + k),
                                                       _mm512_set1_epi16(0x7fff)));
    const __m512i wide = _mm512_max_epu32(_mm512_and_si512(most, _mm512_set1_epi32(0xffff)),
                                          _mm512_srli_epi32(most, 16));
    const uint32_t bits = _mm512_reduce_max_epu32(wide) << 16;
    float largest;
    std::memcpy(&largest, &bits, sizeof bits);
    const float step = largest / 127.0f;
    const bool is_used = step >= TINY;
    const __m512 inverse = _mm512_set1_ps(is_used ? 1.0f / step : 0.0f);
    for (int64_t k = 0; k < inputs; k += 16, out += 4 * rows) {
        const __m512 x = widened(_mm256_loadu_si256((const __m256i*)(row + k)));
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
        alignas(16) int32_t quads[4];
        _mm_store_si128((__m128i*)quads, _mm512_cvtepi32_epi8(whole));
        for (int q = 0; q < 4; ++q) out[q * rows] = quads[q];
    }
    if (bits >= 0x7f800000u) return NAN;
    return is_used ? step : 0.0f;
}

// How the sums of a part begin: the negated sums of inputs, so often as a weight is more than it is.
static inline void fill_starts(const int32_t* inputs, int32_t* starts, int64_t rows, int64_t quads) {
    const __m512i ones = _mm512_set1_epi8(1);
    __m512i sums = _mm512_setzero_si512();
    if (rows == 1) {
        for (int64_t q = 0; q < quads; q += 8)
            sums = _mm512_dpbusd_epi32(sums, ones, _mm512_maskz_loadu_epi32(0xff, inputs + q));
        starts[0] = -OFFSET * _mm512_reduce_add_epi32(sums);
        return;
    }
    const __mmask16 used = (__mmask16)((1u << rows) - 1);
    for (int64_t q = 0; q < quads; ++q)
        sums = _mm512_dpbusd_epi32(sums, ones, _mm512_maskz_loadu_epi32(used, inputs + q * rows));
    _mm512_mask_storeu_epi32(starts, used, _mm512_mullo_epi32(sums, _mm512_set1_epi32(-OFFSET)));
}

static void round_block(const Half* rows, const Inputs& inputs, int64_t block) {
    const int64_t begin = inputs.begin(block), count = inputs.rows(block), part = inputs.part;
    int32_t *out = inputs.of(block), *starts = inputs.starts_of(block);
    float* steps = inputs.steps_of(block);
    for (int64_t r = 0; r < count; ++r)
        for (int64_t p = 0; p < inputs.parts(); ++p)
            steps[p * count + r] = round_part(rows + (begin + r) * inputs.K + p * part, part,
                                              out + p * (part / 4) * count + r, count);
    for (int64_t p = 0; p < inputs.parts(); ++p)
        fill_starts(out + p * (part / 4) * count, starts + p * count, count, part / 4);
}

struct Layer {
    const uint8_t* weight;  // in tiles of `COLUMNS` outputs
    const char* scales;     // [tiles, groups, COLUMNS]
    const float* shifts;    // the same, or null
    const Half* bias;       // [N] or null
    Half* out;              // [M, N]
    int64_t N;
    int64_t scale_type;  // see `Scales`
    int64_t tiles() const { return (N + COLUMNS - 1) / COLUMNS; }
};

static void compute_tile(const Layer& layer, int64_t tile, const Inputs& inputs, int64_t groups) {
    const int64_t units = inputs.K / UNIT, size = units * 128, blocks = inputs.blocks();
    const int64_t place = tile * groups * COLUMNS;
    Block block;
    for (int half = 0; half < 2; ++half) {
        const int64_t begin = tile * COLUMNS + LANES * half;
        block.used[half] = std::clamp<int64_t>(layer.N - begin, 0, LANES);
        Half bias[LANES] = {};
        if (layer.bias != nullptr)
            std::memcpy(bias, layer.bias + begin, block.used[half] * sizeof(Half));
        block.bias[half] = widened(_mm256_loadu_si256((const __m256i*)bias));
    }
    block.scales = {layer.scales + place * (layer.scale_type == 0 ? 4 : 2), layer.scale_type,
                    layer.shifts == nullptr ? nullptr : layer.shifts + place};
    block.units = inputs.part / UNIT;
    block.parts = inputs.parts();
    block.of_group = block.parts / groups;
    block.num_outputs = layer.N;
    block.weight = layer.weight + tile * size;
    for (int64_t b = 0; b < blocks; ++b) {
        // A single block reads its tile from memory. Of several, the first one does, and each
        // fetches a part of the next tile.
        block.step = std::max<int64_t>(1, 128 / blocks);
        block.ahead = (const char*)block.weight +
                      (blocks == 1 ? AHEAD : size + b * block.step * units);
        block.inputs = inputs.of(b);
        block.starts = inputs.starts_of(b);
        block.steps = inputs.steps_of(b);
        block.out = layer.out + inputs.begin(b) * layer.N + tile * COLUMNS;
        compute(block, inputs.rows(b), std::make_integer_sequence<int, MOST>());
    }
}

}  // namespace

// Outputs of a tile.
extern "C" int64_t columns() { return COLUMNS; }

// Rows of a block: of so few, each thread has its own copy in the scratch memory.
extern "C" int64_t most_rows() { return MOST; }

// rows [M, K], in parts of `part` inputs, a multiple of 32, of which a group is one or more. scratch:
// M * (K / 4 + 2 * K / part) words of 4 bytes; where M is at most `most_rows`, as many for each thread.
extern "C" void byte_linears(const Half* rows, const Layer* layers, int64_t count, int32_t* scratch,
                             int64_t M, int64_t K, int64_t groups, int64_t part,
                             int64_t num_threads) {
    int64_t tiles = 0;
    for (int64_t i = 0; i < count; ++i) tiles += layers[i].tiles();
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        Inputs inputs{nullptr, nullptr, nullptr, M, K, part};
        // Few rows by each thread for itself: to wait for others takes longer.
        const bool is_own = M <= MOST;
        inputs.data = scratch + (is_own ? omp_get_thread_num() * inputs.words() : 0);
        inputs.starts = inputs.data + M * (K / 4);
        inputs.steps = (float*)(inputs.starts + M * inputs.parts());
        if (is_own) {
            if (M > 0) round_block(rows, inputs, 0);
        } else {
#pragma omp for schedule(static)
            for (int64_t b = 0; b < inputs.blocks(); ++b) round_block(rows, inputs, b);
        }
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < tiles; ++i) {
            int64_t tile = i;
            const Layer* layer = layers;
            for (; tile >= layer->tiles(); ++layer) tile -= layer->tiles();
            compute_tile(*layer, tile, inputs, groups);
        }
    }
}
