// Linear layers of bf16 rows with packed weights: y = x W^T + bias, for all layers that have the same
// rows as input. See tiled_products.h.

#include "tiled_products.h"

#if defined(__AMX_BF16__) && BITS == 16
#error "oneDNN has faster products, of bf16 tiles"
#endif

// Whether this processor multiplies pairs of bf16.
extern "C" int64_t has_pairs() { return HAS_PAIRS; }

// Outputs of a tile.
extern "C" int64_t columns() { return COLUMNS; }

// rows [M, K], K even, in groups of an even number of inputs, or for BITS=4 of a multiple of eight: 1
// group for BITS=16. widens: by `Floats`, otherwise by `Pairs`. scratch: M * K inputs of 4 bytes for
// `Floats`, of one row as many for each thread; of 2 bytes for `Pairs`, not read for one row. sums: M *
// groups floats, or of one row as many for each thread; null if no layer has shifts.
extern "C" void tiled_linears(const Half* rows, const Layer* layers, int64_t count, char* scratch,
                              float* sums, int64_t M, int64_t K, int64_t groups,
                              int64_t num_threads, int64_t widens) {
    const Inputs inputs{scratch, sums, M, K, groups, widens != 0};
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
                const Half* of_block = rows + inputs.begin(b) * K;
                inputs.functions(b).transpose(of_block, inputs.of(b), K, K / 2 * part / parts,
                                              K / 2 * (part + 1) / parts);
                if (sums != nullptr)
                    sum_groups(of_block, inputs.sums_of(b), inputs.rows(b), K, K / groups,
                               groups * part / parts, groups * (part + 1) / parts);
            }
        } else if (M == 1) {
            // By each thread for itself: to wait for others takes longer.
            if (widens) {
                read.data += omp_get_thread_num() * inputs.row_bytes();
                inputs.functions(0).transpose(rows, read.data, K, 0, K / 2);
            } else {
                read.data = (char*)rows;  // in the order of its only block
            }
            if (sums != nullptr) {
                read.sums += omp_get_thread_num() * groups;
                sum_groups(rows, read.sums, 1, K, K / groups, 0, groups);
            }
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
