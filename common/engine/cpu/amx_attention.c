/* Attention for long extends in bfloat16 on processors with AMX: flash attention (Dao et al., arXiv 2205.14135), tiled.
 *
 * Everything is computed transposed. Scores are [tokens, queries], so that tiles load keys directly from their pages,
 * and a query is one lane of a vector, whose maximum and sum need no shuffles. The second product takes the weights of
 * two neighbouring tokens packed into one word. Only values are copied first, pair by pair.
 *
 * head_dim must be a multiple of 32 up to MAX_DIM, pages a multiple of 16 tokens, and the group size a divisor of 32.
 */
#include "paged.h"

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#include <immintrin.h>
#include <math.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { QUERIES = 32, TOKENS = 256, MAX_DIM = 256 };

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileConfig;

typedef struct {
    uint32_t queries[MAX_DIM / 2][QUERIES]; /* pairs of neighbouring numbers of each query */
    float scores[TOKENS][QUERIES];
    uint32_t weights[TOKENS / 2][QUERIES]; /* pairs of neighbouring tokens */
    float sums[MAX_DIM][QUERIES];
    vf best[2], total[2];
} __attribute__((aligned(64))) Flash;

/* GCC does not know that tile instructions read memory: this forces all earlier stores out. */
#define SETTLE(pointer) __asm__ volatile("" : : "r"(pointer) : "memory")

/* Four tiles (a 32 x 32 square of floats) += (tiles 4 over 5) times (tiles 6 beside 7). */
#define MULTIPLY_SQUARE() \
    do {                  \
        _tile_dpbf16ps(0, 4, 6); \
        _tile_dpbf16ps(1, 4, 7); \
        _tile_dpbf16ps(2, 5, 6); \
        _tile_dpbf16ps(3, 5, 7); \
    } while (0)

/* 16 rows of 32 words into or out of two neighbouring tiles. */
#define LOAD_WIDE(left, right, rows)                      \
    do {                                                  \
        _tile_loadd(left, &(rows)[0][0], sizeof *(rows)); \
        _tile_loadd(right, &(rows)[0][16], sizeof *(rows)); \
    } while (0)
#define STORE_WIDE(left, right, rows)                      \
    do {                                                   \
        _tile_stored(left, &(rows)[0][0], sizeof *(rows)); \
        _tile_stored(right, &(rows)[0][16], sizeof *(rows)); \
    } while (0)

/* A process must ask Linux for permission to use AMX. */
EXPORT int baton_has_amx(void) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}

static void configure_tiles(TileConfig *before) {
    TileConfig ours = {.palette = 1};
    for (int tile = 0; tile < 8; tile++) ours.row_bytes[tile] = 64, ours.rows[tile] = 16;
    _tile_storeconfig(before);
    SETTLE(&ours);
    _tile_loadconfig(&ours);
}

/* oneDNN remembers per thread its last tile configuration, so it must be restored. */
static void restore_tiles(const TileConfig *before) {
    SETTLE(before);
    if (before->palette)
        _tile_loadconfig(before);
    else
        _tile_release();
}

/* Values of tokens 0 .. length as [length / 32][dim][32], zero beyond the end. */
static void pack_values(const Paged *kv, long row, long head, long length, uint16_t *packed) {
    const long dim = kv->dim, padded = (length + 31) / 32 * 32;
    for (long t = 0; t < padded; t += 2) {
        uint32_t *to = (uint32_t *)(packed + t / 32 * 32 * dim) + t % 32 / 2;
        const uint16_t *first = (const uint16_t *)kv->values, *second = first;
        if (t < length) first += token_at(kv, row, head, t);
        if (t + 1 < length) second += token_at(kv, row, head, t + 1);
        const uint32_t low = t < length ? 0xffff : 0, high = t + 1 < length ? 0xffff : 0;
        for (long i = 0; i < dim; i++) to[i * 16] = (first[i] & low) | (second[i] & high) << 16;
    }
}

/* scores[t][m] = key t . query m, for 32 tokens from `start` on; tokens past the end are masked later. */
static void score_tokens(Flash *f, const Paged *kv, const Piece *piece, long head, long start, long length) {
    const char *keys[2];
    for (int half = 0; half < 2; half++) {
        long token = start + 16 * half < length ? start + 16 * half : start;
        keys[half] = kv->keys + 2 * token_at(kv, piece->row, head, token);
    }
    SETTLE(f);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long i = 0; i < kv->dim; i += 32) {
        _tile_loadd(4, keys[0] + 2 * i, 2 * kv->dim);
        _tile_loadd(5, keys[1] + 2 * i, 2 * kv->dim);
        LOAD_WIDE(6, 7, f->queries + i / 2);
        MULTIPLY_SQUARE();
    }
    STORE_WIDE(0, 1, f->scores + start % TOKENS);
    STORE_WIDE(2, 3, f->scores + start % TOKENS + 16);
}

INLINE vf top(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }

/* Turn the scores of 16 queries into weights. Each query sees `visible` tokens, counted from this block's first. */
static void weigh(Flash *f, int half, long tokens, vi visible, int is_masked, float scale, long dim) {
    const int at = 16 * half;
    vf best = f->best[half];
    for (long t = 0; is_masked && t < tokens; t++) {
        vf score = load((const char *)&f->scores[t][at], 0, F32);
        store((char *)&f->scores[t][at], 0, choose(visible > (int)t, score, splat(-1e30f)), F32);
    }
    for (long t = 0; t < tokens; t++) best = top(best, load((const char *)&f->scores[t][at], 0, F32));
    const vf shrink = exponential((f->best[half] - best) * scale);
    f->best[half] = best;
    vf total = f->total[half] * shrink;
    for (long t = 0; t < tokens; t += 2) {
        vf first = exponential((load((const char *)&f->scores[t][at], 0, F32) - best) * scale);
        vf second = exponential((load((const char *)&f->scores[t + 1][at], 0, F32) - best) * scale);
        total += first + second;
        vu low = (vu)first + 0x8000, high = (vu)second + 0x8000; /* rounded: weights are never NaN nor negative */
        vu pair = (low >> 16) | (high & 0xffff0000);
        memcpy(&f->weights[t / 2][at], &pair, sizeof pair);
    }
    f->total[half] = total;
    for (long i = 0; i < dim; i++)
        store((char *)&f->sums[i][at], 0, load((const char *)&f->sums[i][at], 0, F32) * shrink, F32);
}

