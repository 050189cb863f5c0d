/* Attention that reads keys and values in their pages, each once: online softmax (Milakov and Gimelshein, arXiv
 * 1805.02867) over tiles of tokens.
 *
 * The queries of a group of heads, which have one KV head, share each read, for a few neighbouring tokens. Sums are
 * float32. The caller checks that a group has at most MAX_QUERIES heads, and that head_dim is a multiple of 16 and at
 * most MAX_DIM.
 */
#include "dot_attention.h"
#include "parts.h"

#include <math.h>

int omp_get_max_threads(void); /* of the runtime that torch has loaded */

enum { TILE = 64, MAX_QUERIES = 16, MAX_DIM = 256 };

/* One query and its result so far. with_dots() keeps query and weights in 16 bits, integers in these units. */
typedef struct {
    float query[MAX_DIM], sums[MAX_DIM];
    float scores[TILE], best, total, query_unit, weight_unit;
    uint32_t weights[TILE / 2];
} __attribute__((aligned(64))) Query;

/* Places of `count` neighbouring tokens of a row, a multiple of 16. Some may lie beyond the end of the row. */
typedef struct {
    int count;
    ptrdiff_t at[TILE]; /* elements where they begin in the keys and in the values of KV head 0 */
    ptrdiff_t scale_at[TILE]; /* of their scales, likewise */
} Places;

/* Keys, or values, of one KV head. */
typedef struct {
    const char *elements;
    const Places *places;
} Tile;

/* Whether dot_attention.h computes this. */
INLINE int with_dots(long dim, int dtype) { return DOTS >> dtype & 1 && dim % (2 * LANES) == 0; }

EXPORT int baton_has_dots(int dtype) { return with_dots(2 * LANES, dtype); }

/* Fetch `next` elements of a token, one line of memory at each call with another `i`, unless there is no next tile. */
INLINE void fetch(const Tile *next, long t, long i, int dtype) {
    const ptrdiff_t item = (ptrdiff_t)item_bytes(dtype);
    if (next && i * item % 64 == 0) __builtin_prefetch(next->elements + (next->places->at[t] + i) * item, 0, 2);
}

/* Scores of `count` queries with one key. `count` is a constant, so that sums stay in registers. */
INLINE void score(Query *q, const int count, const Tile *keys, const Tile *next, long dim, long t, int dtype) {
    vf parts[4] = {{0}};
    for (long i = 0; i < dim; i += LANES) {
        vf key = load(keys->elements, keys->places->at[t] + i, dtype);
        fetch(next, t, i, dtype);
        for (int m = 0; m < count; m++) parts[m] += key * load((const char *)q[m].query, i, F32);
    }
    for (int m = 0; m < count; m++) q[m].scores[t] = sum(parts[m]);
}

/* Add weighted values to the sums of `count` queries; the sums stay in registers. */
INLINE void add_values(Query *q, const int count, const Tile *values, const Tile *next, long dim, int dtype) {
    for (long i = 0; i < dim; i += BLOCK) {
        vf parts[4][PARTS];
        for (int m = 0; m < count; m++)
            for (int j = 0; j < PARTS; j++) parts[m][j] = load((const char *)q[m].sums, i + j * LANES, F32);
        for (long t = 0; t < values->places->count; t++) {
            fetch(next, t, i, dtype);
            for (int j = 0; j < PARTS; j++) {
                const vf value = load(values->elements, values->places->at[t] + i + j * LANES, dtype);
                for (int m = 0; m < count; m++) parts[m][j] += value * q[m].scores[t];
            }
        }
        for (int m = 0; m < count; m++)
            for (int j = 0; j < PARTS; j++) store((char *)q[m].sums, i + j * LANES, parts[m][j], F32);
    }
}

/* Turn scores into weights relative to the best score so far; if the best rises, scale earlier sums down. The query is
 * number `own` of the tile's tokens, or lies outside. `scales`: of the keys, or null. */
