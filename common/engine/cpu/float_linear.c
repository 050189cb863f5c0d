/* Matrix products of a decoder's linear layers in float32, on processors with AVX2 and without AVX-512.
 *
 * Weights keep their format and are widened in registers. A vector of the packed weight, 64 bytes, holds two
 * consecutive inputs of sixteen outputs in bfloat16 and float16, or one input in float32. Rows of x are widened before, in
 * tiles of at most MOST_ROWS rows: [inputs, rows]. Few rows take as long as memory needs to deliver the weights, many as
 * long as the products take.
 *
 * Each sum adds its products in the order of the inputs, so that a row's result depends on no other row.
 */
#include <omp.h>

#include "products.h"

#if defined(SIMD) && !defined(__AVX512F__)

/* MOST_ROWS: 12 sums, 2 weights and an input fit in the 16 registers. MOST_BLOCKS: of sixteen outputs in a tile of one
 * row. CHUNK_BYTES: of widened rows, which stay in the second cache meanwhile. */
enum { MOST_ROWS = 6, MOST_BLOCKS = 4, CHUNK_BYTES = 384 << 10 };

typedef struct {
    const float *x; /* [inputs, rows] of each tile */
    const char *weight;
    long inputs;
    Output to;
} Linear;

/* Rows of each tile but the last: as even as possible. */
INLINE long tile_rows(long rows) {
    const long tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
    return (rows + tiles - 1) / tiles;
}

INLINE void widen_tile(Rows x, float *to, long inputs, long rows, int dtype) {
    const long whole = inputs - inputs % LANES, item = (long)item_bytes(dtype);
    for (long i = 0; i < whole; i += LANES)
        for (long row = 0; row < rows; row++) {
            const vf part = load(x.at, row * x.stride + i, dtype);
            for (int lane = 0; lane < LANES; lane++) to[(i + lane) * rows + row] = part[lane];
        }
    for (long i = whole; i < inputs; i++)
        for (long row = 0; row < rows; row++) {
            char one[LANES * 4] = {0};
            memcpy(one, x.at + (row * x.stride + i) * item, (size_t)item);
            to[i * rows + row] = load(one, 0, dtype)[0];
        }
}

/* The first or the second input of each word of a weight; a word of float32 is the input. */
INLINE vf widened_weight(vu words, int second, int dtype) {
    if (dtype == F32) return (vf)words;
    if (dtype == BF16) return widened(words, second, BF16);
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15); /* first inputs first */
    const __m256i halves = _mm256_shuffle_epi8((__m256i)words, _mm256_broadcastsi128_si256(order));
    const __m256i parted = _mm256_permute4x64_epi64(halves, 0xd8); /* the same for both halves of the vector */
    return (vf)_mm256_cvtph_ps(second ? _mm256_extracti128_si256(parted, 1) : _mm256_castsi256_si128(parted));
}

INLINE void multiply_tile(const Linear *p, const Part *part, int rows, int blocks, int dtype) {
    const int each = dtype == F32 ? 1 : 2, vectors = blocks * PARTS; /* each: inputs in a word of the weight */
    const long inputs = p->inputs;
    const ptrdiff_t block_bytes = inputs / each * 64, step_bytes = part->pass < part->passes ? 64 / part->passes : 0;
    const char *weight = p->weight + part->block * block_bytes;
    const float *x = p->x + part->row * inputs;
    /* Each of several passes over a block fetches its share of the next one, a last one with fewer rows nothing more. */
    const char *ahead = weight + (part->passes == 1 ? AHEAD / 4 : block_bytes + block_bytes * part->pass / part->passes);
    vf sums[MOST_ROWS][MOST_BLOCKS * PARTS], totals[MOST_ROWS * MOST_BLOCKS * PARTS];
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) sums[i][j] = (vf){0};
    for (long k = 0; k < inputs; k += each, weight += 64, ahead += step_bytes) {
        for (int j = 0; j < blocks; j++) __builtin_prefetch(ahead + j * block_bytes, 0, 2);
#pragma GCC unroll 2
        for (int one = 0; one < each; one++) {
            vf weights[MOST_BLOCKS * PARTS];
#pragma GCC unroll 8
            for (int j = 0; j < vectors; j++) {
                const vu words = (vu)load(weight + j / PARTS * block_bytes, j % PARTS * LANES, F32);
                weights[j] = widened_weight(words, one, dtype);
            }
#pragma GCC unroll 6
            for (int i = 0; i < rows; i++) {
                const vf input = (vf)_mm256_broadcast_ss(x + (k + one) * rows + i);
#pragma GCC unroll 8
                for (int j = 0; j < vectors; j++) sums[i][j] = add_product(sums[i][j], weights[j], input);
            }
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int j = 0; j < vectors; j++) totals[i * vectors + j] = sums[i][j];
    write_sums(totals, &p->to, part->row, part->block * BLOCK, rows, vectors);
}

INLINE void multiply_rows(const Linear *p, const Part *part, int dtype) {
    switch (part->rows * 8 + part->blocks) {
#define CASE(rows, blocks) \
    case rows * 8 + blocks: return multiply_tile(p, part, rows, blocks, dtype);
        CASE(1, 4) CASE(1, 1) CASE(2, 3) CASE(2, 1) CASE(3, 1) CASE(4, 1) CASE(5, 1) CASE(6, 1)
#undef CASE
    }
}

static void multiply(const void *product, const Part *part) {
    WITH_CONSTANT(((const Linear *)product)->to.dtype, multiply_rows, product, part);
}

EXPORT int baton_can_multiply(int dtype) { return dtype == BF16 || dtype == F32 || dtype == F16; }

EXPORT void baton_linear(Rows x, const char *weight, const char *bias, Rows out, char *copied, long rows, long inputs,
                         long width, int dtype, int out_dtype) {
    if (rows == 0) return;
    float *widened = (float *)copied;
    const long most = tile_rows(rows);
#pragma omp parallel for schedule(static) if (rows * inputs > 1 << 16)
    for (long row = 0; row < rows; row += most) {
        const Rows from = {row_at(x, row, dtype), x.stride};
        const long count = rows - row < most ? rows - row : most;
        WITH_CONSTANT(dtype, widen_tile, from, widened + row * inputs, inputs, count);
    }
    const Linear product = {widened, weight, inputs, {bias, out, width, dtype, out_dtype}};
    int together = rows == 1 ? MOST_BLOCKS : rows == 2 ? 3 : 1; /* enough sums to hide a product's latency */
    if (width / BLOCK / together < 2 * omp_get_max_threads()) together = 1; /* so that every core gets a part */
    multiply_all(multiply, &product, rows, most, CHUNK_BYTES / 4 / inputs, width / BLOCK, together,
                 rows * inputs * width > 1 << 18);
}
#endif
