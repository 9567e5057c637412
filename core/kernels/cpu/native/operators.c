/* Our kernels as operators of PyTorch's, through the C interface that it keeps from release to release.

   An operator costs less to call than a function through ctypes, and compiled code calls it without Python. A failed check
   raises RuntimeError in the caller: `aoti_torch_check` throws through these frames, which are compiled for it. An operator
   owns its arguments, so they are checked before anything is made, and given back before it throws. What a table of requests says
   is taken as it is: `SpanBatch` makes it. */

#include <stdbool.h>
#include <string.h>

#include "kernels.h"

/* Of torch/csrc/inductor/aoti_torch/c/shim.h. */
typedef struct AtenTensorOpaque *Tensor;
typedef struct TorchLibraryOpaque *Library;
typedef uint64_t Value; /* a tensor, an int64 or a double */
typedef int32_t Status; /* 0: done */
Status aoti_torch_get_data_ptr(Tensor, void **);
Status aoti_torch_get_dim(Tensor, int64_t *);
Status aoti_torch_get_sizes(Tensor, int64_t **);
Status aoti_torch_get_strides(Tensor, int64_t **);
Status aoti_torch_get_dtype(Tensor, int32_t *);
Status aoti_torch_is_contiguous(Tensor, bool *);
Status aoti_torch_empty_strided(int64_t, const int64_t *, const int64_t *, int32_t, int32_t, int32_t, Tensor *);
Status aoti_torch_delete_tensor_object(Tensor);
Status aoti_torch_library_init_fragment(const char *, const char *, uint32_t, Library *);
Status aoti_torch_library_init_impl(const char *, const char *, const char *, uint32_t, Library *);
Status aoti_torch_library_def(Library, const char *);
Status aoti_torch_library_impl(Library, const char *, void (*)(Value *, uint64_t, uint64_t));
int32_t aoti_torch_device_type_cpu(void);
int32_t aoti_torch_dtype_bfloat16(void);
int32_t aoti_torch_dtype_float32(void);
int32_t aoti_torch_dtype_int64(void);
void aoti_torch_check(bool, const char *, const char *, uint32_t, const char *);

enum { MOST_DIMS = 8, REQUEST_NUMBERS = sizeof(Request) / sizeof(int64_t) };

typedef struct {
    char *data;
    int64_t num_dims, *sizes, *strides;
    int32_t dtype;
} Fields;

static Fields fields_of(Value value) {
    Tensor tensor = (Tensor)value;
    Fields found;
    aoti_torch_get_data_ptr(tensor, (void **)&found.data);
    aoti_torch_get_dim(tensor, &found.num_dims);
    aoti_torch_get_sizes(tensor, &found.sizes);
    aoti_torch_get_strides(tensor, &found.strides);
    aoti_torch_get_dtype(tensor, &found.dtype);
    return found;
}

static bool is_contiguous(Value value) {
    bool answer = false;
    return !aoti_torch_is_contiguous((Tensor)value, &answer) && answer;
}

static bool is_bfloat16(const Fields *tensor) { return tensor->dtype == aoti_torch_dtype_bfloat16(); }

static bool is_served(const Fields *tensor) {
    return is_bfloat16(tensor) || tensor->dtype == aoti_torch_dtype_float32();
}

static void give_back(Value *tensors, int count) {
    for (int i = 0; i < count; i++) aoti_torch_delete_tensor_object((Tensor)tensors[i]);
}

static void require(bool holds, const char *expected, Value *tensors, int count) {
    if (holds) return;
    give_back(tensors, count);
    aoti_torch_check(false, __func__, __FILE__, __LINE__, expected);
}

/* Returns where the numbers of the new tensor go. */
static char *make_result(Value *tensors, int count, int64_t num_dims, const int64_t *sizes, int32_t dtype, Tensor *made) {
    int64_t strides[MOST_DIMS], stride = 1;
    for (int64_t i = num_dims - 1; i >= 0; stride *= sizes[i--]) strides[i] = stride;
    const Status failed = aoti_torch_empty_strided(num_dims, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, made);
    require(!failed, "memory for the result", tensors, count);
    return fields_of((Value)*made).data;
}

