/* Paged attention over a key/value pool, for a few query rows per request.
 *
 * The layout (groups, prefix, tail, mask) is that of attention/cpu_plan.py. One task is a
 * block of rows of one group under one key/value head; it walks the keys once, in
 * blocks of KEYS, with an online softmax in float32.
 *
 * The order of every sum depends only on a key's place in its group's list (prefix,
 * then tail) and never on how many rows or groups there are. A row that sees the same
 * list gets the same bits in decode, in a chain verify and in an extend, alone or in
 * a batch: a key that a row does not see adds an exact zero.
 */
#include "vec.h"

#define KEYS 32     /* keys per block */
#define MAX_ROWS 32 /* query vectors per task: what fits the nearest cache */
#define MAX_DIM 256

/* Mirrored field by field in attention/cpu_native.py. */
typedef struct {
    /* the plan; see attention/cpu_plan.py */
    int64_t num_groups, num_rows;
    const int64_t *req_rows, *prefix_starts, *prefix_lens, *row_indptr, *tail_indptr;
    const int64_t *tail_slots, *row_positions, *tail_positions;
    const uint8_t *mask;
    const int64_t *mask_indptr;
    /* blocks of rows: group and first row (within the group) of each */
    int64_t num_blocks, rows_per_block;
    const int64_t *block_group, *block_row;
    /* pools and tables; strides count elements */
    const int32_t *req_to_token;
    int64_t req_to_token_stride;
    const int64_t *slot_map;
    void *k_cache, *v_cache;
    int64_t k_slot_stride, v_slot_stride;
    /* this forward's rows */
    const void *q, *k_new, *v_new;
    void *out;
    const int64_t *new_slots;
    int64_t q_stride, k_new_stride, v_new_stride;
    int64_t num_q_heads, num_kv_heads, dim, v_dim;
    int64_t window;
    float scaling;
    int32_t row_type, cache_type;
} attention_args;

static inline float exp1(float x) {
    if (x == 0.0f) return 1.0f;
    return exp8(splat(x))[0];
}

/* The sum of each of eight vectors, as one vector. */
static inline v8 sum_lanes(v8 a0, v8 a1, v8 a2, v8 a3, v8 a4, v8 a5, v8 a6, v8 a7) {
#define LO(x, y) __builtin_shuffle(x, y, (v8i){0, 8, 1, 9, 4, 12, 5, 13})
#define HI(x, y) __builtin_shuffle(x, y, (v8i){2, 10, 3, 11, 6, 14, 7, 15})
    v8 b0 = LO(a0, a2) + HI(a0, a2), b1 = LO(a1, a3) + HI(a1, a3);
    v8 b2 = LO(a4, a6) + HI(a4, a6), b3 = LO(a5, a7) + HI(a5, a7);
    v8 c0 = LO(b0, b1) + HI(b0, b1), c1 = LO(b2, b3) + HI(b2, b3);
#undef LO
#undef HI
    v8 low = __builtin_shuffle(c0, c1, (v8i){0, 1, 2, 3, 8, 9, 10, 11});
    v8 high = __builtin_shuffle(c0, c1, (v8i){4, 5, 6, 7, 12, 13, 14, 15});
    return low + high;
}

static inline __attribute__((always_inline)) v8 dot8(
    const float *q, const float *const *k, int64_t dim) {
    v8 a0 = {0}, a1 = {0}, a2 = {0}, a3 = {0}, a4 = {0}, a5 = {0}, a6 = {0}, a7 = {0};
    for (int64_t i = 0; i < dim; i += LANES) {
        v8 x = load8(q + i);
        a0 += x * load8(k[0] + i); a1 += x * load8(k[1] + i);
        a2 += x * load8(k[2] + i); a3 += x * load8(k[3] + i);
        a4 += x * load8(k[4] + i); a5 += x * load8(k[5] + i);
        a6 += x * load8(k[6] + i); a7 += x * load8(k[7] + i);
    }
    return sum_lanes(a0, a1, a2, a3, a4, a5, a6, a7);
}

