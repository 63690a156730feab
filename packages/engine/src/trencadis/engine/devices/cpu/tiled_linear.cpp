// Products of bf16 rows with packed weights, summed up in fp32: y = x W^T + bias, for all layers that
// have the same rows as input.
//
// Compiled for INT8=0: a weight is bf16, or INT8=1: it is integers of 8 bits with a scale for each
// output, which are exact as bf16. A weight is [tiles, K / 2, 32, 2]: 32 outputs of two inputs each
// are two vectors of the processor's instruction, and a tile is one stream of memory. Rows are
// computed in blocks whose sums fill the registers; a block's inputs are another stream, because rows
// that are a power of two apart would displace each other in the cache. A row's result does not depend
// on the other rows. Nothing here allocates memory, so that nothing throws.
//
// There are two ways to multiply: `Pairs`, by the instruction for pairs of bf16, and `Floats`, by that
// for fp32, with each bf16 widened. Which one is faster differs between processors: Intel's with
// AVX512-BF16 begin a product of pairs every two cycles and two of fp32 in each, so that `Floats`
// computes twice as much; AMD's begin as many of one as of the other, and `Pairs` computes twice as
// much. The caller measures. Processors without AVX512-BF16 have `Floats` alone.

#if !defined(__AVX512BW__) || !defined(__AVX512VL__)
#error "this processor has no vectors of 512 bits"
#elif defined(__AMX_BF16__)
#error "oneDNN has faster products, of bf16 tiles"
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <omp.h>
#include <utility>

namespace {

constexpr int MOST = 14;         // rows of a block: 28 sums, 2 vectors of weights, 1 of inputs
constexpr int64_t LANES = 16;    // outputs of a vector
constexpr int64_t COLUMNS = 32;  // outputs of a tile

constexpr int64_t AHEAD = 4096;  // bytes between what is read and what is fetched

typedef uint16_t Half;  // bf16

#if INT8
// For 16 outputs their weights of the first input, then those of the second.
typedef int8_t Weight;
template <int INPUT>
static inline __m512 load_floats(const int8_t* from) {
    const __m128i bytes = _mm_loadu_si128((const __m128i*)(from + LANES * INPUT));
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}
#if defined(__AVX512BF16__)
static inline __m512bh load_pairs(const int8_t* from) {
    const __m512i first = (__m512i)load_floats<0>(from), second = (__m512i)load_floats<1>(from);
    return (__m512bh)_mm512_or_si512(_mm512_srli_epi32(first, 16), second);
}
#endif
static inline __m512 scaled(__m512 sum, __m512 scale, __m512 bias) {
    return _mm512_fmadd_ps(sum, scale, bias);
}
#else
// For 16 outputs pairs of their weights of both inputs.
typedef Half Weight;
template <int INPUT>
static inline __m512 load_floats(const Half* from) {
    if (INPUT == 0) return (__m512)_mm512_slli_epi32(_mm512_loadu_si512(from), 16);
    return (__m512)_mm512_maskz_loadu_epi16(0xAAAAAAAA, from);
}
#if defined(__AVX512BF16__)
static inline __m512bh load_pairs(const Half* from) {
    return (__m512bh)_mm512_loadu_si512(from);
}
#endif
static inline __m512 scaled(__m512 sum, __m512, __m512 bias) { return _mm512_add_ps(sum, bias); }
#endif

static inline __m512 widened(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// To nearest, ties to even.
static inline __m256i narrowed(__m512 floats) {
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(floats);
#else
    const __m512i bits = _mm512_castps_si512(floats);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(floats, floats, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(1 << 22));
    return _mm512_cvtepi32_epi16(
        _mm512_srli_epi32(_mm512_mask_mov_epi32(sum, is_nan, quiet), 16));
#endif
}

struct Block {
    const void* inputs;  // as a way to multiply has them
    int64_t pairs;
    const Weight* weight;
    const char* ahead;  // what is fetched meanwhile, `step` bytes for each pair of inputs
    int64_t step;
    __m512 scale[2], bias[2];
    uint16_t* out;
    int64_t num_outputs;
    __mmask16 mask[2];
};

#if defined(__AVX512BF16__)
// Inputs are pairs of bf16, [K / 2, rows].
struct Pairs {
    typedef int32_t Input;
    static constexpr int64_t OF_PAIR = 1;

    template <int R>
    static inline void add(__m512 (&sums)[R][2], const Weight* weight, const int32_t* inputs) {
        const __m512bh w0 = load_pairs(weight), w1 = load_pairs(weight + 32);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32(inputs[r]);
            sums[r][0] = _mm512_dpbf16_ps(sums[r][0], w0, x);
            sums[r][1] = _mm512_dpbf16_ps(sums[r][1], w1, x);
        }
    }

    static inline void put(int32_t* inputs, int64_t rows, const Half* pair) {
        (void)rows;
        std::memcpy(inputs, pair, sizeof *inputs);
    }
};
#endif

// Inputs are fp32, [K, rows].
struct Floats {
    typedef float Input;
    static constexpr int64_t OF_PAIR = 2;

    template <int R>
    static inline void add(__m512 (&sums)[R][2], const Weight* weight, const float* inputs) {
        add_input<0>(sums, weight, inputs);
        add_input<1>(sums, weight, inputs + R);
    }

    template <int INPUT, int R>
    static inline void add_input(__m512 (&sums)[R][2], const Weight* weight, const float* inputs) {
        const __m512 w0 = load_floats<INPUT>(weight), w1 = load_floats<INPUT>(weight + 32);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const __m512 x = _mm512_set1_ps(inputs[r]);
            sums[r][0] = _mm512_fmadd_ps(w0, x, sums[r][0]);
            sums[r][1] = _mm512_fmadd_ps(w1, x, sums[r][1]);
        }
    }

