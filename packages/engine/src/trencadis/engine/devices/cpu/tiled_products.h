// Products of bf16 rows with packed weights, summed up in fp32: what linear layers and experts share.
//
// Compiled for BITS=16: a weight is bf16, or for 8 and 4: it is an integer, exact as bf16, and each group
// of inputs has a scale for each output, and perhaps a shift: w = scale * integer + shift. Integers of 4
// bits are 0 to 15 and mean -8 to 7. A weight is [tiles, K / UNIT, 2, LANES]: two vectors of outputs, of
// a few inputs each (`UNIT`), and a tile is one stream of memory. The integers of a group are summed up before
// they are scaled. Rows are computed in blocks whose sums fill the registers; a block's inputs are
// another stream, because rows that are a power of two apart would displace each other in the cache. A
// row's result does not depend on the other rows. Nothing here allocates memory, so that nothing throws.
//
// Vectors have 512 bits, or where the processor lacks them 256. There are two ways to multiply: `Pairs`,
// by the instruction for pairs of bf16, and `Floats`, by that for fp32, with each bf16 widened. Which one
// is faster differs between processors: Intel's with AVX512-BF16 begin a product of pairs every two
// cycles and two of fp32 in each, so that `Floats` computes twice as much; AMD's begin as many of one as
// of the other, and `Pairs` computes twice as much. The caller measures. Processors without AVX512-BF16
// have `Floats` alone.

#pragma once

#if defined(__AVX512BW__) && defined(__AVX512VL__)
#define WIDE 1
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WIDE 0
#else
#error "this processor has no vectors of 256 bits (AVX2, FMA, F16C)"
#endif
#if WIDE && defined(__AVX512BF16__)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <omp.h>
#include <utility>

