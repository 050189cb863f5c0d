/* Matrix products with weights of 8 or 4 bits, and with inputs that are rounded to 8 bits here, row by row.
 *
 * A weight is an unsigned number minus the zero point of its group, times the scale of its group; a group is a run of
 * inputs of one output. 64 bytes of values hold four inputs of sixteen outputs, which is what AVX-512's dot product of
 * bytes takes; with 4 bits eight inputs: the low half of a byte is an input, the high half the input four later. Blocks of
 * sixteen outputs stand together as in linear.c. Scales and zero points: [out / 16, groups, 16].
 *
 * Sums within a group are integers, thus exact: a row's result depends on no other row.
 */
#include "products.h"

enum { WORTH_THREADS = 65536 };

#if defined(__AVX512VNNI__) || (defined(SIMD) && !defined(__AVX512F__))

/* Round `length` numbers to 8 bits, relative to the largest of them, and write four of them every `stride` bytes. */
INLINE void quantize(const char *x, ptrdiff_t from, long length, int8_t *values, long stride, float *scale,
                     int32_t *total, int dtype) {
    const float best = largest_magnitude(x, from, length, dtype), inverse = best > 0.0f ? 127.0f / best : 0.0f;
    vf sums = {0}; /* of whole numbers, exact */
    for (long i = 0; i < length; i += LANES) {
        const vf rounded = to_nearest(load(x, from + i, dtype) * inverse);
        const vf whole = choose(rounded == rounded, rounded, (vf){0});
        const vb narrow = __builtin_convertvector(__builtin_convertvector(whole, vi), vb);
        for (int four = 0; four < LANES / 4; four++)
            memcpy(values + (i / 4 + four) * stride, (const char *)&narrow + four * 4, 4);
        sums += whole;
    }
    *scale = best / 127.0f;
    *total = (int32_t)sum(sums);
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

/* Add the products of four weights and four inputs to each of the sums. */
INLINE void add_dot(vi *sums, vi weights, vi inputs, int bits) {
#ifdef __AVX512VNNI__ /* not by an intrinsic, for which GCC 12 copies the sums of a loop in every turn */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sums) : "v"(weights), "v"(inputs));
#else /* weights as magnitudes, signs at the inputs: two products of at most 128 * 127 fit in 16 bits */
    const __m256i w = (__m256i)weights, x = (__m256i)inputs;
    const __m256i pairs = _mm256_maddubs_epi16(bits == 8 ? _mm256_abs_epi8(w) : w, bits == 8 ? _mm256_sign_epi8(x, w) : x);
    *sums += (vi)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

/* Vector j of `vectors` of the weights for the inputs k .. k + 3 of a group. Those of 8 bits are less 128 with AVX2, where
 * they need a sign; scaled() makes up for it. */
INLINE vi weights_at(const uint8_t *values, long k, int j, int vectors, int bits) {
    const vu some = (vu)load((const char *)values, (k * bits / 32 * vectors + j) * LANES, F32);
    if (bits == 8) return (vi)(LANES == 8 ? some ^ 0x80808080 : some);
    return (vi)((k % 8 == 0 ? some : some >> 4) & 0x0f0f0f0f);
}

/* Add the products of `rows` rows with `vectors` vectors of outputs, for eight inputs, to `sums`. */
INLINE void add_products(vi sums[ROWS][BLOCKS * PARTS], const uint8_t *values, const int8_t *x, int rows, int vectors,
                         int bits) {
#pragma GCC unroll 2
    for (long k = 0; k < 8; k += 4) {
        vi weights[BLOCKS * PARTS];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) weights[j] = weights_at(values, k, j, vectors, bits);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            const vi four = (vi)SIMD(broadcastd_epi32)(_mm_loadu_si32(x + k * rows + i * 4));
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) add_dot(&sums[i][j], weights[j], four, bits);
        }
    }
}

typedef struct {
    const QuantizedWeight *weight;
    const QuantizedRows *x;
    int in_tiles;
    Output to;
} Quantized;

/* What sums of values' products with a row, of group `g`, contribute to vector `v` of the results. */
INLINE vf scaled(const Quantized *p, vi sums, long row, long v, long g, int bits) {
    const long groups = p->weight->inputs / p->weight->group, x = row * groups + g;
    const long at = (v / PARTS * groups + g) * BLOCK + v % PARTS * LANES;
    const vi zeros = (vi)SIMD(cvtepu8_epi32)(BYTES(p->weight->zeros + at)) - (LANES == 8 && bits == 8 ? 128 : 0);
    return __builtin_convertvector(sums - zeros * p->x->sums[x], vf) * p->x->scales[x] *
           load((const char *)p->weight->scales, at, F32);
}

INLINE void multiply_tile(const Quantized *p, const Part *part, int bits, int blocks, int rows) {
    const QuantizedWeight *w = p->weight;
    const int vectors = blocks * PARTS;
    const long inputs = w->inputs, groups = inputs / w->group, step_bytes = BLOCK * bits * blocks;
    const uint8_t *values = w->values + part->block * inputs * BLOCK * bits / 8; /* its groups follow each other */
    Ahead ahead = ahead_of((const char *)values, step_bytes, inputs / 8, part->pass, part->passes, rows <= bits / 2);
    vf totals[ROWS * BLOCKS * PARTS] = {{0}};
    for (long g = 0; g < groups; g++) {
        vi sums[ROWS][BLOCKS * PARTS] = {{{0}}};
        const int8_t *some = p->x->values + (part->row * groups + g * rows) * w->group;
        const uint8_t *end = values + w->group * BLOCK * bits / 8 * blocks;
        do {
            fetch_ahead(&ahead);
            add_products(sums, values, some, rows, vectors, bits);
            values += step_bytes;
            some += 8 * rows;
        } while (values < end);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++)
                totals[i * vectors + j] += scaled(p, sums[i][j], part->row + i, part->block * PARTS + j, g, bits);
    }
    write_sums(totals, &p->to, part->row, part->block * BLOCK, rows, vectors);
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
            sums[i] = scaled(p, (vi)sums[i], part->row + i / part->blocks, part->block + i % part->blocks, 0, 8);
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
    multiply_all(multiply, &product, rows, in_tiles ? 32 : ROWS, in_tiles ? CACHED / inputs : rows,
                 weight->outputs / BLOCK, BLOCKS, rows * inputs * weight->outputs > 1 << 18);
}

EXPORT int baton_can_multiply_quantized(void) { return 1; }
#else
EXPORT void baton_linear_quantized(const QuantizedWeight *weight, const QuantizedRows *scratch, Rows x, Rows out,
                                   long rows, int dtype, int out_dtype) {}
EXPORT int baton_can_multiply_quantized(void) { return 0; }
#endif

/* As baton_linear_grouped. `scratch` is for the largest group. */
EXPORT void baton_linear_quantized_grouped(const QuantizedWeight *const *weights, const QuantizedRows *scratch,
                                           Rows x, const long *chosen, const long *ends, long groups, Rows out,
                                           int dtype, int out_dtype) {
    for (long i = 0, first = 0; i < groups; first = ends[i++])
        baton_linear_quantized(weights[chosen[i]], scratch, (Rows){row_at(x, first, dtype), x.stride},
                               (Rows){row_at(out, first, out_dtype), out.stride}, ends[i] - first, dtype, out_dtype);
}
