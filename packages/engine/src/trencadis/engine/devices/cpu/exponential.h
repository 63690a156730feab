// exp(x) of 16 numbers.

#pragma once

#include <cstdint>

// Of this file alone: several libraries that include it are in one process.
namespace {

typedef float SixteenFloats __attribute__((vector_size(64)));
typedef int32_t SixteenIntegers __attribute__((vector_size(64)));

static inline SixteenFloats of_all(float x) { return x - SixteenFloats{}; }

// exp(x) for x <= 0; 0 below -87. Polynomial of 2^f on [-0.5, 0.5], relative error 2e-7.
static inline SixteenFloats exponential(SixteenFloats x) {
    SixteenFloats lowest = of_all(-87.0f);
    SixteenIntegers tiny = x < lowest;
    x = tiny ? lowest : x;
    SixteenFloats y = x * 1.4426950408889634f;
    SixteenFloats shifter = of_all(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    SixteenFloats rounded = y + shifter;
    SixteenIntegers exponent = (SixteenIntegers)rounded << 23;
    SixteenFloats f = y - (rounded - shifter);
    SixteenFloats p = of_all(1.535336188319500e-4f);
    p = p * f + 1.339887440266574e-3f;
    p = p * f + 9.618437357674640e-3f;
    p = p * f + 5.550332471162809e-2f;
    p = p * f + 2.402264791363012e-1f;
    p = p * f + 6.931472028550421e-1f;
    p = p * f + 1.0f;
    SixteenFloats result = (SixteenFloats)((SixteenIntegers)p + exponent);
    return tiny ? SixteenFloats{} : result;
}

}  // namespace
