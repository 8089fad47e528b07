// Attention over the paged KV cache, which is read where it lies. Two ways: a decode has one query a request, and is
// bound by reading keys and values once; a chunk has many, and becomes two matrix products a tile of keys.
//
// In both softmax runs along with the keys («online», Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022): a
// row keeps its largest score so far, the sum of its weights and its weighted values, rescaled when a larger one comes.
#pragma once
#include "product.h"

#define STRETCH 256  // keys of a decode between two rescalings
#define TALLEST 128  // query rows of one key head in a chunk's task
#define NOTHING -1e30f

// Some queries of one request, for some of the key heads.
typedef struct {
    int64_t request, first, count;  // tokens first .. first + count of the request's queries
    int64_t head, heads;            // key heads head .. head + heads
} Task;

// What one layer's attention reads and writes.
typedef struct {
    const number *k_cache, *v_cache;  // [num_blocks, block_size, num_kv_heads, dim]
    int64_t block_size, num_kv_heads, group, dim;
    const float *q;  // scaled and rotated, [tokens, q_stride]
    int64_t q_stride;
    number *out;  // [tokens, out_stride]
    int64_t out_stride;
} Heads;

// Keys key .. key + n of a request lie one after another, from `place` on.
typedef struct {
    int64_t key, n, place;
} Run;

// The runs that keys begin .. end lie in, at most one a key; returns how many.
static inline int runs_of(const Heads &h, int64_t begin, int64_t end, const int32_t *table, Run *runs) {
    int count = 0;
    for (int64_t key = begin; key < end; key += runs[count++].n) {
        const int64_t offset = key % h.block_size, room = h.block_size - offset;
        const int64_t place = (table[key / h.block_size] * h.block_size + offset) * h.num_kv_heads * h.dim;
        runs[count] = {key, room < end - key ? room : end - key, place};
    }
    return count;
}

// A row of keys or values that will be wanted soon.
template <int DIM> static inline void fetch(const number *row) {
    for (int d = 0; FETCH_CACHE && d < DIM; d += 64 / (int)sizeof(number)) __builtin_prefetch(row + d);
}

// scores[i] = q . key i, four keys at a time. ahead: fetched on the way, as many rows.
template <int DIM> static inline void scores_of(const float *q, const number *keys, int64_t stride, int64_t n, const number *ahead, float *scores) {
    vec query[DIM / LANES];
    for (int d = 0; d < DIM / LANES; d++) query[d] = load(q + d * LANES);
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) {
        vec s[4] = {};
        for (int j = 0; j < 4; j++) fetch<DIM>(ahead + (i + j) * stride);
        for (int d = 0; d < DIM / LANES; d++)
            for (int j = 0; j < 4; j++) s[j] += query[d] * load(keys + (i + j) * stride + d * LANES);
        four f = sums(s[0], s[1], s[2], s[3]);
        memcpy(scores + i, &f, sizeof f);
    }
    for (; i < n; i++) {
        vec s = {};
        for (int d = 0; d < DIM / LANES; d++) s += query[d] * load(keys + i * stride + d * LANES);
        scores[i] = sum(s);
    }
}

// total = total * scale + the weighted values.
template <int DIM> static inline void add_values(float *total, float scale, const float *weights, const number *values, int64_t stride, int64_t n,
                                                  const number *ahead) {
    vec sum[DIM / LANES];
    for (int d = 0; d < DIM / LANES; d++) sum[d] = load(total + d * LANES) * scale;
    for (int64_t i = 0; i < n; i++) {
        fetch<DIM>(ahead + i * stride);
        for (int d = 0; d < DIM / LANES; d++) sum[d] += weights[i] * load(values + i * stride + d * LANES);
    }
    for (int d = 0; d < DIM / LANES; d++) store(total + d * LANES, sum[d]);
}

