// Products of bf16 rows with packed weights, summed up in fp32: y = x W^T + bias, for all layers that
// have the same rows as input.
//
// Compiled for INT8=0: a weight is bf16, or INT8=1: it is integers of 8 bits with a scale for each
// output, which are exact as bf16. A weight is [tiles, K / 2, 32, 2]: 32 outputs of two inputs each
// are two vectors of the processor's instruction, and a tile is one stream of memory. Rows are
// computed in blocks whose sums fill the registers; a block's inputs are another stream, because rows
// that are a power of two apart would displace each other in the cache. A row's result does not depend
// on the other rows. Nothing here allocates memory, so that nothing throws.

#if !defined(__AVX512BF16__)
#error "this processor has no products of bf16 vectors"
#elif defined(__AMX_BF16__)
#error "oneDNN has faster products, of bf16 tiles"
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <utility>

namespace {

constexpr int MOST = 14;         // rows of a block: 28 sums, 2 vectors of weights, 1 of inputs
constexpr int64_t LANES = 16;    // outputs of a vector
constexpr int64_t COLUMNS = 32;  // outputs of a tile

constexpr int64_t AHEAD = 4096;  // bytes between what is read and what is fetched

typedef uint16_t Half;  // bf16
static inline __m512bh load(const Half* from) { return (__m512bh)_mm512_loadu_si512(from); }

#if INT8
typedef int8_t Weight;
static inline __m512i as_float(const int8_t* from) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)from);
    return (__m512i)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
// A vector of 16 outputs: their weights of the first input, then those of the second.
static inline __m512bh load(const int8_t* from) {
    return (__m512bh)_mm512_or_si512(_mm512_srli_epi32(as_float(from), 16), as_float(from + LANES));
}
static inline __m512 scaled(__m512 sum, __m512 scale, __m512 bias) {
    return _mm512_fmadd_ps(sum, scale, bias);
}
#else
typedef Half Weight;
static inline __m512 scaled(__m512 sum, __m512, __m512 bias) { return _mm512_add_ps(sum, bias); }
#endif

static inline __m512 widened(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

struct Block {
    const int32_t* inputs;  // [pairs, rows]
    int64_t pairs;
    const Weight* weight;
    const char* ahead;  // what is fetched meanwhile, `step` bytes for each pair of inputs
    int64_t step;
    __m512 scale[2], bias[2];
    uint16_t* out;
    int64_t num_outputs;
    __mmask16 mask[2];
};

template <int R>
static void compute(const Block& block) {
    __m512 sums[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    }
    const int32_t* inputs = block.inputs;
    const Weight* weight = block.weight;
    const char* ahead = block.ahead;
    const int64_t step = block.step;
    for (int64_t p = 0; p < block.pairs; ++p, weight += 64, inputs += R, ahead += step) {
        const __m512bh w0 = load(weight);
        const __m512bh w1 = load(weight + 32);
        _mm_prefetch(ahead, _MM_HINT_T0);
        if (step > 64) _mm_prefetch(ahead + 64, _MM_HINT_T0);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32(inputs[r]);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], w0, x);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], w1, x);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        uint16_t* out = block.out + r * block.num_outputs;
        for (int half = 0; half < 2; ++half) {
            const __m512 sum = scaled(sums[r][half], block.scale[half], block.bias[half]);
            _mm256_mask_storeu_epi16(out + LANES * half, block.mask[half],
                                     (__m256i)_mm512_cvtneps_pbh(sum));
        }
    }
}

// Pairs of inputs in the order in which a block reads them: pairs `from` to `to` of rows [R, K] as
// [K / 2, R].
template <int R>
static void transpose(const Half* rows, int32_t* pairs, int64_t K, int64_t from, int64_t to) {
    for (int64_t p = from; p < to; ++p)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            std::memcpy(pairs + p * R + r, rows + r * K + 2 * p, sizeof *pairs);
}

struct OfRows {
    void (*compute)(const Block&);
    void (*transpose)(const Half*, int32_t*, int64_t, int64_t, int64_t);
};