    static inline void put(float* inputs, int64_t rows, const Half* pair) {
        for (int i = 0; i < 2; ++i) {
            const uint32_t bits = (uint32_t)pair[i] << 16;
            std::memcpy(inputs + i * rows, &bits, sizeof bits);
        }
    }
};

template <class Products, int R>
static void compute(const Block& block) {
    __m512 sums[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        sums[r][0] = sums[r][1] = _mm512_setzero_ps();
    }
    const auto* inputs = (const typename Products::Input*)block.inputs;
    const Weight* weight = block.weight;
    const char* ahead = block.ahead;
    const int64_t step = block.step;
    for (int64_t p = 0; p < block.pairs; ++p, weight += 64, ahead += step) {
        _mm_prefetch(ahead, _MM_HINT_T0);
        if (step > 64) _mm_prefetch(ahead + 64, _MM_HINT_T0);
        Products::add(sums, weight, inputs);
        inputs += R * Products::OF_PAIR;
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
        uint16_t* out = block.out + r * block.num_outputs;
        for (int half = 0; half < 2; ++half) {
            const __m512 sum = scaled(sums[r][half], block.scale[half], block.bias[half]);
            _mm256_mask_storeu_epi16(out + LANES * half, block.mask[half],
                                     narrowed(sum));
        }
    }
}

// Inputs in the order in which a block reads them: pairs `from` to `to` of rows [R, K].
template <class Products, int R>
static void transpose(const Half* rows, void* inputs, int64_t K, int64_t from, int64_t to) {
    auto* out = (typename Products::Input*)inputs + from * R * Products::OF_PAIR;
    for (int64_t p = from; p < to; ++p, out += R * Products::OF_PAIR)
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) Products::put(out + r, R, rows + r * K + 2 * p);
}

struct OfRows {
    void (*compute)(const Block&);
    void (*transpose)(const Half*, void*, int64_t, int64_t, int64_t);
};

template <class Products, int... R>
static const OfRows& of_rows(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr OfRows all[] = {{compute<Products, R + 1>, transpose<Products, R + 1>}...};
    return all[rows - 1];
}

static const OfRows& of_rows(bool widens, int64_t rows) {
    const auto counts = std::make_integer_sequence<int, MOST>();
#if defined(__AVX512BF16__)
    if (!widens) return of_rows<Pairs>(rows, counts);
#endif
    (void)widens;
    return of_rows<Floats>(rows, counts);
}

// Values too small to be normal count as 0, as in the instruction for pairs of bf16: products of fp32
// with them take a hundred times as long.
struct WithoutDenormals {
    const unsigned before = _mm_getcsr();
    WithoutDenormals() { _mm_setcsr(before | 0x8040); }
    ~WithoutDenormals() { _mm_setcsr(before); }
};

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
    char* data;
    int64_t M, K;
    bool widens;
    int64_t blocks() const { return (M + MOST - 1) / MOST; }
    int64_t begin(int64_t block) const { return M * block / blocks(); }
    const OfRows& functions(int64_t block) const {
        return of_rows(widens, begin(block + 1) - begin(block));
    }
    int64_t row_bytes() const { return K * (widens ? sizeof(float) : sizeof(Half)); }
    char* of(int64_t block) const { return data + begin(block) * row_bytes(); }
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
        // A single block reads its tile from memory. Of several, the first one does, and each
        // fetches a part of the next tile.
        block.step = std::max<int64_t>(1, 64 * sizeof(Weight) / blocks);
        block.ahead = blocks == 1 ? (const char*)weight + AHEAD
                                  : (const char*)(weight + size) + b * block.step * (K / 2);
        block.inputs = inputs.of(b);
        block.out = layer.out + inputs.begin(b) * layer.N + tile * COLUMNS;
        inputs.functions(b).compute(block);
    }
}

}  // namespace

// Whether this processor multiplies pairs of bf16.
extern "C" int64_t has_pairs() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// rows [M, K], K even. widens: by `Floats`, otherwise by `Pairs`. scratch: M * K inputs of 4 bytes
// for `Floats`, of one row as many for each thread; of 2 bytes for `Pairs`, not read for one row.
extern "C" void tiled_linears(const Half* rows, const Layer* layers, int64_t count, char* scratch,
                              int64_t M, int64_t K, int64_t num_threads, int64_t widens) {
    const Inputs inputs{scratch, M, K, widens != 0};
    const int64_t blocks = M == 1 ? 0 : inputs.blocks();
    const int64_t parts = num_threads;  // of a block: there may be only one
    int64_t tiles = 0;
    for (int64_t i = 0; i < count; ++i) tiles += layers[i].tiles();
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        const WithoutDenormals flushing;
        Inputs read = inputs;
        if (M > 1) {
#pragma omp for schedule(static)
            for (int64_t i = 0; i < blocks * parts; ++i) {
                const int64_t b = i / parts, part = i % parts;
                inputs.functions(b).transpose(rows + inputs.begin(b) * K, inputs.of(b), K,
                                              K / 2 * part / parts, K / 2 * (part + 1) / parts);
            }
        } else if (M == 1 && widens) {
            // By each thread for itself: to wait for others takes longer.
            read.data += omp_get_thread_num() * inputs.row_bytes();
            inputs.functions(0).transpose(rows, read.data, K, 0, K / 2);
        } else {
            read.data = (char*)rows;  // in the order of its only block
        }
#pragma omp for schedule(static) nowait
        for (int64_t i = 0; i < tiles; ++i) {
            int64_t tile = i;
            const Layer* layer = layers;
            for (; tile >= layer->tiles(); ++layer) tile -= layer->tiles();
            compute_tile(*layer, tile, read);
        }
    }
}
