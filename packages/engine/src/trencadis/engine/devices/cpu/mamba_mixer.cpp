// The convolution, the recurrence and the norm of Mamba 2, on states in the places of a cache.
//
// A job is a row and one of its heads, or some of its channels, so a result does not depend on the other rows.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <omp.h>
#include <type_traits>
#include <vector>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#include "exponential.h"
#include "sixteen_numbers.h"

namespace {

constexpr int64_t LINE = 8;            // vectors of a state that stay in registers
constexpr int64_t TOKENS = 16;         // that a state passes before it is written
constexpr int64_t MOST = 512;          // numbers of a line of a state
constexpr int64_t CHANNELS = 4 * W;    // that are convolved together
constexpr int64_t TAPS = 8;            // of a convolution, at most
constexpr int64_t BEYOND_CACHE = 1 << 22;  // bytes of new states that are written past the caches

static inline float of_bits(int64_t bits) {
    const uint32_t low = (uint32_t)bits;
    float value;
    std::memcpy(&value, &low, sizeof value);
    return value;
}

static inline void write(float* to, SixteenFloats x, bool past_caches) {
#ifdef __AVX512F__
    if (past_caches) {
        _mm512_stream_ps(to, (__m512)x);
        return;
    }
#endif
    std::memcpy(to, &x, sizeof x);
}
static inline void write(Half* to, SixteenFloats x, bool past_caches) {
    const SixteenHalves halves = halves_of(x);
#ifdef __AVX512F__
    if (past_caches) {
        _mm256_stream_si256((__m256i*)to, (__m256i)halves);
        return;
    }
#endif
    std::memcpy(to, &halves, sizeof halves);
}

// S = S kept + added b^T and sums += S c, for V vectors of a line of S and one token after the other.
template <int V, class State>
static inline void pass(const State* from, State* to, const float* kept, const float* added,
                        const float* b, const float* c, int64_t padded, int64_t tokens, float* sums,
                        bool past_caches) {
    SixteenFloats line[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) line[v] = load(from + v * W);
    for (int64_t t = 0; t < tokens; ++t) {
        const SixteenFloats keep = of_all(kept[t]), add = of_all(added[t * W]);
        const float *writes = b + t * padded, *reads = c + t * padded;
        SixteenFloats even = {}, odd = {};
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            line[v] = line[v] * keep + add * load(writes + v * W);
            (v % 2 ? odd : even) += line[v] * load(reads + v * W);
        }
        sums[t * W] += sum_of(even + odd);
    }
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) write(to + v * W, line[v], past_caches);
}

template <class State>
static inline void pass_line(const State* from, State* to, const float* kept, const float* added,
                             const float* b, const float* c, int64_t padded, int64_t tokens,
                             float* sums, bool past_caches) {
    int64_t n = 0;
    const auto next = [&](auto run, int64_t vectors) {
        for (; n + vectors * W <= padded; n += vectors * W)
            run(from + n, to + n, kept, added, b + n, c + n, padded, tokens, sums, past_caches);
    };
    next(pass<LINE, State>, LINE);
    next(pass<4, State>, 4);
    next(pass<2, State>, 2);
    next(pass<1, State>, 1);
}

template <class Number>
static void widen(const Number* from, float* to, int64_t size, int64_t padded) {
    int64_t n = 0;
    for (; n + W <= size; n += W) {
        const SixteenFloats values = load(from + n);
        std::memcpy(to + n, &values, sizeof values);
    }
    for (; n < size; ++n) to[n] = number(from[n]);
    for (; n < padded; ++n) to[n] = 0.0f;
}

static inline float step_of(float dt, float low, float high) {
    if (dt <= 20.0f) dt = std::log1p(std::exp(dt));
    return std::min(std::max(dt, low), high);
}

struct Scan {
    const void *x, *dt, *b, *c;
    const float *a, *bias, *skip;  // of each head
    float* out;
    void* states;
    const int64_t *reads, *writes;
    int64_t x_row, x_token, dt_row, dt_token, b_row, b_token, c_row, c_token;
    int64_t rows, tokens, heads, width, groups, size, threads;
    float low, high;
};

