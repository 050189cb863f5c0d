/* The inner loops of matrix products with packed weights: by AMX, whose tiles have 16 rows of 64 bytes, and by dot
 * products; and the loop over the parts of a product. The files of products and long_attention.c share them. */
#ifndef BATON_PRODUCTS_H
#define BATON_PRODUCTS_H

#include "parts.h"

/* Some rows times some blocks of sixteen outputs, whose weights so many passes read. */
typedef struct {
    long row, block, pass, passes;
    int rows, blocks;
} Part;

#ifdef __AMX_BF16__
typedef struct {
    uint8_t bytes[64]; /* a palette, from byte 16 on the width of each tile in two bytes, from byte 48 on its rows */
} TileConfig;

/* GCC does not know that tile instructions read memory: this forces all earlier stores out. */
#define SETTLE(pointer) __asm__ volatile("" : : "r"(pointer) : "memory")

INLINE void configure_tiles(TileConfig *before) {
    TileConfig ours = {{1}};
    for (int tile = 0; tile < 8; tile++) ours.bytes[16 + 2 * tile] = 64, ours.bytes[48 + tile] = 16;
    _tile_storeconfig(before);
    SETTLE(&ours);
    _tile_loadconfig(&ours);
}

/* oneDNN remembers per thread its last tile configuration, so it must be restored. */
INLINE void restore_tiles(const TileConfig *before) {
    SETTLE(before);
    before->bytes[0] ? _tile_loadconfig(before) : _tile_release();
}

/* The four tiles of sums; the two in a row are one if there is one block. */
#define EACH_TILE(action, sums, width)                  \
    do {                                                \
        action(0, (sums), width);                       \
        action(1, (sums) + (width) - 64, width);        \
        action(2, (sums) + 16 * (width), width);        \
        action(3, (sums) + 17 * (width) - 64, width);   \
    } while (0)

#define NO_SUMS(tile, sums, width) _tile_zero(tile)
/* Tile 4 is of x and tile 5 of weights. Six of the eight tiles are in use, since more are much slower at times, probably
 * where another hardware thread shares the core (docs/cpu-kernels.md). */
#define MULTIPLY(sums) \
    if (is_int8) _tile_dpbsud(sums, 4, 5); else _tile_dpbf16ps(sums, 4, 5)

/* sums [32, blocks, 16], or zero unless `adds`, plus 32 rows of x times one or two blocks of by [steps, 16, blocks, 64
 * bytes]. Rows are `stride` bytes apart; those from the 17th on begin `next_tile` bytes later, which is 0 for 16 rows. A
 * step multiplies 64 bytes of each row, which begin `next_step` bytes after those of the step before. */
INLINE void multiply_tiles(const char *x, ptrdiff_t stride, ptrdiff_t next_tile, ptrdiff_t next_step, const char *by,
                           int blocks, char *sums, long steps, int adds, int is_int8, Ahead ahead) {
    const ptrdiff_t width = 64 * blocks;
    SETTLE(sums);
    EACH_TILE(NO_SUMS, sums, width);
    if (adds) EACH_TILE(_tile_loadd, sums, width);
    for (const char *end = x + next_step * steps; x < end; x += next_step, by += 16 * width) {
        fetch_ahead(&ahead);
        if (ahead.rows-- > 0) {
            __builtin_prefetch(ahead.row, 1, 3);
            ahead.row += ahead.row_bytes;
        }
        _tile_loadd(4, x, stride);
        _tile_loadd(5, by, width);
        MULTIPLY(0);
        _tile_loadd(5, by + width - 64, width);
        MULTIPLY(1);
        if (next_tile == 0) continue;
        _tile_loadd(4, x + next_tile, stride);
        MULTIPLY(3);
        _tile_loadd(5, by, width);
        MULTIPLY(2);
    }
    EACH_TILE(_tile_stored, sums, width);
    SETTLE(sums);
}

/* sums [rows, blocks, 16] of x [all rows, row_bytes], rows `stride` bytes apart, times a packed weight, whose results go
 * `to` memory. */
