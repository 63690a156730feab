// What chooses the experts of a token: the product of a row by a small matrix that is not packed, and the
// largest numbers of a row. A row is computed alike in every batch.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>

#include "exponential.h"
#include "sixteen_numbers.h"

namespace {

constexpr int MOST = 4;             // rows, and outputs, that are computed together
constexpr int64_t LARGE = 1 << 20;  // products from which on threads save more than they wait

template <class Number, int R, int C>
static void multiply(const Number* rows, const Number* weight, Number* out, int64_t N, int64_t K) {
    SixteenFloats sums[R][C] = {};
    int64_t k = 0;
    for (; k + W <= K; k += W) {
        SixteenFloats w[C];
        for (int c = 0; c < C; ++c) w[c] = load(weight + c * K + k);
        for (int r = 0; r < R; ++r) {
            const SixteenFloats x = load(rows + r * K + k);
            for (int c = 0; c < C; ++c) sums[r][c] += x * w[c];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) {
            float sum = sum_of(sums[r][c]);
            for (int64_t i = k; i < K; ++i)
                sum += number(rows[r * K + i]) * number(weight[c * K + i]);
            store(out + r * N + c, sum);
        }
}

template <class Number, int R>
static void multiply_rows(const Number* rows, const Number* weight, Number* out, int64_t N,
                          int64_t K) {
    int64_t n = 0;
    for (; n + MOST <= N; n += MOST) multiply<Number, R, MOST>(rows, weight + n * K, out + n, N, K);
    for (; n < N; ++n) multiply<Number, R, 1>(rows, weight + n * K, out + n, N, K);
}

template <class Number>
static void multiply_all(const Number* rows, const Number* weight, Number* out, int64_t M,
                         int64_t N, int64_t K, int64_t threads) {
    const int64_t blocks = (M + MOST - 1) / MOST;
#pragma omp parallel for num_threads(threads) schedule(static) if (M * N * K > LARGE && threads > 1)
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t first = b * MOST, count = std::min<int64_t>(MOST, M - first);
        const Number* of_block = rows + first * K;
        Number* to = out + first * N;
        if (count == MOST) {
            multiply_rows<Number, MOST>(of_block, weight, to, N, K);
            continue;
        }
        for (int64_t r = 0; r < count; ++r)
            multiply_rows<Number, 1>(of_block + r * K, weight, to + r * N, N, K);
    }
}

// In the order of PyTorch's topk, whose largest number is NaN.
static inline bool is_larger(float x, float y) {
    return x > y || (std::isnan(x) && !std::isnan(y));
}

}  // namespace

// out [M, N] = rows [M, K] by weight [N, K], all bf16, or fp32. Sums are fp32.
extern "C" void plain_product(const void* rows, const void* weight, void* out, int64_t M, int64_t N,
                              int64_t K, int64_t is_bf16, int64_t threads) {
    if (is_bf16) {
        multiply_all((const Half*)rows, (const Half*)weight, (Half*)out, M, N, K, threads);
    } else {
        multiply_all((const float*)rows, (const float*)weight, (float*)out, M, N, K, threads);
    }
}

// values and indices [M, count]: the largest of each row [M, N] in descending order, of equal ones those
// that come first.
extern "C" void largest_of_rows(const float* rows, float* values, int64_t* indices, int64_t M,
                                int64_t N, int64_t count, int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (M * N > LARGE / 64 && threads > 1)
    for (int64_t m = 0; m < M; ++m) {
        const float* row = rows + m * N;
        float* kept = values + m * count;
        int64_t* places = indices + m * count;
        int64_t held = 0;
        for (int64_t n = 0; n < N; ++n) {
            if (held == count && !(count && is_larger(row[n], kept[count - 1]))) continue;
            int64_t i = held < count ? held++ : count - 1;
            for (; i > 0 && is_larger(row[n], kept[i - 1]); --i) {
                kept[i] = kept[i - 1];
                places[i] = places[i - 1];
            }
            kept[i] = row[n];
            places[i] = n;
        }
    }
}