// For each token S = S exp(dt a) + (dt x) b^T, then out = S c + skip x, with dt = softplus(dt + bias) within
// limits. x is [rows, tokens, heads, width], dt [rows, tokens, heads], b and c [rows, tokens, groups, size], with
// strides of rows and tokens. States are [places, heads, width, size]; those of bf16 are rounded after the last token.
template <class Number, class State>
static void scan(const Scan& s) {
    const int64_t padded = (s.size + W - 1) / W * W, of_head = s.width * s.size, of_state = s.heads * of_head;
    const bool is_whole = padded == s.size, past_caches = is_whole && s.tokens == 1 &&
        s.rows * of_state * (int64_t)sizeof(State) > BEYOND_CACHE && (uintptr_t)s.states % 64 == 0;
    // Between tokens that are computed together and the next ones states are fp32.
    const bool is_held = !std::is_same_v<State, float> && s.tokens > TOKENS;
    std::vector<float> all_held(is_held ? s.threads * of_head : 0);
#pragma omp parallel for num_threads(s.threads) schedule(static) if (s.threads > 1)
    for (int64_t job = 0; job < s.rows * s.heads; ++job) {
        const int64_t row = job / s.heads, head = job % s.heads, group = head / (s.heads / s.groups);
        alignas(64) float b[TOKENS * MOST], c[TOKENS * MOST], line[MOST], added[TOKENS * W], sums[TOKENS * W];
        float steps[TOKENS], kept[TOKENS];
        State* to = (State*)s.states + s.writes[row] * of_state + head * of_head;
        const State* from = (State*)s.states + s.reads[row] * of_state + head * of_head;
        float* held = all_held.data() + (is_held ? omp_get_thread_num() * of_head : 0);
        if (is_held) widen(from, held, of_head, of_head);
        for (int64_t first = 0; first < s.tokens; first += TOKENS) {
            const int64_t tokens = std::min(TOKENS, s.tokens - first);
            for (int64_t t = 0; t < tokens; ++t) {
                const int64_t token = first + t;
                const float dt = number(((const Number*)s.dt)[row * s.dt_row + token * s.dt_token + head]);
                steps[t] = step_of(dt + s.bias[head], s.low, s.high);
                kept[t] = std::exp(steps[t] * s.a[head]);
                const int64_t of_group = group * s.size;
                widen((const Number*)s.b + row * s.b_row + token * s.b_token + of_group,
                      b + t * padded, s.size, padded);
                widen((const Number*)s.c + row * s.c_row + token * s.c_token + of_group,
                      c + t * padded, s.size, padded);
            }
            const Number* x = (const Number*)s.x + row * s.x_row + first * s.x_token + head * s.width;
            float* out = s.out + ((row * s.tokens + first) * s.heads + head) * s.width;
            for (int64_t block = 0; block < s.width; block += W) {
                const int64_t count = std::min(W, s.width - block);
                for (int64_t t = 0; t < tokens; ++t) {
                    widen(x + t * s.x_token + block, sums + t * W, count, W);
                    const SixteenFloats values = load(sums + t * W), add = values * steps[t];
                    std::memcpy(added + t * W, &add, sizeof add);
                    const SixteenFloats skipped = values * s.skip[head];
                    std::memcpy(sums + t * W, &skipped, sizeof skipped);
                }
                for (int64_t p = 0; p < count; ++p) {
                    const auto pass_between = [&](const auto* old, auto* now) {
                        if (is_whole) {
                            pass_line(old, now, kept, added + p, b, c, padded, tokens, sums + p,
                                      past_caches);
                        } else {
                            widen(old, line, s.size, padded);
                            pass_line(line, line, kept, added + p, b, c, padded, tokens, sums + p, false);
                            for (int64_t n = 0; n < s.size; ++n) store(now + n, line[n]);
                        }
                    };
                    const int64_t n = (block + p) * s.size;
                    if (is_held)
                        pass_between(held + n, held + n);
                    else
                        pass_between(from + n, to + n);
                }
                for (int64_t t = 0; t < tokens; ++t)
                    std::memcpy(out + t * s.heads * s.width + block, sums + t * W, count * sizeof(float));
            }
            from = to;
        }
        if (is_held)
            for (int64_t n = 0; n < of_head; ++n) store(to + n, held[n]);
#ifdef __AVX512F__
        if (past_caches) _mm_sfence();  // other threads read them in the next step
#endif
    }
}

