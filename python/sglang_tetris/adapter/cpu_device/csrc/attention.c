/* Paged attention over a key/value pool, for a few query rows per request.
 *
 * The layout (groups, prefix, tail, mask) is that of attention/cpu_plan.py. One task is
 * a block of rows of one group under one key/value head; it walks the keys once, in
 * blocks of KEYS, with an online softmax in float32.
 *
 * The order of every sum depends only on the list of keys that a row sees (prefix,
 * then tail) and never on how many rows or groups there are. A row that sees the same
 * list gets the same bits in decode, as a node of a verified tree and in an extend,
 * alone or in a batch: a key that a row does not see adds an exact zero.
 */
#include "products.h"
#include "threads.h"

#define KEYS 32     /* keys per block */
#define MAX_ROWS 32 /* query vectors per task: what fits the nearest cache */
#define MAX_DIM 256
#define MIN_STORED 64 /* rows worth giving away */
#define MAX_PACKED 512 /* tail keys that walk_packed copies to the stack */

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

/* Pointers to the float rows of `count` keys. */
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

/* One task: a block of rows of one group under one key/value head. */
typedef struct {
    const attention_args *a;
    key_list keys;
    int64_t group, head;
    int64_t group_rows; /* rows of the group */
    int64_t row0, rows; /* this block's, counted within the group */
    int64_t share;      /* query heads per key/value head */
    float q[MAX_ROWS * MAX_DIM], acc[MAX_ROWS * MAX_DIM];
    float top[MAX_ROWS], total[MAX_ROWS]; /* running maximum and sum per query vector */
} task;

static inline int64_t row_low(const task *t, int64_t row) {
    const attention_args *a = t->a;
    int64_t low = t->keys.prefix_start;
    if (a->window < 0) return low;
    int64_t position = a->row_positions[a->row_indptr[t->group] + row];
    return max64(low, position - a->window);
}

static inline const uint8_t *row_mask(const task *t, int64_t row) {
    const attention_args *a = t->a;
    return a->mask + a->mask_indptr[t->group] + row * t->keys.num_tail;
}

/* Which of keys [first, first + count) a row sees. NULL: all of them. */
static const uint8_t *visible(const task *t, int64_t row, int64_t first, int64_t count,
                              uint8_t *seen) {
    const attention_args *a = t->a;
    const key_list *keys = &t->keys;
    int64_t low = row_low(t, row);
    int64_t last_tail = keys->num_tail - t->group_rows + row;
    if (first >= low && first + count <= keys->prefix_len) return NULL;
    if (a->window < 0 && !a->mask && first >= low &&
        first + count <= keys->prefix_len + last_tail + 1)
        return NULL;
    for (int64_t i = 0; i < count; i++) {
        int64_t tail = first + i - keys->prefix_len;
        if (tail < 0) {
            seen[i] = first + i >= low;
            continue;
        }
        seen[i] = a->mask ? row_mask(t, row)[tail] != 0 : tail <= last_tail;
        if (a->window >= 0) seen[i] &= keys->tail_positions[tail] >= low;
    }
    return seen;
}

/* Fold `count` keys into query vector `i`. Pointers beyond `count`, up to a multiple
 * of LANES, must be readable. */
static void fold(task *t, int64_t i, const float *const *k, const float *const *v,
                 int64_t count, const uint8_t *seen) {
    int64_t dim = t->a->dim, v_dim = t->a->v_dim;
    int64_t padded = (count + LANES - 1) / LANES * LANES;
    float scores[KEYS];
    for (int64_t j = 0; j < padded; j += LANES)
        store8(scores + j, dot8(t->q + i * dim, k + j, dim));
    if (seen)
        for (int64_t j = 0; j < count; j++)
            if (!seen[j]) scores[j] = -INFINITY;
    for (int64_t j = count; j < padded; j++) scores[j] = -INFINITY;

    float best = t->top[i];
    for (int64_t j = 0; j < padded; j++) best = scores[j] > best ? scores[j] : best;
    if (best == -INFINITY) return;
    float keep = exp1(t->top[i] - best); /* 0 while nothing was seen */
    v8 sum = {0};
    for (int64_t j = 0; j < padded; j += LANES) {
        v8 p = exp8(load8(scores + j) - splat(best));
        store8(scores + j, p);
        sum += p;
    }
    t->total[i] = t->total[i] * keep + lane_sum(sum);
    t->top[i] = best;
    weighted_sum(t->acc + i * v_dim, keep, scores, v, v_dim, count);
}

