/* The row-wise operations between the products of a Llama-like layer.
 *
 * Each row is computed by itself, in one order, so that its bits do not depend on the
 * batch. Rows are shared among threads only where that pays for waking them.
 */
#include "vec.h"

#define PARALLEL_ELEMENTS 65536
#define MAX_WIDTH 65536

/* out = x / rms(x) * weight; with a residual, x + residual first, kept as the new
 * residual (which is rounded to the rows' type only after it was used). */
void tetris_rms_norm(const void *x, const void *residual, const void *weight, void *out,
                     void *new_residual, int64_t rows, int64_t width, float epsilon,
                     int32_t type) {
    size_t bytes = width * item_size(type);
#pragma omp parallel if (rows * width > PARALLEL_ELEMENTS)
    {
        float a[width], b[width], w[width];
        read_row(w, weight, width, type);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            read_row(a, (const char *)x + row * bytes, width, type);
            if (residual) {
                read_row(b, (const char *)residual + row * bytes, width, type);
                for (int64_t i = 0; i < width; i++) a[i] += b[i];
                write_row((char *)new_residual + row * bytes, a, width, type);
            }
            v8 squares = {0};
            int64_t i = 0;
            for (; i + LANES <= width; i += LANES) squares += load8(a + i) * load8(a + i);
            float sum = lane_sum(squares);
            for (; i < width; i++) sum += a[i] * a[i];
            float scale = 1.0f / sqrtf(sum / (float)width + epsilon);
            for (i = 0; i < width; i++) a[i] = a[i] * scale * w[i];
            write_row((char *)out + row * bytes, a, width, type);
        }
    }
}

static inline v8 silu8(v8 x) {
    /* x / (1 + exp(-x)), with exp of a negative number only */
    v8i negative = x < splat(0.0f);
    v8 magnitude = (v8)((v8i)x & 0x7fffffff);
    v8 e = exp8(-magnitude);
    v8 top = (v8)(((v8i)e & negative) | ((v8i)splat(1.0f) & ~negative));
    return x * top / (splat(1.0f) + e);
}

/* out[row] = silu(x[row, :width]) * x[row, width:]; width is a multiple of LANES. */
void tetris_silu_mul(const void *x, void *out, int64_t rows, int64_t width,
                     int32_t type) {
    size_t item = item_size(type);
#pragma omp parallel for schedule(static) if (rows * width > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        const char *gate = (const char *)x + row * 2 * width * item;
        const char *up = gate + width * item;
        char *dst = (char *)out + row * width * item;
        for (int64_t i = 0; i < width; i += LANES) {
            v8 g, u;
            float y[LANES];
            if (type == TYPE_F32) {
                g = load8((const float *)gate + i);
                u = load8((const float *)up + i);
                store8((float *)dst + i, silu8(g) * u);
                continue;
            }
            g = load8_bf16((const uint16_t *)gate + i);
            u = load8_bf16((const uint16_t *)up + i);
            store8(y, silu8(g) * u);
            write_row(dst + i * item, y, LANES, type);
        }
    }
}

/* Rotate, in place, the first 2 * half elements of each head: neox style, that is
 * element i with element i + half. cos_sin: [positions, 2 * half], cosines first. */
static void rotate_heads(void *heads, int64_t num_heads, int64_t dim, const float *cos,
                         const float *sin, int64_t half, int32_t type) {
    size_t item = item_size(type);
    for (int64_t h = 0; h < num_heads; h++) {
        char *head = (char *)heads + h * dim * item;
        float x[2 * half], y[2 * half];
        read_row(x, head, 2 * half, type);
        for (int64_t i = 0; i < half; i++) {
            y[i] = x[i] * cos[i] - x[i + half] * sin[i];
            y[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
        }
        write_row(head, y, 2 * half, type);
    }
}

void tetris_rope(const int64_t *positions, void *q, void *k, const void *cos_sin,
                 int64_t rows, int64_t q_stride, int64_t k_stride, int64_t q_heads,
                 int64_t k_heads, int64_t dim, int64_t rotary_dim, int32_t type,
                 int32_t cache_type) {
    int64_t half = rotary_dim / 2;
    size_t item = item_size(type), cache_item = item_size(cache_type);
    int64_t work = rows * (q_heads + k_heads) * dim;
#pragma omp parallel for schedule(static) if (work > PARALLEL_ELEMENTS)
    for (int64_t row = 0; row < rows; row++) {
        float angles[rotary_dim];
        const char *src =
            (const char *)cos_sin + positions[row] * rotary_dim * cache_item;
        read_row(angles, src, rotary_dim, cache_type);
        rotate_heads((char *)q + row * q_stride * item, q_heads, dim, angles,
                     angles + half, half, type);
        rotate_heads((char *)k + row * k_stride * item, k_heads, dim, angles,
                     angles + half, half, type);
    }
}
