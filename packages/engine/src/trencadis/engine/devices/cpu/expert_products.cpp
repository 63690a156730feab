// A layer of experts: for each token the weighted sum of those that were chosen for it, each of which
// computes W_down (silu(W_gate x) * (W_up x)). Products are those of tiled_products.h.
//
// The rows of an expert follow each other in all that is computed in between, so that each of its tiles is
// read once for all of them. Threads have parts of equal cost, by rows and weights. Gate, up and the
// results of experts are rounded to bf16, as in PyTorch's operations; the sum over experts is fp32.

#include "exponential.h"
#include "tiled_products.h"

#if defined(__AMX_BF16__) && BITS == 16
#error "oneDNN has faster products, of bf16 tiles"
#endif

namespace {

constexpr int64_t READING = 12;  // rows whose products take as long as reading the weights
constexpr int64_t ALIGNMENT = 64;

// What a call computes; sizes are numbers of what they count.
struct Sizes {
    int64_t tokens, chosen, experts, hidden, inner;
    bool widens;

    int64_t rows() const { return tokens * chosen; }
    int64_t gated_tiles() const { return (inner + COLUMNS - 1) / COLUMNS; }
    int64_t down_tiles() const { return (hidden + COLUMNS - 1) / COLUMNS; }
    int64_t input_bytes() const { return widens ? sizeof(float) : sizeof(Half); }
};

// Memory for what is computed in between, as offsets from its beginning.
struct Room {
    int64_t starts, next, tokens, places, inputs, gated, results, bytes;

    explicit Room(const Sizes& sizes) : bytes(0) {
        const int64_t rows = sizes.rows(), word = sizeof(int64_t);
        starts = take((sizes.experts + 1) * word);
        next = take(sizes.experts * word);
        tokens = take(rows * word);
        places = take(rows * word);
        inputs = take(rows * sizes.hidden * sizes.input_bytes());
        gated = take(rows * sizes.inner * sizes.input_bytes());
        results = take((rows * sizes.hidden + LANES) * sizeof(Half));  // vectors reach beyond the end
    }

  private:
    int64_t take(int64_t size) {
        const int64_t begin = bytes;
        bytes += (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
        return begin;
    }
};

// Which rows belong to which expert.
struct Groups {
    int64_t* starts;  // [experts + 1]: where the rows of each begin
    int64_t* next;    // [experts]
    int64_t* tokens;  // of each row
    int64_t* places;  // [tokens, chosen]: the row of each choice, -1 for one of no expert

    void fill(const Sizes& sizes, const int64_t* chosen) const {
        const auto is_expert = [&](int64_t e) { return e >= 0 && e < sizes.experts; };
        std::fill(starts, starts + sizes.experts + 1, 0);
        for (int64_t i = 0; i < sizes.rows(); ++i)
            if (is_expert(chosen[i])) ++starts[chosen[i] + 1];
        for (int64_t e = 0; e < sizes.experts; ++e) {
            next[e] = starts[e];
            starts[e + 1] += starts[e];
        }
        for (int64_t i = 0; i < sizes.rows(); ++i) {
            places[i] = is_expert(chosen[i]) ? next[chosen[i]]++ : -1;
            if (places[i] >= 0) tokens[places[i]] = i / sizes.chosen;
        }
    }

