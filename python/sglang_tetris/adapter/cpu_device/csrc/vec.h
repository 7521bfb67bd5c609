/* Eight float lanes, in the vector extension that gcc and clang share. */
#ifndef TETRIS_VEC_H
#define TETRIS_VEC_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LANES 8
/* Numbers of the element types; mirrored in native_library.py. */
#define TYPE_F32 0
#define TYPE_BF16 1

typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t v8i __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t v8h __attribute__((vector_size(16), aligned(2), may_alias));

static inline v8 load8(const float *p) { return *(const v8 *)p; }
static inline void store8(float *p, v8 x) { *(v8 *)p = x; }
static inline v8 splat(float x) { return (v8){x, x, x, x, x, x, x, x}; }

static inline v8 load8_bf16(const uint16_t *p) {
    return (v8)(__builtin_convertvector(*(const v8h *)p, v8i) << 16);
}

static inline float bf16_to_float(uint16_t x) {
    union { uint32_t u; float f; } bits = {(uint32_t)x << 16};
    return bits.f;
}

/* Round to nearest, ties to even; a NaN stays one. */
static inline uint16_t float_to_bf16(float x) {
    union { float f; uint32_t u; } bits = {x};
    if ((bits.u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return (uint16_t)((bits.u + 0x7fffu + ((bits.u >> 16) & 1u)) >> 16);
}

static inline size_t item_size(int32_t type) { return type == TYPE_F32 ? 4 : 2; }

/* n elements of either type, to floats. */
static inline void read_row(float *dst, const void *src, int64_t n, int32_t type) {
    if (type == TYPE_F32) {
        memcpy(dst, src, n * sizeof(float));
        return;
    }
    const uint16_t *half = src;
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store8(dst + i, load8_bf16(half + i));
    for (; i < n; i++) dst[i] = bf16_to_float(half[i]);
}

/* n floats, to elements of either type. */
static inline void write_row(void *dst, const float *src, int64_t n, int32_t type) {
    if (type == TYPE_F32) {
        memcpy(dst, src, n * sizeof(float));
        return;
    }
    uint16_t *half = dst;
    for (int64_t i = 0; i < n; i++) half[i] = float_to_bf16(src[i]);
}

/* The sum of the lanes, always in this order. */
static inline float lane_sum(v8 x) {
    return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

/* exp(x) for x <= 0, within 2 units in the last place; below -87: 0. */
static inline v8 exp8(v8 x) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to integer */
    v8i small = x < splat(-87.0f);
    v8 t = x * splat(1.44269504f) + splat(magic);
    v8 n = t - splat(magic);
    v8 r = x - n * splat(0.693145752f);
    r = r - n * splat(1.42860677e-6f);
    v8 p = splat(1.98756915e-4f);
    p = p * r + splat(1.39819995e-3f);
    p = p * r + splat(8.33345190e-3f);
    p = p * r + splat(4.16657962e-2f);
    p = p * r + splat(1.66666655e-1f);
    p = p * r + splat(0.5f);
    p = p * r * r + r + splat(1.0f);
    v8i exponent = ((v8i)t - (v8i)splat(magic) + 127) << 23;
    v8 result = p * (v8)exponent;
    return (v8)((v8i)result & ~small);
}

#endif
