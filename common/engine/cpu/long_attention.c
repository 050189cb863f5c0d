/* Attention for long extends in bfloat16: flash attention (Dao et al., arXiv 2205.14135), tiled, by AMX where the
 * processor has it, else by dot products of pairs, or by products in float32.
 *
 * Everything is computed transposed. Scores are [tokens, queries], so that a query is one lane of a vector, whose maximum
 * and sum need no shuffles. Keys and values are copied first. With dot products, two neighbouring numbers of a key or a
 * query, or of two neighbouring tokens in the second product, are packed into one word; else a word is a number in
 * float32. A query's result has the same bits wherever its row is cut.
 *
 * head_dim must be a multiple of 32 up to MAX_DIM, and the group size at most 16.
 */
#include "dot_attention.h"
#include "products.h"

#if defined(SIMD) && defined(__linux__)

int omp_get_thread_num(void); /* of the runtime that torch has loaded */

enum { EACH = DOTS >> BF16 & 1 ? 2 : 1 }; /* numbers in a word of queries, keys, values and weights */
/* PRODUCTS: the format of words in products. WORDS: as which format bfloat16 is loaded to become words. */
enum { QUERIES = 2 * LANES, TOKENS = 256, MAX_DIM = 256, PRODUCTS = EACH == 2 ? BF16 : F32, WORDS = F32 + BF16 - PRODUCTS };

/* Two vectors have a number of each of the QUERIES queries. */
typedef struct {
    vu queries[MAX_DIM / EACH][2];
    vf scores[TOKENS][2];
    vu weights[TOKENS / EACH][2];
    vf sums[MAX_DIM][2];
    vf best[2], total[2];
} Flash;

static const char zeros[2 * MAX_DIM]; /* a token or a query that does not exist */

/* sums [QUERIES, QUERIES], or zero unless `adds`, plus x [QUERIES, words] times by [words, QUERIES]. x consists of parts
 * [QUERIES, LANES], one after the other. */
INLINE void multiply(const uint32_t *x, const vu (*by)[2], vf (*sums)[2], long words, int adds) {
#ifdef __AMX_BF16__
    if (baton_has_amx()) {
        multiply_tiles((const char *)x, 64, 1024, 2048, (const char *)by, 2, (char *)sums, words / 16, adds, 0, (Ahead){0});
        return;
    }
#endif
    for (vf(*end)[2] = sums + QUERIES; sums < end; sums += ROWS, x += ROWS * LANES) {
        const long fetched = EACH == 1 && end - sums == QUERIES ? 4 * QUERIES : 0; /* by the first rows, for the next x */
        vf parts[ROWS][BLOCKS * PARTS];
        for (int i = 0; i < 2 * ROWS; i++) parts[i / 2][i % 2] = adds ? sums[i / 2][i % 2] : (vf){0};
        for (long k = 0; k < words; k += LANES)
            multiply_dots(x + k * QUERIES, LANES, (const char *)(by + k), 2, parts, LANES, ROWS, PRODUCTS,
                          (Ahead){.at = (const char *)(x + (words + k) * QUERIES), .bytes = fetched});
        for (int i = 0; i < 2 * ROWS; i++) sums[i / 2][i % 2] = parts[i / 2][i % 2];
    }
}

/* Where number i of the values from token t on is in the copy: [tokens / TOKENS, dim / QUERIES, words of TOKENS tokens /
 * LANES, QUERIES, LANES] words. */
INLINE void *value_at(const uint32_t *values, long dim, long i, long t) {
    const long at = (t / TOKENS * dim + i / QUERIES * QUERIES) * TOKENS + t % TOKENS * QUERIES;
    return (uint32_t *)values + at / EACH + i % QUERIES * LANES;
}

/* Copy the KV of tokens begin .. length - 1 in the order in which it is read, keys as [tokens / QUERIES, words of a token /
 * LANES, QUERIES tokens, LANES] words. Both are zero before and beyond, up to a multiple of QUERIES tokens. */
