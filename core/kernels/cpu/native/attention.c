/* Attention of a batch's newest tokens over cached keys and values: softmax in one pass over the keys, in fp32.

   Each key and value is read once for four rows, a row being one query of one head; the heads that share a key are
   neighbours. What a row gives depends on its own query and keys alone, to the last bit: its sums run over the same tiles
   in the same order, whatever else is in the batch. The caller (operators.c) checks every argument. */

#include <math.h> /* INFINITY */

#include "kernels.h"
#include "vectors.h"

#if LANES == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif LANES == 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

enum { TILE = 64, MAX_DIM = 512, PAIR = 2 * LANES, WORTH_A_THREAD = 4096 };

typedef float quads __attribute__((vector_size(16)));

static const int32_t COUNTED[16] __attribute__((aligned(64))) = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#define COUNT (*(const ints *)COUNTED)

ALWAYS floats all(float value) { return (floats){0} + value; }
ALWAYS floats choose(ints where, floats yes, floats no) { return (floats)((where & (ints)yes) | (~where & (ints)no)); }
ALWAYS floats larger(floats a, floats b) { return choose(a > b, a, b); }

/* 2 * LANES stored numbers from `element` on; of bfloat16 first those at even places, then those at odd ones, which is
   two operations where their order is one of many. */
ALWAYS void load_pair(const char *data, int64_t element, int is_bfloat16, floats *first, floats *second) {
    if (is_bfloat16) {
        words both;
        memcpy(&both, data + 2 * element, sizeof both);
        *first = lower(both);
        *second = upper(both);
    } else {
        *first = load((const float *)data + element);
        *second = load((const float *)data + element + LANES);
    }
}

/* sum + the products of 2 * LANES numbers of a query and of a key. Where the processor does not multiply bfloat16, those of
   the query are fp32, in the order of `load_pair`. */
ALWAYS floats add_products(floats sum, const char *query, const char *key, int is_bfloat16) {
    if (is_bfloat16 && MULTIPLIES_BFLOAT16) return add_both(sum, (words)load(query), (words)load(key));
    floats first, second;
    load_pair(key, 0, is_bfloat16, &first, &second);
    sum += load(query) * first;
    return sum + load(query + sizeof sum) * second;
}

ALWAYS void store_pair(char *data, int64_t element, int is_bfloat16, floats first, floats second) {
    if (is_bfloat16) {
        words both = (rounded(first) >> 16) | (rounded(second) & 0xffff0000);
        memcpy(data + 2 * element, &both, sizeof both);
    } else {
        store((float *)data + element, first);
        store((float *)data + element + LANES, second);
    }
}

/* e^x for x <= 0, to some 2e-7 of it; 0 below the smallest normal number. */
ALWAYS floats exponential(floats x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, kept in the low bits */
    floats shifted = x * 1.44269504f + magic, whole = shifted - magic;
    floats r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    floats power = (floats)(((ints)shifted + (127 - 0x4b400000)) << 23);
    return choose(x < -87.0f, (floats){0}, p * power);
}

ALWAYS floats capped(floats score, float cap) { /* cap * tanh(score / cap) */
    floats size = choose(score < 0.0f, -score, score), shrunk = exponential(size * (-2.0f / cap));
    floats result = cap * (1.0f - shrunk) / (1.0f + shrunk);
    return choose(score < 0.0f, -result, result);
}

/* Lane i of the result is the sum of vector i. */
ALWAYS void add_pairs(floats *vectors, const int count) {
    UNROLL for (int i = 0; i < count; i++) {
        floats a = vectors[2 * i], b = vectors[2 * i + 1];
        vectors[i] = SHUFFLE(a, b, EVEN) + SHUFFLE(a, b, ODD);
    }
}

ALWAYS floats sum_each(floats vectors[LANES]) {
    if (LANES > 8) add_pairs(vectors, 8);
    if (LANES > 4) add_pairs(vectors, 4);
    add_pairs(vectors, 2);
    add_pairs(vectors, 1);
    return vectors[0];
}

ALWAYS float largest(floats value) {
    quads parts[LANES / 4], most;
    memcpy(parts, &value, sizeof value);
    most = parts[0];
    for (int i = 1; i < LANES / 4; i++)
        for (int j = 0; j < 4; j++) most[j] = parts[i][j] > most[j] ? parts[i][j] : most[j];
    float a = most[0] > most[1] ? most[0] : most[1], b = most[2] > most[3] ? most[2] : most[3];
    return a > b ? a : b;
}

