/* The copy of a weight in the order in which the products read it.
 *
 * They take four bytes of each of sixteen rows as one vector: an input in float32, two in bfloat16, or four or eight
 * rounded ones. So squares of rows and words are transposed, in registers, because memory is then the limit.
 */
#include "parts.h"

/* Copy `blocks` neighbouring blocks of sixteen rows so that the first vector of each comes first, then the second. */
INLINE void pack_tile(const uint32_t *from, uint32_t *to, long words, int blocks) {
    const long whole = words - words % LANES;
    for (long first = 0; first < whole; first += LANES)
        for (int row = 0; row < blocks * BLOCK; row += LANES) {
            vu square[LANES];
            for (int i = 0; i < LANES; i++) memcpy(square + i, from + (row + i) * words + first, sizeof(vu));
            transpose(square);
            for (int i = 0; i < LANES; i++) memcpy(to + (first + i) * blocks * BLOCK + row, square + i, sizeof(vu));
        }
    for (long word = whole; word < words; word++)
        for (int row = 0; row < blocks * BLOCK; row++) to[word * blocks * BLOCK + row] = from[row * words + word];
}

/* rows: [blocks * 16, words], contiguous. */
EXPORT void baton_pack_tiles(const uint32_t *rows, uint32_t *packed, long blocks, long words) {
#pragma omp parallel for schedule(static)
    for (long block = 0; block < blocks; block += BLOCKS) {
        const uint32_t *from = rows + block * BLOCK * words;
        uint32_t *to = packed + block * BLOCK * words;
        if (blocks - block >= BLOCKS)
            pack_tile(from, to, words, BLOCKS);
        else
            for (long j = 0; j < blocks - block; j++)
                pack_tile(from + j * BLOCK * words, to + j * BLOCK * words, words, 1);
    }
}