namespace {

#if WIDE
typedef __m512 Vector;
constexpr int MOST = 14;       // rows of a block: 28 sums, 2 vectors of weights, 1 of inputs
constexpr int64_t LANES = 16;  // outputs of a vector
#else
typedef __m256 Vector;
constexpr int MOST = 6;  // 12 sums
constexpr int64_t LANES = 8;
#endif
constexpr int64_t COLUMNS = 2 * LANES;  // outputs of a tile

constexpr int64_t AHEAD = 4096;  // bytes between what is read and what is fetched

typedef uint16_t Half;  // bf16

#if WIDE
static inline Vector repeated(float value) { return _mm512_set1_ps(value); }
static inline Vector product_added(Vector x, Vector y, Vector sum) {
    return _mm512_fmadd_ps(x, y, sum);
}
static inline Vector widened(const Half* from) {
    const __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}
static inline Vector widened_fp16(const uint16_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
}
static inline Vector loaded(const float* from) { return _mm512_loadu_ps(from); }

// To nearest, ties to even.
static inline __m256i narrowed(__m512 floats) {
#if HAS_PAIRS
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
static inline void store(Half* to, Vector floats, int64_t used) {
    _mm256_mask_storeu_epi16(to, (__mmask16)((1u << used) - 1), narrowed(floats));
}
#else
static inline Vector repeated(float value) { return _mm256_set1_ps(value); }
static inline Vector product_added(Vector x, Vector y, Vector sum) {
    return _mm256_fmadd_ps(x, y, sum);
}
static inline Vector widened(const Half* from) {
    const __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
}
static inline Vector widened_fp16(const uint16_t* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
}
static inline Vector loaded(const float* from) { return _mm256_loadu_ps(from); }

// To nearest, ties to even.
static inline void store(Half* to, Vector floats, int64_t used) {
    const __m256i bits = _mm256_castps_si256(floats);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(floats, floats, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(1 << 22));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(sum, quiet, is_nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x88);
    Half halves[LANES];
    _mm_storeu_si128((__m128i*)halves, _mm256_castsi256_si128(packed));
    std::memcpy(to, halves, used * sizeof(Half));
}
#endif

#if BITS == 16
// For each output the pair of its weights of both inputs.
typedef Half Weight;
constexpr int64_t UNIT = 2;               // inputs whose weights of all outputs are beside each other
constexpr int64_t OF_VECTOR = 2 * LANES;  // of `Weight`: what a unit of inputs has for a vector
template <int INPUT>
static inline Vector load_floats(const Half* from) {
#if WIDE
    if (INPUT == 0) return (Vector)_mm512_slli_epi32(_mm512_loadu_si512(from), 16);
    return (Vector)_mm512_maskz_loadu_epi16(0xAAAAAAAA, from);
#else
    const __m256i pairs = _mm256_loadu_si256((const __m256i*)from);
    return (Vector)(INPUT == 0 ? _mm256_slli_epi32(pairs, 16)
                               : _mm256_and_si256(pairs, _mm256_set1_epi32((int)0xFFFF0000)));
#endif
}
#if HAS_PAIRS
template <int PAIR>
static inline __m512bh load_pairs(const Half* from) {
    return (__m512bh)_mm512_loadu_si512(from);
}
#endif
#elif BITS == 8
// For all outputs of a vector their weights of the first input, then those of the second.
typedef int8_t Weight;
constexpr int64_t UNIT = 2;
constexpr int64_t OF_VECTOR = 2 * LANES;
template <int INPUT>
static inline Vector load_floats(const int8_t* from) {
    from += LANES * INPUT;
#if WIDE
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#else
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#endif
}
#if HAS_PAIRS
template <int PAIR>
static inline __m512bh load_pairs(const int8_t* from) {
    const __m512i first = (__m512i)load_floats<0>(from), second = (__m512i)load_floats<1>(from);
    return (__m512bh)_mm512_or_si512(_mm512_srli_epi32(first, 16), second);
}
#endif
#else
// For each output a word of eight inputs: those of the first, third, fifth and seventh in its lower
// half, four bits each, the others in its upper half. So each shift by four bits gives a pair.
typedef uint32_t Weight;
constexpr int64_t UNIT = 8;
constexpr int64_t OF_VECTOR = LANES;
template <int INPUT>
static inline Vector load_floats(const uint32_t* from) {
    constexpr int SHIFT = 4 * (INPUT / 2) + 16 * (INPUT % 2);
#if WIDE
    const __m512i words = _mm512_srli_epi32(_mm512_loadu_si512(from), SHIFT);
    const __m512 values = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return _mm512_permutexvar_ps(words, values);  // of an index, it reads four bits
#else
    const __m256i words = _mm256_srli_epi32(_mm256_loadu_si256((const __m256i*)from), SHIFT);
    const __m256i four = _mm256_and_si256(words, _mm256_set1_epi32(15));
    return _mm256_cvtepi32_ps(_mm256_sub_epi32(four, _mm256_set1_epi32(8)));
#endif
}
#if HAS_PAIRS
// -8 to 7 as bf16, twice: of an index, the instruction reads five bits.
alignas(64) constexpr Half VALUES[32] = {
    0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040, 0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000,
    0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0, 0xC100, 0xC0E0, 0xC0C0, 0xC0A0, 0xC080, 0xC040,
    0xC000, 0xBF80, 0x0000, 0x3F80, 0x4000, 0x4040, 0x4080, 0x40A0, 0x40C0, 0x40E0};
template <int PAIR>
static inline __m512bh load_pairs(const uint32_t* from) {
    const __m512i words = _mm512_srli_epi32(_mm512_loadu_si512(from), 4 * PAIR);
    return (__m512bh)_mm512_permutexvar_epi16(words, _mm512_load_si512(VALUES));
}
#endif
#endif

constexpr int64_t OF_TILE = 2 * OF_VECTOR;  // of `Weight`: what a unit of inputs has for a tile

struct Scales {
    const char* values;   // [groups, COLUMNS] of a tile
    int64_t type;         // 0: fp32, 1: fp16, 2: bf16
    const float* shifts;  // the same, or null

    Vector scale(int64_t place) const {
        if (type == 1) return widened_fp16((const uint16_t*)values + place);
        return type == 2 ? widened((const Half*)values + place)
                         : loaded((const float*)values + place);
    }
};

struct Block {
    const void* inputs;       // as a way to multiply has them
    const float* input_sums;  // [groups, rows], read where there are shifts
    int64_t units, groups;    // of inputs: units of a group
    const Weight* weight;
    const char* ahead;  // what is fetched meanwhile, `step` bytes for each unit of inputs
    int64_t step;
    Scales scales;
    Vector bias[2];
    Half* out;
    int64_t num_outputs;
    int64_t used[2];  // outputs of each vector
};

#if HAS_PAIRS
// Inputs are pairs of bf16, [K / 2, rows].
struct Pairs {
    typedef int32_t Input;
    static constexpr int64_t OF_PAIR = 1;

    template <int PAIR, int R, int V>
    static inline void add(Vector (&sums)[R][V], const Weight* weight, const int32_t* inputs) {
        __m512bh w[V];
        for (int v = 0; v < V; ++v) w[v] = load_pairs<PAIR>(weight + OF_VECTOR * v);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32(inputs[r]);
            for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], w[v], x);
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

    template <int PAIR, int R, int V>
    static inline void add(Vector (&sums)[R][V], const Weight* weight, const float* inputs) {
        add_input<2 * PAIR>(sums, weight, inputs);
        add_input<2 * PAIR + 1>(sums, weight, inputs + R);
    }

    template <int INPUT, int R, int V>
    static inline void add_input(Vector (&sums)[R][V], const Weight* weight, const float* inputs) {
        Vector w[V];
        for (int v = 0; v < V; ++v) w[v] = load_floats<INPUT>(weight + OF_VECTOR * v);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Vector x = repeated(inputs[r]);
            for (int v = 0; v < V; ++v) sums[r][v] = product_added(w[v], x, sums[r][v]);
        }
    }

