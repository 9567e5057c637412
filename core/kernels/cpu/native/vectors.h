/* Vectors of fp32 as long as the processor's, and bfloat16 in their halves. */

#ifndef SPECDEC_VECTORS_H
#define SPECDEC_VECTORS_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512BF16__)
#include <immintrin.h>
enum { MULTIPLIES_BFLOAT16 = 1 };
#else
enum { MULTIPLIES_BFLOAT16 = 0 };
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES))); /* of bfloat16 two, the first in the lower half */
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

#define UNROLL _Pragma("GCC unroll 16")
#define ALWAYS static inline __attribute__((always_inline))

ALWAYS floats load(const void *data) {
    floats value;
    memcpy(&value, data, sizeof value);
    return value;
}

ALWAYS void store(void *data, floats value) { memcpy(data, &value, sizeof value); }

ALWAYS floats lower(words both) { return (floats)(both << 16); }
ALWAYS floats upper(words both) { return (floats)(both & 0xffff0000); }

/* sum + the products of the bfloat16 in both halves. */
ALWAYS floats add_both(floats sum, words a, words b) {
#if defined(__AVX512BF16__)
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum += lower(a) * lower(b);
    return sum + upper(a) * upper(b);
#endif
}

/* A bfloat16 in the upper half: the nearest, ties to even; not a number stays one. */
ALWAYS words rounded(floats value) {
    words bits = (words)value, is_nan = (words)(value != value);
    return (is_nan & 0x7fc00000) | (~is_nan & (bits + 0x7fff + ((bits >> 16) & 1)));
}

#endif
