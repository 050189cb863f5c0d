/* Attention that reads keys and values in their pages, each once: online softmax (Milakov and Gimelshein, arXiv
 * 1805.02867) over tiles of tokens.
 *
 * The queries of one KV head (its group of heads, for a few neighbouring tokens) share each read. Sums are float32. The
 * caller checks that head_dim is a multiple of 16 and at most MAX_DIM.
 */
#include "dot_attention.h"
#include "paged.h"

#include <math.h>

enum { TILE = 32, MAX_QUERIES = 16, MAX_DIM = 256 };

typedef struct {
    float queries[MAX_QUERIES][MAX_DIM], sums[MAX_QUERIES][MAX_DIM]; /* with_dots() keeps the queries in bfloat16 */
    float scores[MAX_QUERIES][TILE];
    float best[MAX_QUERIES], total[MAX_QUERIES];
    uint32_t weights[MAX_QUERIES][TILE / 2];
} Scratch;

/* Whether dot_attention.h computes this. */
INLINE int with_dots(long dim, int dtype) {
#ifdef __AVX512BF16__
    return dtype == BF16 && dim % (2 * LANES) == 0;
#else
    (void)dim, (void)dtype;
    return 0;
#endif
}

/* Scores of `count` queries, from `first` on, with one key. `count` is a constant, so that sums stay in registers. */
INLINE void score(Scratch *s, int first, const int count, const char *keys, ptrdiff_t at, long dim, long t, int dtype) {
    vf parts[4] = {{0}};
    for (long i = 0; i < dim; i += LANES) {
        vf key = load(keys, at + i, dtype);
        for (int m = 0; m < count; m++) parts[m] += key * load((const char *)s->queries[first + m], i, F32);
    }
    for (int m = 0; m < count; m++) s->scores[first + m][t] = sum(parts[m]);
}

/* Add `tokens` weighted values to the sums of `count` queries from `first` on; the sums stay in registers. */
INLINE void add_values(Scratch *s, int first, const int count, const char *values, const ptrdiff_t *at, long tokens,
                       long dim, int dtype) {
    for (long i = 0; i < dim; i += LANES) {
        vf parts[4];
        for (int m = 0; m < count; m++) parts[m] = load((const char *)s->sums[first + m], i, F32);
        for (long t = 0; t < tokens; t++) {
            vf value = load(values, at[t] + i, dtype);
            for (int m = 0; m < count; m++) parts[m] += value * s->scores[first + m][t];
        }
        for (int m = 0; m < count; m++) store((char *)s->sums[first + m], i, parts[m], F32);
    }
}

/* Turn scores into weights relative to the best score so far; if the best rises, scale earlier sums down. */
INLINE void reweigh(Scratch *s, int m, long visible, long dim, float scale) {
    for (long t = visible < 0 ? 0 : visible; t < TILE; t++) s->scores[m][t] = -INFINITY;
    if (visible <= 0) { /* the whole tile comes after the query */
        memset(s->scores[m], 0, sizeof s->scores[m]);
        return;
    }
    vf low = load((const char *)s->scores[m], 0, F32) * scale, high = load((const char *)s->scores[m], LANES, F32) * scale;
    vf both = larger(low, high);
    float best = s->best[m];
    for (int lane = 0; lane < LANES; lane++) best = both[lane] > best ? both[lane] : best;
    if (best > s->best[m]) {
        float shrink = s->best[m] == -INFINITY ? 0.0f : expf(s->best[m] - best);
        s->total[m] *= shrink;
        for (long i = 0; i < dim; i += LANES)
            store((char *)s->sums[m], i, load((const char *)s->sums[m], i, F32) * shrink, F32);
        s->best[m] = best;
    }
    vf low_weight = exponential(low - best), high_weight = exponential(high - best);
    low_weight = choose(low == splat(-INFINITY), (vf){0}, low_weight);
    high_weight = choose(high == splat(-INFINITY), (vf){0}, high_weight);
    store((char *)s->scores[m], 0, low_weight, F32);
    store((char *)s->scores[m], LANES, high_weight, F32);
    s->total[m] += sum(low_weight + high_weight);
}