INLINE void multiply_part(const char *x, ptrdiff_t stride, const char *weight, long row_bytes, const Part *part,
                          const Output *to, vf *sums, int is_int8) {
    const ptrdiff_t item = (ptrdiff_t)item_bytes(to->out_dtype);
    const char *by = weight + part->block * row_bytes * 16;
    Ahead ahead = ahead_of(by, 1024 * part->blocks, row_bytes / 64, part->pass, part->passes, 0);
    ahead.rows = part->rows, ahead.row_bytes = to->out.stride * item;
    ahead.row = to->out.at + part->row * ahead.row_bytes + part->block * LANES * item;
    multiply_tiles(x + part->row * stride, stride, part->rows > 16 ? 16 * stride : 0, 64, by, part->blocks,
                   (char *)sums, row_bytes / 64, 0, is_int8, ahead);
}
#else
typedef int TileConfig;
#define configure_tiles(before) (void)(before)
#define restore_tiles(before) (void)(before)
#endif

/* With 3 blocks 24 sums, 3 weights and an input fit in the 32 registers of AVX-512; with AVX2 8 sums, 2 weights, their
 * magnitudes and an input in 16. */
enum { ROWS = LANES / 2 };

#ifdef SIMD

/* sum + a * b, rounded once. Not by an intrinsic, for which GCC 12 copies the sums of a loop in every turn. */
INLINE vf add_product(vf sum, vf a, vf b) {
    __asm__("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

/* The first or the second number of each pair. */
INLINE vf widened(vu pairs, int second, int dtype) {
#ifdef __AVX512F__
    if (dtype == F16) return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)(second ? pairs >> 16 : pairs)));
#endif
    return (vf)(second ? pairs & 0xffff0000 : pairs << 16);
}

/* sum + a * b, of the number in each word, or of both; of float16 only with AVX-512. */
INLINE vf add_words(vf sum, vu a, vu b, int dtype) {
    if (dtype == F32) return add_product(sum, (vf)a, (vf)b);
#ifdef __AVX512BF16__
    if (dtype == BF16) return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
    sum = add_product(sum, widened(a, 0, dtype), widened(b, 0, dtype));
    return add_product(sum, widened(a, 1, dtype), widened(b, 1, dtype));
}

/* sums [rows, vectors, LANES] plus x [rows, words] times by [words, vectors, LANES]. Rows of x are `stride` words apart. */
INLINE void multiply_dots(const uint32_t *x, long stride, const char *by, int vectors, vf (*sums)[BLOCKS * PARTS],
                          long words, int rows, int dtype, Ahead ahead) {
    for (long k = 0; k < words; k++, by += 4 * LANES * vectors) {
        vu weights[BLOCKS * PARTS];
        fetch_ahead(&ahead);
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) weights[j] = (vu)load(by, j * LANES, F32);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const vu input = (vu)SIMD(set1_epi32)((int)x[i * stride + k]);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) sums[i][j] = add_words(sums[i][j], input, weights[j], dtype);
        }
    }
}

enum { CACHED = 768 << 10 }; /* bytes of rows that stay in the cache of a core with AMX beside weights and results */

typedef void Multiply(const void *product, const Part *part);

/* Multiplies every `most` rows by every `together` blocks of outputs; blocks that are left over at the end each alone. So
 * many rows as are `fitting` into a cache are multiplied by all weights before the next. A thread computes the same blocks
 * of them each time, so that none waits for another. */
INLINE void multiply_all(Multiply *multiply, const void *product, long rows, long most, long fitting, long all_blocks,
                         int together, int in_parallel) {
    const long times = rows / (fitting + 1) + 1, run = (rows + times * most - 1) / (times * most) * most;
#pragma omp parallel if (in_parallel)
    for (long start = 0; start < rows; start += run) {
        const long end = start + run < rows ? start + run : rows, passes = (end - start) / most;
        TileConfig before;
        if (most > ROWS) configure_tiles(&before);
#pragma omp for schedule(static) nowait
        for (long first = 0; first < all_blocks; first += together) {
            const long is_whole = all_blocks - first >= together, last = is_whole ? first + together : all_blocks;
            Part part = {.passes = passes ? passes : 1, .blocks = is_whole ? together : 1};
            for (part.row = start; part.row < end; part.row += most, part.pass++) {
                part.rows = (int)(end - part.row < most ? end - part.row : most);
                for (part.block = first; part.block < last; part.block += part.blocks) multiply(product, &part);
            }
        }
        if (most > ROWS) restore_tiles(&before);
    }
}
#endif
#endif
