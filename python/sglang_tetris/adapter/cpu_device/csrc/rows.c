/* The row-wise operations between the products of a Llama-like layer.
 *
 * Each row is computed by itself, in one order, so that its bits do not depend on the
 * batch. Rows are shared among threads only where that pays for waking them.
 */
#include "threads.h"
#include "vec.h"

/* Elements worth giving to another thread. */
#define MIN_ELEMENTS 16384

static int64_t row_grain(int64_t rows, int64_t width) {
    int64_t least = (MIN_ELEMENTS + width - 1) / width, even = even_grain(rows);
    return even > least ? even : least;
}

typedef struct {
    const char *x, *residual;
    const void *weight;
    char *out, *new_residual;
    int64_t width;
    float epsilon;
    int32_t type;
} norm_args;

static void norm_rows(void *context, int64_t begin, int64_t end) {
    const norm_args *n = context;
    int64_t width = n->width;
    int32_t type = n->type;
    size_t bytes = width * item_size(type);
    float a[width], b[width], w[width];
    read_row(w, n->weight, width, type);
    for (int64_t row = begin; row < end; row++) {
        read_row(a, n->x + row * bytes, width, type);
        if (n->residual) {
            read_row(b, n->residual + row * bytes, width, type);
            for (int64_t i = 0; i < width; i++) a[i] += b[i];
            write_row(n->new_residual + row * bytes, a, width, type);
        }
        v8 squares = {0};
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) squares += load8(a + i) * load8(a + i);
        float sum = lane_sum(squares);
        for (; i < width; i++) sum += a[i] * a[i];
        float scale = 1.0f / sqrtf(sum / (float)width + n->epsilon);
        for (i = 0; i < width; i++) a[i] = a[i] * scale * w[i];
        write_row(n->out + row * bytes, a, width, type);
    }
}

/* out = x / rms(x) * weight; with a residual, x + residual first, kept as the new
 * residual (which is rounded to the rows' type only after it was used). */
void tetris_rms_norm(const void *x, const void *residual, const void *weight, void *out,
                     void *new_residual, int64_t rows, int64_t width, float epsilon,
                     int32_t type) {
    norm_args n = {x, residual, weight, out, new_residual, width, epsilon, type};
    parallel_for(rows, row_grain(rows, width), norm_rows, &n);
}

static inline v8 silu8(v8 x) {
    /* x / (1 + exp(-x)), with exp of a negative number only */
    v8i negative = x < splat(0.0f);
    v8 magnitude = (v8)((v8i)x & 0x7fffffff);
    v8 e = exp8(-magnitude);
    v8 top = (v8)(((v8i)e & negative) | ((v8i)splat(1.0f) & ~negative));
    return x * top / (splat(1.0f) + e);
}

typedef struct {
    const char *x;
    char *out;
    int64_t width;
    int32_t type;
} silu_args;

static void silu_rows(void *context, int64_t begin, int64_t end) {
    const silu_args *a = context;
    size_t item = item_size(a->type);
    for (int64_t row = begin; row < end; row++) {
        const char *gate = a->x + row * 2 * a->width * item;
        const char *up = gate + a->width * item;
        char *dst = a->out + row * a->width * item;
        for (int64_t i = 0; i < a->width; i += LANES) {
            if (a->type == TYPE_F32) {
                v8 g = load8((const float *)gate + i);
                store8((float *)dst + i, silu8(g) * load8((const float *)up + i));
                continue;
            }
            v8 g = load8_bf16((const uint16_t *)gate + i);
            float y[LANES];
            store8(y, silu8(g) * load8_bf16((const uint16_t *)up + i));
            write_row(dst + i * item, y, LANES, a->type);
        }
    }
}

/* out[row] = silu(x[row, :width]) * x[row, width:]; width is a multiple of LANES. */
void tetris_silu_mul(const void *x, void *out, int64_t rows, int64_t width,
                     int32_t type) {
    silu_args a = {x, out, width, type};
    parallel_for(rows, row_grain(rows, width), silu_rows, &a);
}

/* Mirrored field by field in fused_rows.py. */
typedef struct {
    const int64_t *positions;
    char *q, *k;
    const char *cos_sin;
    int64_t rows, q_stride, k_stride, q_heads, k_heads, dim, rotary_dim;
    int32_t type, cache_type;
} rope_args;

/* Rotate, in place, the first 2 * half elements of each head: neox style, that is
 * element i with element i + half. cos_sin: [positions, 2 * half], cosines first. */
static void rotate_heads(char *heads, int64_t num_heads, const float *cos,
                         const float *sin, const rope_args *a) {
    int64_t half = a->rotary_dim / 2;
    for (int64_t h = 0; h < num_heads; h++) {
        char *head = heads + h * a->dim * item_size(a->type);
        float x[2 * half], y[2 * half];
        read_row(x, head, 2 * half, a->type);
        for (int64_t i = 0; i < half; i++) {
            y[i] = x[i] * cos[i] - x[i + half] * sin[i];
            y[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
        }
        write_row(head, y, 2 * half, a->type);
    }
}

static void rotate_rows(void *context, int64_t begin, int64_t end) {
    const rope_args *a = context;
    size_t item = item_size(a->type), cache_item = item_size(a->cache_type);
    for (int64_t row = begin; row < end; row++) {
        float angles[a->rotary_dim];
        const char *src = a->cos_sin + a->positions[row] * a->rotary_dim * cache_item;
        read_row(angles, src, a->rotary_dim, a->cache_type);
        const float *sin = angles + a->rotary_dim / 2;
        rotate_heads(a->q + row * a->q_stride * item, a->q_heads, angles, sin, a);
        rotate_heads(a->k + row * a->k_stride * item, a->k_heads, angles, sin, a);
    }
}

void tetris_rope(rope_args *a) {
    int64_t width = (a->q_heads + a->k_heads) * a->dim;
    parallel_for(a->rows, row_grain(a->rows, width), rotate_rows, a);
}

int64_t tetris_rope_args_size(void) { return (int64_t)sizeof(rope_args); }
