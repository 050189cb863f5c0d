/* The two products of attention on a tile of tokens, by dot products of pairs: of bfloat16, where the processor has them,
 * or of 16-bit integers, for pages of int8. Queries and weights are then rounded to 16 bits relative to the largest. */
#ifndef BATON_DOT_ATTENTION_H
#define BATON_DOT_ATTENTION_H

#include "paged.h"

/* The formats of pages for which there are dot products, as bits. */
#ifdef __AVX512BF16__
enum { DOTS = 1 << BF16 | 1 << I8 };
#elif defined(__AVX512VNNI__)
enum { DOTS = 1 << I8 };
#else
enum { DOTS = 0 };
#endif

#ifdef __AVX512VNNI__

INLINE __m512i pairs_at(const char *array, ptrdiff_t index, int dtype) {
    if (dtype == I8) return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(array + index)));
    return _mm512_loadu_si512(array + index * 2);
}

/* Sums are floats for bfloat16, else integers. Not by intrinsics, for which GCC 12 copies the sums in every turn. */
INLINE __m512i add_dots(__m512i sums, __m512i a, __m512i b, int dtype) {
    if (dtype == BF16)
        __asm__("vdpbf16ps %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    else
        __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
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
 * `dim` is a multiple of 32. As much of `next` is fetched meanwhile, unless it is null. */
INLINE vf score_eight(const char *one, const char *other, const char *keys, const ptrdiff_t *at, const long dim,
                      const char *next, const ptrdiff_t *next_at, int dtype) {
    const ptrdiff_t item = (ptrdiff_t)item_bytes(dtype);
    __m512i sums[16];
    __m512 rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int t = 0; t < 8; t++)
#pragma GCC unroll 4
        for (long i = 0; i < dim; i += 2 * LANES) {
            const __m512i key = pairs_at(keys, at[t] + i, dtype);
            if (next && i * item % 64 == 0) __builtin_prefetch(next + (next_at[t] + i) * item, 0, 2);
            sums[t] = add_dots(sums[t], pairs_at(one, i, BF16), key, dtype);
            sums[t + 8] = add_dots(sums[t + 8], pairs_at(other, i, BF16), key, dtype);
        }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) rows[i] = dtype == I8 ? _mm512_cvtepi32_ps(sums[i]) : (__m512)sums[i];
    return sums_of(rows);
}

/* Add the weighted values of `tokens` tokens (an even number) to the sums of `count` queries (at most 2) in `width`
 * dimensions (a multiple of 32, at most 128). As many numbers of `next` are fetched meanwhile, unless it is null. Two
 * tokens make a pair. The sums of 32 dimensions are two vectors, as unpacking leaves them: in_order() puts them right.
 * `units`: by which integer sums are multiplied. The sums, weights and units of the queries are `stride` words apart. */
INLINE void add_pairs(float *sums, const uint32_t *weights, const float *units, long stride, const int count,
                      const char *values, const ptrdiff_t *at, long tokens, const int width, const char *next,
                      const ptrdiff_t *next_at, int dtype) {
    const ptrdiff_t item = (ptrdiff_t)item_bytes(dtype);
    __m512i parts[2][8];
    const int vectors = width / LANES;
    for (int m = 0; m < count; m++)
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++)
            parts[m][i] = dtype == I8 ? _mm512_setzero_si512() : _mm512_loadu_si512(sums + m * stride + i * LANES);
    for (long t = 0; t < tokens; t += 2) {
        __m512i pairs[2];
        for (int m = 0; m < count; m++) pairs[m] = _mm512_set1_epi32((int)weights[m * stride + t / 2]);
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i += 2) {
            if (next && i * LANES * item % 64 == 0) {
                __builtin_prefetch(next + (next_at[t] + i * LANES) * item, 0, 2);
                __builtin_prefetch(next + (next_at[t + 1] + i * LANES) * item, 0, 2);
            }
            const __m512i a = pairs_at(values, at[t] + i * LANES, dtype), b = pairs_at(values, at[t + 1] + i * LANES, dtype);
            const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
            for (int m = 0; m < count; m++) {
                parts[m][i] = add_dots(parts[m][i], pairs[m], low, dtype);
                parts[m][i + 1] = add_dots(parts[m][i + 1], pairs[m], high, dtype);
            }
        }
    }
    for (int m = 0; m < count; m++)
#pragma GCC unroll 8
        for (int i = 0; i < vectors; i++) {
            float *to = sums + m * stride + i * LANES;
            const __m512 part = _mm512_cvtepi32_ps(parts[m][i]), unit = _mm512_set1_ps(units[m * stride]);
            _mm512_storeu_ps(to, dtype == I8 ? _mm512_fmadd_ps(part, unit, _mm512_loadu_ps(to)) : (__m512)parts[m][i]);
        }
}

/* Put 32 sums of add_pairs() into the order of their dimensions. */
INLINE void in_order(float *sums) {
    const __m512 low = _mm512_loadu_ps(sums), high = _mm512_loadu_ps(sums + LANES);
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
    _mm512_storeu_ps(sums, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(sums + LANES, _mm512_permutex2var_ps(low, second, high));
}

/* Round `count` numbers (a multiple of 16) to bfloat16, or to 16-bit integers. `to` may be `from`. Returns the unit of
 * the integers. */
INLINE float round_to_pairs(const float *from, void *to, long count, int dtype) {
    char *target = to;
#ifdef __AVX512BF16__
    for (long i = 0; dtype == BF16 && i < count; i += LANES)
        _mm256_storeu_si256((__m256i *)(target + 2 * i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + i)));
#endif
    if (dtype == BF16) return 1.0f;
    const float best = largest_magnitude((const char *)from, 0, count, F32);
    const float inverse = best > 0.0f ? 32767.0f / best : 0.0f;
    for (long i = 0; i < count; i += LANES) {
        const __m512i whole = _mm512_cvtps_epi32((__m512)(load((const char *)from, i, F32) * inverse));
        _mm256_storeu_si256((__m256i *)(target + 2 * i), _mm512_cvtsepi32_epi16(whole));
    }
    return best / 32767.0f;
}
#endif
#endif