/* The result takes the place of the arguments. */
static void finish(Value *stack, int num_tensors, Tensor result) {
    give_back(stack, num_tensors);
    stack[0] = (Value)result;
}

static const char LINEAR[] = "linear(Tensor input, Tensor packed, Tensor bias, int num_outputs) -> Tensor";

static void linear(Value *stack, uint64_t num_arguments, uint64_t num_results) {
    const Fields input = fields_of(stack[0]), packed = fields_of(stack[1]);
    const Fields bias = fields_of(stack[2]); /* fp32, empty where there is none */
    const int64_t num_outputs = (int64_t)stack[3], panel = outputs_per_panel(), last = input.num_dims - 1;
    require(is_served(&input) && input.dtype == packed.dtype && bias.dtype == aoti_torch_dtype_float32(),
            "linear: an input of the dtype of the weights, fp32 or bfloat16", stack, 3);
    require(is_contiguous(stack[0]) && is_contiguous(stack[1]) && is_contiguous(stack[2]), "linear: contiguous tensors", stack, 3);
    require(packed.num_dims == 3 + is_bfloat16(&packed) && packed.sizes[2] == panel && bias.num_dims == 1 &&
                packed.sizes[0] == (num_outputs + panel - 1) / panel && (!bias.sizes[0] || bias.sizes[0] == num_outputs),
            "linear: weights packed for this processor, and as many biases as outputs", stack, 3);
    require(last >= 0 && last < MOST_DIMS && input.sizes[last] == packed.sizes[1] * (is_bfloat16(&input) ? 2 : 1),
            "linear: rows as long as the layer has inputs", stack, 3);
    int64_t sizes[MOST_DIMS], num_rows = 1;
    for (int64_t i = 0; i < last; i++) num_rows *= sizes[i] = input.sizes[i];
    sizes[last] = num_outputs;
    Tensor output;
    char *result = make_result(stack, 3, input.num_dims, sizes, input.dtype, &output);
    multiply(input.data, packed.data, bias.sizes[0] ? (float *)bias.data : 0, result, num_rows, packed.sizes[1], num_outputs,
             is_bfloat16(&input));
    finish(stack, 3, output);
}

static double number_of(Value value) {
    double number;
    memcpy(&number, &value, sizeof number);
    return number;
}

static const char RMS_NORM[] = "rms_norm(Tensor input, Tensor gain, float eps, int rounds_first) -> Tensor";

static void rms_norm(Value *stack, uint64_t num_arguments, uint64_t num_results) {
    const Fields input = fields_of(stack[0]), gain = fields_of(stack[1]);
    const int64_t last = input.num_dims - 1;
    require(is_served(&input) && gain.dtype == aoti_torch_dtype_float32(), "rms_norm: fp32 or bfloat16, gains in fp32", stack, 2);
    require(last >= 0 && last < MOST_DIMS && input.strides[last] == 1, "rms_norm: rows in one piece", stack, 2);
    require(gain.num_dims == 1 && is_contiguous(stack[1]) && gain.sizes[0] == input.sizes[last], "rms_norm: a gain for each value",
            stack, 2);
    Tensor output;
    char *result = make_result(stack, 2, input.num_dims, input.sizes, input.dtype, &output);
    normalize(input.data, (Grid){input.num_dims, input.sizes, input.strides}, (const float *)gain.data, (float)number_of(stack[2]),
              result, is_bfloat16(&input), (int64_t)stack[3]);
    finish(stack, 2, output);
}

/* It changes the state and does not say so, as attention. */
static const char DELTA_RULE[] =
    "delta_rule(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, Tensor state, float eps, int normalizes) -> "
    "Tensor";

static bool has_sizes(const Fields *tensor, int64_t num_dims, const int64_t *sizes) {
    return tensor->num_dims == num_dims && !memcmp(tensor->sizes, sizes, num_dims * sizeof *sizes);
}

