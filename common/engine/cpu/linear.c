/* Matrix products of a decoder's linear layers with weights that were packed once, of 16 bits, on processors with AVX-512.
 * float_linear.c has those for processors with AVX2 alone.
 *
 * A vector of the packed weight holds two consecutive inputs of sixteen outputs, which is what the processor's dot
 * product of bfloat16 pairs takes; without it, and for float16, both are widened to float32 in registers. Three blocks of
 * sixteen outputs stand together, [in / 2, 3, 16, 2], and one or two that are left over at the end each alone, so that all
 * weights are read in the order of their addresses, once for every eight rows of x. Few rows take as long as memory needs
 * to deliver the weights, many as long as the products take.
 */
#include "parts.h"

#ifdef __AVX512BF16__
EXPORT int baton_has_bf16_dot(void) { return 1; }
#else
EXPORT int baton_has_bf16_dot(void) { return 0; }
#endif

#ifdef __AVX512BW__

enum { ROWS = 8 }; /* with 3 blocks 24 sums, 3 weights and one input fit in the 32 registers */

/* The first or the second number of each pair. */
INLINE __m512 widened(__m512i pairs, int second, int dtype) {
    if (dtype == BF16) return (__m512)(second ? (vu)pairs & 0xffff0000 : (vu)pairs << 16);
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(second ? _mm512_srli_epi32(pairs, 16) : pairs));
}

/* sum + a * b, of both numbers of each pair. */
INLINE __m512 add_pairs(__m512 sum, __m512i a, __m512i b, int dtype) {
#ifdef __AVX512BF16__
    if (dtype == BF16) return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#endif
    sum = _mm512_fmadd_ps(widened(a, 0, dtype), widened(b, 0, dtype), sum);
    return _mm512_fmadd_ps(widened(a, 1, dtype), widened(b, 1, dtype), sum);
}

typedef struct {
    const uint32_t *x;
    const char *weight, *bias; /* or null */
    char *out;
    long pairs, width; /* pairs: half the number of inputs */
    int dtype, out_dtype;
} Tile;

/* Some rows times some blocks of sixteen outputs. */
INLINE void multiply_tile(const Tile *tile, int blocks, int dtype, int rows) {
    const long pairs = tile->pairs;
    const int is_near = is_zen5();
    const char *weight = tile->weight;
    __m512 sums[ROWS][BLOCKS];
    vf totals[ROWS * BLOCKS];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < blocks; j++)
            sums[i][j] = tile->bias ? (__m512)load(tile->bias, j * LANES, dtype) : _mm512_setzero_ps();
    for (long k = 0; k < pairs; k++) {
        __m512i weights[BLOCKS];
        for (int j = 0; j < blocks; j++)
            fetch_weights(weight + (k * blocks + j) * 64, is_near, rows <= 5);
#pragma GCC unroll 4
        for (int j = 0; j < blocks; j++) weights[j] = _mm512_loadu_si512(weight + (k * blocks + j) * 64);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const __m512i input = _mm512_set1_epi32((int)tile->x[i * pairs + k]);
#pragma GCC unroll 4
            for (int j = 0; j < blocks; j++) sums[i][j] = add_pairs(sums[i][j], input, weights[j], dtype);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < blocks; j++) totals[i * blocks + j] = (vf)sums[i][j];
    write_sums(totals, tile->out, tile->width, rows, blocks, tile->out_dtype);
}

/* The format becomes a constant here, within the parallel part: a constant from outside of it is a variable. */
INLINE void multiply_rows(const Tile *tile, int blocks, long rows) {
    if (tile->dtype == BF16)
        WITH_ROWS(rows, multiply_tile, tile, blocks, BF16);
    else
        WITH_ROWS(rows, multiply_tile, tile, blocks, F16);
}

EXPORT int baton_can_multiply(int dtype) { return dtype == BF16 || dtype == F16; }

EXPORT void baton_linear(const char *x, const char *weight, const char *bias, char *out, float *widened, long rows,
                         long inputs, long width, int dtype, int out_dtype) {
    (void)widened;
    const long pairs = inputs / 2, all_blocks = width / LANES;
#pragma omp parallel for schedule(static) if (rows * inputs * width > 1 << 18)
    for (long first = 0; first < all_blocks; first += BLOCKS)
        for (long row = 0; row < rows; row += ROWS) {
            const int together = all_blocks - first >= BLOCKS;
            const long end = together ? first + 1 : all_blocks, left = rows - row < ROWS ? rows - row : ROWS;
            for (long block = first; block < end; block++) {
                const Tile tile = {.x = (const uint32_t *)x + row * pairs, .weight = weight + block * pairs * 64,
                                   .bias = bias ? bias + block * LANES * 2 : 0, .pairs = pairs, .width = width,
                                   .out = out + (row * width + block * LANES) * (ptrdiff_t)item_bytes(out_dtype),
                                   .dtype = dtype, .out_dtype = out_dtype};
                if (together)
                    multiply_rows(&tile, BLOCKS, left);
                else
                    multiply_rows(&tile, 1, left);
            }
        }
}
#elif !defined(__FMA__) || defined(__AVX512F__)
EXPORT int baton_can_multiply(int dtype) { return (void)dtype, 0; }

EXPORT void baton_linear(const char *x, const char *weight, const char *bias, char *out, float *widened, long rows,
                         long inputs, long width, int dtype, int out_dtype) {
    (void)x, (void)weight, (void)bias, (void)out, (void)widened, (void)rows, (void)inputs, (void)width;
    (void)dtype, (void)out_dtype;
}
#endif

/* Several products: the rows of x up to ends[i], from ends[i - 1] on, times weights[chosen[i]], without biases. */
EXPORT void baton_linear_grouped(const char *x, const char *const *weights, const long *chosen, const long *ends,
                                 long groups, char *out, float *widened, long inputs, long width, int dtype,
                                 int out_dtype) {
    for (long i = 0, first = 0; i < groups; first = ends[i++])
        baton_linear(x + first * inputs * (ptrdiff_t)item_bytes(dtype), weights[chosen[i]], 0,
                     out + first * width * (ptrdiff_t)item_bytes(out_dtype), widened, ends[i] - first, inputs, width,
                     dtype, out_dtype);
}
