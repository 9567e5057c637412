/* Root mean square norms: x / sqrt(mean(x^2) + eps) * gain, computed in fp32. What a row gives depends on that row alone. */

#include <math.h>

#include "kernels.h"
#include "vectors.h"

enum { WORTH_A_THREAD = 1 << 17 };

ALWAYS floats widened(const char *row, int64_t count, const int is_bfloat16) {
    if (!is_bfloat16) {
        floats values = {0};
        memcpy(&values, row, 4 * count);
        return values;
    }
    halves narrow = {0};
    memcpy(&narrow, row, 2 * count);
    return (floats)(__builtin_convertvector(narrow, words) << 16);
}

ALWAYS void write(char *row, floats values, int64_t count, const int is_bfloat16) {
    if (is_bfloat16) {
        const halves narrow = __builtin_convertvector(rounded(values) >> 16, halves);
        memcpy(row, &narrow, 2 * count);
    } else memcpy(row, &values, 4 * count);
}

ALWAYS floats normal(const char *row, float inverse, int64_t count, const int is_bfloat16, const int rounds_first) {
    const floats values = widened(row, count, is_bfloat16) * inverse;
    return rounds_first ? (floats)(rounded(values) & 0xffff0000) : values;
}

ALWAYS void normalize_row(const char *row, const float *gain, float eps, char *output, int64_t size, const int is_bfloat16,
                          const int rounds_first) {
    const int64_t bytes = is_bfloat16 ? 2 : 4, whole = size - size % LANES, rest = size - whole;
    floats squares = {0};
    for (int64_t i = 0; i < whole; i += LANES) {
        const floats values = widened(row + i * bytes, LANES, is_bfloat16);
        squares += values * values;
    }
    if (rest) {
        const floats values = widened(row + whole * bytes, rest, is_bfloat16);
        squares += values * values;
    }
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += squares[lane];
    const float inverse = 1 / sqrtf(sum / (float)size + eps);
    for (int64_t i = 0; i < whole; i += LANES) {
        const floats values = normal(row + i * bytes, inverse, LANES, is_bfloat16, rounds_first) * load(gain + i);
        write(output + i * bytes, values, LANES, is_bfloat16);
    }
    if (rest) {
        const floats factors = widened((const char *)(gain + whole), rest, 0);
        const floats values = normal(row + whole * bytes, inverse, rest, is_bfloat16, rounds_first) * factors;
        write(output + whole * bytes, values, rest, is_bfloat16);
    }
}

void normalize(const char *input, Grid grid, const float *gain, float eps, char *output, int64_t is_bfloat16,
               int64_t rounds_first) {
    const int64_t bytes = is_bfloat16 ? 2 : 4;
    int64_t num_groups = 1;
    for (int64_t d = 0; d < grid.num_dims - 2; d++) num_groups *= grid.sizes[d];
    const int64_t size = grid.sizes[grid.num_dims - 1], group = grid.num_dims > 1 ? grid.sizes[grid.num_dims - 2] : 1;
#pragma omp parallel for if (num_groups * group * size > WORTH_A_THREAD)
    for (int64_t i = 0; i < num_groups; i++) {
        int64_t start = 0, index = i;
        for (int64_t d = grid.num_dims - 3; d >= 0; index /= grid.sizes[d--]) start += index % grid.sizes[d] * grid.strides[d];
        for (int64_t j = 0; j < group; j++) {
            const char *row = input + bytes * (start + (grid.num_dims > 1 ? j * grid.strides[grid.num_dims - 2] : 0));
            char *out = output + bytes * size * (i * group + j);
            if (!is_bfloat16) normalize_row(row, gain, eps, out, size, 0, 0);
            else if (rounds_first) normalize_row(row, gain, eps, out, size, 1, 1);
            else normalize_row(row, gain, eps, out, size, 1, 0);
        }
    }
}