INLINE void reweigh(Query *q, const Paged *kv, int count, const float *scales, long own) {
    const float scale = kv->layer.scale, soft_cap = kv->layer.soft_cap;
    char *scores = (char *)q->scores;
    vf highest = splat(q->best), total = {0};
    for (int t = 0; t < count; t += LANES) {
        const vf factor = scales ? load((const char *)scales, t, F32) * (scale * q->query_unit) : splat(scale);
        vf scaled = load(scores, t, F32) * factor;
        if (soft_cap != 0.0f) scaled = capped(scaled, soft_cap);
        scaled = choose(is_seen((int32_t)own - t - lane_numbers(), kv->layer.window), scaled, splat(-INFINITY));
        store(scores, t, scaled, F32);
        highest = larger(highest, scaled);
    }
    const float best = highest_of(highest);
    if (best > q->best) {
        const float shrink = expf(q->best - best);
        q->total *= shrink;
        for (long i = 0; i < kv->dim; i += LANES)
            store((char *)q->sums, i, load((const char *)q->sums, i, F32) * shrink, F32);
        q->best = best;
    }
    for (int t = 0; t < count; t += LANES) {
        const vf score = load(scores, t, F32);
        const vf weight = choose(score == splat(-INFINITY), (vf){0}, exponential(score - best));
        store(scores, t, weight, F32);
        total += weight;
    }
    q->total += sum(total);
}

/* The scores of all queries with a tile's keys, or else their sums with its values. `next` is fetched meanwhile. */
INLINE void each_four(Query *q, int num, const Tile *tile, const Tile *next, long dim, int of_keys, int dtype) {
    int m = 0;
#define PART(at_once)                                                                                            \
    if (of_keys)                                                                                                 \
        for (long t = 0; t < tile->places->count; t++) score(q + m, at_once, tile, m ? 0 : next, dim, t, dtype); \
    else                                                                                                         \
        add_values(q + m, at_once, tile, m ? 0 : next, dim, dtype);
    for (; m + 4 <= num; m += 4) { PART(4) }
    for (; m + 2 <= num; m += 2) { PART(2) }
    if (m < num) { PART(1) }
#undef PART
}

#ifdef __AVX512VNNI__
INLINE void score_all(Query *q, int num, const Tile *keys, const Tile *next, long dim, int dtype) {
    for (int m = 0; m < num; m += 2) {
        Query *other = q + (m + 1 < num ? m + 1 : m);
        for (int t = 0; t < keys->places->count; t += 8) {
#define SCORES(dim) \
    score_eight((const char *)q[m].query, (const char *)other->query, keys->elements, keys->places->at + t, dim, \
                m ? 0 : next->elements, next->places->at + t, dtype)
            const vf scores = dim == 128 ? SCORES(128) : dim == 64 ? SCORES(64) : SCORES(dim);
#undef SCORES
            memcpy(other->scores + t, (const char *)&scores + 32, 32);
            memcpy(q[m].scores + t, &scores, 32);
        }
    }
}

INLINE void add_all(Query *q, int num, const Tile *values, const Tile *next, long dim, int dtype) {
    enum { STRIDE = sizeof(Query) / 4 };
    const ptrdiff_t *at = values->places->at, item = (ptrdiff_t)item_bytes(dtype);
    const int width = dim % 128 == 0 ? 128 : 32, tokens = values->places->count;
    for (int m = 0; m < num; m++) q[m].weight_unit = round_to_pairs(q[m].scores, q[m].weights, tokens, dtype);
    for (int m = 0; m < num; m += 2)
        for (long i = 0; i < dim; i += width) {
            const char *elements = values->elements + i * item, *ahead = m ? 0 : next->elements + i * item;
            float *sums = q[m].sums + i;
#define ADD(count, width) \
    add_pairs(sums, q[m].weights, &q[m].weight_unit, STRIDE, count, elements, at, tokens, width, ahead, \
              next->places->at, dtype)
            if (num - m > 1)
                width == 128 ? ADD(2, 128) : ADD(2, 32);
            else
                width == 128 ? ADD(1, 128) : ADD(1, 32);
#undef ADD
        }
}
#else
#define score_all(...)
#define add_all(...)
#define round_to_pairs(...) 1.0f
#define in_order(...)
#endif

INLINE void read_scales(const Tile *tile, float *scales) {
    for (int t = 0; t < tile->places->count; t++)
        scales[t] = power_of_two((uint8_t)tile->elements[tile->places->scale_at[t]]);
}

/* The weights of a tile's tokens for `num` queries, of one group of heads. The first query is number `own` of the
 * tokens. */
