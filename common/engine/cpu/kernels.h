/* Vectors of sixteen floats, loaded from and stored to the three number formats, with the vector extensions of GCC
 * (version 12 on) and clang.
 *
 * `dtype` is a compile-time constant wherever these are inlined: exported functions branch on it once, at the top.
 */
#ifndef BATON_KERNELS_H
#define BATON_KERNELS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { F32 = 0, BF16 = 1, F16 = 2, I8 = 3 }; /* I8: of KV pages */
enum { LANES = 16 };

typedef float vf __attribute__((vector_size(64)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef _Float16 vh16 __attribute__((vector_size(32)));
typedef int8_t vb __attribute__((vector_size(16)));

/* How many bytes ahead weights are fetched where the products take about as long as memory does: the processor's own
 * prefetching falls behind then. */
enum { AHEAD = 8192 };

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

INLINE size_t item_bytes(int dtype) { return dtype == F32 ? 4 : dtype == I8 ? 1 : 2; }

/* Numbers index .. index + 15 of an array. */
INLINE vf load(const char *array, ptrdiff_t index, int dtype) {
    const char *at = array + index * (ptrdiff_t)item_bytes(dtype);
    if (dtype == F32) {
        vf x;
        memcpy(&x, at, sizeof x);
        return x;
    }
    if (dtype == BF16) {
        vh x;
        memcpy(&x, at, sizeof x);
        return (vf)(__builtin_convertvector(x, vu) << 16);
    }
    if (dtype == I8) {
        vb x;
        memcpy(&x, at, sizeof x);
        return __builtin_convertvector(x, vf);
    }
    vh16 x;
    memcpy(&x, at, sizeof x);
    return __builtin_convertvector(x, vf);
}

/* Rounds to nearest, ties to even. NaN stays NaN. */
INLINE void store(char *array, ptrdiff_t index, vf x, int dtype) {
    char *at = array + index * (ptrdiff_t)item_bytes(dtype);
    if (dtype == F32) {
        memcpy(at, &x, sizeof x);
    } else if (dtype == BF16) {
        vu bits = (vu)x;
        vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        vu is_nan = (vu)(x != x);
        vh half = __builtin_convertvector((rounded & ~is_nan) | (0x7fc0 & is_nan), vh);
        memcpy(at, &half, sizeof half);
    } else {
        vh16 half = __builtin_convertvector(x, vh16);
        memcpy(at, &half, sizeof half);
    }
}

INLINE vf splat(float x) { return x - (vf){0}; }

INLINE float sum(vf x) {
    typedef float v8 __attribute__((vector_size(32)));
    typedef float v4 __attribute__((vector_size(16)));
    v8 a = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
           __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
    v4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    v4 c = b + __builtin_shufflevector(b, b, 2, 3, 0, 1);
    return c[0] + c[1];
}

INLINE float highest_of(vf x) {
    float best = x[0];
    for (int lane = 1; lane < LANES; lane++) best = x[lane] > best ? x[lane] : best;
    return best;
}

/* By lane: a where the comparison held (all bits set), else b. */
INLINE vf choose(vi held, vf a, vf b) { return (vf)((held & (vi)a) | (~held & (vi)b)); }

INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }

/* e to the x, to about 1e-7: split off a power of two, then a polynomial (as in Cephes). Clamped to +-87. */
INLINE vf exponential(vf x) {
    x = larger(x, splat(-87.0f));
    x = choose(x < splat(87.0f), x, splat(87.0f));
    const vf magic = splat(12582912.0f); /* adding it rounds to an integer */
    vf n = (x * 1.44269504088896341f + magic) - magic;
    vf r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vf p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    vi power = (__builtin_convertvector(n, vi) + 127) << 23;
    return p * (vf)power;
}

#endif