ALWAYS float sum_of(floats value) {
    quads parts[LANES / 4], sum = {0};
    memcpy(parts, &value, sizeof value);
    for (int i = 0; i < LANES / 4; i++) sum += parts[i];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

ALWAYS int64_t slot_of(const Request *request, int64_t key) {
    return request->slots ? request->slots[key] : request->first_slot + key;
}

/* `rows` rows from `row` on of one request and key head; the last is repeated where there are fewer. */
ALWAYS void attend_rows(const Layer *layer, const Request *request, int64_t head, int64_t row, Rows query, char *output,
                        const int rows, const int is_bfloat16) {
    const int64_t key_dim = layer->key_dim, value_dim = layer->value_dim, group = layer->group;
    const int64_t num_rows = request->num_queries * group, first_query = request->num_keys - request->num_queries;
    const int size = is_bfloat16 ? 2 : 4, keys_at_once = LANES / rows;
    const int64_t key_slot = layer->num_kv_heads * key_dim, value_slot = layer->num_kv_heads * value_dim;
    const int is_widened = is_bfloat16 && !MULTIPLIES_BFLOAT16, query_size = is_widened ? 4 : size;
    const char *keys = layer->keys + head * key_dim * size;
    const char *values = layer->values + head * value_dim * size;

    char queries[rows][4 * MAX_DIM] __attribute__((aligned(64)));
    float sums[rows][MAX_DIM + PAIR], weights[rows][TILE], maximum[rows], total[rows];
    int32_t low[rows], high[rows]; /* a row sees the keys low .. high-1 */
    int64_t token[rows], query_head[rows];
    int64_t seen_from = INT64_MAX, seen_to = 0, by_all_from = 0, by_all_to = INT64_MAX;
    UNROLL for (int r = 0; r < rows; r++) {
        int64_t own = row + r < num_rows ? row + r : num_rows - 1, number = own / group;
        token[r] = request->first_query + number;
        query_head[r] = head * group + own % group;
        int64_t place = token[r] * query.token + query_head[r] * query.head;
        if (!is_widened) memcpy(queries[r], query.data + place * size, key_dim * size);
        else
            for (int64_t d = 0; d < key_dim; d += PAIR) {
                floats first, second;
                load_pair(query.data, place + d, 1, &first, &second);
                store(queries[r] + 4 * d, first);
                store(queries[r] + 4 * d + sizeof first, second);
            }
        memset(sums[r], 0, (value_dim + PAIR) * sizeof(float));
        maximum[r] = layer->sinks ? layer->sinks[query_head[r]] : -INFINITY;
        total[r] = layer->sinks ? 1 : 0;
        int64_t position = first_query + number, from = 0;
        if (layer->window) from = request->mode == 0 ? position - layer->window + 1 : first_query - layer->window;
        if (layer->chunk) from = position / layer->chunk * layer->chunk;
        low[r] = from > 0 ? from : 0;
        high[r] = request->mode == 2 ? request->num_keys : position + 1;
        if (low[r] < seen_from) seen_from = low[r];
        if (high[r] > seen_to) seen_to = high[r];
        if (low[r] > by_all_from) by_all_from = low[r];
        if (high[r] < by_all_to) by_all_to = high[r];
    }

    for (int64_t tile = seen_from / TILE * TILE; tile < seen_to; tile += TILE) {
        const int64_t stop = tile + TILE < seen_to ? tile + TILE : seen_to;
        for (int64_t key = tile; key < stop; key += keys_at_once) {
            const char *place[keys_at_once];
            UNROLL for (int k = 0; k < keys_at_once; k++) {
                const int64_t slot = slot_of(request, key + k < stop ? key + k : stop - 1);
                place[k] = keys + slot * key_slot * size;
                /* The keys follow each other, which the processor sees; that their values come next it cannot. */
                for (int64_t line = 0; line < value_dim * size; line += 64)
                    __builtin_prefetch(values + slot * value_slot * size + line);
            }
            floats products[LANES] = {0};
            for (int64_t d = 0; d < key_dim; d += PAIR)
                UNROLL for (int k = 0; k < keys_at_once; k++)
                    UNROLL for (int r = 0; r < rows; r++) {
                        floats *product = products + r * keys_at_once + k;
                        *product = add_products(*product, queries[r] + d * query_size, place[k] + d * size, is_bfloat16);
                    }
            floats scores = sum_each(products) * layer->scale;
            UNROLL for (int r = 0; r < rows; r++)
                memcpy(&weights[r][key - tile], (char *)&scores + r * keys_at_once * 4, keys_at_once * 4);
        }
        const int num_vectors = (stop - tile + LANES - 1) / LANES;
        float drop[LANES] = {0}, base[rows];
        UNROLL for (int r = 0; r < rows; r++) {
            floats most = all(-INFINITY);
            for (int i = 0; i < num_vectors; i++) {
                floats score = load(weights[r] + i * LANES);
                if (layer->softcap != 0) score = capped(score, layer->softcap);
                ints key = COUNT + (int32_t)(tile + i * LANES);
                score = choose((key >= low[r]) & (key < high[r]), score, all(-INFINITY));
                store(weights[r] + i * LANES, score);
                most = larger(most, score);
            }
            const float before = maximum[r], here = largest(most);
            maximum[r] = here > before ? here : before;
            base[r] = maximum[r] == -INFINITY ? 0 : maximum[r];
            drop[r] = before - base[r];
        }
        floats shrink = exponential(load(drop));
        UNROLL for (int r = 0; r < rows; r++) {
            floats added = {0};
            for (int i = 0; i < num_vectors; i++) {
                floats weight = exponential(load(weights[r] + i * LANES) - base[r]);
                store(weights[r] + i * LANES, weight);
                added += weight;
            }
            total[r] = total[r] * shrink[r] + sum_of(added);
        }
        const int64_t all_from = by_all_from > tile ? by_all_from : tile, all_to = by_all_to < stop ? by_all_to : stop;
        for (int64_t start = 0; start < value_dim; start += 2 * PAIR) {
            const int is_half = value_dim - start == PAIR;
            floats sum[rows][4];
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int c = 0; c < 4; c++) sum[r][c] = load(sums[r] + start + c * LANES) * shrink[r];
            for (int64_t key = tile; key < stop; key++) {
                const char *place = values + slot_of(request, key) * value_slot * size;
                floats stored[4];
                load_pair(place, start, is_bfloat16, stored, stored + 1);
                if (is_half) stored[2] = stored[3] = (floats){0};
                else load_pair(place, start + PAIR, is_bfloat16, stored + 2, stored + 3);
                const int by_all = key >= all_from && key < all_to;
                UNROLL for (int r = 0; r < rows; r++)
                    if (by_all || (key >= low[r] && key < high[r]))
                        UNROLL for (int c = 0; c < 4; c++) sum[r][c] += stored[c] * weights[r][key - tile];
            }
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int c = 0; c < 4; c++) store(sums[r] + start + c * LANES, sum[r][c]);
        }
    }
    for (int r = 0; r < rows && row + r < num_rows; r++) {
        int64_t place = (token[r] * layer->num_kv_heads * group + query_head[r]) * value_dim;
        for (int64_t d = 0; d < value_dim; d += PAIR)
            store_pair(output, place + d, is_bfloat16, load(sums[r] + d) / total[r], load(sums[r] + d + LANES) / total[r]);
    }
}

