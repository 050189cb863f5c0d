/* Matrix products of a decoder's linear layers with weights that were packed once, of 16 bits, on processors with AVX-512.
 * float_linear.c has those for processors with AVX2 alone.
 *
 * A vector of the packed weight holds two consecutive inputs of sixteen outputs, which is what the processor's dot
 * product of bfloat16 pairs takes, and a row of a tile of AMX; without both, and for float16, both are widened to float32 in
 * registers. Three blocks of sixteen outputs (BLOCKS: with AMX two) stand together, [in / 2, 3, 16, 2], and one or two that
 * are left over at the end each alone, so that all weights are read in the order of their addresses, once for every eight
 * rows of x (with AMX, 32). Few rows take as long as memory needs to deliver the weights, many as long as the products take.
 */
#include "products.h"

#ifdef __AVX512BW__

typedef struct {
    Rows x;
    const char *weight;
    long inputs;
    int dtype, in_tiles;
    Output to;
} Linear;

INLINE void multiply_tile(const Linear *p, const Part *part, int dtype, int blocks, int rows) {
    const long pairs = p->inputs / 2;
    const char *weight = p->weight + part->block * pairs * 64;
    vf sums[ROWS][BLOCKS] = {{{0}}};
    vf totals[ROWS * BLOCKS];
    multiply_dots((const uint32_t *)row_at(p->x, part->row, dtype), p->x.stride / 2, weight, blocks, sums, pairs, rows,
                  dtype, ahead_of(weight, 64 * blocks, pairs, part->pass, part->passes, rows <= 5));
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < blocks; j++) totals[i * blocks + j] = sums[i][j];
    write_sums(totals, &p->to, part->row, part->block * LANES, rows, blocks);
}

/* The format becomes a constant here, within the parallel part: a constant from outside of it is a variable. */
static void multiply(const void *product, const Part *part) {
    const Linear *p = product;
#ifdef __AMX_BF16__
    if (p->in_tiles) {
        vf sums[32 * BLOCKS];
        multiply_part(p->x.at, 2 * p->x.stride, p->weight, 2 * p->inputs, part, &p->to, sums, 0);
        write_sums(sums, &p->to, part->row, part->block * LANES, part->rows, part->blocks);
        return;
    }
#endif
    if (p->dtype == BF16)
        WITH_SHAPE(part->blocks, part->rows, multiply_tile, p, part, BF16);
    else
        WITH_SHAPE(part->blocks, part->rows, multiply_tile, p, part, F16);
}

EXPORT int baton_can_multiply(int dtype) { return dtype == BF16 || dtype == F16; }

EXPORT void baton_linear(Rows x, const char *weight, const char *bias, Rows out, char *copied, long rows, long inputs,
                         long width, int dtype, int out_dtype) {
    const int in_tiles = dtype == BF16 && inputs % 32 == 0 && baton_has_amx();
    if (in_tiles && rows % 16 != 0) /* whole tiles are read */
        x.at = memcpy(copied, x.at, (size_t)(2 * ((rows - 1) * x.stride + inputs)));
    const Linear product = {x, weight, inputs, dtype, in_tiles, {bias, out, width, dtype, out_dtype}};
    multiply_all(multiply, &product, rows, in_tiles ? 32 : ROWS, in_tiles ? CACHED / 2 / inputs : rows, width / LANES,
                 BLOCKS, rows * inputs * width > 1 << 18);
}
#elif !defined(SIMD) || defined(__AVX512F__)
EXPORT int baton_can_multiply(int dtype) { return 0; }

EXPORT void baton_linear(Rows x, const char *weight, const char *bias, Rows out, char *copied, long rows, long inputs,
                         long width, int dtype, int out_dtype) {}
#endif

/* Several products: the rows of x up to ends[i], from ends[i - 1] on, times weights[chosen[i]], without biases. */
EXPORT void baton_linear_grouped(Rows x, const char *const *weights, const long *chosen, const long *ends, long groups,
                                 Rows out, char *copied, long inputs, long width, int dtype, int out_dtype) {
    for (long i = 0, first = 0; i < groups; first = ends[i++])
        baton_linear((Rows){row_at(x, first, dtype), x.stride}, weights[chosen[i]], 0,
                     (Rows){row_at(out, first, out_dtype), out.stride}, copied, ends[i] - first, inputs, width, dtype,
                     out_dtype);
}