/* Keys [begin, end), read once for all rows; a row's unseen keys count as -inf. */
static void walk_shared(task *t, int64_t begin, int64_t end) {
    const attention_args *a = t->a;
    float k_buffer[KEYS * MAX_DIM], v_buffer[KEYS * MAX_DIM];
    const float *k_rows[KEYS], *v_rows[KEYS];
    uint8_t buffer[KEYS];
    for (int64_t first = begin; first < end; first += KEYS) {
        int64_t count = min64(KEYS, end - first);
        if (first + KEYS < end)
            prefetch_block(&t->keys, first + KEYS, min64(first + 2 * KEYS, end), a,
                           t->head);
        gather(&t->keys, first, count, a->k_cache, a->k_slot_stride, t->head * a->dim,
               a->dim, a->cache_type, k_buffer, k_rows);
        gather(&t->keys, first, count, a->v_cache, a->v_slot_stride,
               t->head * a->v_dim, a->v_dim, a->cache_type, v_buffer, v_rows);
        for (int64_t i = count; i < KEYS; i++) k_rows[i] = k_rows[count - 1];
        for (int64_t row = 0; row < t->rows; row++) {
            const uint8_t *seen = visible(t, t->row0 + row, first, count, buffer);
            for (int64_t s = 0; s < t->share; s++)
                fold(t, row * t->share + s, k_rows, v_rows, count, seen);
        }
    }
}

/* Keys from `begin` on, of which each row gets those that its mask keeps, packed: a
 * node of a tree then adds up the same list, in the same blocks, as if its path were
 * decoded token by token. */
static void walk_packed(task *t, int64_t begin) {
    const attention_args *a = t->a;
    const key_list *keys = &t->keys;
    int64_t count = keys->prefix_len - begin + keys->num_tail;
    int wide = a->cache_type != TYPE_F32;
    float k_buffer[wide ? count * a->dim : 1], v_buffer[wide ? count * a->v_dim : 1];
    const float *k_all[count], *v_all[count];
    gather(keys, begin, count, a->k_cache, a->k_slot_stride, t->head * a->dim, a->dim,
           a->cache_type, k_buffer, k_all);
    gather(keys, begin, count, a->v_cache, a->v_slot_stride, t->head * a->v_dim,
           a->v_dim, a->cache_type, v_buffer, v_all);
    for (int64_t row = 0; row < t->rows; row++) {
        const uint8_t *mask = row_mask(t, t->row0 + row);
        int64_t low = row_low(t, t->row0 + row);
        const float *k[KEYS], *v[KEYS];
        uint8_t seen[KEYS];
        int64_t n = 0;
        for (int64_t i = 0; i < count; i++) {
            int64_t tail = begin + i - keys->prefix_len;
            if (tail >= 0 && !mask[tail]) continue;
            int64_t position = tail < 0 ? begin + i : keys->tail_positions[tail];
            seen[n] = tail >= 0 && a->window < 0 ? 1 : position >= low;
            k[n] = k_all[i];
            v[n] = v_all[i];
            if (++n < KEYS) continue;
            for (int64_t s = 0; s < t->share; s++)
                fold(t, row * t->share + s, k, v, n, seen);
            n = 0;
        }
        if (n == 0) continue;
        for (int64_t i = n; i < KEYS; i++) k[i] = k[n - 1];
        for (int64_t s = 0; s < t->share; s++)
            fold(t, row * t->share + s, k, v, n, seen);
    }
}

static void read_queries(task *t) {
    const attention_args *a = t->a;
    size_t item = item_size(a->row_type);
    int64_t first_row = a->row_indptr[t->group] + t->row0;
    for (int64_t i = 0; i < t->rows * t->share; i++) {
        int64_t row = first_row + i / t->share, head = t->head * t->share + i % t->share;
        float *dst = t->q + i * a->dim;
        read_row(dst, (const char *)a->q + (row * a->q_stride + head * a->dim) * item,
                 a->dim, a->row_type);
        for (int64_t d = 0; d < a->dim; d++) dst[d] *= a->scaling;
        t->top[i] = -INFINITY;
        t->total[i] = 0.0f;
    }
    memset(t->acc, 0, sizeof(float) * t->rows * t->share * a->v_dim);
}

