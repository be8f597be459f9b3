/* The two limits of matrix products on a machine: reading memory, and multiplying codes in the nearest cache. */
#include "decoder.c"

typedef struct {
    const char *memory;
    i64 count; /* of pages to read, or of products */
} Amount;

static volatile int32_t result;

static void read_pages(Thread *t, const void *argument) {
    const Amount *work = argument;
    PIECES(t, work->count, 16, first, last) {
        ints sums[4] = {0};
        for (i64 at = first * 4096; at < last * 4096; at += 4 * sizeof(ints))
            for (int k = 0; k < 4; k++) sums[k] |= *(const ints *)(work->memory + at + k * sizeof(ints));
        result = (sums[0] | sums[1] | sums[2] | sums[3])[0];
    }
}

/* Multiply 4 KiB of codes with a tile of rows, as often as `count` says. */
static void multiply_codes(Thread *t, const void *argument) {
    const Amount *work = argument;
    PIECES(t, work->count, 16, first, last)
        for (i64 time = first; time < last; time++) {
            ints sums[TILE_ROWS] = {0};
            for (i64 i = 0; i < 1024 / LANES; i++) {
                const codes w = *(const codes *)(work->memory + i * sizeof(codes));
#pragma GCC unroll 8
                for (int r = 0; r < TILE_ROWS; r++) {
                    const ints x = spread((const int8_t *)work->memory + (i * TILE_ROWS + r) * 4);
#ifdef PAIRS
                    sums[r] = (ints)((shorts)sums[r] + PAIRS(w, x));
#else
                    sums[r] = DOT4(sums[r], w, x);
#endif
                }
            }
            for (int r = 0; r < TILE_ROWS; r++) result = sums[r][0];
        }
}

void read_memory(Pool *pool, const char *memory, i64 bytes) { pool_run(pool, read_pages, &(Amount){memory, bytes / 4096}); }

/* Return the number of products of two codes. */
i64 multiply_memory(Pool *pool, const char *memory, i64 times) {
    pool_run(pool, multiply_codes, &(Amount){memory, times});
    return times * 4096 * TILE_ROWS;
}
