// 16 numbers of fp32 or bf16, and single ones.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "exponential.h"

// Of this file alone: several libraries that include it are in one process.
namespace {

constexpr int64_t W = 16;  // lanes of a vector

typedef uint16_t Half;  // bf16
typedef uint16_t SixteenHalves __attribute__((vector_size(32)));
typedef uint32_t SixteenWords __attribute__((vector_size(64)));

static inline SixteenFloats load(const float* from) {
    SixteenFloats values;
    std::memcpy(&values, from, sizeof values);
    return values;
}
static inline SixteenFloats load(const Half* from) {
    SixteenHalves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (SixteenFloats)(__builtin_convertvector(halves, SixteenWords) << 16);
}
static inline float number(float x) { return x; }
static inline float number(Half x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
static inline void store(float* to, float x) { *to = x; }
static inline void store(Half* to, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    // To nearest, ties to even.
    *to = (Half)(std::isnan(x) ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
// To nearest, ties to even.
static inline SixteenHalves halves_of(SixteenFloats x) {
#ifdef __AVX512BF16__
    return (SixteenHalves)_mm512_cvtneps_pbh((__m512)x);
#else
    const SixteenWords bits = (SixteenWords)x;
    const SixteenWords rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return __builtin_convertvector((x == x) ? rounded : SixteenWords{} + 0x7fc0, SixteenHalves);
#endif
}

static inline float sum_of(SixteenFloats x) {
#ifdef __AVX512F__
    return _mm512_reduce_add_ps((__m512)x);
#else
    float lanes[W];
    std::memcpy(lanes, &x, sizeof lanes);
    for (int64_t half = W / 2; half > 0; half /= 2)
        for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
#endif
}

}  // namespace
