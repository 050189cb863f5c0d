/* The element-wise operations between a layer's matrix products, each in one pass over memory.
 *
 * Rows are independent and divided among the threads of torch's OpenMP team. The caller checks shapes, contiguity, and
 * that all widths are multiples of 16.
 */
#include "parts.h"

#include <math.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Smallest count of numbers for which more than one thread is faster. */
enum { WORTH_THREADS = 16384 };

INLINE void norm_row(char *x, const char *delta, const char *weight, char *out, long width, float eps, int dtype) {
    vf squares = {0};
    for (long i = 0; i < width; i += LANES) {
        if (delta) store(x, i, load(x, i, dtype) + load(delta, i, dtype), dtype);
        squares += load(x, i, dtype) * load(x, i, dtype);
    }
    const float scale = 1.0f / sqrtf(sum(squares) / (float)width + eps);
    for (long i = 0; i < width; i += LANES)
        store(out, i, load(x, i, dtype) * scale * load(weight, i, dtype), dtype);
}

/* x += delta (unless that is null), out = x / rms(x) * weight. x, delta, out: [rows, width]. */
EXPORT void baton_add_rms_norm(Rows x, Rows delta, const char *weight, Rows out, long rows, long width, float eps,
                               int dtype) {
#pragma omp parallel for schedule(static) if (rows * width > WORTH_THREADS)
    for (long row = 0; row < rows; row++) {
        const char *change = delta.at ? row_at(delta, row, dtype) : 0;
        WITH_CONSTANT(dtype, norm_row, row_at(x, row, dtype), change, weight, row_at(out, row, dtype), width, eps);
    }
}

/* One head: normalise (if it has a weight), then rotate pairs (i, i + dim / 2). */
INLINE void turn_head(char *head, const char *weight, const float *cos, const float *sin, long dim, float eps,
                      int dtype) {
    const long half = dim / 2;
    vf squares = {0};
    for (long i = 0; weight && i < dim; i += LANES) squares += load(head, i, dtype) * load(head, i, dtype);
    const float scale = weight ? 1.0f / sqrtf(sum(squares) / (float)dim + eps) : 1.0f;
    for (long i = 0; i < half; i += LANES) {
        vf first = load(head, i, dtype) * scale, second = load(head, i + half, dtype) * scale;
        if (weight) first *= load(weight, i, dtype), second *= load(weight, i + half, dtype);
        vf c = load((const char *)cos, i, F32), s = load((const char *)sin, i, F32);
        store(head, i, first * c - second * s, dtype);
        store(head, i + half, second * c + first * s, dtype);
    }
}

/* Queries and keys inside qkv [rows, heads + 2 * kv_heads, dim], in place; cos, sin: [rows, dim / 2] float. */
EXPORT void baton_norm_and_rotate(Rows qkv, const char *q_weight, const char *k_weight, const float *cos,
                                  const float *sin, long rows, long heads, long kv_heads, long dim, float eps,
                                  int dtype) {
#pragma omp parallel for schedule(static) if (rows * (heads + kv_heads) * dim > WORTH_THREADS)
    for (long row = 0; row < rows; row++)
        for (long head = 0; head < heads + kv_heads; head++) {
            char *at = row_at(qkv, row, dtype) + head * dim * (ptrdiff_t)item_bytes(dtype);
            const char *weight = head < heads ? q_weight : k_weight;
            const float *c = cos + row * dim / 2, *s = sin + row * dim / 2;
            if (dim == 128) WITH_CONSTANT(dtype, turn_head, at, weight, c, s, 128, eps); /* unrolled */
            else WITH_CONSTANT(dtype, turn_head, at, weight, c, s, dim, eps);
        }
}

/* In the formats of 16 bits to about 2^-14. */
INLINE vf silu(vf x, int dtype) {
#ifdef __AVX512F__
    if (dtype != F32) return x * (vf)_mm512_rcp14_ps((__m512)(1.0f + two_to_the(x * -1.44269504f)));
#endif
    return x / (1.0f + exponential(-x));
}

INLINE void gate_row(const char *gate, const char *up, char *out, long width, int dtype) {
    for (long i = 0; i < width; i += LANES)
        store(out, i, silu(load(gate, i, dtype), dtype) * load(up, i, dtype), dtype);
}

/* silu(gate) * up; gate_up: [rows, 2 * width], gate first; out: [rows, width]. */
EXPORT void baton_silu_and_multiply(Rows gate_up, Rows out, long rows, long width, int dtype) {
#pragma omp parallel for schedule(static) if (rows * width > WORTH_THREADS)
    for (long row = 0; row < rows; row++) {
        const char *gate = row_at(gate_up, row, dtype), *up = gate + width * (ptrdiff_t)item_bytes(dtype);
        WITH_CONSTANT(dtype, gate_row, gate, up, row_at(out, row, dtype), width);
    }
}

/* Whether this process may use AMX, for which it must ask Linux. */
EXPORT int baton_has_amx(void) {
    static int known; /* 1: no, 2: yes */
#ifdef __AMX_BF16__
    if (!known) known = 1 + (syscall(SYS_arch_prctl, 0x1023 /* ask for */, 18 /* tile data */) == 0);
#endif
    return known == 2;
}
