/* Matrix products with weights of 8 or 4 bits, and with inputs that are rounded to 8 bits here, row by row.
 *
 * A weight is an unsigned number minus the zero point of its group, times the scale of its group; a group is a run of
 * inputs of one output. A vector of values, 64 bytes, holds four inputs of sixteen outputs, which is what the processor's
 * dot product of bytes takes; with 4 bits eight inputs: the low half of a byte is an input, the high half the input four
 * later. Blocks of sixteen outputs stand together as in linear.c. Scales and zero points: [out / 16, groups, 16].
 *
 * Sums within a group are integers, thus exact: a row's result depends on no other row.
 */
#include "parts.h"

typedef uint8_t v16u8 __attribute__((vector_size(16)));

enum { ROWS = 8, WORTH_THREADS = 65536 };

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
    *total = 0;
    for (int lane = 0; lane < LANES; lane++) *total += sums[lane];
}

static void quantize_rows(const char *x, const QuantizedRows *to, long rows, long inputs, long group, int dtype) {
    const long groups = inputs / group;
#pragma omp parallel for schedule(static) if (rows * inputs > WORTH_THREADS)
    for (long unit = 0; unit < rows * groups; unit++) {
        const long row = unit / groups, first = row / ROWS * ROWS; /* of its tile */
        const long stride = 4 * (rows - first < ROWS ? rows - first : ROWS);
        int8_t *values = to->values + first * inputs + (row - first) * 4 + unit % groups * group / 4 * stride;
        WITH_CONSTANT(dtype, quantize, x, unit * group, group, values, stride, to->scales + unit, to->sums + unit);
    }
}

#ifdef __AVX512VNNI__

INLINE __m512i four_inputs(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
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
            const __m512i four = four_inputs(x + k * rows + i * 4);
#pragma GCC unroll 4
            for (int j = 0; j < blocks; j++) add_dot(&sums[i][j], weights[j], four);
        }
    }
}

/* `rows` rows from `row` on times `blocks` blocks of sixteen outputs from `block` on. */
INLINE void multiply_tile(const QuantizedWeight *w, const QuantizedRows *x, char *out, long row, long block,
                          int blocks, int bits, int dtype, int out_dtype, int rows) {
    const long inputs = w->inputs, groups = inputs / w->group;
    const int is_near = is_zen5();
    const uint8_t *values = w->values + block * inputs * LANES * bits / 8; /* the groups of a tile follow each other */
    vf totals[ROWS * BLOCKS];
    for (int i = 0; i < rows * blocks; i++) totals[i] = (vf){0};
    for (long g = 0; g < groups; g++) {
        __m512i sums[ROWS][BLOCKS];
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < blocks; j++) {
                v16u8 zeros;
                memcpy(&zeros, w->zeros + ((block + j) * groups + g) * LANES, sizeof zeros);
                sums[i][j] = (__m512i)(__builtin_convertvector(zeros, vi) * -x->sums[(row + i) * groups + g]);
            }
        const int8_t *some = x->values + (row * groups + g * rows) * w->group;
        const uint8_t *end = values + w->group * LANES * bits / 8 * blocks;
        do {
            for (int byte = 0; byte < LANES * bits * blocks; byte += 64)
                fetch_weights((const char *)values + byte, is_near, rows <= 4);
            add_products(sums, values, some, rows, blocks, bits);
            values += LANES * bits * blocks;
            some += 8 * rows;
        } while (values < end);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
            for (int j = 0; j < blocks; j++)
                totals[i * blocks + j] += (vf)_mm512_cvtepi32_ps(sums[i][j]) * x->scales[(row + i) * groups + g] *
                                load((const char *)w->scales, ((block + j) * groups + g) * LANES, F32);
    }
    for (int j = 0; w->bias && j < blocks; j++) {
        const vf bias = load(w->bias, (block + j) * LANES, dtype);
        for (int i = 0; i < rows; i++) totals[i * blocks + j] += bias;
    }
    write_sums(totals, out + (row * w->outputs + block * LANES) * (ptrdiff_t)item_bytes(out_dtype), w->outputs, rows,
               blocks, out_dtype);
}

/* The number of bits becomes a constant here, within the parallel part: a constant from outside of it is a variable. */
INLINE void multiply_rows(const QuantizedWeight *w, const QuantizedRows *x, char *out, long row, long block, long rows,
                          int blocks, int dtype, int out_dtype) {
    if (w->bits == 8)
        WITH_ROWS(rows, multiply_tile, w, x, out, row, block, blocks, 8, dtype, out_dtype);
    else
        WITH_ROWS(rows, multiply_tile, w, x, out, row, block, blocks, 4, dtype, out_dtype);
}

static void multiply(const QuantizedWeight *w, const QuantizedRows *x, char *out, long rows, int dtype,
                     int out_dtype) {
    const long all_blocks = w->outputs / LANES;
#pragma omp parallel for schedule(static) if (rows * w->inputs * w->outputs > 1 << 18)
    for (long block = 0; block < all_blocks; block += BLOCKS)
        for (long row = 0; row < rows; row += ROWS) {
            const long left = rows - row < ROWS ? rows - row : ROWS;
            const long end = block + BLOCKS < all_blocks ? block + BLOCKS : all_blocks;
            if (end - block == BLOCKS)
                multiply_rows(w, x, out, row, block, left, BLOCKS, dtype, out_dtype);
            else
                for (long last = block; last < end; last++)
                    multiply_rows(w, x, out, row, last, left, 1, dtype, out_dtype);
        }
}

EXPORT int baton_has_int8_dot(void) { return 1; }
#else
static void multiply(const QuantizedWeight *w, const QuantizedRows *x, char *out, long rows, int dtype,
                     int out_dtype) {
    (void)w, (void)x, (void)out, (void)rows, (void)dtype, (void)out_dtype;
}
EXPORT int baton_has_int8_dot(void) { return 0; }
#endif

/* out = x @ weight.T + bias. x: [rows, inputs] in `dtype`; out: [rows, outputs] in `out_dtype`. */
EXPORT void baton_linear_quantized(const QuantizedWeight *weight, const QuantizedRows *scratch, const char *x,
                                   char *out, long rows, int dtype, int out_dtype) {
    quantize_rows(x, scratch, rows, weight->inputs, weight->group, dtype);
    multiply(weight, scratch, out, rows, dtype, out_dtype);
}

/* As baton_linear_grouped. `scratch` is for the largest group. */
EXPORT void baton_linear_quantized_grouped(const QuantizedWeight *const *weights, const QuantizedRows *scratch,
                                           const char *x, const long *chosen, const long *ends, long groups, char *out,
                                           int dtype, int out_dtype) {
    for (long i = 0, first = 0; i < groups; first = ends[i++]) {
        const QuantizedWeight *weight = weights[chosen[i]];
        baton_linear_quantized(weight, scratch, x + first * weight->inputs * (ptrdiff_t)item_bytes(dtype),
                               out + first * weight->outputs * (ptrdiff_t)item_bytes(out_dtype), ends[i] - first, dtype,
                               out_dtype);
    }
}
