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
enum { PRODUCTS = EACH == 2 ? BF16 : F32, WORDS = F32 + BF16 - PRODUCTS };
/* TOKENS: of a block. TILES: so many use a block, one after the other, while it is in the second cache. */
enum { QUERIES = 2 * LANES, TOKENS = 256, TILES = 8, MAX_DIM = 256 };

/* Queries, in two vectors a number of each, and their results so far. They see tokens begin .. length - 1, each query at
 * least up to `position`. */
typedef struct {
    vu queries[MAX_DIM / EACH][2];
    vf sums[MAX_DIM][2], best[2], total[2];
    vi positions[2];
    long num, position, begin, length; /* num: of the queries, at most QUERIES */
    char *outs[QUERIES];
} Tile;

typedef struct {
    vf scores[TOKENS][2]; /* of one tile with a block */
    vu weights[TOKENS / EACH][2];
    Tile tiles[TILES];
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

/* Turn the scores of some tokens, from `start` on, into weights. */
static void weigh(Flash *f, Tile *tile, const Paged *kv, long start, long tokens) {
    const float scale = scale_of(kv), soft_cap = kv->layer.soft_cap;
    const long clear = start < first_seen(kv, tile->length - 1) ? 0 : tile->position + 1 - start; /* all queries see them */
    vf best[2] = {tile->best[0], tile->best[1]};
    for (long t = 0; t < tokens; t++)
        for (int half = 0; half < 2; half++) {
            vf score = f->scores[t][half];
            if (soft_cap != 0.0f) score = capped(score * kv->layer.scale, soft_cap);
            if (t >= clear) /* far below the first best */
                score = choose(is_seen(tile->positions[half] - (int)(start + t), kv->layer.window), score, splat(-2e30f));
            if (t >= clear || soft_cap != 0.0f) f->scores[t][half] = score;
            best[half] = larger(best[half], score);
        }
    for (int half = 0; half < 2; half++) {
        const vf shrink = two_to_the((tile->best[half] - best[half]) * scale), base = best[half] * scale;
        vf total = tile->total[half] * shrink;
        for (long t = 0; t < tokens; t += 2) {
            const vf first = two_to_the(f->scores[t][half] * scale - base);
            const vf second = two_to_the(f->scores[t + 1][half] * scale - base);
            const vu low = (vu)first + 0x8000, high = (vu)second + 0x8000; /* rounded: never NaN nor negative */
            f->weights[t / EACH][half] = EACH == 2 ? (low >> 16) | (high & 0xffff0000) : (vu)first;
            if (EACH == 1) f->weights[t + 1][half] = (vu)second;
            total += first + second;
        }
        tile->best[half] = best[half], tile->total[half] = total;
        for (long i = 0; i < kv->dim && start > tile->begin; i++) tile->sums[i][half] *= shrink;
    }
}

/* Begin with the queries of at most `most` neighbouring tokens, from token `first` of the piece on. */
static void begin_tile(Tile *tile, const Paged *kv, const Piece *piece, long head, long first, long most, Rows q, Rows out) {
    const long left_over = piece->num_queries - first, num_tokens = left_over < most ? left_over : most;
    const long group = group_size(kv), dim = kv->dim, num = num_tokens * group, position = piece->position + first;
    const char *from = row_at(q, piece->first_query + first, BF16) + 2 * head * group * dim;
    const float *sinks = kv->layer.sinks ? kv->layer.sinks + head * group : 0;
    const char *queries[QUERIES];
    tile->num = num, tile->position = position, tile->length = position + num_tokens;
    tile->begin = first_seen(kv, position) / QUERIES * QUERIES;
    for (int m = 0; m < QUERIES; m++) {
        queries[m] = m < num ? from + 2 * (m / group * q.stride + m % group * dim) : zeros;
        tile->outs[m] = row_at(out, piece->first_query + first + m / group, BF16) + 2 * (head * group + m % group) * dim;
        for (long i = 0; m < num && i < 2 * dim; i += 64) __builtin_prefetch(tile->outs[m] + i, 1, 2);
        tile->positions[m / LANES][m % LANES] = (int)(position + m / group);
        tile->best[m / LANES][m % LANES] = sinks ? sinks[m % group] * 1.44269504f / scale_of(kv) : -1e30f;
        tile->total[m / LANES][m % LANES] = sinks ? 1.0f : 0.0f;
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
            for (int lane = 0; lane < LANES; lane++) tile->queries[i + lane][half] = square[lane];
        }
}

/* What the tokens of the block from `block` on add to a tile. */
static void attend_block(Flash *f, Tile *tile, const Paged *kv, long block, const uint32_t *keys, const uint32_t *values) {
    const long dim = kv->dim, start = block > tile->begin ? block : tile->begin;
    const long length = (tile->length + QUERIES - 1) / QUERIES * QUERIES;
    const long tokens = (length < block + TOKENS ? length : block + TOKENS) - start;
    if (tokens <= 0) return;
    for (long t = 0; t < tokens; t += QUERIES)
        multiply(keys + (start + t) * dim / EACH, tile->queries, f->scores + t, dim / EACH, 0);
    weigh(f, tile, kv, start, tokens);
    for (long i = 0; i < dim; i += QUERIES)
        multiply(value_at(values, dim, i, start), f->weights, tile->sums + i, tokens / EACH, start > tile->begin);
}

static void end_tile(const Tile *tile, long dim) {
    for (int half = 0; half < 2; half++) {
        const vf factor = 1.0f / tile->total[half];
        for (long i = 0; i < dim; i += LANES) {
            vu square[LANES]; /* a row for each number from i on, then for each query */
            for (int lane = 0; lane < LANES; lane++) square[lane] = (vu)(tile->sums[i + lane][half] * factor);
            transpose(square);
            for (long m = LANES * half; m < tile->num && m < LANES * half + LANES; m++)
                store(tile->outs[m], i, (vf)square[m % LANES], BF16);
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
    for (long first = 0, num = 0; first < piece->num_queries; num = 0) {
        Tile *tiles = flash.tiles;
        for (; num < TILES && first < piece->num_queries; first += step)
            begin_tile(tiles + num++, kv, piece, head, first, step, q, out);
        for (long block = tiles[0].begin / TOKENS * TOKENS; block < tiles[num - 1].length; block += TOKENS)
            for (int i = 0; i < num; i++) attend_block(&flash, tiles + i, kv, block, keys, values);
        for (int i = 0; i < num; i++) end_tile(tiles + i, kv->dim);
    }
    if (baton_has_amx()) restore_tiles(&before);
}

#endif

EXPORT void baton_long_attention(const Paged *kv, const Piece *pieces, long num_pieces, char *scratch,
                                 long scratch_bytes, Rows q, Rows out) {
#if defined(SIMD) && defined(__linux__)
#pragma omp parallel for schedule(dynamic) if (num_pieces * kv->groups > 1)
    for (long unit = 0; unit < num_pieces * kv->groups; unit++)
        attend_piece(kv, pieces + unit / kv->groups, unit % kv->groups,
                     scratch + omp_get_thread_num() * scratch_bytes, q, out);
#endif
}