/* acc[0:8n] = acc * keep + sum over keys of p[key] * v[key][0:8n]. */
#define WEIGHTED_SUM(name, n)                                                        \
    static inline void name(float *acc, float keep, const float *p,                  \
                            const float *const *v, int64_t at, int64_t keys) {       \
        v8 a[n];                                                                     \
        for (int j = 0; j < n; j++) a[j] = load8(acc + LANES * j) * keep;            \
        for (int64_t i = 0; i < keys; i++) {                                         \
            v8 w = splat(p[i]);                                                      \
            for (int j = 0; j < n; j++) a[j] += w * load8(v[i] + at + LANES * j);    \
        }                                                                            \
        for (int j = 0; j < n; j++) store8(acc + LANES * j, a[j]);                   \
    }
WEIGHTED_SUM(weighted_sum_64, 8)
WEIGHTED_SUM(weighted_sum_32, 4)
WEIGHTED_SUM(weighted_sum_8, 1)

static inline void weighted_sum(float *acc, float keep, const float *p,
                                const float *const *v, int64_t dim, int64_t keys) {
    int64_t at = 0;
    for (; at + 64 <= dim; at += 64) weighted_sum_64(acc + at, keep, p, v, at, keys);
    for (; at + 32 <= dim; at += 32) weighted_sum_32(acc + at, keep, p, v, at, keys);
    for (; at + 8 <= dim; at += 8) weighted_sum_8(acc + at, keep, p, v, at, keys);
}

static inline int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

/* Write this forward's keys and values to their slots. */
static void store_rows(const attention_args *a, int64_t begin, int64_t end) {
    size_t k_bytes = a->num_kv_heads * a->dim * item_size(a->cache_type);
    size_t v_bytes = a->num_kv_heads * a->v_dim * item_size(a->cache_type);
    size_t item = item_size(a->cache_type);
    for (int64_t row = begin; row < end; row++) {
        int64_t slot = a->new_slots[row];
        if (a->slot_map) slot = a->slot_map[slot];
        memcpy((char *)a->k_cache + slot * a->k_slot_stride * item,
               (const char *)a->k_new + row * a->k_new_stride * item, k_bytes);
        memcpy((char *)a->v_cache + slot * a->v_slot_stride * item,
               (const char *)a->v_new + row * a->v_new_stride * item, v_bytes);
    }
}

/* Where one task's keys lie. A key's index counts from position 0 of the prefix. */
typedef struct {
    const int32_t *prefix_slots;
    const int64_t *tail_slots, *tail_positions, *slot_map;
    int64_t prefix_start, prefix_len, num_tail;
} key_list;

static inline int64_t key_slot(const key_list *keys, int64_t index) {
    int64_t slot = index < keys->prefix_len
                       ? (int64_t)keys->prefix_slots[index]
                       : keys->tail_slots[index - keys->prefix_len];
    if (!keys->slot_map) return slot;
    /* Keys outside the window may have left their pool; they are read, not seen. */
    slot = keys->slot_map[slot];
    return slot < 0 ? 0 : slot;
}

/* Pointers to the float rows of `count` keys (the block's rest repeats the last). */
static void gather(const key_list *keys, int64_t first, int64_t count,
                   const void *cache, int64_t slot_stride, int64_t offset,
                   int64_t dim, int32_t type, float *buffer, const float **rows) {
    for (int64_t i = 0; i < count; i++) {
        int64_t at = key_slot(keys, first + i) * slot_stride + offset;
        if (type == TYPE_F32) {
            rows[i] = (const float *)cache + at;
        } else {
            read_row(buffer + i * dim, (const uint16_t *)cache + at, dim, type);
            rows[i] = buffer + i * dim;
        }
    }
    for (int64_t i = count; i < KEYS; i++) rows[i] = rows[count - 1];
}

