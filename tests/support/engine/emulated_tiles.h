/* The tile instructions of AMX as functions, for processors without them. Included before every file of the kernels. */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef __AVX512BF16__

#define __AMX_BF16__ 1
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#define _tile_loadd emulated_load
#define _tile_stored emulated_store
#define _tile_zero(tile) memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile])
#define _tile_dpbf16ps emulated_add_pairs
#define _tile_dpbsud emulated_add_bytes
#define _tile_loadconfig(config) emulated_configure(config)
#define _tile_storeconfig(config) memset(config, 0, 64)
#define _tile_release() ((void)(emulated_is_configured = 0))
#define syscall(number, ...) ((void)(number), 0) /* permission is granted */
#define UNUSED __attribute__((unused))

static _Thread_local uint8_t emulated_tiles[8][16][64];
static _Thread_local int emulated_is_configured;

/* Every row of every tile that is used must have been configured with its whole size. */
UNUSED static void emulated_configure(const void *config) {
    const uint8_t *bytes = config;
    emulated_is_configured = bytes[0] == 1;
    for (int tile = 0; tile < 8; tile++)
        if (bytes[16 + 2 * tile] != 64 || bytes[48 + tile] != 16) emulated_is_configured = 0;
}

UNUSED static void emulated_load(int tile, const void *from, long stride) {
    if (!emulated_is_configured) __builtin_trap();
    for (int row = 0; row < 16; row++) memcpy(emulated_tiles[tile][row], (const char *)from + row * stride, 64);
}

UNUSED static void emulated_store(int tile, void *to, long stride) {
    if (!emulated_is_configured) __builtin_trap();
    for (int row = 0; row < 16; row++) memcpy((char *)to + row * stride, emulated_tiles[tile][row], 64);
}

UNUSED static float emulated_number(uint16_t bits) {
    const uint32_t word = (uint32_t)bits << 16;
    float number;
    memcpy(&number, &word, sizeof number);
    return number;
}

UNUSED static void emulated_add_pairs(int sums, int x, int by) {
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 16; column++) {
            float total, parts[2] = {0, 0};
            for (int k = 0; k < 16; k++)
                for (int i = 0; i < 2; i++) {
                    uint16_t a, b;
                    memcpy(&a, emulated_tiles[x][row] + 4 * k + 2 * i, sizeof a);
                    memcpy(&b, emulated_tiles[by][k] + 4 * column + 2 * i, sizeof b);
                    parts[i] += emulated_number(a) * emulated_number(b);
                }
            memcpy(&total, emulated_tiles[sums][row] + 4 * column, sizeof total);
            total += parts[0] + parts[1];
            memcpy(emulated_tiles[sums][row] + 4 * column, &total, sizeof total);
        }
}

/* Signed bytes of x times unsigned ones. */
UNUSED static void emulated_add_bytes(int sums, int x, int by) {
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 16; column++) {
            int32_t total;
            memcpy(&total, emulated_tiles[sums][row] + 4 * column, sizeof total);
            for (int k = 0; k < 64; k++)
                total += (int8_t)emulated_tiles[x][row][k] * emulated_tiles[by][k / 4][4 * column + k % 4];
            memcpy(emulated_tiles[sums][row] + 4 * column, &total, sizeof total);
        }
}
#endif
