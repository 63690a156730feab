// The recurrence of Mamba 2: for each token S = S exp(dt a) + (dt x) b^T, then y = S c, in fp32.
//
// x and out are [rows, tokens, heads, width], step is [rows, tokens, heads], a is [heads], b and c are
// [rows, tokens, groups, size], and state is [rows, heads, width, size]: read, and replaced by that after the
// last token. A head of a row is computed by one thread, so a result does not depend on the other rows.

#include <cmath>
#include <cstdint>
#include <omp.h>

extern "C" void scan_states(const float* x, const float* step, const float* a, const float* b,
                            const float* c, float* out, float* state, int64_t rows, int64_t tokens,
                            int64_t heads, int64_t width, int64_t groups, int64_t size,
                            int64_t threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t job = 0; job < rows * heads; job++) {
        const int64_t row = job / heads, head = job % heads, group = head / (heads / groups);
        float* own = state + job * width * size;
        for (int64_t token = 0; token < tokens; token++) {
            const int64_t place = row * tokens + token;
            const float dt = step[place * heads + head];
            const float kept = std::exp(dt * a[head]);
            const float* values = x + (place * heads + head) * width;
            const float* writes = b + (place * groups + group) * size;
            const float* reads = c + (place * groups + group) * size;
            float* results = out + (place * heads + head) * width;
            for (int64_t p = 0; p < width; p++) {
                float* line = own + p * size;
                const float added = dt * values[p];
                float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
                for (int64_t n = 0; n < size; n++) {
                    const float now = line[n] * kept + added * writes[n];
                    line[n] = now;
                    sum += now * reads[n];
                }
                results[p] = sum;
            }
        }
    }
}