    int64_t count(int64_t expert) const { return starts[expert + 1] - starts[expert]; }
};

// The tiles of each expert that a thread computes: of all, in order, a part of the cost.
template <class Compute>
static void compute_part(const Sizes& sizes, const Groups& groups, int64_t tiles,
                         const Compute& compute) {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const auto cost = [&](int64_t e) { return groups.count(e) ? groups.count(e) + READING : 0; };
    int64_t total = 0, before = 0;
    for (int64_t e = 0; e < sizes.experts; ++e) total += tiles * cost(e);
    for (int64_t e = 0; e < sizes.experts; before += tiles * cost(e), ++e) {
        if (cost(e) == 0) continue;
        // The first tile that does not begin before the part of a thread.
        const auto first = [&](int64_t of_thread) {
            const int64_t missing = total * of_thread - before * threads, unit = cost(e) * threads;
            return missing <= 0 ? 0 : std::min(tiles, (missing + unit - 1) / unit);
        };
        for (int64_t tile = first(thread); tile < first(thread + 1); ++tile) compute(e, tile);
    }
}

// A row, in the order in which its block reads it. `from`: the first of so many pairs of its inputs.
static void place(const Half* row, const Inputs& inputs, int64_t number, int64_t from,
                  int64_t pairs) {
    const int64_t blocks = inputs.blocks(), b = ((number + 1) * blocks - 1) / inputs.M;
    const int64_t rows = inputs.rows(b), r = number - inputs.begin(b);
    char* to = inputs.of(b) + 2 * from * rows * (inputs.widens ? sizeof(float) : sizeof(Half));
#if HAS_PAIRS
    if (!inputs.widens) {
        for (int64_t p = 0; p < pairs; ++p)
            Pairs::put((int32_t*)to + p * rows + r, rows, row + 2 * p);
        return;
    }
#endif
    for (int64_t p = 0; p < pairs; ++p)
        Floats::put((float*)to + 2 * p * rows + r, rows, row + 2 * p);
}

static inline SixteenFloats load_sixteen(const Half* from) {
    SixteenFloats values;
    for (int64_t i = 0; i < 16; i += LANES) {
        const Vector part = widened(from + i);
        std::memcpy((float*)&values + i, &part, sizeof part);
    }
    return values;
}

// gate = silu(gate) * up, of a multiple of 16.
static void multiply_gated(Half* gate, const Half* up, int64_t size) {
    for (int64_t i = 0; i < size; i += 16) {
        const SixteenFloats x = load_sixteen(gate + i);
        const SixteenFloats small = exponential(x < 0 ? x : -x);
        const SixteenFloats gated = x * (x < 0 ? small : of_all(1)) / (small + 1) * load_sixteen(up + i);
        for (int64_t j = 0; j < 16; j += LANES)
            store(gate + i + j, loaded((const float*)&gated + j), LANES);
    }
}

// The inputs of the second product of an expert, of as many columns as a tile has.
static void compute_gated(const Layer& layer, int64_t tile, const Inputs& inputs,
                          const Inputs& gated) {
    alignas(ALIGNMENT) Half gate[MOST * COLUMNS], up[MOST * COLUMNS];
    Block of_gate = tile_of(layer, 2 * tile, inputs), of_up = tile_of(layer, 2 * tile + 1, inputs);
    of_gate.num_outputs = of_up.num_outputs = COLUMNS;
    const int64_t column = tile * COLUMNS, used = std::min(COLUMNS, gated.K - column);
    for (int64_t b = 0; b < inputs.blocks(); ++b) {
        compute_block(of_gate, inputs, b, 2, gate);
        compute_block(of_up, inputs, b, 2, up);
        multiply_gated(gate, up, inputs.rows(b) * COLUMNS);
        for (int64_t r = 0; r < inputs.rows(b); ++r)
            place(gate + r * COLUMNS, gated, inputs.begin(b) + r, column / 2, used / 2);
    }
}

// The layers of all experts, one after the other.
struct Weights {
    const Weight* tiles;
    const char* scales;
    int64_t groups;  // of inputs
    int64_t scale_type;

