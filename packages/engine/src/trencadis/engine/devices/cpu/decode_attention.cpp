// Decode attention over a paged KV cache, for one layer: writes the new keys and values, then attends.
//
// Compiled for one model: D is the head size (a multiple of 16), G the query heads of each KV head,
// BF16 the type (1: bf16, 0: fp32). Softmax and sums are fp32. Layouts are those of
// `block_attention.py`: the cache of a layer is [blocks, K, S, D]; of the pairs (block, sequence),
// the first are the blocks 0, 1, 2, ... themselves and the last `num_extra` name their block.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

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

static inline Vector splat(float x) { return x - Vector{}; }

static inline float sum(Vector x) {
    typedef float Half __attribute__((vector_size(32)));
    typedef float Quarter __attribute__((vector_size(16)));
    Half halves[2];
    std::memcpy(halves, &x, sizeof x);
    halves[0] += halves[1];
    Quarter quarters[2];
    std::memcpy(quarters, halves, sizeof quarters);
    quarters[0] += quarters[1];
    return (quarters[0][0] + quarters[0][2]) + (quarters[0][1] + quarters[0][3]);
}

static inline float largest(Vector x) {
    float top = x[0];
    for (int i = 1; i < W; ++i) top = std::max(top, x[i]);
    return top;
}

// exp(x) for x <= 0; 0 below -87. Polynomial of 2^f on [-0.5, 0.5], relative error 2e-7.
static inline Vector exponential(Vector x) {
    Vector lowest = splat(-87.0f);
    Integers tiny = x < lowest;
    x = tiny ? lowest : x;
    Vector y = x * 1.4426950408889634f;
    Vector shifter = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    Vector rounded = y + shifter;
    Integers exponent = (Integers)rounded << 23;
    Vector f = y - (rounded - shifter);
    Vector p = splat(1.535336188319500e-4f);
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    Vector result = (Vector)((Integers)p + exponent);
    return tiny ? Vector{} : result;
}

// A partial softmax: the largest score, the sum of exponentials, the values weighted by them.
struct Partial {
    float peak[G];
    float total[G];
    float weighted[G][D];
};

// Attention of one sequence and KV head to some of its blocks.
struct Item {
    int32_t row, head, begin, end;
};

static void attend_blocks(Partial& partial, const Scalar* query, int64_t query_stride, float scale,
                          const Scalar* keys, const Scalar* values, int64_t block_stride,
                          const int32_t* pairs, int32_t num_pairs, const int64_t* extra,
                          int64_t num_prefix, const float* bias, int64_t S) {
    Vector q[G][DV], weighted[G][DV];
    float peak[G], total[G];
    for (int g = 0; g < G; ++g) {
        for (int v = 0; v < DV; ++v) {
            q[g][v] = load(query + g * query_stride + v * W) * scale;
            weighted[g][v] = Vector{};
        }
        peak[g] = -INFINITY;
        total[g] = 0;
    }
    alignas(64) float weights[G][STRIP];
    for (int32_t i = 0; i < num_pairs; ++i) {
        const int64_t pair = pairs[i];
        const int64_t block = pair < num_prefix ? pair : extra[pair - num_prefix];
        for (int64_t from = 0; from < S; from += STRIP) {
            const int count = (int)std::min<int64_t>(STRIP, S - from);
            const int padded = (count + W - 1) / W * W;
            const Scalar* key = keys + block * block_stride + from * D;
            const Scalar* value = values + block * block_stride + from * D;
            const float* shift = bias + pair * S + from;
            for (int s = 0; s < count; ++s) {
                Vector k[DV];
                for (int v = 0; v < DV; ++v) k[v] = load(key + s * D + v * W);
                for (int g = 0; g < G; ++g) {
                    Vector product = q[g][0] * k[0];
                    for (int v = 1; v < DV; ++v) product += q[g][v] * k[v];
                    weights[g][s] = sum(product) + shift[s];
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
                const float ratio = std::exp(peak[g] - top);
                Vector sums = Vector{};
                for (int s = 0; s < padded; s += W) {
                    Vector x = exponential(loadf(weights[g] + s) - top);
                    std::memcpy(weights[g] + s, &x, sizeof x);
                    sums += x;
                }
                peak[g] = top;
                total[g] = total[g] * ratio + sum(sums);
                for (int v = 0; v < DV; ++v) weighted[g][v] *= ratio;
            }
            for (int s = 0; s < count; ++s) {
                Vector x[DV];
                for (int v = 0; v < DV; ++v) x[v] = load(value + s * D + v * W);
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

// query [K * G, B, D], key and value [K, B, D], each with the strides of its first two axes; out
// [B, K * G, D]; write_blocks, write_offsets [B]; owners [N], bias [N, S], extra [num_extra].
extern "C" void decode_attention(
    const Scalar* query, int64_t query_head, int64_t query_row, const Scalar* key,
    const Scalar* value, int64_t key_head, int64_t key_row, int64_t value_head, int64_t value_row,
    Scalar* out, Scalar* keys, Scalar* values, const int64_t* write_blocks,
    const int64_t* write_offsets, const int64_t* owners, const float* bias, const int64_t* extra,
    int64_t num_extra, int64_t N, int64_t B, int64_t K, int64_t S, float scale,
    int64_t num_threads) {
    const int64_t head_stride = S * D, block_stride = K * head_stride;
    for (int64_t b = 0; b < B; ++b) {
        for (int64_t k = 0; k < K; ++k) {
            const int64_t to = write_blocks[b] * block_stride + k * head_stride + write_offsets[b] * D;
            const Scalar* new_key = key + k * key_head + b * key_row;
            const Scalar* new_value = value + k * value_head + b * value_row;
            // Finite: the next owner of a block adds a bias to what it has not overwritten yet.
            for (int d = 0; d < D; ++d) keys[to + d] = bounded(new_key[d]);
            for (int d = 0; d < D; ++d) values[to + d] = bounded(new_value[d]);
        }
    }

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
    for (int32_t b = 0; b < B; ++b)
        for (int32_t k = 0; k < K; ++k)
            for (int32_t i = first[b]; i < first[b + 1]; i += per_item)
                items.push_back({b, k, i, std::min(i + per_item, first[b + 1])});
    std::vector<Partial> partials(items.size());
    const int64_t count = (int64_t)items.size();

#pragma omp parallel for schedule(dynamic, 1) num_threads(num_threads) if (num_threads > 1)
    for (int64_t i = 0; i < count; ++i) {
        const Item& item = items[i];
        const int64_t head = item.head * head_stride;
        attend_blocks(partials[i], query + item.head * G * query_head + item.row * query_row,
                      query_head, scale, keys + head, values + head, block_stride,
                      &pairs[item.begin], item.end - item.begin, extra, N - num_extra, bias, S);
    }

    std::memset(out, 0, sizeof(Scalar) * B * K * G * D);
    for (int64_t i = 0; i < count;) {
        int64_t end = i + 1;
        while (end < count && items[end].row == items[i].row && items[end].head == items[i].head)
            ++end;
        combine(out + (items[i].row * K + items[i].head) * G * D, &partials[i], end - i);
        i = end;
    }
}
