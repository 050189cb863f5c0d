/* Matrix products with weights of 8 or 4 bits, and with inputs that are rounded to 8 bits here, row by row.
 *
 * A weight is an unsigned number minus the zero point of its group, times the scale of its group; a group is a run of
 * inputs of one output. A vector of values, 64 bytes, holds four inputs of sixteen outputs, which is what the processor's
 * dot product of bytes takes; with 4 bits eight inputs: the low half of a byte is an input, the high half the input four
 * later. Blocks of sixteen outputs stand together as in linear.c. Scales and zero points: [out / 16, groups, 16].
 *
 * Sums within a group are integers, thus exact: a row's result depends on no other row.
 */
#include "products.h"

enum { WORTH_THREADS = 65536 };

#ifdef __AVX512VNNI__

/* Round `length` numbers to 8 bits, relative to the largest of them, and write four of them every `stride` bytes. */
INLINE void quantize(const char *x, ptrdiff_t from, long length, int8_t *values, long stride, float *scale,
                     int32_t *total, int dtype) {
    const float best = largest_magnitude(x, from, length, dtype), inverse = best > 0.0f ? 127.0f / best : 0.0f;
    vi sums = {0};
    for (long i = 0; i < length; i += LANES) {
        const vf rounded = to_nearest(load(x, from + i, dtype) * inverse);
        const vi whole = __builtin_convertvector(choose(rounded == rounded, rounded, (vf){0}), vi);
        const vb narrow = __builtin_convertvector(whole, vb);
        for (int four = 0; four < LANES / 4; four++)
            memcpy(values + (i / 4 + four) * stride, (const char *)&narrow + four * 4, 4);
        sums += whole;
    }
    *scale = best / 127.0f;
    *total = _mm512_reduce_add_epi32((__m512i)sums);
}

/* Round all rows. The values of so many rows stand together, at most ROWS. */
static void quantize_rows(Rows x, const QuantizedRows *to, const QuantizedWeight *weight, long rows, long together,
                          int dtype) {
    const long inputs = weight->inputs, group = weight->group, groups = inputs / group;
#pragma omp parallel for schedule(static) if (rows * inputs > WORTH_THREADS)
    for (long unit = 0; unit < rows * groups; unit++) {
        const long row = unit / groups, first = row / together * together;
        const long start = unit % groups * group, apart = 4 * (rows - first < together ? rows - first : together);
        int8_t *values = to->values + first * inputs + (row - first) * 4 + start / 4 * apart;
        WITH_CONSTANT(dtype, quantize, x.at, row * x.stride + start, group, values, apart, to->scales + unit, to->sums + unit);
    }
}

/* As _mm512_dpbusd_epi32, for which GCC 12 copies the sums of a loop in every turn. */
INLINE void add_dot(__m512i *sums, __m512i weights, __m512i inputs) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sums) : "v"(weights), "v"(inputs));
}

/* Weights of block j of `blocks` for the inputs k .. k + 3 of a group. */
INLINE __m512i weights_at(const uint8_t *values, long k, int j, int blocks, int bits) {
    if (bits == 8) return _mm512_loadu_si512(values + (k / 4 * blocks + j) * 64);
    const __m512i both = _mm512_loadu_si512(values + (k / 8 * blocks + j) * 64);
    return _mm512_and_si512(k % 8 == 0 ? both : _mm512_srli_epi16(both, 4), _mm512_set1_epi8(15));
}

/* Add the products of `rows` rows with `blocks` blocks of sixteen outputs, for eight inputs, to `sums`. */
INLINE void add_products(__m512i sums[ROWS][BLOCKS], const uint8_t *values, const int8_t *x, int rows, int blocks,
                         int bits) {
#pragma GCC unroll 2
    for (long k = 0; k < 8; k += 4) {
        __m512i weights[BLOCKS];
#pragma GCC unroll 4
        for (int j = 0; j < blocks; j++) weights[j] = weights_at(values, k, j, blocks, bits);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const __m512i four = _mm512_broadcastd_epi32(_mm_loadu_si32(x + k * rows + i * 4));
#pragma GCC unroll 4
            for (int j = 0; j < blocks; j++) add_dot(&sums[i][j], weights[j], four);
        }
    }
}

typedef struct {
    const QuantizedWeight *weight;
    const QuantizedRows *x;
    int in_tiles;
    Output to;
} Quantized;