static inline void prefetch_block(const key_list *keys, int64_t first, int64_t end,
                                  const attention_args *a, int64_t head) {
    size_t item = item_size(a->cache_type);
    for (int64_t i = first; i < end; i++) {
        int64_t slot = key_slot(keys, i);
        const char *k = (const char *)a->k_cache +
                        (slot * a->k_slot_stride + head * a->dim) * item;
        const char *v = (const char *)a->v_cache +
                        (slot * a->v_slot_stride + head * a->v_dim) * item;
        for (size_t b = 0; b < a->dim * item; b += 64) __builtin_prefetch(k + b);
        for (size_t b = 0; b < a->v_dim * item; b += 64) __builtin_prefetch(v + b);
    }
}

/* What one row sees of keys [first, first + count): 1 or 0 per key. Returns whether
 * it sees all of them; then `seen` is not written. */
static int visible(const attention_args *a, const key_list *keys, int64_t group,
                   int64_t row, int64_t num_rows, int64_t first, int64_t count,
                   uint8_t *seen) {
    int64_t position = a->row_positions[a->row_indptr[group] + row];
    int64_t low = a->window >= 0 ? position - a->window : INT64_MIN;
    low = max64(low, keys->prefix_start);
    if (first + count <= keys->prefix_len && first >= low) return 1;
    int64_t last_tail = keys->num_tail - num_rows + row;
    const uint8_t *mask = NULL;
    if (a->mask) mask = a->mask + a->mask_indptr[group] + row * keys->num_tail;
    for (int64_t i = 0; i < count; i++) {
        int64_t index = first + i, tail = index - keys->prefix_len;
        if (tail < 0) {
            seen[i] = index >= low;
        } else {
            seen[i] = mask ? mask[tail] != 0 : tail <= last_tail;
            if (a->window >= 0) seen[i] &= keys->tail_positions[tail] >= low;
        }
    }
    return 0;
}