INLINE void weigh(Query *q, int num, const Paged *kv, const Tile *keys, const Tile *next, long own, int dtype) {
    float scales[TILE];
    if (with_dots(kv->dim, dtype))
        score_all(q, num, keys, next, kv->dim, dtype);
    else
        each_four(q, num, keys, next, kv->dim, 1, dtype);
    if (dtype == I8) read_scales(keys, scales);
    for (int m = 0; m < num; m++)
        reweigh(q + m, kv, keys->places->count, dtype == I8 ? scales : 0, own + m / group_size(kv));
}

INLINE void add_weighted(Query *q, int num, const Paged *kv, const Tile *values, const Tile *next, int dtype) {
    float scales[TILE];
    if (dtype == I8) read_scales(values, scales);
    for (int m = 0; dtype == I8 && m < num; m++)
        for (int t = 0; t < values->places->count; t++) q[m].scores[t] *= scales[t];
    if (with_dots(kv->dim, dtype))
        add_all(q, num, values, next, kv->dim, dtype);
    else
        each_four(q, num, values, next, kv->dim, 0, dtype);
}

/* Find the tokens from `start` to `end`. The last one of the row stands in for those beyond it. */
INLINE void locate(const Paged *kv, long row, long start, long end, long length, Places *to) {
    to->count = (int)((end < length ? end : length) - start + 15) / 16 * 16;
    for (long i = 0; i < end - start; i++) {
        const long token = start + i < length ? start + i : length - 1;
        to->at[i] = token_at(kv, row, 0, token);
        to->scale_at[i] = to->at[i] + scale_after(kv, place_in_page(kv, token));
    }
}

INLINE Tile tile_of(const Paged *kv, const char *elements, long group, const Places *places, int dtype) {
    return (Tile){elements + kv_head_of(kv, group) * kv->head_stride * (ptrdiff_t)item_bytes(dtype), places};
}

/* One piece of a row at the groups of heads first_head .. end_head - 1. q, out: [tokens, heads, dim], strides in
 * elements. `pages`: the dtype of the pages, a constant; `inputs`: that of q and out, which is the same unless the
 * pages are rounded.
 *
 * Memory delivers most when it is read in the order of its addresses, and the heads of a page are neighbours. So the
 * keys of all groups of a tile come first, then their values, and each asks for those that are read next. */
INLINE void attend(const Paged *kv, const Piece *piece, long first_head, long end_head, Rows q, Rows out, int inputs,
                   int pages) {
    const int dtype = pages == I8 ? inputs : pages;
    Query queries[MAX_QUERIES];
    Places places[2]; /* of this tile and the next */
    const long group = group_size(kv), dim = kv->dim;
    const int num = (int)(piece->num_queries * group), is_dotted = with_dots(dim, pages);
    const int all = num * (int)(end_head - first_head);
    /* What the first query does not see, no other one sees; the last one sees no token from `length` on. */
    const long begin = first_seen(kv, piece->position), length = piece->position + piece->num_queries;
    const float *sinks = kv->layer.sinks;
    locate(kv, piece->row, begin, begin + TILE, length, places);
    for (int m = 0; m < all; m++) {
        const long head = (first_head + m / num) * group + m % num % group;
        const ptrdiff_t from = (piece->first_query + m % num / group) * q.stride + head * dim;
        for (long i = 0; i < dim; i += LANES)
            store((char *)queries[m].query, i, load(q.at, from + i, dtype), F32);
        queries[m].query_unit = is_dotted ? round_to_pairs(queries[m].query, queries[m].query, dim, pages) : 1.0f;
        memset(queries[m].sums, 0, (size_t)dim * sizeof(float));
        queries[m].best = sinks ? sinks[head] : -INFINITY;
        queries[m].total = sinks ? 1.0f : 0.0f;
    }
    const char *keys = kv->layer.keys, *values = kv->layer.values;
    for (long start = begin, turn = 0; start < length; start += TILE, turn ^= 1) {
        const Places *here = places + turn, *later = start + TILE < length ? places + !turn : here;
        if (later != here) locate(kv, piece->row, start + TILE, start + 2 * TILE, length, places + !turn);
        for (long head = first_head; head < end_head; head++) {
            const Tile tile = tile_of(kv, keys, head, here, pages);
            const Tile next = head + 1 < end_head ? tile_of(kv, keys, head + 1, here, pages)
                                                  : tile_of(kv, values, first_head, here, pages);
            weigh(queries + (head - first_head) * num, num, kv, &tile, &next, piece->position - start, pages);
        }
        for (long head = first_head; head < end_head; head++) {
            const Tile tile = tile_of(kv, values, head, here, pages);
            const Tile next = head + 1 < end_head ? tile_of(kv, values, head + 1, here, pages)
                                                  : tile_of(kv, keys, first_head, later, pages);
            add_weighted(queries + (head - first_head) * num, num, kv, &tile, &next, pages);
        }
    }
    for (int m = 0; m < all; m++) {
        const long head = (first_head + m / num) * group + m % num % group;
        const ptrdiff_t to = (piece->first_query + m % num / group) * out.stride + head * dim;
        const float share = 1.0f / queries[m].total;
        for (long i = 0; is_dotted && i < dim; i += 2 * LANES) in_order(queries[m].sums + i);
        for (long i = 0; i < dim; i += LANES)
            store(out.at, to + i, load((const char *)queries[m].sums, i, F32) * share, dtype);
    }
}

