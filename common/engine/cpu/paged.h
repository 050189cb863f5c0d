/* Structs of the attention kernels: the location of keys and values, and a unit of work. */
#ifndef BATON_PAGED_H
#define BATON_PAGED_H

#include "kernels.h"

/* Location of one layer's keys and values. Strides in elements; the elements of a token's head are contiguous. In pages
 * of int8 a byte for each token of a head follows its elements: the exponent, biased by 127, of a power of two, which is
 * the scale of the token's elements. */
typedef struct {
    char *keys, *values;
    const int32_t *page_table; /* [rows, table_width] */
    long table_width, page_size, page_stride, head_stride;
    long heads, kv_heads, dim;
    int dtype; /* of the pages */
} Paged;

/* Queries first_query .. first_query + num_queries - 1 of one row; the first has `position` in its request. */
typedef struct {
    int64_t row, first_query, num_queries, position;
} Piece;

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