static void delta_rule(Value *stack, uint64_t num_arguments, uint64_t num_results) {
    Fields given[6];
    for (int i = 0; i < 6; i++) {
        given[i] = fields_of(stack[i]);
        require(given[i].dtype == aoti_torch_dtype_float32() && is_contiguous(stack[i]), "delta_rule: contiguous fp32", stack, 6);
    }
    const Fields *query = given, *value = given + 2;
    require(query->num_dims == 4 && value->num_dims == 4, "delta_rule: [requests, tokens, heads, size]", stack, 6);
    const int64_t *sizes = query->sizes, value_dim = value->sizes[3];
    const int64_t of_values[] = {sizes[0], sizes[1], sizes[2], value_dim}, of_state[] = {sizes[0], sizes[2], sizes[3], value_dim};
    require(has_sizes(given + 1, 4, sizes) && has_sizes(value, 4, of_values) && has_sizes(given + 3, 3, sizes) &&
                has_sizes(given + 4, 3, sizes) && has_sizes(given + 5, 4, of_state) && value_dim <= longest_delta_head(),
            "delta_rule: queries, keys, values, decays and a state that fit together", stack, 6);
    const Delta delta = {sizes[0], sizes[1], sizes[2], sizes[3], value_dim, (int64_t)stack[7], (float)number_of(stack[6])};
    Tensor output;
    char *result = make_result(stack, 6, 4, of_values, query->dtype, &output);
    take_tokens((float *)given[0].data, (float *)given[1].data, (float *)given[2].data, (float *)given[3].data,
                (float *)given[4].data, delta, (float *)given[5].data, (float *)result);
    finish(stack, 6, output);
}

static bool is_of_heads(const Fields *tensor) { return tensor->num_dims == 3 && tensor->strides[2] == 1; }

static Rows rows_of(const Fields *tensor) { return (Rows){tensor->data, tensor->strides[0], tensor->strides[1]}; }

/* stack: query, keys, values, `num_tensors` tensors in all, the last one sinks, then numbers; limits: scale, window,
   softcap, chunk. */
static void attend_stored(Value *stack, int num_tensors, char *stored_keys, char *stored_values, Value table,
                          const Value *limits) {
    const Fields query = fields_of(stack[0]), keys = fields_of(stack[1]), values = fields_of(stack[2]);
    const Fields requests = fields_of(table), sinks = fields_of(stack[num_tensors - 1]); /* empty where there are none */
    require(is_served(&query) && query.dtype == keys.dtype && query.dtype == values.dtype,
            "attend: queries, keys and values of one dtype, fp32 or bfloat16", stack, num_tensors);
    require(is_of_heads(&query) && is_of_heads(&keys) && is_of_heads(&values), "attend: [N, heads, size], each head in one piece",
            stack, num_tensors);
    const int64_t num_kv_heads = keys.sizes[1], key_dim = keys.sizes[2], value_dim = values.sizes[2];
    require(query.sizes[0] == keys.sizes[0] && keys.sizes[0] == values.sizes[0] && num_kv_heads == values.sizes[1] &&
                num_kv_heads > 0 && query.sizes[1] % num_kv_heads == 0 && query.sizes[2] == key_dim,
            "attend: a key and a value for every token, whose heads fit the queries'", stack, num_tensors);
    require(key_dim % head_size_multiple() == 0 && value_dim % head_size_multiple() == 0 && key_dim <= longest_head() &&
                value_dim <= longest_head(),
            "attend: heads of a size that is served", stack, num_tensors);
    require(requests.dtype == aoti_torch_dtype_int64() && requests.num_dims == 1 && is_contiguous(table) &&
                requests.sizes[0] % REQUEST_NUMBERS == 0,
            "attend: a table of requests", stack, num_tensors);
    require(sinks.dtype == aoti_torch_dtype_float32() && is_contiguous(stack[num_tensors - 1]) && sinks.num_dims == 1 &&
                (!sinks.sizes[0] || sinks.sizes[0] == query.sizes[1]),
            "attend: a sink for each head, in fp32", stack, num_tensors);
    const Layer layer = {stored_keys, stored_values, num_kv_heads, query.sizes[1] / num_kv_heads, key_dim, value_dim,
                         is_bfloat16(&query), (int64_t)limits[1], (int64_t)limits[3], (float)number_of(limits[0]),
                         (float)number_of(limits[2]), sinks.sizes[0] ? (const float *)sinks.data : 0};
    const int64_t sizes[] = {query.sizes[0], query.sizes[1], value_dim};
    Tensor output;
    char *result = make_result(stack, num_tensors, 3, sizes, query.dtype, &output);
    attend((const Request *)requests.data, requests.sizes[0] / REQUEST_NUMBERS, rows_of(&query), rows_of(&keys), rows_of(&values),
           layer, result);
    finish(stack, num_tensors, output);
}

