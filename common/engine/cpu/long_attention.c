/* Attention for long extends in bfloat16: flash attention (Dao et al., arXiv 2205.14135), tiled, by AMX where the
 * processor has it, else by dot products of pairs.
 *
 * Everything is computed transposed. Scores are [tokens, queries], so that a query is one lane of a vector, whose maximum
 * and sum need no shuffles. The second product takes the weights of two neighbouring tokens packed into one word. Keys
 * and values are copied first, values pair by pair. A query's result has the same bits wherever its row is cut.
 *
 * head_dim must be a multiple of 32 up to MAX_DIM, and the group size at most QUERIES.
 */
#include "products.h"

#if defined(__AVX512BF16__) && defined(__linux__)

int omp_get_thread_num(void); /* of the runtime that torch has loaded */

enum { QUERIES = 32, TOKENS = 256, MAX_DIM = 256 };

/* Two vectors have a number of each of the QUERIES queries. */
typedef struct {
    vu queries[MAX_DIM / 2][2]; /* pairs of neighbouring numbers of each query */
    vf scores[TOKENS][2];
    vu weights[TOKENS / 2][2]; /* pairs of neighbouring tokens */
    vf sums[MAX_DIM][2];
    vf best[2], total[2];
} Flash;

static const char zeros[2 * MAX_DIM]; /* a token or a query that does not exist */

/* sums [32, QUERIES], or zero unless `adds`, plus x [32, pairs] times by [pairs, QUERIES]. x consists of parts [32, 16], each
 * of which begins `step` words after the one before. */
INLINE void multiply(const uint32_t *x, long step, const vu (*by)[2], vf (*sums)[2], long pairs, int adds) {
#ifdef __AMX_BF16__
    if (baton_has_amx()) {
        multiply_tiles((const char *)x, 64, 1024, 4 * step, (const char *)by, 2, (char *)sums, pairs / 16, adds, 0,
                       (Ahead){0});
        return;
    }
#endif
    for (vf(*end)[2] = sums + 32; sums < end; sums += ROWS, x += ROWS * LANES) {
        __m512 parts[ROWS][BLOCKS];
#pragma GCC unroll 16
        for (int i = 0; i < 2 * ROWS; i++) parts[i / 2][i % 2] = adds ? (__m512)sums[i / 2][i % 2] : _mm512_setzero_ps();
        for (long k = 0; k < pairs; k += LANES)
            multiply_dots(x + k / LANES * step, LANES, (const char *)(by + k), 2, parts, LANES, ROWS, BF16, (Ahead){0});
#pragma GCC unroll 16
        for (int i = 0; i < 2 * ROWS; i++) sums[i / 2][i % 2] = (vf)parts[i / 2][i % 2];
    }
}

/* Copy the KV of tokens begin .. length - 1 in the order in which it is read: keys as [tokens / 32, dim / 32, 32 tokens, 16]
 * pairs of numbers, values as [tokens / 32, dim, 16] pairs of tokens. Both are zero before and beyond, up to a multiple of
 * 32 tokens. */
static void copy_row(const Paged *kv, long row, long head, long begin, long length, uint32_t *keys, uint32_t *values) {
    const long dim = kv->dim;
    for (long start = begin / (2 * LANES) * (2 * LANES); start < length; start += 2 * LANES) {
        const char *from[2 * LANES]; /* values of each token */
        for (long t = start; t < start + 2 * LANES; t++) {
            const ptrdiff_t at = t < begin || t >= length ? -1 : token_at(kv, row, head, t) * 2;
            const char *key = at < 0 ? zeros : kv->layer.keys + at;
            from[t - start] = at < 0 ? zeros : kv->layer.values + at;
            for (long i = 0; i < dim / 2; i += LANES)
                memcpy(keys + start * dim / 2 + (2 * i + t - start) * LANES, key + 4 * i, 4 * LANES);
        }
        for (long i = 0; i < dim; i += LANES) {
            vu square[LANES]; /* a row for each pair of tokens */
            for (int t = 0; t < LANES; t++)
                square[t] = (vu)load(from[2 * t], i, BF16) >> 16 | (vu)load(from[2 * t + 1], i, BF16);
            transpose(square);
            memcpy(values + start * dim / 2 + i * LANES, square, sizeof square);
        }
    }
}

/* The factor of scores in the exponent of 2; of capped ones, theirs has been applied before. */
INLINE float scale_of(const Paged *kv) { return 1.44269504f * (kv->layer.soft_cap != 0.0f ? 1.0f : kv->layer.scale); }

/* Turn the scores of some tokens, from `start` on, into weights. Every query sees the first `clear` of them. */
static void weigh(Flash *f, const Paged *kv, const vi *positions, long start, long tokens, long clear, int is_first) {
    const float scale = scale_of(kv), soft_cap = kv->layer.soft_cap;
    vf best[2] = {f->best[0], f->best[1]};
    for (long t = 0; t < tokens; t++)
        for (int half = 0; half < 2; half++) {
            vf score = f->scores[t][half];
            if (soft_cap != 0.0f) score = capped(score * kv->layer.scale, soft_cap);
            if (t >= clear) /* far below the first best */
                score = choose(is_seen(positions[half] - (int)(start + t), kv->layer.window), score, splat(-2e30f));
            if (t >= clear || soft_cap != 0.0f) f->scores[t][half] = score;
            best[half] = larger(best[half], score);
        }
    for (int half = 0; half < 2; half++) {
        const vf shrink = two_to_the((f->best[half] - best[half]) * scale), base = best[half] * scale;
        vf total = f->total[half] * shrink;
        for (long t = 0; t < tokens; t += 2) {
            const vf first = two_to_the(f->scores[t][half] * scale - base);
            const vf second = two_to_the(f->scores[t + 1][half] * scale - base);
            const vu low = (vu)first + 0x8000, high = (vu)second + 0x8000; /* rounded: never NaN nor negative */
            f->weights[t / 2][half] = (low >> 16) | (high & 0xffff0000);
            total += first + second;
        }
        f->best[half] = best[half], f->total[half] = total;
        for (long i = 0; i < kv->dim && !is_first; i++) f->sums[i][half] *= shrink;
    }
}

