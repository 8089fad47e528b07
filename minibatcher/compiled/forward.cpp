// A whole step of a Llama-family model on a CPU in one call: what model/llama.py says in PyTorch, said in loops.
//
// T tokens of R requests are packed in one row, as everywhere here. All threads go through a layer together, part by
// part, and meet after each. Compiled twice: weights and cache in float32, and in bfloat16 (-DBF16). Sums, the residual
// stream, queries and softmax are float32 in both.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_thread_num() { return 0; }
static inline int omp_get_num_threads() { return 1; }
#endif

#include "attention.h"
#include "product.h"

extern "C" {

typedef struct {
    Weights qkv, o, gate_up, down;
    const float *norm1, *norm2;      // [hidden]
    const float *qkv_bias;           // or null
    const float *q_norm, *k_norm;    // [head_dim], or null
} Layer;

typedef struct {
    int64_t hidden, intermediate, num_layers, num_heads, num_kv_heads, head_dim, vocab;
    float eps;
    const number *embedding;  // [vocab, hidden]
    const float *norm;
    Weights head;
    const Layer *layers;
} Model;

typedef struct {
    int64_t num_tokens, num_requests, num_newest, max_blocks, block_size, num_threads;
    const int64_t *token_ids, *positions, *slot_mapping;  // [T]
    const int32_t *query_starts;                          // [R + 1]
    const int32_t *context_lens;                          // [R]
    const int32_t *block_tables;                          // [R, max_blocks]
    const int64_t *newest;                                // [N]: the tokens whose logits are wanted
    const float *cos, *sin;                               // [positions, head_dim / 2]
    number *const *k_caches, *const *v_caches;            // of each layer
    float *logits;                                        // [N, padded(vocab)]
    int64_t *best;                                        // [N]: the token of the largest logit, the first of equals
    char *workspace;                                      // workspace_bytes
    double *seconds;                                      // [NUM_PARTS] to add to, or null
} Step;

enum Part { NORMS, PRODUCTS, ROTATION, ATTENTION, LOGITS, NUM_PARTS };

}

static inline int64_t padded(int64_t columns) { return num_panels(columns) * WIDTH; }

// Buffers of a step, one after another in its workspace.
struct Buffers {
    int64_t hidden, qkv, heads, intermediate;  // strides
    float *x, *mixed, *scratch;
    number *normed, *attended, *inner;
    int64_t scratch_floats, bytes;

    Buffers(const Model &m, int64_t tokens, int64_t threads, char *base) {
        hidden = padded(m.hidden);
        qkv = padded((m.num_heads + 2 * m.num_kv_heads) * m.head_dim);
        heads = padded(m.num_heads * m.head_dim);
        intermediate = padded(m.intermediate);
        const Heads h = {nullptr, nullptr, 0, m.num_kv_heads, m.num_heads / m.num_kv_heads, m.head_dim, nullptr, 0, nullptr, 0};
        scratch_floats = decode_floats(h) > chunk_floats(h) ? decode_floats(h) : chunk_floats(h);
        scratch_floats = (scratch_floats + 15) / 16 * 16;
        bytes = 0;
        x = (float *)take(base, tokens * hidden * sizeof(float));
        mixed = (float *)take(base, tokens * qkv * sizeof(float));
        scratch = (float *)take(base, threads * scratch_floats * sizeof(float));
        normed = (number *)take(base, tokens * hidden * sizeof(number));
        attended = (number *)take(base, tokens * heads * sizeof(number));
        inner = (number *)take(base, tokens * intermediate * sizeof(number));
    }

    char *take(char *base, int64_t size) {
        char *here = base + bytes;
        bytes += (size + 63) / 64 * 64;
        return here;
    }
};

static void rms_norm(const Model &m, const float *weight, const float *x, number *out, int64_t rows, int64_t stride) {
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * stride;
        vec squares = {};
        for (int64_t i = 0; i < m.hidden; i += LANES) squares += load(from + i) * load(from + i);
        const float scale = 1 / sqrtf(sum(squares) / m.hidden + m.eps);
        for (int64_t i = 0; i < m.hidden; i += LANES) store(out + r * stride + i, load(from + i) * scale * load(weight + i));
    }
}

static void norm_head(float *head, const float *weight, int64_t size, float eps) {
    float squares = 0;
    for (int64_t i = 0; i < size; i++) squares += head[i] * head[i];
    const float scale = 1 / sqrtf(squares / size + eps);
    for (int64_t i = 0; i < size; i++) head[i] *= scale * weight[i];
}