template <int... R>
static const OfRows& of_rows(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr OfRows all[] = {{compute<R + 1>, transpose<R + 1>}...};
    return all[rows - 1];
}

static const OfRows& of_rows(int64_t rows) {
    return of_rows(rows, std::make_integer_sequence<int, MOST>());
}

struct Layer {
    const Weight* weight;  // [N / 32 rounded up, K / 2, 32, 2], of integers [.., K / 2, 2, 2, 16]
    const float* scales;   // [N], of integers
    const Half* bias;      // [N] or null
    Half* out;             // [M, N]
    int64_t N;
    int64_t tiles() const { return (N + COLUMNS - 1) / COLUMNS; }
};

// Rows, in blocks, as all layers read them.
struct Inputs {
    const int32_t* pairs;
    int64_t M, K;
    int64_t blocks() const { return (M + MOST - 1) / MOST; }
    int64_t begin(int64_t block) const { return M * block / blocks(); }
};

static Block tile_of(const Layer& layer, int64_t column) {
    Block block;
    for (int half = 0; half < 2; ++half) {
        const int64_t used = std::clamp<int64_t>(layer.N - column - LANES * half, 0, LANES);
        block.mask[half] = (__mmask16)((1u << used) - 1);
        block.bias[half] = block.scale[half] = _mm512_setzero_ps();
        if (layer.scales != nullptr)
            block.scale[half] =
                _mm512_maskz_loadu_ps(block.mask[half], layer.scales + column + LANES * half);
        if (layer.bias != nullptr)
            block.bias[half] = widened(
                _mm256_maskz_loadu_epi16(block.mask[half], layer.bias + column + LANES * half));
    }
    return block;
}

static void compute_tile(const Layer& layer, int64_t tile, const Inputs& inputs) {
    const int64_t K = inputs.K, size = K * COLUMNS, blocks = inputs.blocks();
    const Weight* weight = layer.weight + tile * size;
    Block block = tile_of(layer, tile * COLUMNS);
    block.pairs = K / 2;
    block.num_outputs = layer.N;
    block.weight = weight;
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t first = inputs.begin(b), rows = inputs.begin(b + 1) - first;
        // A single block reads its tile from memory. Of several, the first one does, and each
        // fetches a part of the next tile.
        block.step = std::max<int64_t>(1, 64 * sizeof(Weight) / blocks);
        block.ahead = blocks == 1 ? (const char*)weight + AHEAD
                                  : (const char*)(weight + size) + b * block.step * (K / 2);
        block.inputs = inputs.pairs + first * K / 2;
        block.out = layer.out + first * layer.N + tile * COLUMNS;
        of_rows(rows).compute(block);
    }
}

}  // namespace

// rows [M, K], K even; pairs: M * K / 2 integers of scratch, not read for one row.
extern "C" void tiled_linears(const Half* rows, const Layer* layers, int64_t count, int32_t* pairs,
                              int64_t M, int64_t K, int64_t num_threads) {
    // A row is in the order of its only block.
    const Inputs inputs{M == 1 ? (const int32_t*)rows : pairs, M, K};
    const int64_t blocks = M == 1 ? 0 : inputs.blocks();
    const int64_t parts = num_threads;  // of a block: there may be only one
    int64_t tiles = 0;
    for (int64_t i = 0; i < count; ++i) tiles += layers[i].tiles();
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        if (blocks > 0) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < blocks * parts; ++i) {
                const int64_t b = i / parts, part = i % parts, first = inputs.begin(b);
                of_rows(inputs.begin(b + 1) - first)
                    .transpose(rows + first * K, pairs + first * K / 2, K, K / 2 * part / parts,
                               K / 2 * (part + 1) / parts);
            }
        }
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < tiles; ++i) {
            int64_t tile = i;
            const Layer* layer = layers;
            for (; tile >= layer->tiles(); ++layer) tile -= layer->tiles();
            compute_tile(*layer, tile, inputs);
        }
    }
}
