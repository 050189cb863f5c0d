/* Weights of tokens in a random choice; sampling/weights.py defines them.
 *
 * Every operation is rounded by itself, so that the weights have the same bits on every processor and device: the
 * compiler must not fuse products and sums.
 */
#pragma GCC optimize("fp-contract=off")
#include "kernels.h"

/* Smallest count of numbers for which more than one thread is faster. */
enum { WORTH_THREADS = 65536, WEIGHT_BITS = 34 };

INLINE vf whole_part(vf x) { /* the largest whole number up to x, for |x| < 2^31 */
    vf cut = __builtin_convertvector(__builtin_convertvector(x, vi), vf);
    return choose(cut > x, cut - 1.0f, cut);
}

INLINE vf weight_of(vf scaled, vf threshold) {
    const vf least = splat(-(float)(WEIGHT_BITS + 2));
    vf x = choose((scaled >= threshold) & (scaled > least), scaled, least);
    vf whole = whole_part(x), part = x - whole;
    vf power = (((part * 0.0018671302f + 0.00901703f) * part + 0.055799913f) * part + 0.24016444f) * part;
    power = (power + 0.6931513f) * part + 1.0f;
    vi exponent = (__builtin_convertvector(whole, vi) + WEIGHT_BITS) << 23;
    vf weight = (vf)((vi)power + exponent);
    /* Numbers from 2^24 on are whole. */
    vi is_small = weight < splat(16777216.0f);
    vf cut = __builtin_convertvector(__builtin_convertvector(choose(is_small, weight, splat(0.0f)), vi), vf);
    return choose(is_small, cut, weight);
}

/* scaled: [rows, width], overwritten with the weights. thresholds: [rows], or null to keep all tokens. */
EXPORT void baton_token_weights(float *scaled, const float *thresholds, long rows, long width) {
#pragma omp parallel for schedule(static) if (rows * width > WORTH_THREADS)
    for (long row = 0; row < rows; row++) {
        float *at = scaled + row * width;
        const vf threshold = splat(thresholds ? thresholds[row] : -__builtin_inff());
        long i = 0;
        for (; i + LANES <= width; i += LANES)
            store((char *)at, i, weight_of(load((const char *)at, i, F32), threshold), F32);
        if (i < width) {
            float last[LANES] = {0};
            memcpy(last, at + i, (size_t)(width - i) * sizeof *at);
            store((char *)last, 0, weight_of(load((const char *)last, 0, F32), threshold), F32);
            memcpy(at + i, last, (size_t)(width - i) * sizeof *at);
        }
    }
}