INLINE void each_four(Scratch *s, int num, const Paged *kv, const ptrdiff_t *at, long tokens, int of_keys, int dtype) {
    int m = 0;
#define PART(count)                                                                                          \
    if (of_keys)                                                                                             \
        for (long t = 0; t < tokens; t++) score(s, m, count, kv->keys, at[t], kv->dim, t, dtype);            \
    else                                                                                                     \
        add_values(s, m, count, kv->values, at, tokens, kv->dim, dtype);
    for (; m + 4 <= num; m += 4) { PART(4) }
    for (; m + 2 <= num; m += 2) { PART(2) }
    if (m < num) { PART(1) }
#undef PART
}

#ifdef __AVX512BF16__
INLINE void score_all(Scratch *s, int num, const Paged *kv, const ptrdiff_t *at) {
    for (int m = 0; m < num; m++)
        for (int t = 0; t < TILE; t += LANES)
            store((char *)s->scores[m], t, score_sixteen((const char *)s->queries[m], kv->keys, at + t, kv->dim), F32);
}

INLINE void add_all(Scratch *s, int num, const Paged *kv, const ptrdiff_t *at) {
    const int width = kv->dim % 128 == 0 ? 128 : 32;
    for (int m = 0; m < num; m++) round_weights(s->scores[m], s->weights[m]);
    for (int m = 0; m < num; m += 2)
        for (long i = 0; i < kv->dim; i += width) {
            const char *values = kv->values + i * 2;
            float *sums = s->sums[m] + i;
            if (width == 128 && num - m > 1)
                add_pairs(sums, MAX_DIM, 2, s->weights[m], TILE / 2, values, at, TILE, 128);
            else if (width == 128)
                add_pairs(sums, MAX_DIM, 1, s->weights[m], TILE / 2, values, at, TILE, 128);
            else if (num - m > 1)
                add_pairs(sums, MAX_DIM, 2, s->weights[m], TILE / 2, values, at, TILE, 32);
            else
                add_pairs(sums, MAX_DIM, 1, s->weights[m], TILE / 2, values, at, TILE, 32);
        }
}
#endif

/* Attention of `num` queries, which share a KV head, to the tokens of one tile, which begin at the elements `at`. */
INLINE void attend_tile(Scratch *s, int num, const Paged *kv, const ptrdiff_t *at, const Piece *piece, long start,
                        long tokens, float scale, int dtype) {
    const int is_dotted = with_dots(kv->dim, dtype);
    const long group = kv->heads / kv->kv_heads;
#ifdef __AVX512BF16__
    if (is_dotted) score_all(s, num, kv, at);
#endif
    if (!is_dotted) each_four(s, num, kv, at, tokens, 1, dtype);
    for (int m = 0; m < num; m++) {
        const long visible = piece->position + m / group + 1 - start;
        reweigh(s, m, visible < tokens ? visible : tokens, kv->dim, scale);
    }
#ifdef __AVX512BF16__
    if (is_dotted) add_all(s, num, kv, at);
#endif
    if (!is_dotted) each_four(s, num, kv, at, tokens, 0, dtype);
}

/* Find the elements where the tokens from `start` on begin, and begin to fetch them: memory answers while the tile before
 * is computed. The last token of the row stands in for those beyond it, whose weights are 0. */
INLINE void locate(const Paged *kv, long row, long kv_head, long start, long length, ptrdiff_t *at, int dtype) {
    const ptrdiff_t item = (ptrdiff_t)item_bytes(dtype);
    for (long t = 0; t < TILE && start < length; t++) {
        at[t] = token_at(kv, row, kv_head, start + t < length ? start + t : length - 1);
        for (long byte = 0; byte < kv->dim * item; byte += 64) {
            __builtin_prefetch(kv->keys + at[t] * item + byte, 0, 1);
            __builtin_prefetch(kv->values + at[t] * item + byte, 0, 1);
        }
    }
}