/* sums[i][m] += number i of value t * weight of token t for query m, over a block of tokens (a multiple of 32). */
static void add_values(Flash *f, const uint16_t *packed, long tokens, long dim) {
    SETTLE(f);
    for (long i = 0; i < dim; i += 32) {
        LOAD_WIDE(0, 1, f->sums + i);
        LOAD_WIDE(2, 3, f->sums + i + 16);
        for (long t = 0; t < tokens; t += 32) {
            const uint16_t *values = packed + t * dim + i * 32;
            _tile_loadd(4, values, 64);
            _tile_loadd(5, values + 16 * 32, 64);
            LOAD_WIDE(6, 7, f->weights + t / 2);
            MULTIPLY_SQUARE();
        }
        STORE_WIDE(0, 1, f->sums + i);
        STORE_WIDE(2, 3, f->sums + i + 16);
    }
}

/* Up to 32 queries: those of `num_tokens` neighbouring tokens, from token `first` of the piece on. */
static void attend_tile(Flash *f, const Paged *kv, const Piece *piece, long head, long first, long num_tokens,
                        const uint16_t *packed, const char *q, long q_stride, char *out, float scale) {
    const long group = kv->heads / kv->kv_heads, dim = kv->dim, num = num_tokens * group;
    const uint16_t *from = (const uint16_t *)q + (piece->first_query + first) * q_stride + head * group * dim;
    memset(f->queries, 0, sizeof f->queries);
    memset(f->sums, 0, sizeof f->sums);
    for (long m = 0; m < num; m++)
        for (long i = 0; i < dim; i += 2)
            memcpy(&f->queries[i / 2][m], from + m / group * q_stride + m % group * dim + i, sizeof(uint32_t));
    vi visible[2]; /* from token 0 on */
    for (int m = 0; m < QUERIES; m++) visible[m / 16][m % 16] = (int)(piece->position + first + m / group + 1);
    f->best[0] = f->best[1] = splat(-1e30f);
    f->total[0] = f->total[1] = (vf){0};
    const long length = piece->position + first + num_tokens;
    for (long start = 0; start < length; start += TOKENS) {
        const long tokens = length - start < TOKENS ? (length - start + 31) / 32 * 32 : TOKENS;
        for (long t = 0; t < tokens; t += 32) score_tokens(f, kv, piece, head, start + t, length);
        const int is_masked = start + tokens > piece->position + first + 1;
        for (int half = 0; half < 2; half++)
            weigh(f, half, tokens, visible[half] - (int)start, is_masked, scale, dim);
        add_values(f, packed + start * dim, tokens, dim);
    }
    for (long m = 0; m < num; m++) {
        const float share = 1.0f / f->total[m / 16][m % 16];
        const ptrdiff_t to = (piece->first_query + first + m / group) * kv->heads * dim + (head * group + m % group) * dim;
        for (long i = 0; i < dim; i += LANES) {
            vf column;
            for (int lane = 0; lane < LANES; lane++) column[lane] = f->sums[i + lane][m];
            store(out, to + i, column * share, BF16);
        }
    }
}

static int attend_piece(const Paged *kv, const Piece *piece, long head, const char *q, long q_stride, char *out,
                        float scale) {
    const long length = piece->position + piece->num_queries, step = QUERIES / (kv->heads / kv->kv_heads);
    const size_t bytes = (size_t)((length + TOKENS) / 32 * 32 * kv->dim) * sizeof(uint16_t);
    uint16_t *packed = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (!packed) return 0;
    TileConfig before;
    Flash flash;
    configure_tiles(&before);
    pack_values(kv, piece->row, head, length, packed);
    for (long first = 0; first < piece->num_queries; first += step) {
        long num_tokens = piece->num_queries - first < step ? piece->num_queries - first : step;
        attend_tile(&flash, kv, piece, head, first, num_tokens, packed, q, q_stride, out, scale);
    }
    restore_tiles(&before);
    free(packed);
    return 1;
}

/* Like baton_paged_attention, for bfloat16. Returns 0 if out of memory. */
EXPORT int baton_amx_attention(const Paged *kv, const Piece *pieces, long num_pieces, const char *q, long q_stride,
                               char *out, float scale) {
    int is_done = 1;
#pragma omp parallel for schedule(dynamic) reduction(&& : is_done) if (num_pieces * kv->kv_heads > 1)
    for (long unit = 0; unit < num_pieces * kv->kv_heads; unit++)
        is_done = attend_piece(kv, pieces + unit / kv->kv_heads, unit % kv->kv_heads, q, q_stride, out, scale) && is_done;
    return is_done;
}

#else

EXPORT int baton_has_amx(void) { return 0; }

EXPORT int baton_amx_attention(const Paged *kv, const Piece *pieces, long num_pieces, const char *q, long q_stride,
                               char *out, float scale) {
    (void)kv, (void)pieces, (void)num_pieces, (void)q, (void)q_stride, (void)out, (void)scale;
    return 0;
}

#endif