/* What a sum of values' products with a row, of group `g`, contributes to the result. */
INLINE vf scaled(const Quantized *p, vi sum, long row, long block, long g) {
    const long groups = p->weight->inputs / p->weight->group, x = row * groups + g, at = (block * groups + g) * LANES;
    const vi zeros = (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p->weight->zeros + at)));
    return (vf)_mm512_cvtepi32_ps((__m512i)(sum - zeros * p->x->sums[x])) * p->x->scales[x] *
           load((const char *)p->weight->scales, at, F32);
}

INLINE void multiply_tile(const Quantized *p, const Part *part, int bits, int blocks, int rows) {
    const QuantizedWeight *w = p->weight;
    const long inputs = w->inputs, groups = inputs / w->group, step_bytes = LANES * bits * blocks;
    const uint8_t *values = w->values + part->block * inputs * LANES * bits / 8; /* its groups follow each other */
    Ahead ahead = ahead_of((const char *)values, step_bytes, inputs / 8, part->pass, part->passes, rows <= 4);
    vf totals[ROWS * BLOCKS] = {{0}};
    for (long g = 0; g < groups; g++) {
        __m512i sums[ROWS][BLOCKS] = {{{0}}};
        const int8_t *some = p->x->values + (part->row * groups + g * rows) * w->group;
        const uint8_t *end = values + w->group * LANES * bits / 8 * blocks;
        do {
            fetch_ahead(&ahead);
            add_products(sums, values, some, rows, blocks, bits);
            values += step_bytes;
            some += 8 * rows;
        } while (values < end);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < blocks; j++)
                totals[i * blocks + j] += scaled(p, (vi)sums[i][j], part->row + i, part->block + j, g);
    }
    write_sums(totals, &p->to, part->row, part->block * LANES, rows, blocks);
}

/* The number of bits becomes a constant here, within the parallel part: a constant from outside of it is a variable. */
static void multiply(const void *product, const Part *part) {
    const Quantized *p = product;
#ifdef __AMX_BF16__
    if (p->in_tiles) {
        vf sums[32 * BLOCKS];
        multiply_part((const char *)p->x->values, p->weight->inputs, (const char *)p->weight->values, p->weight->inputs,
                      part, &p->to, sums, 1);
        for (int i = 0; i < part->rows * part->blocks; i++)
            sums[i] = scaled(p, (vi)sums[i], part->row + i / part->blocks, part->block + i % part->blocks, 0);
        write_sums(sums, &p->to, part->row, part->block * LANES, part->rows, part->blocks);
        return;
    }
#endif
    if (p->weight->bits == 8)
        WITH_SHAPE(part->blocks, part->rows, multiply_tile, p, part, 8);
    else
        WITH_SHAPE(part->blocks, part->rows, multiply_tile, p, part, 4);
}

/* out = x @ weight.T + bias. x: [rows, inputs] in `dtype`; out: [rows, outputs] in `out_dtype`. */
EXPORT void baton_linear_quantized(const QuantizedWeight *weight, const QuantizedRows *scratch, Rows x, Rows out,
                                   long rows, int dtype, int out_dtype) {
    const long inputs = weight->inputs;
    const int in_tiles = weight->bits == 8 && weight->group == inputs && inputs % 64 == 0 && baton_has_amx();
    const Quantized product = {weight, scratch, in_tiles, {weight->bias, out, weight->outputs, dtype, out_dtype}};
    quantize_rows(x, scratch, weight, rows, in_tiles ? 1 : ROWS, dtype);
    multiply_all(multiply, &product, rows, inputs, in_tiles ? 32 : ROWS, weight->outputs / LANES,
                 rows * inputs * weight->outputs > 1 << 18);
}

EXPORT int baton_has_int8_dot(void) { return 1; }
#else
EXPORT void baton_linear_quantized(const QuantizedWeight *weight, const QuantizedRows *scratch, Rows x, Rows out,
                                   long rows, int dtype, int out_dtype) {}
EXPORT int baton_has_int8_dot(void) { return 0; }
#endif

/* As baton_linear_grouped. `scratch` is for the largest group. */
EXPORT void baton_linear_quantized_grouped(const QuantizedWeight *const *weights, const QuantizedRows *scratch,
                                           Rows x, const long *chosen, const long *ends, long groups, Rows out,
                                           int dtype, int out_dtype) {
    for (long i = 0, first = 0; i < groups; first = ends[i++])
        baton_linear_quantized(weights[chosen[i]], scratch, (Rows){row_at(x, first, dtype), x.stride},
                               (Rows){row_at(out, first, out_dtype), out.stride}, ends[i] - first, dtype, out_dtype);
}
