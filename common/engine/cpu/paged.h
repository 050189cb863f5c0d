/* Structs of the attention kernels: where keys and values are and how a layer attends, and a unit of work. */
#ifndef BATON_PAGED_H
#define BATON_PAGED_H

#include "kernels.h"

/* Keys and values of one layer, and how it attends: AttentionParams of attention/protocol.py. */
typedef struct {
    char *keys, *values;
    const float *sinks; /* [heads], or null */
    float scale, soft_cap; /* soft_cap: 0 without */
    int32_t window; /* INT32_MAX without */
} LayerCache;

/* Location of one layer's keys and values. Strides in elements; the elements of a token's head are contiguous. In pages
 * of int8 a byte for each token of a head follows its elements: the exponent, biased by 127, of a power of two, which is
 * the scale of the token's elements. The query heads are in `groups` of one size; each has one KV head, and several may
 * have the same. */
typedef struct {
    LayerCache layer;
    const int32_t *page_table; /* [rows, table_width] */
    long table_width, page_size, page_stride, head_stride;
    long heads, kv_heads, groups, dim;
    int dtype; /* of the pages */
} Paged;

/* Queries first_query .. first_query + num_queries - 1 of one row; the first has `position` in its request. */
typedef struct {
    int64_t row, first_query, num_queries, position;
} Piece;

INLINE long group_size(const Paged *kv) { return kv->heads / kv->groups; }
INLINE long kv_head_of(const Paged *kv, long group) { return group / (kv->groups / kv->kv_heads); }

/* The first token that a query at this position sees. */
INLINE long first_seen(const Paged *kv, long position) {
    const long first = position + 1 - kv->layer.window;
    return first > 0 ? first : 0;
}

/* Which tokens are seen, by lane: from 0 up to window - 1 tokens before the query. */
INLINE vi is_seen(vi distance, int32_t window) { return (vu)distance < (vu){0} + (uint32_t)window; }

/* cap * tanh(score / cap). Near 0, where a difference of exponentials loses digits, a polynomial fitted to tanh. */
INLINE vf capped(vf score, float cap) {
    const vf x = score / cap, square = x * x, far = 1.0f - 2.0f / (exponential(2.0f * x) + 1.0f);
    const vf part = (-5.528613e-3f * square + 2.0483294e-2f) * square - 5.369296e-2f;
    const vf near = (part * square + 1.3330900e-1f) * square - 3.3333263e-1f;
    return cap * choose(square < splat(0.4225f), near * square * x + x, far);
}

/* Divisions of 32 bits, since those of 64 bits take several times as long. */
INLINE long page_of(const Paged *kv, long token) { return (uint32_t)token / (uint32_t)kv->page_size; }
INLINE long place_in_page(const Paged *kv, long token) { return (uint32_t)token % (uint32_t)kv->page_size; }

INLINE ptrdiff_t token_at(const Paged *kv, long row, long head, long token) {
    const long page = kv->page_table[row * kv->table_width + page_of(kv, token)];
    return (ptrdiff_t)page * kv->page_stride + head * kv->head_stride + place_in_page(kv, token) * kv->dim;
}

/* Where the scale of a token is, relative to its elements. `offset`: of the token in its page. */
INLINE ptrdiff_t scale_after(const Paged *kv, long offset) { return (kv->page_size - offset) * kv->dim + offset; }

INLINE float power_of_two(uint32_t biased) {
    const uint32_t bits = biased << 23;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

#endif
