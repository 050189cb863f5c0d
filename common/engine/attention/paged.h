/* What the attention kernels share: where keys and values lie, and which queries belong together. */
#ifndef BATON_PAGED_H
#define BATON_PAGED_H

#include "../kernels.h"

/* Where one layer's keys and values lie. Strides in numbers; a token's numbers are contiguous. */
typedef struct {
    char *keys, *values;
    const int32_t *page_table; /* [rows, table_width] */
    long table_width, page_size, page_stride, head_stride;
    long heads, kv_heads, dim;
} Paged;

/* Queries first_query .. first_query + num_queries of one row, whose first stands at `position` of its text. */
typedef struct {
    int64_t row, first_query, num_queries, position;
} Piece;

INLINE ptrdiff_t token_at(const Paged *kv, long row, long head, long token) {
    long page = kv->page_table[row * kv->table_width + token / kv->page_size];
    return (ptrdiff_t)page * kv->page_stride + head * kv->head_stride + token % kv->page_size * kv->dim;
}

#endif