// Scores [n] (room up to a multiple of LANES) become weights. state: largest score, sum of weights; returns by what all
// that came before must be scaled.
static inline float soften(float *scores, int64_t n, float *state) {
    for (int64_t i = n; i % LANES; i++) scores[i] = NOTHING;
    vec most = all(state[0]), total = {};
    for (int64_t i = 0; i < n; i += LANES) {
        vec s = load(scores + i);
        most = s > most ? s : most;
    }
    float peak = most[0];
    for (int i = 1; i < LANES; i++) peak = most[i] > peak ? most[i] : peak;
    for (int64_t i = 0; i < n; i += LANES) {
        vec w = exponential(load(scores + i) - peak);
        store(scores + i, w);
        total += w;
    }
    const float scale = expf(state[0] - peak);
    state[0] = peak;
    state[1] = state[1] * scale + sum(total);
    return scale;
}

static inline int64_t decode_floats(const Heads &h) { return h.num_kv_heads * h.group * (2 + h.dim + STRETCH); }

// One query, all heads of a task together: block after block of the cache, each from front to back.
template <int DIM> static void decode(const Heads &h, const Task &task, int64_t token, int64_t context, const int32_t *table, float *scratch) {
    const int64_t stride = h.num_kv_heads * DIM, rows = task.heads * h.group;
    const float *q = h.q + token * h.q_stride + task.head * h.group * DIM;
    float *scores = scratch, *totals = scores + rows * STRETCH, *states = totals + rows * DIM, scales[rows];
    memset(totals, 0, rows * DIM * sizeof(float));
    for (int64_t r = 0; r < rows; r++) states[2 * r] = NOTHING, states[2 * r + 1] = 0;
    for (int64_t begin = 0; begin < context; begin += STRETCH) {
        const int64_t end = begin + STRETCH < context ? begin + STRETCH : context;
        Run runs[STRETCH];
        const int num_runs = runs_of(h, begin, end, table, runs);
        for (int i = 0; i < num_runs; i++) {
            const Run &run = runs[i];
            const number *ahead = i + 1 < num_runs ? h.k_cache + runs[i + 1].place : h.v_cache + runs[0].place;
            for (int64_t r = 0; r < rows; r++) {
                const int64_t head = (task.head + r / h.group) * DIM;
                scores_of<DIM>(q + r * DIM, h.k_cache + run.place + head, stride, run.n, ahead + head,
                               scores + r * STRETCH + run.key - begin);
            }
        }
        for (int64_t r = 0; r < rows; r++) scales[r] = soften(scores + r * STRETCH, end - begin, states + 2 * r);
        for (int i = 0; i < num_runs; i++) {
            const Run &run = runs[i];
            const number *ahead = h.v_cache + runs[i + 1 < num_runs ? i + 1 : i].place;
            for (int64_t r = 0; r < rows; r++) {
                const int64_t head = (task.head + r / h.group) * DIM;
                add_values<DIM>(totals + r * DIM, i ? 1 : scales[r], scores + r * STRETCH + run.key - begin,
                                h.v_cache + run.place + head, stride, run.n, ahead + head);
            }
        }
    }
    number *out = h.out + token * h.out_stride + task.head * h.group * DIM;
    for (int64_t r = 0; r < rows; r++)
        for (int d = 0; d < DIM; d += LANES) store(out + r * DIM + d, load(totals + r * DIM + d) / states[2 * r + 1]);
}

static inline int64_t chunk_floats(const Heads &h) {
    const int64_t rows = TALLEST + h.group, columns = num_panels(h.dim) * WIDTH;
    return WIDTH * (h.dim + columns) + rows * (h.dim + columns + 2) + MOST_ROWS * WIDTH * 2;
}

// Keys [n] of one head as a panel: outputs are keys, the inner dimension is the head's.
static inline void pack_keys(const Heads &h, const number *const *keys, int64_t n, number *panel) {
    for (int64_t d = 0; d < h.dim; d += PER_STEP)
        for (int64_t i = 0; i < WIDTH; i++)
            for (int j = 0; j < PER_STEP; j++) panel[d * WIDTH + i * PER_STEP + j] = i < n ? keys[i][d + j] : 0;
}