// Biases, norms of heads and rotation; new keys and values go into the cache, queries stay where they are.
static void rotate_and_store(const Model &m, const Layer &layer, const Step &s, const Buffers &b, int64_t index) {
    const int64_t dim = m.head_dim, half = dim / 2, q_heads = m.num_heads, kv_heads = m.num_kv_heads;
    const float scale = 1 / sqrtf((float)dim);
#pragma omp for schedule(static) nowait
    for (int64_t t = 0; t < s.num_tokens; t++) {
        float *row = b.mixed + t * b.qkv;
        if (layer.qkv_bias)
            for (int64_t i = 0; i < (q_heads + 2 * kv_heads) * dim; i++) row[i] += layer.qkv_bias[i];
        const float *cos = s.cos + s.positions[t] * half, *sin = s.sin + s.positions[t] * half;
        for (int64_t h = 0; h < q_heads + kv_heads; h++) {
            float *head = row + h * dim;
            if (layer.q_norm) norm_head(head, h < q_heads ? layer.q_norm : layer.k_norm, dim, m.eps);
            const float by = h < q_heads ? scale : 1;
            for (int64_t i = 0; i < half; i++) {
                const float a = head[i] * by, c = head[i + half] * by;
                head[i] = a * cos[i] - c * sin[i];
                head[i + half] = c * cos[i] + a * sin[i];
            }
        }
        const int64_t place = s.slot_mapping[t] * kv_heads * dim;
        const float *k = row + q_heads * dim, *v = k + kv_heads * dim;
        for (int64_t i = 0; i < kv_heads * dim; i += LANES) {
            store(s.k_caches[index] + place + i, load(k + i));
            store(s.v_caches[index] + place + i, load(v + i));
        }
    }
}

// Decodes take all heads of a request together, so that its cache is read in order; chunks go head by head.
static std::vector<Task> tasks_of(const Model &m, const Step &s) {
    std::vector<Task> tasks;
    const int64_t group = m.num_heads / m.num_kv_heads, tall = CHUNKS && TALLEST > group ? TALLEST / group : 1;
    const bool many = s.num_requests >= 4 * s.num_threads;
    for (int64_t r = 0; r < s.num_requests; r++) {
        const int64_t queries = s.query_starts[r + 1] - s.query_starts[r];
        const int64_t heads = queries == 1 && many ? m.num_kv_heads : 1;
        for (int64_t head = 0; head < m.num_kv_heads; head += heads)
            for (int64_t first = 0; first < queries; first += tall)
                tasks.push_back({r, first, queries - first < tall ? queries - first : tall, head, heads});
    }
    return tasks;
}

static void attention(const Model &m, const Step &s, const Buffers &b, const std::vector<Task> &tasks, int64_t index) {
    const Heads h = {s.k_caches[index], s.v_caches[index], s.block_size, m.num_kv_heads, m.num_heads / m.num_kv_heads,
                     m.head_dim, b.mixed, b.qkv, b.attended, b.heads};
    float *scratch = b.scratch + omp_get_thread_num() * b.scratch_floats;
#pragma omp for schedule(dynamic) nowait
    for (size_t i = 0; i < tasks.size(); i++) {
        const Task &task = tasks[i];
        const int64_t start = s.query_starts[task.request], queries = s.query_starts[task.request + 1] - start;
        const int64_t token = start + task.first, position = s.context_lens[task.request] - queries + task.first;
        const int32_t *table = s.block_tables + task.request * s.max_blocks;
        if (CHUNKS && queries > 1) {
            chunk(h, task, token, position, table, scratch);
            continue;
        }
        switch (m.head_dim) {
        case 16: decode<16>(h, task, token, position + 1, table, scratch); break;
        case 32: decode<32>(h, task, token, position + 1, table, scratch); break;
        case 48: decode<48>(h, task, token, position + 1, table, scratch); break;
        case 64: decode<64>(h, task, token, position + 1, table, scratch); break;
        case 80: decode<80>(h, task, token, position + 1, table, scratch); break;
        case 96: decode<96>(h, task, token, position + 1, table, scratch); break;
        default: decode<128>(h, task, token, position + 1, table, scratch);
        }
    }
}

// Where all threads wait for the last. A part of a small model takes microseconds, less than it takes the system to wake
// a thread that sleeps, so they spin a little; beside another busy program they soon give way.
struct Meeting {
    std::atomic<int> arrived{0}, round{0};

    void wait() {
        const int now = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == omp_get_num_threads()) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(now + 1, std::memory_order_release);
            return;
        }
        for (int i = 0; round.load(std::memory_order_acquire) == now; i++)
            if (i > 10000) std::this_thread::yield();
    }
};

// Says how long each part took, where a step asks for it.
struct Stopwatch {
    double *seconds;
    std::chrono::steady_clock::time_point last;

