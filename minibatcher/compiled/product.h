// y = x W^T with W packed once into panels, so that every pass reads it front to back exactly once.
//
// A panel holds WIDTH rows of W (outputs) side by side: for each step along the inner dimension WIDTH neighbours. In
// bfloat16 a step is two inner elements, interleaved, as the processors' dot-product instruction wants them.
#pragma once
#include "switches.h"
#include "vectors.h"

#if LANES == 8  // AVX2 has 16 registers
#define VECTORS 2
#else
#define VECTORS 4
#endif
#define WIDTH (VECTORS * LANES)
#define MOST_ROWS 6  // of x in one tile: MOST_ROWS * VECTORS sums stay in registers

#ifdef BF16
#define PER_STEP 2
#else
#define PER_STEP 1
#endif

typedef struct {
    const number *panels;
    int64_t outputs, inner;  // inner is even in bfloat16
} Weights;

static inline int64_t num_panels(int64_t outputs) { return (outputs + WIDTH - 1) / WIDTH; }

// Row i of the packed matrix is row source(i) of W; rows beyond the last are zero.
static void pack_panel(const number *w, int64_t inner, const int64_t *rows, number *panel) {
    for (int64_t k = 0; k < inner; k += PER_STEP)
        for (int i = 0; i < WIDTH; i++)
            for (int j = 0; j < PER_STEP; j++)
                panel[k * WIDTH + i * PER_STEP + j] = rows[i] < 0 ? 0 : w[rows[i] * inner + k + j];
}

#ifdef BF16
static inline vec multiply_add(vec total, bits w, uint32_t x) {
#ifdef __AVX512BF16__
    return (vec)_mm512_dpbf16_ps((__m512)total, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
#else
    uint32_t low = x << 16, high = x & 0xffff0000u;
    float x0, x1;
    memcpy(&x0, &low, 4);
    memcpy(&x1, &high, 4);
    return total + (vec)(w << 16) * x0 + (vec)(w & 0xffff0000u) * x1;
#endif
}
typedef bits step_vec;
typedef uint32_t step_of_x;

static inline step_vec load_step(const number *p) {
    step_vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
#else
static inline vec multiply_add(vec total, vec w, float x) { return total + w * x; }
typedef vec step_vec;
typedef float step_of_x;

static inline step_vec load_step(const number *p) { return load(p); }
#endif

// sums[r][v] = row r of x times the panel's columns. `ahead`: what will be wanted next is fetched on the way.
template <int ROWS, int LINES>
static inline void tile(const number *x, int64_t stride, const number *panel, int64_t inner, const number *ahead,
                        vec sums[MOST_ROWS][VECTORS]) {
    vec total[ROWS][VECTORS] = {};
    for (int64_t k = 0; k < inner; k += PER_STEP) {
        step_vec w[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            w[v] = load_step(panel + k * WIDTH + v * LANES * PER_STEP);
            if (v < LINES) __builtin_prefetch(ahead + (k * LINES + v * PER_STEP) * LANES, 0, 2);
        }
        for (int r = 0; r < ROWS; r++) {
            step_of_x step;
            memcpy(&step, x + r * stride + k, sizeof step);
            for (int v = 0; v < VECTORS; v++) total[r][v] = multiply_add(total[r][v], w[v], step);
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = total[r][v];
}

template <int LINES>
static void some_rows(int rows, const number *x, int64_t stride, const number *panel, int64_t inner,
                      const number *ahead, vec sums[MOST_ROWS][VECTORS]) {
    switch (rows) {
    case 1: return tile<1, LINES>(x, stride, panel, inner, ahead, sums);
    case 2: return tile<2, LINES>(x, stride, panel, inner, ahead, sums);
    case 3: return tile<3, LINES>(x, stride, panel, inner, ahead, sums);
    case 4: return tile<4, LINES>(x, stride, panel, inner, ahead, sums);
    case 5: return tile<5, LINES>(x, stride, panel, inner, ahead, sums);
    default: return tile<6, LINES>(x, stride, panel, inner, ahead, sums);
    }
}

#define ROW_BLOCK 96  // rows of x that stay in a core's cache while the panels go by

// What becomes of the sums of one tile: row r, columns column .. column + WIDTH.
typedef void Finish(void *out, int64_t stride, int64_t row, int64_t column, const vec sums[VECTORS]);

// out = x W^T for `rows` rows of x, shared among the threads of the region that calls it: all must, and then meet.
template <Finish finish>
static void product(const Weights &w, const number *x, int64_t stride, int64_t rows, void *out, int64_t out_stride) {
    const int64_t panels = num_panels(w.outputs), blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK, length = w.inner * WIDTH;
#pragma omp for schedule(static) nowait
    for (int64_t task = 0; task < panels * blocks; task++) {
        const int64_t begin = task / panels * ROW_BLOCK, end = begin + ROW_BLOCK < rows ? begin + ROW_BLOCK : rows;
        const number *panel = w.panels + task % panels * length;
        const int64_t tiles = (end - begin + MOST_ROWS - 1) / MOST_ROWS;
        int64_t row = begin;
        for (int64_t t = 0; t < tiles; t++) {
            const int here = (int)((end - row + tiles - t - 1) / (tiles - t));  // tiles of equal height
            const number *from = x + row * stride;
            vec sums[MOST_ROWS][VECTORS];
            // While one panel is multiplied, the next comes from memory: a part of it with each of the first tiles.
            if (!FETCH_WEIGHTS) some_rows<0>(here, from, stride, panel, w.inner, panel, sums);
            else if (tiles == 1) some_rows<VECTORS>(here, from, stride, panel, w.inner, panel + 32 * WIDTH, sums);
            else if (tiles == 2) some_rows<VECTORS / 2>(here, from, stride, panel, w.inner, panel + length + t * length / 2, sums);
            else if (t < VECTORS) some_rows<1>(here, from, stride, panel, w.inner, panel + length + t * length / VECTORS, sums);
            else some_rows<0>(here, from, stride, panel, w.inner, panel, sums);
            for (int r = 0; r < here; r++) finish(out, out_stride, row + r, task % panels * WIDTH, sums[r]);
            row += here;
        }
    }
}

static void assign(void *out, int64_t stride, int64_t row, int64_t column, const vec sums[VECTORS]) {
    for (int v = 0; v < VECTORS; v++) store((float *)out + row * stride + column + v * LANES, sums[v]);
}

static void add(void *out, int64_t stride, int64_t row, int64_t column, const vec sums[VECTORS]) {
    float *p = (float *)out + row * stride + column;
    for (int v = 0; v < VECTORS; v++) store(p + v * LANES, load(p + v * LANES) + sums[v]);
}

// silu(gate) * up, where half of the panel's columns are gates and half are the ups that belong to them.
static void swiglu(void *out, int64_t stride, int64_t row, int64_t column, const vec sums[VECTORS]) {
    number *p = (number *)out + row * stride + column / 2;
    for (int v = 0; v < VECTORS / 2; v++) {
        vec gate = sums[v];
        store(p + v * LANES, gate / (1.0f + exponential(-gate)) * sums[v + VECTORS / 2]);
    }
}
