/* out = x w^T (+ bias) for few rows: weights packed once, in panels of 16 columns.
 *
 * A panel holds, for each k, the 16 weights of its columns side by side: as bfloat16
 * where that loses nothing (it halves what a step reads from memory), columns c and
 * c + 8 being the two halves of a 32-bit word, and as float otherwise. Every output is
 * one chain of multiply-adds in the order of k, whatever the number of rows: a row's
 * result does not depend on its batch, bit for bit.
 */
#include <stdlib.h>

#include "threads.h"
#include "vec.h"

#define PANEL 16
#define MAX_TILE 6      /* rows in one tile of registers: 12 accumulators */
#define ROW_BLOCK 96    /* rows whose inputs stay in the second-level cache */

typedef struct {
    const void *panels;
    const float *bias; /* or NULL */
    const void *x;     /* [rows, k], of the outputs' type */
    void *out;         /* [rows, columns] */
    int64_t rows, k, columns;
    int32_t panel_type, row_type;
} linear_args;

/* One block of rows under all panels. */
typedef struct {
    const linear_args *a;
    const float *x; /* [rows, k] of this block */
    int64_t row, rows, width, num_panels;
} block;

/* Columns 0..7 and 8..15 of one k of a panel. */
#define LOAD_F32(w, low, high) low = load8(w), high = load8((w) + LANES)
#define LOAD_BF16(w, low, high)                                                        \
    v8i pair = *(const v8i *)(w);                                                      \
    low = (v8)(pair << 16), high = (v8)(pair & (int32_t)0xffff0000)

/* TILE(name, rows, panels, element, load): acc = x[rows, k] times the panels. */
#define TILE(name, R, P, T, LOAD)                                                      \
    static void name(const float *x, int64_t k, const void *panels, float *acc) {      \
        const T *w = panels;                                                           \
        const int64_t step = k * PANEL;                                                \
        v8 a[R][P][2];                                                                 \
        for (int r = 0; r < R; r++)                                                    \
            for (int p = 0; p < P; p++) a[r][p][0] = a[r][p][1] = splat(0.0f);         \
        for (int64_t i = 0; i < k; i++, w += PANEL) {                                  \
            v8 b[P][2];                                                                \
            for (int p = 0; p < P; p++) {                                              \
                LOAD(w + p * step, b[p][0], b[p][1]);                                  \
            }                                                                          \
            for (int r = 0; r < R; r++) {                                              \
                v8 value = splat(x[r * k + i]);                                        \
                for (int p = 0; p < P; p++) {                                          \
                    a[r][p][0] += value * b[p][0];                                     \
                    a[r][p][1] += value * b[p][1];                                     \
                }                                                                      \
            }                                                                          \
        }                                                                              \
        for (int r = 0; r < R; r++)                                                    \
            for (int p = 0; p < P; p++) {                                              \
                store8(acc + (r * P + p) * PANEL, a[r][p][0]);                         \
                store8(acc + (r * P + p) * PANEL + LANES, a[r][p][1]);                 \
            }                                                                          \
    }