    static inline void put(float* inputs, int64_t rows, const Half* pair) {
        for (int i = 0; i < 2; ++i) {
            const uint32_t bits = (uint32_t)pair[i] << 16;
            std::memcpy(inputs + i * rows, &bits, sizeof bits);
        }
    }
};

// Adds the products of a unit of inputs, pair after pair.
template <class Products, int R, int V, int... PAIR>
static inline void add_unit(Vector (&sums)[R][V], const Weight* weight,
                            const typename Products::Input* inputs,
                            std::integer_sequence<int, PAIR...>) {
    (Products::template add<PAIR>(sums, weight, inputs + PAIR * R * Products::OF_PAIR), ...);
}

// Adds the sums of a group of inputs to those of all, as numbers: the sums of integers are scaled.
template <int R, int V>
static inline void add_group(Vector (&totals)[R][V], const Vector (&sums)[R][V],
                             const Block& block, int64_t group, int first) {
    for (int v = 0; v < V; ++v) {
#if BITS == 16
        (void)group, (void)first;
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) totals[r][v] = sums[r][v] + totals[r][v];
#else
        const int64_t place = group * COLUMNS + LANES * (first + v);
        const Vector scale = block.scales.scale(place);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            totals[r][v] = product_added(sums[r][v], scale, totals[r][v]);
        if (block.scales.shifts == nullptr) continue;
        const Vector shift = loaded(block.scales.shifts + place);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
            const Vector of_inputs = repeated(block.input_sums[group * R + r]);
            totals[r][v] = product_added(of_inputs, shift, totals[r][v]);
        }
#endif
    }
}

// Of `V` vectors of a tile, from `first` on.
template <class Products, int R, int V>
static inline void compute_vectors(const Block& block, int first) {
    Vector totals[R][V];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) totals[r][v] = block.bias[first + v];
    // Results of long prompts are in no cache: their lines arrive while the sums are computed.
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        __builtin_prefetch(block.out + r * block.num_outputs + LANES * first, 1);
    const auto* inputs = (const typename Products::Input*)block.inputs;
    const Weight* weight = block.weight + OF_VECTOR * first;
    const char* ahead = block.ahead;
    const int64_t step = block.step;
    for (int64_t group = 0; group < block.groups; ++group) {
        Vector sums[R][V];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
            for (int v = 0; v < V; ++v) sums[r][v] = repeated(0);
        for (int64_t u = 0; u < block.units; ++u, weight += OF_TILE, ahead += step) {
            _mm_prefetch(ahead, _MM_HINT_T0);
            if (step > 64) _mm_prefetch(ahead + 64, _MM_HINT_T0);
            add_unit<Products>(sums, weight, inputs, std::make_integer_sequence<int, UNIT / 2>());
            inputs += R * UNIT / 2 * Products::OF_PAIR;
        }
        add_group(totals, sums, block, group, first);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
            store(block.out + r * block.num_outputs + LANES * (first + v), totals[r][v],
                  block.used[first + v]);
}

template <class Products, int R>
static void compute(const Block& block) {
    // The sums of a group and those of all must both fit the registers.
    if (BITS == 16 || block.groups == 1 || R <= MOST / 2) {
        compute_vectors<Products, R, 2>(block, 0);
    } else {
        compute_vectors<Products, R, 1>(block, 0);
        compute_vectors<Products, R, 1>(block, 1);
    }
}

static inline float as_float(Half half) {
    const uint32_t bits = (uint32_t)half << 16;
    float value;
    std::memcpy(&value, &bits, sizeof bits);
    return value;
}

