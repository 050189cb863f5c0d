/* Vectors of sixteen floats, or eight without AVX-512, loaded from and stored to the three number formats, with the
 * vector extensions of GCC (version 11 on).
 *
 * `dtype` is a compile-time constant wherever these are inlined: WITH_CONSTANT branches on it.
 */
#ifndef BATON_KERNELS_H
#define BATON_KERNELS_H

#ifdef __clang__
#error "the kernels need GCC 11 or newer; code of clang calls another OpenMP runtime than that of torch"
#endif
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

enum { F32 = 0, BF16 = 1, F16 = 2, I8 = 3 }; /* I8: of KV pages */
enum { BLOCK = 16 }; /* outputs that stand together in a packed weight; every width is a multiple of it */
#ifdef __AVX512F__
enum { LANES = 16 };
#define SIMD(operation) _mm512_##operation
#define BYTES(at) _mm_loadu_si128((const __m128i *)(at)) /* one for each lane */
typedef __m256i_u Half; /* 16 bits for each lane */
typedef __m512 FloatVector;
#else
enum { LANES = 8 };
#if defined(__AVX2__) && defined(__F16C__) && defined(__FMA__)
#define SIMD(operation) _mm256_##operation
#define BYTES(at) _mm_loadl_epi64((const __m128i *)(at))
typedef __m128i_u Half;
typedef __m256 FloatVector;
#endif
#endif

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));
typedef uint32_t vu __attribute__((vector_size(4 * LANES)));
typedef uint16_t vh __attribute__((vector_size(2 * LANES)));
#ifndef SIMD
typedef _Float16 vh16 __attribute__((vector_size(2 * LANES)));
#endif
typedef int8_t vb __attribute__((vector_size(LANES)));

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* Call with the format of numbers as a constant, within a parallel part: a constant from outside of it is a variable. */
#define WITH_CONSTANT(dtype, function, ...)                    \
    do {                                                       \
        if ((dtype) == F32) function(__VA_ARGS__, F32);        \
        else if ((dtype) == BF16) function(__VA_ARGS__, BF16); \
        else function(__VA_ARGS__, F16);                       \
    } while (0)

INLINE size_t item_bytes(int dtype) { return dtype == F32 ? 4 : dtype == I8 ? 1 : 2; }

/* Rows of numbers, `stride` numbers apart. */
typedef struct {
    char *at;
    long stride;
} Rows;

INLINE char *row_at(Rows rows, long row, int dtype) { return rows.at + row * rows.stride * (ptrdiff_t)item_bytes(dtype); }

/* The vector that begins at `at`, its numbers converted. */
#define CONVERTED(at, from, to)            \
    ({                                     \
        from x_;                           \
        memcpy(&x_, at, sizeof x_);        \
        __builtin_convertvector(x_, to);   \
    })

/* Numbers index .. index + LANES - 1 of an array. */
INLINE vf load(const char *array, ptrdiff_t index, int dtype) {
    const char *at = array + index * (ptrdiff_t)item_bytes(dtype);
    if (dtype == F32) return CONVERTED(at, vf, vf);
#ifdef SIMD /* GCC 12 converts number by number */
    if (dtype == BF16) return (vf)((vu)SIMD(cvtepu16_epi32)(*(const Half *)at) << 16);
    if (dtype == I8) return (vf)SIMD(cvtepi32_ps)(SIMD(cvtepi8_epi32)(BYTES(at)));
    return (vf)SIMD(cvtph_ps)(*(const Half *)at);
#else
    if (dtype == BF16) return (vf)(CONVERTED(at, vh, vu) << 16);
    return dtype == I8 ? CONVERTED(at, vb, vf) : CONVERTED(at, vh16, vf);
#endif
}

/* Rounds to nearest, ties to even. NaN stays NaN. */
INLINE void store(char *array, ptrdiff_t index, vf x, int dtype) {
    char *at = array + index * (ptrdiff_t)item_bytes(dtype);
    if (dtype == F32) {
        memcpy(at, &x, sizeof x);
    } else if (dtype == BF16) {
#ifdef __AVX512BF16__
        const __m256bh half = _mm512_cvtneps_pbh((__m512)x); /* denormal numbers become 0 */
#else
        vu bits = (vu)x;
        vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        vu is_nan = (vu)(x != x);
        vh half = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), vh);
#endif
        memcpy(at, &half, sizeof half);
    } else {
#ifdef SIMD
        const Half half = SIMD(cvtps_ph)((FloatVector)x, _MM_FROUND_TO_NEAREST_INT);
#else
        const vh16 half = __builtin_convertvector(x, vh16);
#endif
        memcpy(at, &half, sizeof half);
    }
}

INLINE vf splat(float x) { return x - (vf){0}; }

/* 0, 1, 2 and so on. */
INLINE vi lane_numbers(void) {
    vi numbers;
    for (int lane = 0; lane < LANES; lane++) numbers[lane] = lane;
    return numbers;
}

