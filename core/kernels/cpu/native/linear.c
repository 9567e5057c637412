/* A linear layer: each weight is read once for up to six rows, products are summed in fp32.

   What a row gives depends on that row alone, to the last bit: its sums run over the inputs one after the other, whatever
   rows are beside it. The caller (operators.c) checks every argument. */

#include "kernels.h"
#include "vectors.h"

#if LANES == 16 || defined(__aarch64__)
enum { VECTORS = 4 }; /* 24 sums, 4 vectors of weights and an input, of 32 registers */
#else
enum { VECTORS = 2 }; /* 12 sums, 2 vectors of weights and an input, of 16 */
#endif
enum { MOST_ROWS = 6, PANEL = LANES * VECTORS, WORTH_A_THREAD = 1 << 18 };

ALWAYS void multiply_rows(const char *input, const char *panel, floats sums[][VECTORS], int64_t num_words, const int rows,
                          const int is_bfloat16) {
    floats sum[rows][VECTORS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECTORS; v++) sum[r][v] = (floats){0};
    for (int64_t k = 0; k < num_words; k++) {
        floats weights[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) weights[v] = load(panel + (k * VECTORS + v) * sizeof(floats));
        UNROLL for (int r = 0; r < rows; r++) {
            uint32_t word;
            memcpy(&word, input + 4 * (r * num_words + k), 4);
            const words value = (words){0} + word;
            UNROLL for (int v = 0; v < VECTORS; v++) {
                if (is_bfloat16) sum[r][v] = add_both(sum[r][v], (words)weights[v], value);
                else sum[r][v] += weights[v] * (floats)value;
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = sum[r][v];
}

ALWAYS void store_row(char *output, const floats *sums, const float *bias, int64_t count, const int is_bfloat16) {
    float added[PANEL] = {0};
    if (bias) memcpy(added, bias, 4 * count);
    char row[4 * PANEL];
    UNROLL for (int v = 0; v < VECTORS; v++) {
        floats value = sums[v] + load(added + v * LANES);
        if (is_bfloat16) {
            halves narrow = __builtin_convertvector(rounded(value) >> 16, halves);
            memcpy(row + v * sizeof narrow, &narrow, sizeof narrow);
        } else store(row + 4 * v * LANES, value);
    }
    memcpy(output, row, count * (is_bfloat16 ? 2 : 4));
}

ALWAYS void multiply_panel(const char *input, const char *panel, const float *bias, char *output, int64_t num_rows,
                           int64_t num_words, int64_t num_outputs, int64_t count, const int is_bfloat16) {
    const int64_t num_blocks = (num_rows + MOST_ROWS - 1) / MOST_ROWS;
    for (int64_t block = 0; block < num_blocks; block++) {
        const int64_t first = num_rows * block / num_blocks, rows = num_rows * (block + 1) / num_blocks - first;
        const char *own = input + 4 * first * num_words;
        floats sums[MOST_ROWS][VECTORS];
        switch (rows) {
        case 1: multiply_rows(own, panel, sums, num_words, 1, is_bfloat16); break;
        case 2: multiply_rows(own, panel, sums, num_words, 2, is_bfloat16); break;
        case 3: multiply_rows(own, panel, sums, num_words, 3, is_bfloat16); break;
        case 4: multiply_rows(own, panel, sums, num_words, 4, is_bfloat16); break;
        case 5: multiply_rows(own, panel, sums, num_words, 5, is_bfloat16); break;
        default: multiply_rows(own, panel, sums, num_words, 6, is_bfloat16);
        }
        for (int64_t r = 0; r < rows; r++)
            store_row(output + (first + r) * num_outputs * (is_bfloat16 ? 2 : 4), sums[r], bias, count, is_bfloat16);
    }
}

int64_t outputs_per_panel(void) { return PANEL; }

void multiply(const char *input, const char *packed, const float *bias, char *output, int64_t num_rows, int64_t num_words,
              int64_t num_outputs, int64_t is_bfloat16) {
    const int64_t num_panels = (num_outputs + PANEL - 1) / PANEL;
#pragma omp parallel for if (num_rows * num_words * num_outputs > WORTH_A_THREAD)
    for (int64_t i = 0; i < num_panels; i++) {
        const int64_t first = i * PANEL, count = num_outputs - first < PANEL ? num_outputs - first : PANEL;
        const char *panel = packed + 4 * first * num_words;
        const float *own = bias ? bias + first : 0;
        char *out = output + first * (is_bfloat16 ? 2 : 4);
        if (is_bfloat16) multiply_panel(input, panel, own, out, num_rows, num_words, num_outputs, count, 1);
        else multiply_panel(input, panel, own, out, num_rows, num_words, num_outputs, count, 0);
    }
}
