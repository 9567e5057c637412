/* The gated delta rule, token by token, in fp32: what chunks of tokens compute with matrices, for few tokens. */

#include <math.h>

#include "kernels.h"

enum { WORTH_A_THREAD = 1 << 17, LONGEST_HEAD = 512 };

int64_t longest_delta_head(void) { return LONGEST_HEAD; }

static float inverse_norm(const float *vector, int64_t size, float eps) {
    float squares = 0;
    for (int64_t i = 0; i < size; i++) squares += vector[i] * vector[i];
    return 1 / sqrtf(squares + eps);
}

/* state [key_dim, value_dim] = decay * state + key x (value - its reading of the decayed state) * beta; output = its reading. */
static void take_token(const float *query, const float *key, const float *value, float decay, float beta, float query_scale,
                       float key_scale, Delta sizes, float *state, float *output) {
    float change[LONGEST_HEAD] = {0};
    const int64_t key_dim = sizes.key_dim, value_dim = sizes.value_dim;
    for (int64_t i = 0; i < key_dim; i++) {
        float *row = state + i * value_dim;
        const float factor = key[i] * key_scale;
        for (int64_t j = 0; j < value_dim; j++) {
            row[j] *= decay;
            change[j] += row[j] * factor;
        }
    }
    for (int64_t j = 0; j < value_dim; j++) {
        change[j] = (value[j] - change[j]) * beta;
        output[j] = 0;
    }
    for (int64_t i = 0; i < key_dim; i++) {
        float *row = state + i * value_dim;
        const float factor = key[i] * key_scale, reading = query[i] * query_scale;
        for (int64_t j = 0; j < value_dim; j++) {
            row[j] += factor * change[j];
            output[j] += row[j] * reading;
        }
    }
}

void take_tokens(const float *query, const float *key, const float *value, const float *decay, const float *beta, Delta sizes,
                 float *state, float *output) {
    const int64_t heads = sizes.num_heads, length = sizes.num_tokens, state_size = sizes.key_dim * sizes.value_dim;
    const float scale = 1 / sqrtf((float)sizes.key_dim);
#pragma omp parallel for if (sizes.num_requests * heads * length * state_size > WORTH_A_THREAD)
    for (int64_t each = 0; each < sizes.num_requests * heads; each++) {
        float *own = state + each * state_size;
        for (int64_t t = 0; t < length; t++) {
            const int64_t place = (each / heads * length + t) * heads + each % heads;
            const float *q = query + place * sizes.key_dim, *k = key + place * sizes.key_dim;
            const float query_scale = sizes.normalizes ? scale * inverse_norm(q, sizes.key_dim, sizes.eps) : scale;
            const float key_scale = sizes.normalizes ? inverse_norm(k, sizes.key_dim, sizes.eps) : 1;
            take_token(q, k, value + place * sizes.value_dim, expf(decay[place]), beta[place], query_scale, key_scale, sizes,
                       own, output + place * sizes.value_dim);
        }
    }
}
