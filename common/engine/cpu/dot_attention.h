/* The two products of attention on a tile of tokens, for bfloat16 on processors with a dot product of bfloat16 pairs. */
#ifndef BATON_DOT_ATTENTION_H
#define BATON_DOT_ATTENTION_H

#include "paged.h"

#ifdef __AVX512BF16__
#include <immintrin.h>

INLINE __m512bh pairs_at(const char *array, ptrdiff_t index) {
    return (__m512bh)_mm512_loadu_si512(array + index * 2);
}

/* The sum of each of sixteen vectors, as one vector. Destroys `rows`. */
INLINE vf sums_of(__m512 rows[16]) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) /* each quarter of rows[i]: parts of the sums of 2i and 2i + 1, alternating */
        rows[i] = _mm512_add_ps(_mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]),
                                _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) { /* each quarter of rows[i]: parts of the sums of 4i .. 4i + 3 */
        __m512d a = (__m512d)rows[2 * i], b = (__m512d)rows[2 * i + 1];
        rows[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd(a, b), (__m512)_mm512_unpackhi_pd(a, b));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        rows[i] = _mm512_add_ps(_mm512_shuffle_f32x4(rows[2 * i], rows[2 * i + 1], 0x88),
                                _mm512_shuffle_f32x4(rows[2 * i], rows[2 * i + 1], 0xdd));
    return (vf)_mm512_add_ps(_mm512_shuffle_f32x4(rows[0], rows[1], 0x88),
                             _mm512_shuffle_f32x4(rows[0], rows[1], 0xdd));
}

/* Scores of two queries with eight keys, which begin at the elements `at`: first eight of one, then eight of the other.
 * `dim` is a multiple of 32. Memory at the distance `ahead` from the keys is fetched meanwhile, unless that is 0. */
INLINE vf score_eight(const char *one, const char *other, const char *keys, const ptrdiff_t *at, long dim,
                      ptrdiff_t ahead) {
    __m512 rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) rows[i] = _mm512_setzero_ps();
    for (long i = 0; i < dim; i += 2 * LANES) {
        const __m512bh part = pairs_at(one, i), other_part = pairs_at(other, i);
#pragma GCC unroll 8
        for (int t = 0; t < 8; t++) {
            const char *address = keys + (at[t] + i) * 2;
            const __m512bh key = pairs_at(address, 0);
            if (ahead) __builtin_prefetch(address + ahead, 0, 2);
            rows[t] = _mm512_dpbf16_ps(rows[t], part, key);
            rows[t + 8] = _mm512_dpbf16_ps(rows[t + 8], other_part, key);
        }
    }
    return sums_of(rows);
}

/* Add the weighted values of `tokens` tokens (an even number) to the sums of `count` queries (at most 2) in `width`
 * dimensions (a multiple of 32, at most 128). As many numbers of `next` are fetched meanwhile, unless it is null. Two
 * tokens make a pair. The sums of 32 dimensions are two vectors, as unpacking leaves them: in_order() puts them right. */
INLINE void add_pairs(float *sums, long stride, const int count, const uint32_t *weights, long weight_stride,
                      const char *values, const ptrdiff_t *at, long tokens, const int width, const char *next,
                      const ptrdiff_t *next_at) {
    __m512 parts[2][8];
    const int vectors = width / LANES;
    for (int m = 0; m < count; m++)
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) parts[m][i] = _mm512_loadu_ps(sums + m * stride + i * LANES);
    for (long t = 0; t < tokens; t += 2) {
        __m512bh pairs[2];
        for (int m = 0; m < count; m++)
            pairs[m] = (__m512bh)_mm512_set1_epi32((int)weights[m * weight_stride + t / 2]);
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i += 2) {
            if (next) {
                __builtin_prefetch(next + (next_at[t] + i * LANES) * 2, 0, 2);
                __builtin_prefetch(next + (next_at[t + 1] + i * LANES) * 2, 0, 2);
            }
            const __m512i a = _mm512_loadu_si512(values + (at[t] + i * LANES) * 2);
            const __m512i b = _mm512_loadu_si512(values + (at[t + 1] + i * LANES) * 2);
            const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b), high = (__m512bh)_mm512_unpackhi_epi16(a, b);
            for (int m = 0; m < count; m++) {
                parts[m][i] = _mm512_dpbf16_ps(parts[m][i], pairs[m], low);
                parts[m][i + 1] = _mm512_dpbf16_ps(parts[m][i + 1], pairs[m], high);
            }
        }
    }
    for (int m = 0; m < count; m++)
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) _mm512_storeu_ps(sums + m * stride + i * LANES, parts[m][i]);
}

/* Put 32 sums of add_pairs() into the order of their dimensions. */
INLINE void in_order(float *sums) {
    const __m512 low = _mm512_loadu_ps(sums), high = _mm512_loadu_ps(sums + LANES);
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    _mm512_storeu_ps(sums, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(sums + LANES, _mm512_permutex2var_ps(low, second, high));
}

/* Round 32 weights to bfloat16. */
INLINE void round_weights(const float *weights, uint32_t *pairs) {
    const __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(weights + LANES), _mm512_loadu_ps(weights));
    _mm512_storeu_si512(pairs, (__m512i)rounded);
}
#endif
#endif
