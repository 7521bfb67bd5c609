/* MurmurHash3 (32 bit) of four 4-byte blocks: seed low, seed high, position, column. */
#include "threads.h"
#include "vec.h"

static inline uint32_t rotate_left(uint32_t x, int bits) {
    return (x << bits) | (x >> (32 - bits));
}

static inline uint32_t mix(uint32_t state, uint32_t block) {
    block = rotate_left(block * 0xCC9E2D51u, 15) * 0x1B873593u;
    return rotate_left(state ^ block, 13) * 5u + 0xE6546B64u;
}

static inline uint32_t finish(uint32_t state) {
    state ^= 16; /* length in bytes */
    state = (state ^ (state >> 16)) * 0x85EBCA6Bu;
    state = (state ^ (state >> 13)) * 0xC2B2AE35u;
    return state ^ (state >> 16);
}

typedef struct {
    const int64_t *seeds, *positions, *column_numbers;
    uint32_t *out;
    int64_t columns;
} hash_args;

static void hash_rows(void *context, int64_t begin, int64_t end) {
    const hash_args *a = context;
    for (int64_t row = begin; row < end; row++) {
        uint64_t seed = (uint64_t)a->seeds[row];
        uint32_t state = mix(mix(0, (uint32_t)seed), (uint32_t)(seed >> 32));
        state = mix(state, (uint32_t)a->positions[row]);
        uint32_t *dst = a->out + row * a->columns;
        for (int64_t c = 0; c < a->columns; c++)
            dst[c] = finish(mix(state, (uint32_t)a->column_numbers[c]));
    }
}

/* out [rows, columns]; seeds and positions per row, column numbers per column. */
void tetris_murmur_hash32(const int64_t *seeds, const int64_t *positions,
                          const int64_t *column_numbers, uint32_t *out, int64_t rows,
                          int64_t columns) {
    hash_args a = {seeds, positions, column_numbers, out, columns};
    parallel_for(rows, even_grain(rows), hash_rows, &a);
}