/* Both write to what is stored, and do not say so: a tracer would make copies of it. */
static const char ATTEND[] =
    "attend(Tensor query, Tensor keys, Tensor values, Tensor stored_keys, Tensor stored_values, Tensor table, Tensor sinks, "
    "float scale, int window, float softcap, int chunk) -> Tensor";

static bool is_storage_of(const Fields *stored, const Fields *added) {
    return stored->dtype == added->dtype && stored->num_dims == 3 && added->num_dims == 3 &&
           stored->sizes[1] == added->sizes[1] && stored->sizes[2] == added->sizes[2];
}

static void attend_tensors(Value *stack, uint64_t num_arguments, uint64_t num_results) {
    const Fields keys = fields_of(stack[1]), values = fields_of(stack[2]);
    const Fields stored_keys = fields_of(stack[3]), stored_values = fields_of(stack[4]);
    require(is_storage_of(&stored_keys, &keys) && is_storage_of(&stored_values, &values) && is_contiguous(stack[3]) &&
                is_contiguous(stack[4]),
            "attend: stored keys and values as the new ones are", stack, 7);
    attend_stored(stack, 7, stored_keys.data, stored_values.data, stack[5], stack + 7);
}

/* storage int64 [layers, 2]: where the keys and values of each layer lie, which the caller compares with the new ones. */
static const char ATTEND_AT[] =
    "attend_at(Tensor query, Tensor keys, Tensor values, Tensor table, Tensor storage, Tensor sinks, int layer, float scale, "
    "int window, float softcap, int chunk) -> Tensor";

static void attend_at(Value *stack, uint64_t num_arguments, uint64_t num_results) {
    const Fields storage = fields_of(stack[4]);
    const int64_t layer = (int64_t)stack[6];
    require(storage.dtype == aoti_torch_dtype_int64() && storage.num_dims == 2 && storage.sizes[1] == 2 &&
                is_contiguous(stack[4]) && 0 <= layer && layer < storage.sizes[0],
            "attend_at: the addresses of a layer that the cache has", stack, 6);
    char **own = (char **)storage.data + 2 * layer;
    attend_stored(stack, 6, own[0], own[1], stack[3], stack + 7);
}

/* Define the operators in a name space. 0: done. */
EXPORTED int32_t register_operators(const char *name_space) {
    Library names, kernels; /* they last as long as the process */
    if (aoti_torch_library_init_fragment(name_space, __FILE__, __LINE__, &names)) return 1;
    if (aoti_torch_library_init_impl(name_space, "CPU", __FILE__, __LINE__, &kernels)) return 1;
    return aoti_torch_library_def(names, LINEAR) || aoti_torch_library_impl(kernels, "linear", linear) ||
           aoti_torch_library_def(names, RMS_NORM) || aoti_torch_library_impl(kernels, "rms_norm", rms_norm) ||
           aoti_torch_library_def(names, DELTA_RULE) || aoti_torch_library_impl(kernels, "delta_rule", delta_rule) ||
           aoti_torch_library_def(names, ATTEND) || aoti_torch_library_impl(kernels, "attend", attend_tensors) ||
           aoti_torch_library_def(names, ATTEND_AT) || aoti_torch_library_impl(kernels, "attend_at", attend_at);
}