static void write_outputs(task *t) {
    const attention_args *a = t->a;
    size_t item = item_size(a->row_type);
    int64_t first_row = a->row_indptr[t->group] + t->row0, v_dim = a->v_dim;
    for (int64_t i = 0; i < t->rows * t->share; i++) {
        int64_t row = first_row + i / t->share, head = t->head * t->share + i % t->share;
        float *acc = t->acc + i * v_dim;
        float inverse = t->total[i] > 0.0f ? 1.0f / t->total[i] : 0.0f;
        for (int64_t d = 0; d < v_dim; d++) acc[d] *= inverse;
        write_row((char *)a->out + (row * a->num_q_heads + head) * v_dim * item, acc,
                  v_dim, a->row_type);
    }
}

static void attend(const attention_args *a, int64_t block, int64_t head) {
    task t;
    t.a = a;
    t.head = head;
    t.group = a->block_group[block];
    t.group_rows = a->row_indptr[t.group + 1] - a->row_indptr[t.group];
    t.row0 = a->block_row[block];
    t.rows = min64(a->rows_per_block, t.group_rows - t.row0);
    t.share = a->num_q_heads / a->num_kv_heads;
    key_list keys = {
        .prefix_slots = a->req_to_token + a->req_rows[t.group] * a->req_to_token_stride,
        .tail_slots = a->tail_slots + a->tail_indptr[t.group],
        .tail_positions = a->tail_positions + a->tail_indptr[t.group],
        .slot_map = a->slot_map,
        .prefix_start = a->prefix_starts ? a->prefix_starts[t.group] : 0,
        .prefix_len = a->prefix_lens[t.group],
        .num_tail = a->tail_indptr[t.group + 1] - a->tail_indptr[t.group],
    };
    t.keys = keys;
    read_queries(&t);

    int64_t begin = keys.prefix_len;
    for (int64_t row = 0; row < t.rows; row++)
        begin = min64(begin, row_low(&t, t.row0 + row));
    begin -= begin % KEYS; /* blocks start where they always start */
    if (a->mask && keys.num_tail <= MAX_PACKED) {
        int64_t whole = max64(begin, keys.prefix_len - keys.prefix_len % KEYS);
        walk_shared(&t, begin, whole);
        walk_packed(&t, whole);
    } else {
        /* Without a mask the block's last row sees the furthest. */
        int64_t beyond = a->mask ? 0 : t.group_rows - (t.row0 + t.rows);
        walk_shared(&t, begin, keys.prefix_len + keys.num_tail - beyond);
    }
    write_outputs(&t);
}

static void store_body(void *context, int64_t begin, int64_t end) {
    store_rows(context, begin, end);
}

static void attend_body(void *context, int64_t begin, int64_t end) {
    const attention_args *a = context;
    int64_t tasks = a->num_blocks * a->num_kv_heads;
    for (int64_t i = begin; i < end; i++) {
        int64_t task = tasks - 1 - i; /* the last rows of an extend see the most */
        attend(a, task / a->num_kv_heads, task % a->num_kv_heads);
    }
}

/* Store the new rows (when k_new is given), then attend. */
void tetris_attention(attention_args *a) {
    if (a->k_new)
        parallel_for(a->num_rows, max64(MIN_STORED, even_grain(a->num_rows)), store_body,
                     a);
    parallel_for(a->num_blocks * a->num_kv_heads, 1, attend_body, a);
}

typedef struct {
    char *const *caches, *const *scratch;
    const int64_t *row_bytes, *target, *source;
    int64_t num_slots;
} move_args;

static void move_body(void *context, int64_t begin, int64_t end) {
    const move_args *a = context;
    for (int64_t c = begin; c < end; c++) {
        char *cache = a->caches[c], *kept = a->scratch[c];
        int64_t bytes = a->row_bytes[c];
        for (int64_t i = 0; i < a->num_slots; i++)
            memcpy(kept + i * bytes, cache + a->source[i] * bytes, bytes);
        for (int64_t i = 0; i < a->num_slots; i++)
            memcpy(cache + a->target[i] * bytes, kept + i * bytes, bytes);
    }
}

/* Copy slots of each cache: all sources are read before a target is written. */
void tetris_move_slots(char *const *caches, int64_t num_caches, const int64_t *row_bytes,
                       const int64_t *target, const int64_t *source, int64_t num_slots,
                       char *const *scratch) {
    move_args a = {caches, scratch, row_bytes, target, source, num_slots};
    parallel_for(num_caches, even_grain(num_caches), move_body, &a);
}

int64_t tetris_attention_args_size(void) { return (int64_t)sizeof(attention_args); }
