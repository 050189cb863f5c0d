/* All layers of a decoder in one call, so that no Python runs between the kernels: at small batches it took a tenth of
 * a step.
 *
 * models/decoder.py has the same operations in the same order, and its results have the same bits.
 */
#include "parts.h"

/* The weight of a matrix product: of baton_linear, or of quantized_linear.c if `quantized` is not null. */
typedef struct {
    const char *weight, *bias;
    const QuantizedWeight *quantized;
    long inputs, outputs;
} Product;

/* q_norm and k_norm: both may be null. */
typedef struct {
    const char *input_norm, *q_norm, *k_norm, *post_norm;
    Product qkv, o, gate_up, down;
} Layer;

/* What the layers of a step share. Every array of activations has a row for each of the step's tokens. */
typedef struct {
    Rows x; /* the residual stream */
    Rows normed, qkv, attended, delta, gate_up, gated;
    char *copied;          /* rows of a product, for baton_linear */
    QuantizedRows rounded; /* and for baton_linear_quantized */
    const float *cos, *sin;
    Paged kv; /* each layer has its own LayerCache */
    const Piece *pieces, *long_pieces; /* of baton_paged_attention and of baton_long_attention */
    char *scratch;                     /* of baton_long_attention */
    const int64_t *pages, *offsets; /* of every token's KV */
    const int64_t *keep;            /* tokens whose results are wanted; null: all */
    Rows kept;                      /* the rows of x that `keep` names */
    long rows, num_pieces, num_long, scratch_bytes, num_kept;
    float eps;
    int dtype;
} Step;

static void multiply(const Step *step, const Product *by, Rows x, Rows out, long rows) {
    if (by->quantized)
        baton_linear_quantized(by->quantized, &step->rounded, x, out, rows, step->dtype, step->dtype);
    else
        baton_linear(x, by->weight, by->bias, out, step->copied, rows, by->inputs, by->outputs, step->dtype, step->dtype);
}

/* Write the KV of all tokens, and their attention into `attended`. */
static void attend(const Step *step, const Layer *layer, const LayerCache *cache) {
    Paged kv = step->kv;
    kv.layer = *cache;
    const ptrdiff_t item = (ptrdiff_t)item_bytes(step->dtype);
    const char *k = step->qkv.at + kv.heads * kv.dim * item, *v = k + kv.kv_heads * kv.dim * item;
    multiply(step, &layer->qkv, step->normed, step->qkv, step->rows);
    baton_norm_and_rotate(step->qkv, layer->q_norm, layer->k_norm, step->cos, step->sin, step->rows, kv.heads,
                          kv.kv_heads, kv.dim, step->eps, step->dtype);
    baton_write_kv(&kv, step->pages, step->offsets, step->rows, k, v, step->qkv.stride, step->dtype);
    baton_paged_attention(&kv, step->pieces, step->num_pieces, step->qkv, step->attended, step->dtype);
    baton_long_attention(&kv, step->long_pieces, step->num_long, step->scratch, step->scratch_bytes, step->qkv,
                         step->attended);
}

static Rows gather(const Step *step, Rows from, long width, Rows to) {
    const int dtype = step->dtype;
    for (long row = 0; row < step->num_kept; row++)
        memcpy(row_at(to, row, dtype), row_at(from, step->keep[row], dtype), (size_t)width * item_bytes(dtype));
    return to;
}

/* The sum of the residual stream, x or the kept rows of it, and `delta` is the result. */
EXPORT void baton_run_layers(const Layer *layers, const LayerCache *caches, long num_layers, const Step *step) {
    const long hidden = layers->o.outputs;
    Rows x = step->x, attended = step->attended, delta = {0};
    long rows = step->rows;
    for (long number = 0; number < num_layers; number++) {
        const Layer *layer = layers + number;
        baton_add_rms_norm(x, delta, layer->input_norm, step->normed, rows, hidden, step->eps, step->dtype);
        attend(step, layer, caches + number);
        delta = step->delta;
        if (step->keep && number + 1 == num_layers) {
            rows = step->num_kept;
            x = gather(step, x, hidden, step->kept);
            attended = gather(step, attended, layer->o.inputs, (Rows){step->qkv.at, attended.stride});
        }
        multiply(step, &layer->o, attended, delta, rows);
        baton_add_rms_norm(x, delta, layer->post_norm, step->normed, rows, hidden, step->eps, step->dtype);
        multiply(step, &layer->gate_up, step->normed, step->gate_up, rows);
        baton_silu_and_multiply(step->gate_up, step->gated, rows, layer->down.inputs, step->dtype);
        multiply(step, &layer->down, step->gated, delta, rows);
    }
}