/* One block of rows of one group under one key/value head. */
static void attend(const attention_args *a, int64_t block, int64_t head) {
    float q[MAX_ROWS * MAX_DIM], acc[MAX_ROWS * MAX_DIM];
    float k_buffer[KEYS * MAX_DIM], v_buffer[KEYS * MAX_DIM];
    float scores[KEYS], top[MAX_ROWS], total[MAX_ROWS];
    const float *k_rows[KEYS], *v_rows[KEYS];
    uint8_t seen[KEYS];

    int64_t group = a->block_group[block], row0 = a->block_row[block];
    int64_t first_row = a->row_indptr[group];
    int64_t group_rows = a->row_indptr[group + 1] - first_row;
    int64_t rows = min64(a->rows_per_block, group_rows - row0);
    int64_t share = a->num_q_heads / a->num_kv_heads, vectors = rows * share;
    int64_t dim = a->dim, v_dim = a->v_dim;

    key_list keys = {
        .prefix_slots = a->req_to_token + a->req_rows[group] * a->req_to_token_stride,
        .tail_slots = a->tail_slots + a->tail_indptr[group],
        .tail_positions = a->tail_positions + a->tail_indptr[group],
        .slot_map = a->slot_map,
        .prefix_start = a->prefix_starts ? a->prefix_starts[group] : 0,
        .prefix_len = a->prefix_lens[group],
        .num_tail = a->tail_indptr[group + 1] - a->tail_indptr[group],
    };

    /* Key indices that some row of the block can see. */
    int64_t begin = keys.prefix_start, end = keys.prefix_len + keys.num_tail;
    if (!a->mask) end -= group_rows - (row0 + rows);
    if (a->window >= 0) {
        int64_t lowest = INT64_MAX;
        for (int64_t r = 0; r < rows; r++)
            lowest = min64(lowest, a->row_positions[first_row + row0 + r] - a->window);
        begin = max64(begin, min64(lowest, keys.prefix_len));
    }
    begin -= begin % KEYS; /* blocks start where they always start */

    for (int64_t i = 0; i < vectors; i++) {
        int64_t row = first_row + row0 + i / share;
        int64_t at = row * a->q_stride + (head * share + i % share) * dim;
        float *dst = q + i * dim;
        read_row(dst, (const char *)a->q + at * item_size(a->row_type), dim, a->row_type);
        for (int64_t d = 0; d < dim; d++) dst[d] *= a->scaling;
        top[i] = -INFINITY;
        total[i] = 0.0f;
    }
    memset(acc, 0, sizeof(float) * vectors * v_dim);

    for (int64_t first = begin; first < end; first += KEYS) {
        int64_t count = min64(KEYS, end - first);
        int64_t padded = (count + LANES - 1) / LANES * LANES;
        if (first + KEYS < end)
            prefetch_block(&keys, first + KEYS, min64(first + 2 * KEYS, end), a, head);
        gather(&keys, first, count, a->k_cache, a->k_slot_stride, head * dim, dim,
               a->cache_type, k_buffer, k_rows);
        gather(&keys, first, count, a->v_cache, a->v_slot_stride, head * v_dim, v_dim,
               a->cache_type, v_buffer, v_rows);
        int all_seen = 1;
        for (int64_t i = 0; i < vectors; i++) {
            if (i % share == 0)
                all_seen = visible(a, &keys, group, row0 + i / share, group_rows, first,
                                   count, seen);
            for (int64_t j = 0; j < padded; j += LANES)
                store8(scores + j, dot8(q + i * dim, k_rows + j, dim));
            if (!all_seen)
                for (int64_t j = 0; j < count; j++)
                    if (!seen[j]) scores[j] = -INFINITY;
            for (int64_t j = count; j < padded; j++) scores[j] = -INFINITY;

            float best = top[i];
            for (int64_t j = 0; j < padded; j++) best = scores[j] > best ? scores[j] : best;
            if (best == -INFINITY) continue;
            float keep = exp1(top[i] - best); /* 0 while nothing was seen */
            v8 sum = {0};
            for (int64_t j = 0; j < padded; j += LANES) {
                v8 p = exp8(load8(scores + j) - splat(best));
                store8(scores + j, p);
                sum += p;
            }
            total[i] = total[i] * keep + lane_sum(sum);
            top[i] = best;
            weighted_sum(acc + i * v_dim, keep, scores, v_rows, v_dim, count);
        }
    }

    for (int64_t i = 0; i < vectors; i++) {
        int64_t row = first_row + row0 + i / share;
        int64_t at = (row * a->num_q_heads + head * share + i % share) * v_dim;
        float inverse = total[i] > 0.0f ? 1.0f / total[i] : 0.0f;
        for (int64_t d = 0; d < v_dim; d++) acc[i * v_dim + d] *= inverse;
        write_row((char *)a->out + at * item_size(a->row_type), acc + i * v_dim, v_dim,
                  a->row_type);
    }
}

/* Store the new rows (when k_new is given), then attend. */
void tetris_attention(const attention_args *a) {
    int64_t tasks = a->num_blocks * a->num_kv_heads;
#pragma omp parallel
    {
        if (a->k_new) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < a->num_rows; row++) store_rows(a, row, row + 1);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < tasks; i++) {
            int64_t task = tasks - 1 - i; /* the last rows of an extend see the most */
            attend(a, task / a->num_kv_heads, task % a->num_kv_heads);
        }
    }
}

/* Copy slots of one cache: all sources are read before a target is written. */
void tetris_move_slots(char *const *caches, int64_t num_caches, const int64_t *row_bytes,
                       const int64_t *target, const int64_t *source, int64_t num_slots,
                       char *const *scratch) {
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < num_caches; c++) {
        int64_t bytes = row_bytes[c];
        for (int64_t i = 0; i < num_slots; i++)
            memcpy(scratch[c] + i * bytes, caches[c] + source[i] * bytes, bytes);
        for (int64_t i = 0; i < num_slots; i++)
            memcpy(caches[c] + target[i] * bytes, scratch[c] + i * bytes, bytes);
    }
}

int64_t tetris_attention_args_size(void) { return (int64_t)sizeof(attention_args); }
