/* The copy of a weight in the order in which linear.c and quantized_linear.c read it.
 *
 * Both take four bytes of each of sixteen rows as one vector: two inputs in bfloat16, or four or eight rounded ones. So
 * squares of sixteen rows and sixteen words are transposed, in registers, because memory is then the limit.
 */
#include "kernels.h"

enum { BLOCKS = 3 };

/* Exchange quadrants: in every square of 2 * `size` rows and lanes, the upper right one with the lower left one. */
#define EXCHANGE(rows, size, first, second)                                         \
    for (int i = 0; i < LANES; i++)                                                 \
        if ((i & (size)) == 0) {                                                    \
            const vu upper = rows[i], lower = rows[i + (size)];                     \
            rows[i] = __builtin_shufflevector(upper, lower, first);                 \
            rows[i + (size)] = __builtin_shufflevector(upper, lower, second);       \
        }
#define LIST(...) __VA_ARGS__

INLINE void transpose(vu rows[LANES]) {
#pragma GCC unroll 16
    EXCHANGE(rows, 8, LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
             LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#pragma GCC unroll 16
    EXCHANGE(rows, 4, LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
             LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
#pragma GCC unroll 16
    EXCHANGE(rows, 2, LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
             LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
#pragma GCC unroll 16
    EXCHANGE(rows, 1, LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
             LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
}

/* Copy `blocks` neighbouring blocks of sixteen rows so that the first vector of each comes first, then the second. */
INLINE void pack_tile(const uint32_t *from, uint32_t *to, long words, int blocks) {
    const long whole = words - words % LANES;
    for (long first = 0; first < whole; first += LANES)
        for (int j = 0; j < blocks; j++) {
            vu square[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) memcpy(square + i, from + (j * LANES + i) * words + first, sizeof(vu));
            transpose(square);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) memcpy(to + ((first + i) * blocks + j) * LANES, square + i, sizeof(vu));
        }
    for (long word = whole; word < words; word++)
        for (int row = 0; row < blocks * LANES; row++)
            to[(word * blocks + row / LANES) * LANES + row % LANES] = from[row * words + word];
}

/* rows: [blocks * 16, words], contiguous. */
EXPORT void baton_pack_tiles(const uint32_t *rows, uint32_t *packed, long blocks, long words) {
#pragma omp parallel for schedule(static)
    for (long block = 0; block < blocks; block += BLOCKS) {
        const uint32_t *from = rows + block * LANES * words;
        uint32_t *to = packed + block * LANES * words;
        if (blocks - block >= BLOCKS)
            pack_tile(from, to, words, BLOCKS);
        else
            for (long j = 0; j < blocks - block; j++)
                pack_tile(from + j * LANES * words, to + j * LANES * words, words, 1);
    }
}