/* Neighbouring groups of heads that a thread computes together: as many as fit, if that leaves work for every thread. */
INLINE long heads_at_once(const Paged *kv, const Piece *piece, long num_pieces) {
    const long fitting = MAX_QUERIES / (piece->num_queries * group_size(kv)), threads = omp_get_max_threads();
    const long fair = (num_pieces * kv->groups + threads - 1) / threads;
    return fitting < fair ? fitting : fair;
}

EXPORT void baton_paged_attention(const Paged *kv, const Piece *pieces, long num_pieces, Rows q, Rows out, int dtype) {
#pragma omp parallel for schedule(dynamic) if (num_pieces * kv->groups > 1)
    for (long unit = 0; unit < num_pieces * kv->groups; unit++) {
        const Piece *piece = pieces + unit / kv->groups;
        const long head = unit % kv->groups, count = heads_at_once(kv, piece, num_pieces);
        const long end = head + count < kv->groups ? head + count : kv->groups;
        if (head % count != 0) continue;
        if (kv->dtype == I8)
            attend(kv, piece, head, end, q, out, dtype, I8);
        else
            WITH_CONSTANT(dtype, attend, kv, piece, head, end, q, out, dtype);
    }
}

/* Round a token's key or value to int8, with the least power of two as scale that lets no number exceed 127. */
static void write_rounded(const char *from, char *to, char *scale, long dim, int dtype) {
    const float best = largest_magnitude(from, 0, dim, dtype);
    uint32_t bits;
    memcpy(&bits, &best, sizeof bits);
    const int least = (int)(bits >> 23) - 6 + ((bits & 0x7fffff) > 0x7effff);
    const int biased = best != best ? 255 : least < 1 ? 1 : least; /* 255: infinite */
    *scale = (char)biased;
    for (long i = 0; i < dim; i += LANES) {
        const vf whole = to_nearest(load(from, i, dtype) * power_of_two(254 - (uint32_t)biased));
        const vb narrow = __builtin_convertvector(__builtin_convertvector(whole, vi), vb);
        memcpy(to + i, &narrow, sizeof narrow);
    }
}

/* Write new keys and values [tokens, kv_heads, dim] (strides in elements) into their pages. */
EXPORT void baton_write_kv(const Paged *kv, const int64_t *pages, const int64_t *offsets, long num_tokens,
                           const char *k, const char *v, long stride, int dtype) {
    const ptrdiff_t item = (ptrdiff_t)item_bytes(dtype), head_bytes = kv->dim * item;
#pragma omp parallel for schedule(static) if (num_tokens > 64)
    for (long n = 0; n < num_tokens; n++)
        for (long head = 0; head < kv->kv_heads; head++) {
            ptrdiff_t to = pages[n] * kv->page_stride + head * kv->head_stride + offsets[n] * kv->dim;
            ptrdiff_t from = n * stride + head * kv->dim, scale = to + scale_after(kv, offsets[n]);
            if (kv->dtype == I8) {
                write_rounded(k + from * item, kv->layer.keys + to, kv->layer.keys + scale, kv->dim, dtype);
                write_rounded(v + from * item, kv->layer.values + to, kv->layer.values + scale, kv->dim, dtype);
                continue;
            }
            memcpy(kv->layer.keys + to * item, k + from * item, (size_t)head_bytes);
            memcpy(kv->layer.values + to * item, v + from * item, (size_t)head_bytes);
        }
}