static inline SixteenFloats silu(SixteenFloats x) {
    const SixteenIntegers negative = x < SixteenFloats{};
    const SixteenFloats e = exponential(negative ? x : -x);
    return x * (negative ? e : of_all(1.0f)) / (e + 1.0f);
}

// The taps of some channels, and then their biases: [taps + 1][CHANNELS], zero behind the last channel.
template <class Number>
static void taps_of(const Number* weight, const Number* bias, int64_t taps, int64_t count, float* to) {
    for (int64_t k = 0; k <= taps; ++k)
        for (int64_t c = 0; c < CHANNELS; ++c)
            to[k * CHANNELS + c] = c >= count ? 0.0f
                : k < taps                    ? number(weight[c * taps + k])
                : bias                        ? number(bias[c])
                                              : 0.0f;
}

// The sums of CHANNELS channels, with their activation: inputs are [taps][CHANNELS].
static void convolve(const float* inputs, const float* taps, int64_t num_taps, float* out) {
    for (int64_t c = 0; c < CHANNELS; c += W) {
        SixteenFloats sum = load(taps + num_taps * CHANNELS + c);
        for (int64_t k = 0; k < num_taps; ++k)
            sum += load(inputs + k * CHANNELS + c) * load(taps + k * CHANNELS + c);
        sum = silu(sum);
        std::memcpy(out + c, &sum, sizeof sum);
    }
}

struct Convolution {
    const void *x, *weight, *bias;  // the bias may be null
    void *out, *states;
    const int64_t *reads, *writes;
    int64_t x_row, x_token, rows, tokens, channels, taps, known, threads;
};

// Whether the state of each of CHANNELS channels is a word of four numbers.
static inline bool is_word(const float*, int64_t, int64_t) { return false; }
static inline bool is_word(const Half*, int64_t known, int64_t count) {
    return known == 4 && count == CHANNELS;
}

// The inputs of some channels before the first token: `inputs` [taps - 1][CHANNELS]. States are [channels, known].
template <class Number>
static void read_state(const Convolution& s, const Number* old, int64_t count, float* inputs) {
    for (int64_t k = 0; k < s.taps - 1; ++k) {
        const int64_t place = s.known - s.taps + 1 + k;
        if (is_word(old, s.known, count)) {
            uint64_t words[CHANNELS];
            std::memcpy(words, old, sizeof words);
            for (int64_t c = 0; c < CHANNELS; ++c) {
                const uint32_t bits = (uint32_t)(words[c] >> 16 * place) << 16;
                std::memcpy(inputs + k * CHANNELS + c, &bits, sizeof bits);
            }
        } else {
            for (int64_t c = 0; c < CHANNELS; ++c)
                inputs[k * CHANNELS + c] = c < count ? number(old[c * s.known + place]) : 0.0f;
        }
    }
}

// A new state of some channels, after all tokens of x.
template <class Number>
static void write_state(const Convolution& s, const Number* old, const Number* x, int64_t count,
                        Number* now) {
    if (s.tokens == 1 && is_word(old, s.known, count)) {
        uint64_t words[CHANNELS];
        std::memcpy(words, old, sizeof words);
        for (int64_t c = 0; c < CHANNELS; ++c) words[c] = words[c] >> 16 | (uint64_t)x[c] << 48;
        std::memcpy(now, words, sizeof words);
        return;
    }
    for (int64_t k = 0; k < s.known; ++k) {
        const int64_t token = s.tokens - s.known + k;
        for (int64_t c = 0; c < count; ++c)
            now[c * s.known + k] = token >= 0 ? x[token * s.x_token + c]
                                          : old[c * s.known + s.known + token];
    }
}