/* Up to 32 queries: those of `num_tokens` neighbouring tokens, from token `first` of the piece on. */
static void attend_tile(Flash *f, const Paged *kv, const Piece *piece, long head, long first, long num_tokens,
                        const uint32_t *keys, const uint32_t *values, Rows q, Rows out) {
    const long group = group_size(kv), dim = kv->dim, num = num_tokens * group;
    const char *from = row_at(q, piece->first_query + first, BF16) + 2 * head * group * dim;
    const long position = piece->position + first, length = position + num_tokens;
    const float *sinks = kv->layer.sinks ? kv->layer.sinks + head * group : 0;
    const char *queries[QUERIES];
    char *outs[QUERIES];
    vi positions[2];
    for (int m = 0; m < QUERIES; m++) {
        queries[m] = m < num ? from + 2 * (m / group * q.stride + m % group * dim) : zeros;
        outs[m] = row_at(out, piece->first_query + first + m / group, BF16) + 2 * (head * group + m % group) * dim;
        for (long i = 0; m < num && i < 2 * dim; i += 64) __builtin_prefetch(outs[m] + i, 1, 2);
        positions[m / 16][m % 16] = (int)(position + m / group);
        f->best[m / 16][m % 16] = sinks ? sinks[m % group] * 1.44269504f / scale_of(kv) : -1e30f;
        f->total[m / 16][m % 16] = sinks ? 1.0f : 0.0f;
    }
    for (long i = 0; i < dim / 2; i += LANES)
        for (int half = 0; half < 2; half++) {
            vu square[LANES]; /* a row for each query, then for each of the pairs i .. i + 15 */
            for (int lane = 0; lane < LANES; lane++) {
                const char *query = queries[16 * half + lane] + 4 * i;
                __builtin_prefetch(query + 2 * num_tokens * q.stride, 0, 2); /* for the next tile */
                memcpy(square + lane, query, sizeof *square);
            }
            transpose(square);
            for (int lane = 0; lane < LANES; lane++) f->queries[i + lane][half] = square[lane];
        }
    for (long begin = first_seen(kv, position) / 32 * 32, start = begin, tokens; start < length; start += tokens) {
        const long in_block = start % TOKENS, left = (length - start + 31) / 32 * 32;
        tokens = left < TOKENS - in_block ? left : TOKENS - in_block;
        for (long t = 0; t < tokens; t += 32)
            multiply(keys + (start + t) * dim / 2, 32 * LANES, f->queries, f->scores + t, dim / 2, 0);
        const long clear = start < first_seen(kv, length - 1) ? 0 : position + 1 - start;
        weigh(f, kv, positions, start, tokens, clear, start == begin);
        for (long i = 0; i < dim; i += 32)
            multiply(values + start * dim / 2 + i * LANES, dim * LANES, f->weights, f->sums + i, tokens / 2,
                     start > begin);
    }
    for (int half = 0; half < 2; half++) {
        const vf factor = 1.0f / f->total[half];
        for (long i = 0; i < dim; i += LANES) {
            vu square[LANES]; /* a row for each of the numbers i .. i + 15, then for each query */
            for (int lane = 0; lane < LANES; lane++) square[lane] = (vu)(f->sums[i + lane][half] * factor);
            transpose(square);
            for (long m = 16 * half; m < num && m < 16 * half + 16; m++) store(outs[m], i, (vf)square[m % 16], BF16);
        }
    }
}

static void attend_piece(const Paged *kv, const Piece *piece, long head, char *scratch, Rows q, Rows out) {
    const long length = piece->position + piece->num_queries, step = QUERIES / group_size(kv);
    uint32_t *keys = (uint32_t *)scratch, *values = keys + (length + TOKENS - 1) / TOKENS * TOKENS / 2 * kv->dim;
    TileConfig before;
    Flash flash;
    copy_row(kv, piece->row, kv_head_of(kv, head), first_seen(kv, piece->position), length, keys, values);
    if (baton_has_amx()) configure_tiles(&before);
    for (long first = 0; first < piece->num_queries; first += step) {
        const long left = piece->num_queries - first;
        attend_tile(&flash, kv, piece, head, first, left < step ? left : step, keys, values, q, out);
    }
    if (baton_has_amx()) restore_tiles(&before);
}

EXPORT void baton_long_attention(const Paged *kv, const Piece *pieces, long num_pieces, char *scratch,
                                 long scratch_bytes, Rows q, Rows out) {
#pragma omp parallel for schedule(dynamic) if (num_pieces * kv->groups > 1)
    for (long unit = 0; unit < num_pieces * kv->groups; unit++)
        attend_piece(kv, pieces + unit / kv->groups, unit % kv->groups,
                     scratch + omp_get_thread_num() * scratch_bytes, q, out);
}
#else
EXPORT void baton_long_attention(const Paged *kv, const Piece *pieces, long num_pieces, char *scratch,
                                 long scratch_bytes, Rows q, Rows out) {}
#endif