    Layer of(int64_t expert, int64_t inputs, int64_t num_tiles, int64_t outputs, Half* out) const {
        const int64_t size = scale_type == 0 ? 4 : 2;
        return {tiles + expert * num_tiles * (inputs / UNIT) * OF_TILE,
                scales + expert * num_tiles * groups * COLUMNS * size,
                nullptr,
                nullptr,
                out,
                outputs,
                scale_type};
    }
};

static void add_up(const Sizes& sizes, const int64_t* places, const float* weights,
                   const Half* results, Half* out) {
    for (int64_t column = 0; column < sizes.hidden; column += LANES) {
        Vector sum = repeated(0);
        for (int64_t i = 0; i < sizes.chosen; ++i) {
            if (places[i] < 0) continue;
            const Vector result = widened(results + places[i] * sizes.hidden + column);
            sum = product_added(repeated(weights[i]), result, sum);
        }
        store(out + column, sum, std::min(LANES, sizes.hidden - column));
    }
}

}  // namespace

extern "C" int64_t has_pairs() { return HAS_PAIRS; }

extern "C" int64_t columns() { return COLUMNS; }

// Bytes of `scratch`.
extern "C" int64_t scratch_bytes(int64_t tokens, int64_t chosen, int64_t experts, int64_t hidden,
                                 int64_t inner, int64_t widens) {
    return Room(Sizes{tokens, chosen, experts, hidden, inner, widens != 0}).bytes;
}

// rows and out [tokens, hidden], choices and weights [tokens, chosen], hidden and inner even. gate_up: for
// each expert a tile of gate, the same of up, the next of gate; scales follow the tiles. A choice that is
// no number of an expert adds nothing. scratch: of `scratch_bytes`.
extern "C" void compute_experts(const Half* rows, const int64_t* choices, const float* weights,
                                const Weight* gate_up, const char* gate_up_scales,
                                const Weight* down, const char* down_scales, Half* out,
                                char* scratch, int64_t tokens, int64_t chosen, int64_t experts,
                                int64_t hidden, int64_t inner, int64_t gate_up_groups,
                                int64_t down_groups, int64_t scale_type, int64_t num_threads,
                                int64_t widens) {
    const Sizes sizes{tokens, chosen, experts, hidden, inner, widens != 0};
    const Room room(sizes);
    const Groups groups{(int64_t*)(scratch + room.starts), (int64_t*)(scratch + room.next),
                        (int64_t*)(scratch + room.tokens), (int64_t*)(scratch + room.places)};
    groups.fill(sizes, choices);
    const int64_t gated_tiles = sizes.gated_tiles();
    const Weights first{gate_up, gate_up_scales, gate_up_groups, scale_type};
    const Weights second{down, down_scales, down_groups, scale_type};
    Half* results = (Half*)(scratch + room.results);
    const auto inputs_of = [&](int64_t e) {
        char* data = scratch + room.inputs + groups.starts[e] * hidden * sizes.input_bytes();
        return Inputs{data, nullptr, groups.count(e), hidden, gate_up_groups, sizes.widens};
    };
    const auto gated_of = [&](int64_t e) {
        char* data = scratch + room.gated + groups.starts[e] * inner * sizes.input_bytes();
        return Inputs{data, nullptr, groups.count(e), inner, down_groups, sizes.widens};
    };
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
    {
        const WithoutDenormals flushing;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tokens * chosen; ++i)
            if (groups.places[i] >= 0) {
                const int64_t e = choices[i];
                place(rows + i / chosen * hidden, inputs_of(e), groups.places[i] - groups.starts[e], 0,
                      hidden / 2);
            }
        compute_part(sizes, groups, gated_tiles, [&](int64_t e, int64_t tile) {
            const int64_t outputs = 2 * gated_tiles * COLUMNS;
            const Layer layer = first.of(e, hidden, 2 * gated_tiles, outputs, nullptr);
            compute_gated(layer, tile, inputs_of(e), gated_of(e));
        });
#pragma omp barrier
        compute_part(sizes, groups, sizes.down_tiles(), [&](int64_t e, int64_t tile) {
            Half* of_expert = results + groups.starts[e] * hidden;
            const Layer layer = second.of(e, inner, sizes.down_tiles(), hidden, of_expert);
            compute_tile(layer, tile, gated_of(e));
        });
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t t = 0; t < tokens; ++t)
            add_up(sizes, groups.places + t * chosen, weights + t * chosen, results,
                   out + t * hidden);
    }
}