    void lap(Part part) {
        if (!seconds || omp_get_thread_num() != 0) return;
        const auto now = std::chrono::steady_clock::now();
        seconds[part] += std::chrono::duration<double>(now - last).count();
        last = now;
    }
};

// After the last attention only the tokens whose logits are wanted go on: they move to the front.
static void keep_newest(const Step &s, const Buffers &b) {
#pragma omp single nowait
    for (int64_t i = 0; i < s.num_newest; i++) {
        memmove(b.x + i * b.hidden, b.x + s.newest[i] * b.hidden, b.hidden * sizeof(float));
        memmove(b.attended + i * b.heads, b.attended + s.newest[i] * b.heads, b.heads * sizeof(number));
    }
}

static void choose_best(const Model &m, const Step &s) {
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < s.num_newest; r++) {
        const float *row = s.logits + r * padded(m.vocab);
        float most = row[0];
        for (int64_t i = 0; i < m.vocab; i++) most = row[i] > most ? row[i] : most;
        int64_t i = 0;
        while (i < m.vocab - 1 && row[i] != most) i++;
        s.best[r] = i;
    }
}

extern "C" {

int64_t workspace_bytes(const Model *m, int64_t tokens, int64_t threads) {
    return Buffers(*m, tokens, threads, nullptr).bytes;
}

int64_t logits_stride(const Model *m) { return padded(m->vocab); }

int64_t packed_numbers(int64_t outputs, int64_t inner) { return padded(outputs) * inner; }

// Pack W [outputs, inner]. pairs: its upper half are gates and its lower half ups, and each panel gets of both.
void pack(const number *w, int64_t outputs, int64_t inner, int64_t pairs, number *panels) {
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < num_panels(outputs); p++) {
        int64_t rows[WIDTH];
        for (int64_t i = 0; i < WIDTH; i++) {
            const int64_t half = WIDTH / 2, column = p * half + i % half;
            if (pairs) rows[i] = column < outputs / 2 ? column + i / half * (outputs / 2) : -1;
            else rows[i] = p * WIDTH + i < outputs ? p * WIDTH + i : -1;
        }
        pack_panel(w, inner, rows, panels + p * WIDTH * inner);
    }
}

void forward(const Model *model, const Step *step) {
    const Model &m = *model;
    const Step &s = *step;
    const Buffers b(m, s.num_tokens, s.num_threads, s.workspace);
    const std::vector<Task> tasks = tasks_of(m, s);
    Meeting meeting;
#pragma omp parallel num_threads(s.num_threads)
    {
#pragma omp for schedule(static) nowait
        for (int64_t t = 0; t < s.num_tokens; t++)
            for (int64_t i = 0; i < m.hidden; i += LANES)
                store(b.x + t * b.hidden + i, load(m.embedding + s.token_ids[t] * m.hidden + i));
        int64_t rows = s.num_tokens;
        Stopwatch watch = {s.seconds, std::chrono::steady_clock::now()};
        const auto met = [&](Part part) {
            meeting.wait();
            watch.lap(part);
        };
        met(NORMS);
        for (int64_t l = 0; l < m.num_layers; l++) {
            const Layer &layer = m.layers[l];
            const bool last = l == m.num_layers - 1;
            rms_norm(m, layer.norm1, b.x, b.normed, rows, b.hidden);
            met(NORMS);
            product<assign>(layer.qkv, b.normed, b.hidden, rows, b.mixed, b.qkv);
            met(PRODUCTS);
            rotate_and_store(m, layer, s, b, l);
            met(ROTATION);
            if (TRIM && last && s.num_newest == 0) break;  // a part of a prompt: its keys and values were all it had to give
            attention(m, s, b, tasks, l);
            met(ATTENTION);
            if (TRIM && last) {
                keep_newest(s, b);
                rows = s.num_newest;
                met(ATTENTION);
            }
            product<add>(layer.o, b.attended, b.heads, rows, b.x, b.hidden);
            met(PRODUCTS);
            rms_norm(m, layer.norm2, b.x, b.normed, rows, b.hidden);
            met(NORMS);
            product<swiglu>(layer.gate_up, b.normed, b.hidden, rows, b.inner, b.intermediate);
            met(PRODUCTS);
            product<add>(layer.down, b.inner, b.intermediate, rows, b.x, b.hidden);
            met(PRODUCTS);
        }
        if (!TRIM) {
            keep_newest(s, b);
            rows = s.num_newest;
            met(NORMS);
        }
        if (s.num_newest) {
            rms_norm(m, m.norm, b.x, b.normed, rows, b.hidden);
            met(NORMS);
            product<assign>(m.head, b.normed, b.hidden, rows, s.logits, padded(m.vocab));
            met(LOGITS);
            choose_best(m, s);
            met(LOGITS);
        }
    }
}

}