// A job has some tokens and channels of a row. Those of the same tokens follow each other, since what they read lies
// together.
template <class Number>
static void convolve_rows(const Convolution& s) {
    const int64_t blocks = (s.channels + CHANNELS - 1) / CHANNELS, before = s.taps - 1;
    const int64_t parts = (s.tokens + TOKENS - 1) / TOKENS, of_block = (s.taps + 1) * CHANNELS;
    std::vector<float> taps(blocks * of_block);
#pragma omp parallel num_threads(s.threads) if (s.threads > 1)
    {
        alignas(64) float inputs[(TAPS + TOKENS) * CHANNELS], sums[CHANNELS];
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; ++block) {
            const int64_t first = block * CHANNELS, count = std::min(CHANNELS, s.channels - first);
            taps_of((const Number*)s.weight + first * s.taps,
                    s.bias ? (const Number*)s.bias + first : nullptr, s.taps, count,
                    taps.data() + block * of_block);
        }
#pragma omp for schedule(static)
        for (int64_t job = 0; job < s.rows * parts * blocks; ++job) {
            const int64_t row = job / blocks / parts, token = job / blocks % parts * TOKENS;
            const int64_t block = job % blocks, channel = block * CHANNELS;
            const int64_t count = std::min(CHANNELS, s.channels - channel);
            const int64_t tokens = std::min(TOKENS, s.tokens - token);
            const Number* x = (const Number*)s.x + row * s.x_row + channel;
            Number* states = (Number*)s.states + channel * s.known;
            const int64_t of_state = s.channels * s.known;
            const Number* old = states + s.reads[row] * of_state;
            if (token == 0) {
                read_state(s, old, count, inputs);
                write_state(s, old, x, count, states + s.writes[row] * of_state);
            }
            const int64_t known = token == 0 ? before : 0;  // TOKENS are at least as many as the taps
            for (int64_t t = known; t < before + tokens; ++t)
                widen(x + (token + t - before) * s.x_token, inputs + t * CHANNELS, count, CHANNELS);
            Number* out = (Number*)s.out + (row * s.tokens + token) * s.channels + channel;
            for (int64_t t = 0; t < tokens; ++t, out += s.channels) {
                convolve(inputs + t * CHANNELS, taps.data() + block * of_block, s.taps, sums);
                if (count == CHANNELS)
                    for (int64_t c = 0; c < CHANNELS; c += W) write(out + c, load(sums + c), false);
                else
                    for (int64_t c = 0; c < count; ++c) store(out + c, sums[c]);
            }
        }
    }
}

struct Mixer {
    const void *projected, *weight, *conv_bias, *decay, *step_bias, *skip, *norm;  // conv_bias and norm may be null
    void *conv_states, *convolved, *out, *states;
    float* scanned;
    const int64_t *reads, *writes;
    int64_t row, token, rows, tokens, heads, width, groups, size, taps, known, of_norm, threads;
    float low, high, epsilon;
};

// out = norm(scanned silu(gate)), over `of_norm` numbers at once; without a norm where that is null.
template <class Number>
static void normalise(const Mixer& m) {
    const int64_t inner = m.heads * m.width;
#pragma omp parallel for num_threads(m.threads) schedule(static) if (m.threads > 1)
    for (int64_t token = 0; token < m.rows * m.tokens; ++token) {
        const Number* gate = (const Number*)m.projected + token / m.tokens * m.row +
            token % m.tokens * m.token;
        float* values = m.scanned + token * inner;
        Number* out = (Number*)m.out + token * inner;
        for (int64_t first = 0; first < inner; first += m.of_norm) {
            float squares = 0.0f;
            for (int64_t n = first; n < first + m.of_norm; n += W) {
                const int64_t count = std::min(W, first + m.of_norm - n);
                float gates[W], lanes[W];
                widen(gate + n, gates, count, W);
                widen(values + n, lanes, count, W);
                const SixteenFloats gated = load(lanes) * silu(load(gates));
                std::memcpy(values + n, &gated, count * sizeof(float));
                squares += sum_of(gated * gated);
            }
            const float scale = m.norm ? 1.0f / std::sqrt(squares / m.of_norm + m.epsilon) : 1.0f;
            for (int64_t n = first; n < first + m.of_norm; ++n)
                store(out + n, values[n] * scale * (m.norm ? number(((const Number*)m.norm)[n]) : 1.0f));
        }
    }
}

