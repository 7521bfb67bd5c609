/* The two products of attention: scores against keys, weights over values. */
#ifndef TETRIS_PRODUCTS_H
#define TETRIS_PRODUCTS_H

#include "vec.h"

static inline float exp1(float x) {
    if (x == 0.0f) return 1.0f;
    return exp8(splat(x))[0];
}

#ifdef __clang__
#define SHUFFLE(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE(x, y, ...) __builtin_shuffle(x, y, (v8i){__VA_ARGS__})
#endif

/* The sum of each of eight vectors, as one vector. */
static inline v8 sum_lanes(v8 a0, v8 a1, v8 a2, v8 a3, v8 a4, v8 a5, v8 a6, v8 a7) {
#define LO(x, y) SHUFFLE(x, y, 0, 8, 1, 9, 4, 12, 5, 13)
#define HI(x, y) SHUFFLE(x, y, 2, 10, 3, 11, 6, 14, 7, 15)
    v8 b0 = LO(a0, a2) + HI(a0, a2), b1 = LO(a1, a3) + HI(a1, a3);
    v8 b2 = LO(a4, a6) + HI(a4, a6), b3 = LO(a5, a7) + HI(a5, a7);
    v8 c0 = LO(b0, b1) + HI(b0, b1), c1 = LO(b2, b3) + HI(b2, b3);
#undef LO
#undef HI
    v8 low = SHUFFLE(c0, c1, 0, 1, 2, 3, 8, 9, 10, 11);
    v8 high = SHUFFLE(c0, c1, 4, 5, 6, 7, 12, 13, 14, 15);
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

#endif
