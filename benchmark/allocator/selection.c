/* The compiled loop of core/cpu_select.py's fill_selection, without weights, caps and
 * floors, in C: how much a C extension would gain over numba. Same keys, same radix
 * selection, same order. */

#include <stdint.h>
#include <string.h>

enum { DIGITS = 128 };

static int64_t kth_largest(int64_t *keys, int64_t count, int64_t *rank)
{
    int shift = 56;
    for (;;) {
        int64_t first = keys[0], difference = 0, histogram[DIGITS] = {0};
        for (int64_t i = 0; i < count; i++)
            difference |= keys[i] ^ first;
        if (difference == 0)
            return first;
        while (shift > 0 && difference >> (shift + 6) == 0)
            shift--;
        for (int64_t i = 0; i < count; i++)
            histogram[(keys[i] >> shift) & (DIGITS - 1)]++;
        int64_t digit = DIGITS - 1, end = 0;
        for (; *rank > histogram[digit]; digit--)
            *rank -= histogram[digit];
        for (int64_t i = 0; i < count; i++)
            if (((keys[i] >> shift) & (DIGITS - 1)) == digit)
                keys[end++] = keys[i];
        count = end;
    }
}

/* survival, keys, pool: scratch of bs * max_nodes; depths: of max_nodes. */
void fill_selection(int64_t bs, int64_t max_nodes, const int64_t *parents,
                    const float *probs, const int64_t *num_nodes, int64_t budget,
                    float *survival, int64_t *keys, int64_t *pool, int64_t *depths,
                    uint8_t *keep, int32_t *verify_lens, float *expected)
{
    int64_t available = 0;
    for (int64_t r = 0; r < bs; r++) {
        const int64_t *parent = parents + r * max_nodes;
        float *value = survival + r * max_nodes;
        for (int64_t n = 0; n < num_nodes[r]; n++) {
            int64_t depth = 1;
            value[n] = probs[r * max_nodes + n];
            if (parent[n] >= 0) {
                value[n] *= value[parent[n]];
                depth = depths[parent[n]] + 1;
            }
            depths[n] = depth;
            float positive = value[n] + 0.0f;
            int32_t bits;
            memcpy(&bits, &positive, sizeof bits);
            int64_t key = ((int64_t)bits << 31) | (INT32_MAX - depth);
            keys[r * max_nodes + n] = key;
            pool[available++] = key;
        }
    }
    int64_t cut = budget == 0 ? INT64_MAX : -1, spare = 0;
    if (budget > 0 && budget < available) {
        spare = budget;
        cut = kth_largest(pool, available, &spare);
    }
    for (int64_t r = 0; r < bs; r++) {
        int32_t length = 1;
        double total = 0;
        for (int64_t n = 0; n < num_nodes[r]; n++) {
            int64_t at = r * max_nodes + n;
            int chosen = keys[at] > cut;
            if (keys[at] == cut && spare > 0) {
                spare--;
                chosen = 1;
            }
            keep[at] = (uint8_t)chosen;
            if (chosen) {
                length++;
                total += survival[at];
            }
        }
        memset(keep + r * max_nodes + num_nodes[r], 0, max_nodes - num_nodes[r]);
        verify_lens[r] = length;
        expected[r] = (float)total;
    }
}
