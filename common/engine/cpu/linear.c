/* Matrix products of a decoder's linear layers with weights that were packed once, in bfloat16. float_linear.c has those
 * for processors without dot products of bfloat16.
 *
 * A vector of the packed weight holds two consecutive inputs of sixteen outputs, which is what the processor's dot
 * product of bfloat16 pairs takes. Three blocks of sixteen outputs stand together, [in / 2, 3, 16, 2], and one or two that
 * are left over at the end each alone, so that all weights are read in the order of their addresses, once for every
 * eight rows of x. Few rows take as long as memory needs to deliver the weights, many as long as the products take.
 */
#include "parts.h"

#ifdef __AVX512BF16__

enum { ROWS = 8 }; /* with 3 blocks 24 sums, 3 weights and one input fit in the 32 registers */

/* `rows` rows of `x` times `blocks` blocks of sixteen outputs. `pairs`: half the number of inputs. */
INLINE void multiply_tile(const uint32_t *x, const char *weight, const char *bias, char *out, long pairs, long width,
                          int rows, int blocks, int dtype) {
    __m512 sums[ROWS][BLOCKS];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < blocks; j++) sums[i][j] = bias ? (__m512)load(bias, j * LANES, BF16) : _mm512_setzero_ps();
    for (long k = 0; k < pairs; k++) {
        __m512bh weights[BLOCKS];
        for (int j = 0; rows > 1 && j < blocks; j++)
            __builtin_prefetch(weight + (k * blocks + j) * 64 + (rows > 5 ? AHEAD : AHEAD / 4), 0, 2);
#pragma GCC unroll 4
        for (int j = 0; j < blocks; j++)
            weights[j] = (__m512bh)_mm512_loadu_si512(weight + (k * blocks + j) * 64);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const __m512bh input = (__m512bh)_mm512_set1_epi32((int)x[i * pairs + k]);
#pragma GCC unroll 4
            for (int j = 0; j < blocks; j++) sums[i][j] = _mm512_dpbf16_ps(sums[i][j], input, weights[j]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < blocks; j++) store(out, i * width + j * LANES, (vf)sums[i][j], dtype);
}

INLINE void multiply_rows(const uint32_t *x, const char *weight, const char *bias, char *out, long pairs, long width,
                          long rows, int blocks, int dtype) {
    switch (rows) {
        case 1: return multiply_tile(x, weight, bias, out, pairs, width, 1, blocks, dtype);
        case 2: return multiply_tile(x, weight, bias, out, pairs, width, 2, blocks, dtype);
        case 3: return multiply_tile(x, weight, bias, out, pairs, width, 3, blocks, dtype);
        case 4: return multiply_tile(x, weight, bias, out, pairs, width, 4, blocks, dtype);
        case 5: return multiply_tile(x, weight, bias, out, pairs, width, 5, blocks, dtype);
        case 6: return multiply_tile(x, weight, bias, out, pairs, width, 6, blocks, dtype);
        case 7: return multiply_tile(x, weight, bias, out, pairs, width, 7, blocks, dtype);
        default: return multiply_tile(x, weight, bias, out, pairs, width, ROWS, blocks, dtype);
    }
}

INLINE void multiply(const char *x, const char *weight, const char *bias, char *out, long rows, long inputs, long width,
                     int dtype) {
    const long pairs = inputs / 2, all_blocks = width / LANES;
#pragma omp parallel for schedule(static) if (rows * inputs * width > 1 << 18)
    for (long block = 0; block < all_blocks; block += BLOCKS)
        for (long row = 0; row < rows; row += ROWS) {
            const uint32_t *first = (const uint32_t *)x + row * pairs;
            char *target = out + (row * width + block * LANES) * (ptrdiff_t)item_bytes(dtype);
            const char *panel = weight + block * pairs * 64, *panel_bias = bias ? bias + block * LANES * 2 : 0;
            const long left = rows - row < ROWS ? rows - row : ROWS;
            if (all_blocks - block >= BLOCKS) {
                multiply_rows(first, panel, panel_bias, target, pairs, width, left, BLOCKS, dtype);
            } else {
                for (long j = 0; j < all_blocks - block; j++)
                    multiply_rows(first, panel + j * pairs * 64, panel_bias ? panel_bias + j * LANES * 2 : 0,
                                  target + j * LANES * (ptrdiff_t)item_bytes(dtype), pairs, width, left, 1, dtype);
            }
        }
}

EXPORT int baton_has_bf16_dot(void) { return 1; }
EXPORT int baton_can_multiply(int dtype) { return dtype == BF16; }

EXPORT void baton_linear(const char *x, const char *weight, const char *bias, char *out, float *widened, long rows,
                         long inputs, long width, int dtype, int out_dtype) {
    (void)widened, (void)dtype;
    if (out_dtype == F32) multiply(x, weight, bias, out, rows, inputs, width, F32);
    if (out_dtype == BF16) multiply(x, weight, bias, out, rows, inputs, width, BF16);
}
#else
EXPORT int baton_has_bf16_dot(void) { return 0; }
#if !defined(__FMA__) || defined(__AVX512F__)
EXPORT int baton_can_multiply(int dtype) { return (void)dtype, 0; }

EXPORT void baton_linear(const char *x, const char *weight, const char *bias, char *out, float *widened, long rows,
                         long inputs, long width, int dtype, int out_dtype) {
    (void)x, (void)weight, (void)bias, (void)out, (void)widened, (void)rows, (void)inputs, (void)width;
    (void)dtype, (void)out_dtype;
}
#endif
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