ALWAYS void attend_head(const Layer *layer, const Request *request, int64_t head, Rows query, char *output,
                        const int is_bfloat16) {
    const int64_t num_rows = request->num_queries * layer->group;
    for (int64_t row = 0; row < num_rows; row += 4) {
        if (num_rows - row > 2) attend_rows(layer, request, head, row, query, output, 4, is_bfloat16);
        else if (num_rows - row == 2) attend_rows(layer, request, head, row, query, output, 2, is_bfloat16);
        else attend_rows(layer, request, head, row, query, output, 1, is_bfloat16);
    }
}

static void store_rows(char *stored, Rows rows, const Layer *layer, int64_t dim, const Request *request) {
    const int64_t size = layer->is_bfloat16 ? 2 : 4;
    for (int64_t i = 0; i < request->num_queries; i++) {
        char *slot = stored + slot_of(request, request->num_keys - request->num_queries + i) * layer->num_kv_heads * dim * size;
        const char *token = rows.data + (request->first_query + i) * rows.token * size;
        for (int64_t head = 0; head < layer->num_kv_heads; head++)
            memcpy(slot + head * dim * size, token + head * rows.head * size, dim * size);
    }
}

int64_t head_size_multiple(void) { return PAIR; }

int64_t longest_head(void) { return MAX_DIM; }

void attend(const Request *requests, int64_t num_requests, Rows query, Rows key, Rows value, Layer layer, char *output) {
    int64_t work = 0;
    for (int64_t b = 0; b < num_requests; b++) {
        store_rows(layer.keys, key, &layer, layer.key_dim, requests + b);
        store_rows(layer.values, value, &layer, layer.value_dim, requests + b);
        work += requests[b].num_queries * requests[b].num_keys * layer.num_kv_heads * layer.group;
    }
#pragma omp parallel for schedule(dynamic) if (work > WORTH_A_THREAD)
    for (int64_t task = 0; task < num_requests * layer.num_kv_heads; task++) {
        const Request *request = requests + task / layer.num_kv_heads;
        if (layer.is_bfloat16) attend_head(&layer, request, task % layer.num_kv_heads, query, output, 1);
        else attend_head(&layer, request, task % layer.num_kv_heads, query, output, 0);
    }
}
