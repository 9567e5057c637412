/* What the kernels take. */

#ifndef SPECDEC_KERNELS_H
#define SPECDEC_KERNELS_H

#include <stdint.h>

#define EXPORTED __attribute__((visibility("default"))) /* the rest stays within the library */

typedef struct {
    int64_t first_query, num_queries, num_keys, first_slot;
    const int64_t *slots; /* of each key; null where they follow first_slot */
    int64_t mode;         /* 0 causal, 1 causal with windows counted from the first query, 2 every key with such windows */
} Request; /* a row of SpanBatch.table */

typedef struct {
    char *keys, *values; /* [slots, num_kv_heads, key_dim or value_dim] */
    int64_t num_kv_heads, group, key_dim, value_dim, is_bfloat16;
    int64_t window, chunk; /* positions that a query sees, and of which its chunk consists; 0 for all */
    float scale, softcap;  /* softcap 0: none */
    const float *sinks;    /* [num_heads] scores of a key without a value; null for none */
} Layer;

typedef struct {
    const char *data;
    int64_t token, head; /* strides in elements */
} Rows;

/* Sizes of heads must be multiples of the one and at most the other. */
EXPORTED int64_t head_size_multiple(void);
EXPORTED int64_t longest_head(void);

/* Store the new keys and values of every request, then attend: query [N, num_heads, key_dim], key and value
   [N, num_kv_heads, ...], output [N, num_heads, value_dim] without gaps. */
void attend(const Request *requests, int64_t num_requests, Rows query, Rows key, Rows value, Layer layer, char *output);

/* Outputs whose weights lie together in packed weights. */
EXPORTED int64_t outputs_per_panel(void);

/* output [num_rows, num_outputs] = input [num_rows, inputs] times weights, plus bias [num_outputs] in fp32 if there is one.
   packed: 4-byte words [panels, num_words, outputs_per_panel()], one fp32 weight or two of bfloat16 of neighbouring inputs. */
void multiply(const char *input, const char *packed, const float *bias, char *output, int64_t num_rows, int64_t num_words,
              int64_t num_outputs, int64_t is_bfloat16);

typedef struct {
    int64_t num_dims; /* at least one, and the last has stride 1 */
    const int64_t *sizes, *strides; /* in elements */
} Grid;

/* output, without gaps = the rows of the last dimension of input / sqrt(mean of their squares + eps) * gain [size].
   rounds_first: whether bfloat16 is rounded before the gain as well. */
void normalize(const char *input, Grid grid, const float *gain, float eps, char *output, int64_t is_bfloat16,
               int64_t rounds_first);

typedef struct {
    int64_t num_requests, num_tokens, num_heads, key_dim, value_dim;
    int64_t normalizes; /* whether queries and keys are divided by their norms */
    float eps;
} Delta;

EXPORTED int64_t longest_delta_head(void);

/* All fp32 without gaps: query, key [requests, tokens, heads, key_dim], value and output [..., value_dim], decay (logarithms) and
   beta [requests, tokens, heads]; state [requests, heads, key_dim, value_dim] is the one after the last token then. */
void take_tokens(const float *query, const float *key, const float *value, const float *decay, const float *beta, Delta sizes,
                 float *state, float *output);

#endif