/* One piece of a row at one KV head. q, out: [tokens, heads, dim], strides in elements. */
INLINE void attend(const Paged *kv, const Piece *piece, long kv_head, const char *q, long q_stride, char *out,
                   float scale, int dtype) {
    Scratch s;
    ptrdiff_t places[2][TILE]; /* of this tile and the next */
    const long group = kv->heads / kv->kv_heads, dim = kv->dim;
    const int num = (int)(piece->num_queries * group), is_dotted = with_dots(dim, dtype);
    const long length = piece->position + piece->num_queries; /* the last query sees this many tokens */
    locate(kv, piece->row, kv_head, 0, length, places[0], dtype);
    for (int m = 0; m < num; m++) {
        ptrdiff_t from = (piece->first_query + m / group) * q_stride + (kv_head * group + m % group) * dim;
        for (long i = 0; i < dim; i += LANES)
            store((char *)s.queries[m], i, load(q, from + i, dtype), is_dotted ? BF16 : F32);
        memset(s.sums[m], 0, (size_t)dim * sizeof(float));
        s.best[m] = -INFINITY;
        s.total[m] = 0.0f;
    }
    for (long start = 0; start < length; start += TILE) {
        const long tile = start / TILE, tokens = length - start < TILE ? length - start : TILE;
        locate(kv, piece->row, kv_head, start + TILE, length, places[(tile + 1) % 2], dtype);
        attend_tile(&s, num, kv, places[tile % 2], piece, start, tokens, scale, dtype);
    }
    for (int m = 0; m < num; m++) {
        ptrdiff_t to = ((piece->first_query + m / group) * kv->heads + kv_head * group + m % group) * dim;
        const float share = 1.0f / s.total[m];
#ifdef __AVX512BF16__
        for (long i = 0; is_dotted && i < dim; i += 2 * LANES) in_order(s.sums[m] + i);
#endif
        for (long i = 0; i < dim; i += LANES)
            store(out, to + i, load((const char *)s.sums[m], i, F32) * share, dtype);
    }
}

INLINE void attend_all(const Paged *kv, const Piece *pieces, long num_pieces, const char *q, long q_stride, char *out,
                       float scale, int dtype) {
#pragma omp parallel for schedule(dynamic) if (num_pieces * kv->kv_heads > 1)
    for (long unit = 0; unit < num_pieces * kv->kv_heads; unit++)
        attend(kv, pieces + unit / kv->kv_heads, unit % kv->kv_heads, q, q_stride, out, scale, dtype);
}

EXPORT void baton_paged_attention(const Paged *kv, const Piece *pieces, long num_pieces, const char *q, long q_stride,
                                  char *out, float scale, int dtype) {
    if (dtype == F32) attend_all(kv, pieces, num_pieces, q, q_stride, out, scale, F32);
    if (dtype == BF16) attend_all(kv, pieces, num_pieces, q, q_stride, out, scale, BF16);
    if (dtype == F16) attend_all(kv, pieces, num_pieces, q, q_stride, out, scale, F16);
}

/* Write new keys and values [tokens, kv_heads, dim] (strides in elements) into their pages. */
EXPORT void baton_write_kv(const Paged *kv, const int64_t *pages, const int64_t *offsets, long num_tokens,
                           const char *k, const char *v, long stride, int dtype) {
    const ptrdiff_t item = (ptrdiff_t)item_bytes(dtype), head_bytes = kv->dim * item;
#pragma omp parallel for schedule(static) if (num_tokens > 64)
    for (long n = 0; n < num_tokens; n++)
        for (long head = 0; head < kv->kv_heads; head++) {
            ptrdiff_t to = pages[n] * kv->page_stride + head * kv->head_stride + offsets[n] * kv->dim;
            ptrdiff_t from = n * stride + head * kv->dim;
            memcpy(kv->keys + to * item, k + from * item, (size_t)head_bytes);
            memcpy(kv->values + to * item, v + from * item, (size_t)head_bytes);
        }
}