static void copy_row(const Paged *kv, long row, long head, long begin, long length, uint32_t *keys, uint32_t *values) {
    const long dim = kv->dim;
    for (long start = begin / QUERIES * QUERIES; start < length; start += QUERIES) {
        const char *from[QUERIES]; /* values of each token */
        for (long t = start; t < start + QUERIES; t++) {
            const ptrdiff_t at = t < begin || t >= length ? -1 : token_at(kv, row, head, t) * 2;
            const char *key = at < 0 ? zeros : kv->layer.keys + at;
            from[t - start] = at < 0 ? zeros : kv->layer.values + at;
            for (long i = 0; i < dim / EACH; i += LANES)
                store((char *)(keys + start * dim / EACH + (2 * i + t - start) * LANES), 0, load(key, i, WORDS), F32);
        }
        for (long t = 0; t < QUERIES; t += EACH * LANES)
            for (long i = 0; i < dim; i += LANES) {
                vu square[LANES]; /* a row for each token, or pair of tokens */
                for (int row = 0; row < LANES; row++) {
                    square[row] = (vu)load(from[t + EACH * row + EACH - 1], i, BF16);
                    if (EACH == 2) square[row] |= (vu)load(from[t + EACH * row], i, BF16) >> 16;
                }
                transpose(square);
                memcpy(value_at(values, dim, i, start + t), square, sizeof square);
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
            f->weights[t / EACH][half] = EACH == 2 ? (low >> 16) | (high & 0xffff0000) : (vu)first;
            if (EACH == 1) f->weights[t + 1][half] = (vu)second;
            total += first + second;
        }
        f->best[half] = best[half], f->total[half] = total;
        for (long i = 0; i < kv->dim && !is_first; i++) f->sums[i][half] *= shrink;
    }
}

/* Up to QUERIES queries: those of at most `most` neighbouring tokens, from token `first` of the piece on. */
static void attend_tile(Flash *f, const Paged *kv, const Piece *piece, long head, long first, long most,
                        const uint32_t *keys, const uint32_t *values, Rows q, Rows out) {
    const long left_over = piece->num_queries - first, num_tokens = left_over < most ? left_over : most;
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
        positions[m / LANES][m % LANES] = (int)(position + m / group);
        f->best[m / LANES][m % LANES] = sinks ? sinks[m % group] * 1.44269504f / scale_of(kv) : -1e30f;
        f->total[m / LANES][m % LANES] = sinks ? 1.0f : 0.0f;
    }
    for (long i = 0; i < dim / EACH; i += LANES)
        for (int half = 0; half < 2; half++) {
            vu square[LANES]; /* a row for each query, then for each word from i on */
            for (int lane = 0; lane < LANES; lane++) {
                const char *query = queries[LANES * half + lane];
                __builtin_prefetch(query + 2 * (EACH * i + num_tokens * q.stride), 0, 2); /* for the next tile */
                square[lane] = (vu)load(query, i, WORDS);
            }
            transpose(square);
            for (int lane = 0; lane < LANES; lane++) f->queries[i + lane][half] = square[lane];
        }
    for (long begin = first_seen(kv, position) / QUERIES * QUERIES, start = begin, tokens; start < length; start += tokens) {
        const long in_block = start % TOKENS, left = (length - start + QUERIES - 1) / QUERIES * QUERIES;
        tokens = left < TOKENS - in_block ? left : TOKENS - in_block;
        for (long t = 0; t < tokens; t += QUERIES)
            multiply(keys + (start + t) * dim / EACH, f->queries, f->scores + t, dim / EACH, 0);
        const long clear = start < first_seen(kv, length - 1) ? 0 : position + 1 - start;
        weigh(f, kv, positions, start, tokens, clear, start == begin);
        for (long i = 0; i < dim; i += QUERIES)
            multiply(value_at(values, dim, i, start), f->weights, f->sums + i, tokens / EACH, start > begin);
    }
    for (int half = 0; half < 2; half++) {
        const vf factor = 1.0f / f->total[half];
        for (long i = 0; i < dim; i += LANES) {
            vu square[LANES]; /* a row for each number from i on, then for each query */
            for (int lane = 0; lane < LANES; lane++) square[lane] = (vu)(f->sums[i + lane][half] * factor);
            transpose(square);
            for (long m = LANES * half; m < num && m < LANES * half + LANES; m++)
                store(outs[m], i, (vf)square[m % LANES], BF16);
        }
    }
}

static void attend_piece(const Paged *kv, const Piece *piece, long head, char *scratch, Rows q, Rows out) {
    const long length = piece->position + piece->num_queries, step = QUERIES / group_size(kv);
    uint32_t *keys = (uint32_t *)scratch, *values = keys + (length + TOKENS - 1) / TOKENS * TOKENS / EACH * kv->dim;
    TileConfig before;
    Flash flash;
    copy_row(kv, piece->row, kv_head_of(kv, head), first_seen(kv, piece->position), length, keys, values);
    if (baton_has_amx()) configure_tiles(&before);
    for (long first = 0; first < piece->num_queries; first += step)
        attend_tile(&flash, kv, piece, head, first, step, keys, values, q, out);
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
