/* The exported functions of other files that layers.c puts together, and the form of packed weights. */
#ifndef BATON_PARTS_H
#define BATON_PARTS_H

#include "paged.h"

/* Blocks of sixteen outputs that stand together in a packed weight. */
#if defined(__AMX_BF16__)
enum { BLOCKS = 2 };
#elif defined(__AVX512VNNI__)
enum { BLOCKS = 3 };
#else
enum { BLOCKS = 1 };
#endif

/* PARTS: vectors of a block. AHEAD: how many bytes ahead weights are fetched. */
enum { PARTS = BLOCK / LANES, AHEAD = 8192 };

#ifdef __AVX512BW__
/* Zen 5, and what follows it. */
INLINE int is_zen5(void) { return __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512vp2intersect"); }
#else
#define is_zen5() 0
#endif

/* What to ask for while weights are multiplied: in each step so many bytes of weights, and with AMX a row of the results
 * as long as there are any. */
typedef struct {
    const char *at;
    long bytes;
    int is_near, rows;
    char *row;
    ptrdiff_t row_bytes;
} Ahead;

/* Zen 5 reads weights fastest if they come into the nearest cache. Zen 4 fetches ahead by itself where few rows are
 * multiplied, and is disturbed unless it is asked for what it fetches next anyway. Where several `passes` with all rows
 * that fit read a tile of weights, each asks for its share of the next tile, and a last one with fewer rows for none. */
INLINE Ahead ahead_of(const char *tile, long step_bytes, long steps, long pass, long passes, int has_few_rows) {
    const long share = step_bytes / passes, distance = has_few_rows && LANES == 16 && !is_zen5() ? 1024 : AHEAD;
    if (pass >= passes) return (Ahead){0};
    if (passes == 1) return (Ahead){.at = tile + distance, .bytes = step_bytes, .is_near = is_zen5()};
    return (Ahead){.at = tile + step_bytes * steps + share * steps * pass, .bytes = share};
}

INLINE void fetch_ahead(Ahead *ahead) {
    for (long at = 0; at < ahead->bytes; at += 64)
        ahead->is_near ? __builtin_prefetch(ahead->at + at, 0, 3) : __builtin_prefetch(ahead->at + at, 0, 2);
    ahead->at += ahead->bytes;
}

/* Call with one or BLOCKS blocks and up to eight rows as constants, the last arguments. */
#define WITH_SHAPE(blocks, rows, function, ...)                                \
    do switch (2 * (rows) + ((blocks) > 1)) {                                  \
            WITH_BLOCKS(1, function, __VA_ARGS__) WITH_BLOCKS(2, function, __VA_ARGS__) \
            WITH_BLOCKS(3, function, __VA_ARGS__) WITH_BLOCKS(4, function, __VA_ARGS__) \
            WITH_BLOCKS(5, function, __VA_ARGS__) WITH_BLOCKS(6, function, __VA_ARGS__) \
            WITH_BLOCKS(7, function, __VA_ARGS__) WITH_BLOCKS(8, function, __VA_ARGS__) \
        }                                                                      \
    while (0)
#define WITH_BLOCKS(rows, function, ...)                                          \
    case 2 * (rows): if (rows <= ROWS) function(__VA_ARGS__, 1, rows); break;      \
    case 2 * (rows) + 1: if (rows <= ROWS && BLOCKS > 1) function(__VA_ARGS__, BLOCKS, rows); break;

/* Where the results of a product go. bias: [width] in `dtype`, or null; out: [rows, width] in `out_dtype`. */
typedef struct {
    const char *bias;
    Rows out;
    long width;
    int dtype, out_dtype;
} Output;

INLINE void write_sums_as(const vf *sums, Output to, long row, long column, int rows, int vectors, int dtype) {
    for (long at = row * to.out.stride + column; rows-- > 0; at += to.out.stride)
        for (int j = 0; j < vectors * LANES; j += LANES, sums++)
            store(to.out.at, at + j, to.bias ? *sums + load(to.bias, column + j, to.dtype) : *sums, dtype);
}

/* Write a tile's sums [rows, vectors]. Not inlined, since a copy for every size of tile would buy nothing. */
static __attribute__((noinline, unused)) void write_sums(const vf *sums, const Output *to, long row, long column,
                                                         int rows, int vectors) {
    WITH_CONSTANT(to->out_dtype, write_sums_as, sums, *to, row, column, rows, vectors);
}

typedef struct {
    const uint8_t *values;
    const float *scales;
    const uint8_t *zeros;
    const char *bias; /* [outputs] in the dtype of the inputs, or null */
    long inputs, outputs, group;
    int bits;
} QuantizedWeight;

typedef struct {
    int8_t *values; /* of every tile of ROWS rows: [inputs / 4, rows, 4]; for AMX [rows, inputs] */
    float *scales;  /* [rows, groups] */
    int32_t *sums;  /* of the values; [rows, groups] */
} QuantizedRows;

/* Whether this process may use AMX. */
int baton_has_amx(void);
void baton_add_rms_norm(Rows x, Rows delta, const char *weight, Rows out, long rows, long width, float eps, int dtype);
void baton_norm_and_rotate(Rows qkv, const char *q_weight, const char *k_weight, const float *cos, const float *sin,
                           long rows, long heads, long kv_heads, long dim, float eps, int dtype);
void baton_silu_and_multiply(Rows gate_up, Rows out, long rows, long width, int dtype);
/* out = x @ weight.T + bias. x: [rows, inputs] and bias: [width] (or null) in `dtype`, that of the weight; out: [rows,
 * width] in `out_dtype`, which is `dtype` or F32. copied: memory for x in the order in which it is read. */
void baton_linear(Rows x, const char *weight, const char *bias, Rows out, char *copied, long rows, long inputs,
                  long width, int dtype, int out_dtype);
void baton_linear_quantized(const QuantizedWeight *weight, const QuantizedRows *scratch, Rows x, Rows out, long rows,
                            int dtype, int out_dtype);
void baton_write_kv(const Paged *kv, const int64_t *pages, const int64_t *offsets, long num_tokens, const char *k,
                    const char *v, long stride, int dtype);
void baton_paged_attention(const Paged *kv, const Piece *pieces, long num_pieces, Rows q, Rows out, int dtype);
void baton_long_attention(const Paged *kv, const Piece *pieces, long num_pieces, char *scratch, long scratch_bytes,
                          Rows q, Rows out);

#endif