// Values [n] as panels: outputs are the head's dimensions, the inner one is the keys.
static inline void pack_values(const Heads &h, const number *const *values, int64_t n, number *panels) {
    for (int64_t p = 0; p < num_panels(h.dim); p++, panels += WIDTH * WIDTH)
        for (int64_t k = 0; k < WIDTH; k += PER_STEP)
            for (int64_t i = 0; i < WIDTH; i++)
                for (int j = 0; j < PER_STEP; j++) {
                    const bool there = k + j < n && p * WIDTH + i < h.dim;
                    panels[k * WIDTH + i * PER_STEP + j] = there ? values[k + j][p * WIDTH + i] : 0;
                }
}

// Many queries of one key head, the first at `position`: for each tile of WIDTH keys, scores and then weighted values.
static void chunk(const Heads &h, const Task &task, int64_t token, int64_t position, const int32_t *table, float *scratch) {
    const int64_t columns = num_panels(h.dim) * WIDTH, rows = h.group * task.count, context = position + task.count;
    float *totals = scratch, *states = totals + rows * columns, *scores = states + 2 * rows;
    number *keys = (number *)(scores + MOST_ROWS * WIDTH), *values = keys + WIDTH * h.dim;
    number *queries = values + WIDTH * columns, *weights = queries + rows * h.dim;
    memset(totals, 0, rows * columns * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        states[2 * r] = NOTHING, states[2 * r + 1] = 0;
        const float *q = h.q + (token + r / h.group) * h.q_stride + (task.head * h.group + r % h.group) * h.dim;
        for (int64_t d = 0; d < h.dim; d += LANES) store(queries + r * h.dim + d, load(q + d));
    }
    for (int64_t begin = 0; begin < context; begin += WIDTH) {
        const int64_t end = begin + WIDTH < context ? begin + WIDTH : context;
        const number *k_rows[WIDTH], *v_rows[WIDTH];
        Run runs[WIDTH];
        const int num_runs = runs_of(h, begin, end, table, runs);
        for (const Run *run = runs; run < runs + num_runs; run++)
            for (int64_t i = 0; i < run->n; i++) {
                const int64_t row = run->place + (i * h.num_kv_heads + task.head) * h.dim;
                k_rows[run->key - begin + i] = h.k_cache + row, v_rows[run->key - begin + i] = h.v_cache + row;
            }
        pack_keys(h, k_rows, end - begin, keys);
        pack_values(h, v_rows, end - begin, values);
        int64_t row = begin > position ? (begin - position) * h.group : 0;  // earlier ones see none of these keys
        for (int64_t here; row < rows; row += here) {
            here = rows - row < MOST_ROWS ? rows - row : MOST_ROWS;
            vec sums[MOST_ROWS][VECTORS];
            float scales[MOST_ROWS];
            some_rows<0>((int)here, queries + row * h.dim, h.dim, keys, h.dim, keys, sums);
            for (int64_t r = 0; r < here; r++) {
                const int64_t visible = position + (row + r) / h.group + 1 - begin;
                for (int v = 0; v < VECTORS; v++) store(scores + v * LANES, sums[r][v]);
                for (int64_t i = visible < end - begin ? visible : end - begin; i < WIDTH; i++) scores[i] = NOTHING;
                scales[r] = soften(scores, WIDTH, states + 2 * (row + r));
                for (int v = 0; v < VECTORS; v++) store(weights + r * WIDTH + v * LANES, load(scores + v * LANES));
            }
            for (int64_t p = 0; p < columns; p += WIDTH) {
                some_rows<0>((int)here, weights, WIDTH, values + p * WIDTH, WIDTH, values, sums);
                for (int64_t r = 0; r < here; r++) {
                    float *total = totals + (row + r) * columns + p;
                    for (int v = 0; v < VECTORS; v++)
                        store(total + v * LANES, load(total + v * LANES) * scales[r] + sums[r][v]);
                }
            }
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        number *out = h.out + (token + r / h.group) * h.out_stride + (task.head * h.group + r % h.group) * h.dim;
        for (int64_t d = 0; d < h.dim; d += LANES) store(out + d, load(totals + r * columns + d) / states[2 * r + 1]);
    }
}