template <class Number, class State>
static void mix(const Mixer& m) {
    const int64_t inner = m.heads * m.width, between = m.groups * m.size;
    const int64_t channels = inner + 2 * between;
    std::vector<float> of_heads(3 * m.heads);
    for (int64_t h = 0; h < m.heads; ++h) {
        of_heads[h] = -std::exp(number(((const Number*)m.decay)[h]));
        of_heads[m.heads + h] = number(((const Number*)m.step_bias)[h]);
        of_heads[2 * m.heads + h] = number(((const Number*)m.skip)[h]);
    }
    const Number *projected = (const Number*)m.projected, *convolved = (const Number*)m.convolved;
    convolve_rows<Number>({projected + inner, m.weight, m.conv_bias, m.convolved, m.conv_states,
                           m.reads, m.writes, m.row, m.token, m.rows, m.tokens, channels, m.taps,
                           m.known, m.threads});
    const int64_t of_row = m.tokens * channels;
    scan<Number, State>({convolved, projected + inner + channels, convolved + inner,
                         convolved + inner + between, of_heads.data(), of_heads.data() + m.heads,
                         of_heads.data() + 2 * m.heads, m.scanned, m.states, m.reads, m.writes,
                         of_row, channels, m.row, m.token, of_row, channels, of_row, channels,
                         m.rows, m.tokens, m.heads, m.width, m.groups, m.size, m.threads, m.low,
                         m.high});
    normalise<Number>(m);
}

}  // namespace

// All between the two projections of a layer: the convolution, the scan, and the norm with a gate. projected
// [rows, tokens, ...] has strides, and of each token the gate, what is convolved, and dt. convolved and scanned
// are memory for results in between. All are bf16 or fp32: scanned is fp32, and `states` have a dtype of their own.
// Returns 0, or 1 for sizes that it does not take, or 2 without memory.
//
// Arguments are integers and addresses alone, so that calls can be made again from a list; the last three have
// the bits of an fp32 number.
extern "C" int mix_rows(const void* projected, const void* weight, const void* conv_bias, const void* decay,
                        const void* step_bias, const void* skip, const void* norm, void* convolved,
                        float* scanned, void* out, void* conv_states, void* states,
                        const int64_t* reads, const int64_t* writes, int64_t row, int64_t token,
                        int64_t rows, int64_t tokens, int64_t heads, int64_t width, int64_t groups,
                        int64_t size, int64_t taps, int64_t known, int64_t of_norm, int64_t threads,
                        int64_t is_bf16, int64_t of_bf16_states, int64_t low, int64_t high,
                        int64_t epsilon) try {
    const Mixer m = {projected, weight, conv_bias, decay, step_bias, skip, norm, conv_states,
                     convolved, out, states, scanned, reads, writes, row, token, rows, tokens, heads,
                     width, groups, size, taps, known, of_norm, threads, of_bits(low),
                     of_bits(high), of_bits(epsilon)};
    if (size > MOST || heads % groups || taps > TAPS || taps < 1 || known < taps - 1 || of_norm < 1 ||
        heads * width % of_norm)
        return 1;
    if (of_bf16_states)
        is_bf16 ? mix<Half, Half>(m) : mix<float, Half>(m);
    else
        is_bf16 ? mix<Half, float>(m) : mix<float, float>(m);
    return 0;
} catch (const std::exception&) {
    return 2;
}