// In an order that does not depend on how wide vectors are.
static inline float sum_of(const Half* inputs, int64_t size) {
    constexpr int64_t WIDTH = 16;
    float parts[WIDTH] = {};
    int64_t k = 0;
    for (; k + WIDTH <= size; k += WIDTH)
        for (int64_t i = 0; i < WIDTH; ++i) parts[i] += as_float(inputs[k + i]);
    for (int64_t i = 0; k < size; ++i, ++k) parts[i] += as_float(inputs[k]);
    for (int64_t half = WIDTH / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; ++i) parts[i] += parts[i + half];
    return parts[0];
}

// The sums of each group of inputs, [groups, rows], for groups `from` to `to` of rows [R, K].
static void sum_groups(const Half* rows, float* sums, int64_t num_rows, int64_t K, int64_t size,
                       int64_t from, int64_t to) {
    for (int64_t group = from; group < to; ++group)
        for (int64_t r = 0; r < num_rows; ++r) {
            sums[group * num_rows + r] = sum_of(rows + r * K + group * size, size);
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
#if HAS_PAIRS
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
    const Weight* weight;  // [tiles, K / UNIT, 2, LANES], in tiles of `COLUMNS` outputs
    const char* scales;    // [tiles, groups, COLUMNS], of integers
    const float* shifts;   // the same, or null
    const Half* bias;      // [N] or null
    Half* out;             // [M, N]
    int64_t N;
    int64_t scale_type;  // see `Scales`
    int64_t tiles() const { return (N + COLUMNS - 1) / COLUMNS; }
};

// Rows, in blocks, as all layers read them.
struct Inputs {
    char* data;
    float* sums;  // of groups, [blocks, groups, rows of the block]
    int64_t M, K, groups;
    bool widens;
    int64_t blocks() const { return (M + MOST - 1) / MOST; }
    int64_t begin(int64_t block) const { return M * block / blocks(); }
    int64_t rows(int64_t block) const { return begin(block + 1) - begin(block); }
    const OfRows& functions(int64_t block) const { return of_rows(widens, rows(block)); }
    int64_t row_bytes() const { return K * (widens ? sizeof(float) : sizeof(Half)); }
    char* of(int64_t block) const { return data + begin(block) * row_bytes(); }
    float* sums_of(int64_t block) const { return sums + begin(block) * groups; }
};

// A tile of a layer, for a block of rows that are not given yet.
static Block tile_of(const Layer& layer, int64_t tile, const Inputs& inputs) {
    Block block;
    const int64_t groups = inputs.groups, units = inputs.K / UNIT, column = tile * COLUMNS;
    const int64_t size = layer.scale_type == 0 ? 4 : 2;
    for (int half = 0; half < 2; ++half) {
        const int64_t begin = column + LANES * half;
        block.used[half] = std::clamp<int64_t>(layer.N - begin, 0, LANES);
        Half bias[LANES] = {};
        if (layer.bias != nullptr)
            std::memcpy(bias, layer.bias + begin, block.used[half] * sizeof(Half));
        block.bias[half] = widened(bias);
    }
    block.scales = {layer.scales + tile * groups * COLUMNS * size, layer.scale_type,
                    layer.shifts == nullptr ? nullptr : layer.shifts + tile * groups * COLUMNS};
    block.units = units / groups;
    block.groups = groups;
    block.num_outputs = layer.N;
    block.weight = layer.weight + tile * units * OF_TILE;
    return block;
}

// A tile for the rows of block `b`, to `out`. `next`: of the tiles after it, the one that is fetched.
static void compute_block(Block& block, const Inputs& inputs, int64_t b, int64_t next, Half* out) {
    const int64_t units = inputs.K / UNIT, blocks = inputs.blocks();
    constexpr int64_t BYTES = OF_TILE * sizeof(Weight);
    // A single block reads its tile from memory. Of several, the first one does, and each fetches a part
    // of the next tile.
    block.step = std::max<int64_t>(1, BYTES / blocks);
    block.ahead = (const char*)block.weight +
                  (blocks == 1 ? AHEAD : next * units * BYTES + b * block.step * units);
    block.inputs = inputs.of(b);
    block.input_sums = inputs.sums_of(b);
    block.out = out;
    inputs.functions(b).compute(block);
}

// A tile for all rows, to the layer's results.
static void compute_tile(const Layer& layer, int64_t tile, const Inputs& inputs) {
    Block block = tile_of(layer, tile, inputs);
    for (int64_t b = 0; b < inputs.blocks(); ++b)
        compute_block(block, inputs, b, 1, layer.out + inputs.begin(b) * layer.N + tile * COLUMNS);
}

}  // namespace