#define TILES(suffix, T, LOAD)                                                         \
    TILE(tile_1x1_##suffix, 1, 1, T, LOAD)                                             \
    TILE(tile_2x1_##suffix, 2, 1, T, LOAD)                                             \
    TILE(tile_3x1_##suffix, 3, 1, T, LOAD)                                             \
    TILE(tile_4x1_##suffix, 4, 1, T, LOAD)                                             \
    TILE(tile_5x1_##suffix, 5, 1, T, LOAD)                                             \
    TILE(tile_6x1_##suffix, 6, 1, T, LOAD)                                             \
    TILE(tile_1x4_##suffix, 1, 4, T, LOAD)                                             \
    TILE(tile_2x2_##suffix, 2, 2, T, LOAD)                                             \
    TILE(tile_3x2_##suffix, 3, 2, T, LOAD)
TILES(f32, float, LOAD_F32)
TILES(bf16, uint16_t, LOAD_BF16)

typedef void (*tile_function)(const float *, int64_t, const void *, float *);
/* [type][rows] */
static const tile_function narrow_tiles[2][MAX_TILE + 1] = {
    {0, tile_1x1_f32, tile_2x1_f32, tile_3x1_f32, tile_4x1_f32, tile_5x1_f32,
     tile_6x1_f32},
    {0, tile_1x1_bf16, tile_2x1_bf16, tile_3x1_bf16, tile_4x1_bf16, tile_5x1_bf16,
     tile_6x1_bf16},
};
/* Up to three rows leave registers for more panels, which hides the latency. */
static const tile_function wide_tiles[2][4] = {
    {0, tile_1x4_f32, tile_2x2_f32, tile_3x2_f32},
    {0, tile_1x4_bf16, tile_2x2_bf16, tile_3x2_bf16},
};
static const int64_t wide_panels[4] = {1, 4, 2, 2};

static void write_tile(const block *b, const float *acc, int64_t row, int64_t rows,
                       int64_t panel, int64_t panels) {
    const linear_args *a = b->a;
    int64_t first = panel * PANEL;
    int64_t count = a->columns - first;
    if (count > panels * PANEL) count = panels * PANEL;
    for (int64_t r = 0; r < rows; r++) {
        float values[4 * PANEL];
        const float *sums = acc + r * panels * PANEL;
        for (int64_t c = 0; c < count; c++)
            values[c] = a->bias ? sums[c] + a->bias[first + c] : sums[c];
        char *dst = (char *)a->out +
                    ((b->row + row + r) * a->columns + first) * item_size(a->row_type);
        write_row(dst, values, count, a->row_type);
    }
}

static void multiply(const block *b, int64_t panel, int64_t panels) {
    const linear_args *a = b->a;
    float acc[MAX_TILE * 4 * PANEL];
    const char *w = (const char *)a->panels +
                    panel * a->k * PANEL * (int64_t)item_size(a->panel_type);
    if (panels > 1) {
        wide_tiles[a->panel_type][b->rows](b->x, a->k, w, acc);
        write_tile(b, acc, 0, b->rows, panel, panels);
        return;
    }
    /* Tiles of nearly equal height: 16 rows are 6 + 5 + 5, never 6 + 6 + 4. */
    int64_t tiles = (b->rows + MAX_TILE - 1) / MAX_TILE;
    for (int64_t t = 0; t < tiles; t++) {
        int64_t begin = b->rows * t / tiles, height = b->rows * (t + 1) / tiles - begin;
        narrow_tiles[a->panel_type][height](b->x + begin * a->k, a->k, w, acc);
        write_tile(b, acc, begin, height, panel, 1);
    }
}

static void multiply_groups(void *context, int64_t begin, int64_t end) {
    const block *b = context;
    for (int64_t group = begin; group < end; group++) {
        int64_t panel = group * b->width;
        if (panel + b->width <= b->num_panels) {
            multiply(b, panel, b->width);
        } else {
            for (int64_t p = panel; p < b->num_panels; p++) multiply(b, p, 1);
        }
    }
}

/* 0, or -1 where there is no memory for the inputs as floats. */
int32_t tetris_linear(const linear_args *a) {
    float *floats = NULL;
    if (a->row_type != TYPE_F32) {
        int64_t most = a->rows < ROW_BLOCK ? a->rows : ROW_BLOCK;
        floats = malloc(most * a->k * sizeof(float));
        if (!floats) return -1;
    }
    int64_t num_panels = (a->columns + PANEL - 1) / PANEL;
    for (int64_t row = 0; row < a->rows; row += ROW_BLOCK) {
        int64_t rows = a->rows - row < ROW_BLOCK ? a->rows - row : ROW_BLOCK;
        const void *x = (const char *)a->x + row * a->k * item_size(a->row_type);
        if (floats) read_row(floats, x, rows * a->k, a->row_type);
        int64_t width = rows < 4 ? wide_panels[rows] : 1;
        block b = {a, floats ? floats : x, row, rows, width, num_panels};
        int64_t groups = (num_panels + width - 1) / width;
        parallel_for(groups, even_grain(groups), multiply_groups, &b);
    }
    free(floats);
    return 0;
}

typedef struct {
    const void *w;
    void *panels;
    int64_t columns, k;
    int32_t type, panel_type;
} pack_args;

static void pack_panels(void *context, int64_t begin, int64_t end) {
    const pack_args *a = context;
    for (int64_t p = begin; p < end; p++)
        for (int64_t i = 0; i < a->k; i++)
            for (int64_t c = 0; c < PANEL; c++) {
                int64_t column = p * PANEL + c, at = column * a->k + i;
                float value = 0.0f;
                if (column < a->columns)
                    value = a->type == TYPE_F32
                                ? ((const float *)a->w)[at]
                                : bf16_to_float(((const uint16_t *)a->w)[at]);
                int64_t to = (p * a->k + i) * PANEL;
                if (a->panel_type == TYPE_F32)
                    ((float *)a->panels)[to + c] = value;
                else
                    ((uint16_t *)a->panels)[to + 2 * (c % LANES) + c / LANES] =
                        float_to_bf16(value);
            }
}

/* Panels from w [columns, k]; the last panel is filled with zeros. */
void tetris_pack_linear(const void *w, int32_t type, void *panels, int32_t panel_type,
                        int64_t columns, int64_t k) {
    pack_args a = {w, panels, columns, k, type, panel_type};
    int64_t num_panels = (columns + PANEL - 1) / PANEL;
    parallel_for(num_panels, even_grain(num_panels), pack_panels, &a);
}

int64_t tetris_linear_args_size(void) { return (int64_t)sizeof(linear_args); }