/* The list of what `f` says for each lane and `size`. */
#ifdef __AVX512F__
#define EACH_LANE(f, size) EIGHT_LANES(f, 0, size), EIGHT_LANES(f, 8, size)
#else
#define EACH_LANE(f, size) EIGHT_LANES(f, 0, size)
#endif
#define EIGHT_LANES(f, at, size)                                                                           \
    f(at, size), f(at + 1, size), f(at + 2, size), f(at + 3, size), f(at + 4, size), f(at + 5, size), \
        f(at + 6, size), f(at + 7, size)
#define TURNED(lane, size) (((lane) + (size)) % LANES)

/* The lanes moved by 8, 4 or 2 places. */
INLINE vf turned(vf x, int size) {
    if (size == 8) return __builtin_shuffle(x, (vi){EACH_LANE(TURNED, 8)});
    if (size == 4) return __builtin_shuffle(x, (vi){EACH_LANE(TURNED, 4)});
    return __builtin_shuffle(x, (vi){EACH_LANE(TURNED, 2)});
}

INLINE float sum(vf x) {
    for (int size = LANES / 2; size > 1; size /= 2) x += turned(x, size);
    return x[0] + x[1];
}

/* By lane: a where the comparison held (all bits set), else b. */
INLINE vf choose(vi held, vf a, vf b) { return (vf)((held & (vi)a) | (~held & (vi)b)); }

/* By lane; b if one of them is not a number. */
#ifdef SIMD
INLINE vf larger(vf a, vf b) { return (vf)SIMD(max_ps)((FloatVector)a, (FloatVector)b); }
INLINE vf smaller(vf a, vf b) { return (vf)SIMD(min_ps)((FloatVector)a, (FloatVector)b); }
#else
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }
INLINE vf smaller(vf a, vf b) { return choose(a < b, a, b); }
#endif

/* Rounds to whole numbers below 2^22: adding the number moves what is below one out of the mantissa. */
INLINE vf to_nearest(vf x) { return (x + 12582912.0f) - 12582912.0f; }

/* 2 to the x, to about 3e-6, by a polynomial that was fitted to it; 0 where x is very small. */
INLINE vf two_to_the(vf x) {
#ifdef __AVX512F__
    const vf n = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC), r = x - n;
#else
    const vf n = to_nearest(x), r = x - n;
#endif
    const vf power = (((9.5701013e-3f * r + 5.5917859e-2f) * r + 2.4024744e-1f) * r + 6.9312179e-1f) * r + 9.9999928e-1f;
#ifdef __AVX512F__
    return (vf)_mm512_scalef_ps((__m512)power, (__m512)n);
#else
    return choose(n < splat(-126.0f), (vf){0}, (vf)((vu)power + ((vu)__builtin_convertvector(n, vi) << 23)));
#endif
}

INLINE float highest_of(vf x) {
    for (int size = LANES / 2; size > 1; size /= 2) x = larger(x, turned(x, size));
    return x[0] > x[1] ? x[0] : x[1];
}

/* The largest magnitude of `count` numbers (a multiple of LANES) from `index` on; NaN if one of them is not finite. */
INLINE float largest_magnitude(const char *array, ptrdiff_t index, long count, int dtype) {
    vf largest = {0}, broken = {0};
    for (long i = index; i < index + count; i += LANES) {
        const vf x = load(array, i, dtype);
        largest = larger(larger(x, -x), largest);
        broken += x * 0.0f;
    }
    return highest_of(largest) + sum(broken);
}

/* e to the x, to about 1e-7: split off a power of two, then a polynomial (as in Cephes). Clamped to +-87. */
INLINE vf exponential(vf x) {
    x = smaller(larger(x, splat(-87.0f)), splat(87.0f));
    const vf magic = splat(12582912.0f); /* adding it rounds to an integer, which is in the lowest bits then */
    const vf shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
    const vf r = x - n * 0.693359375f - n * -2.12194440e-4f;
    const vf p = ((1.9875691500e-4f * r + 1.3981999507e-3f) * r + 8.3334519073e-3f) * r + 4.1665795894e-2f;
    const vf power = ((p * r + 1.6666665459e-1f) * r + 5.0000001201e-1f) * r * r + r + 1.0f;
    return (vf)((vu)power + ((vu)shifted << 23));
}

/* Exchange quadrants: in every square of 2 * `size` rows and lanes, the upper right one with the lower left one. */
#define EXCHANGE(rows, size)                                                                         \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) if ((i & (size)) == 0) {                \
        const vu upper = rows[i], lower = rows[i + (size)];                                          \
        rows[i] = __builtin_shuffle(upper, lower, (vi){EACH_LANE(OF_LEFT, size)});                   \
        rows[i + (size)] = __builtin_shuffle(upper, lower, (vi){EACH_LANE(OF_RIGHT, size)});         \
    }
#define OF_LEFT(lane, size) ((lane) & (size) ? LANES + (lane) - (size) : (lane))
#define OF_RIGHT(lane, size) ((lane) & (size) ? LANES + (lane) : (lane) + (size))

/* Rows become columns, in registers. */
INLINE void transpose(vu rows[LANES]) {
#ifdef __AVX512F__
    EXCHANGE(rows, 8)
#endif
    EXCHANGE(rows, 4)
    EXCHANGE(rows, 2)
    EXCHANGE(rows, 1)
}

#endif
