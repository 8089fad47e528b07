// Numbers and vectors: one source for AVX-512, AVX2 and everything else, by the compiler's own vector types.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t bits __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));

// What weights, activations and the KV cache are stored as. All sums are float32.
#ifdef BF16
typedef uint16_t number;
#else
typedef float number;
#endif

static inline vec all(float x) { return vec{} + x; }

static inline vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

static inline void store(float *p, vec v) { memcpy(p, &v, sizeof v); }

#ifdef BF16
static inline float to_float(number x) {
    uint32_t wide = (uint32_t)x << 16;
    float f;
    memcpy(&f, &wide, 4);
    return f;
}

static inline vec load(const number *p) {
#ifdef __AVX512F__  // GCC makes two instructions and a shuffle of what is one
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    halves h;
    memcpy(&h, p, sizeof h);
    return (vec)(__builtin_convertvector(h, bits) << 16);
#endif
}

// Rounded to the nearest, ties to even, as PyTorch does. NaN is not kept: nothing here makes one.
static inline void store(number *p, vec v) {
    bits b = (bits)v;
    b = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    halves h = __builtin_convertvector(b, halves);
    memcpy(p, &h, sizeof h);
}
#else
static inline float to_float(number x) { return x; }
#endif

typedef float four __attribute__((vector_size(16)));

// The lanes folded onto four sums.
static inline four fold(vec v) {
#if LANES == 16
    typedef float eight __attribute__((vector_size(32)));
    eight low, high;
    memcpy(&low, &v, sizeof low);
    memcpy(&high, (const char *)&v + sizeof low, sizeof high);
    low += high;
#else
    vec low = v;
#endif
    four a, b = {};
    memcpy(&a, &low, sizeof a);
    if (sizeof low > sizeof a) memcpy(&b, (const char *)&low + sizeof low - sizeof b, sizeof b);
    return a + b;
}

static inline float sum(vec v) {
    four f = fold(v);
    return (f[0] + f[1]) + (f[2] + f[3]);
}

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t four_ints __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (four_ints){__VA_ARGS__})
#endif

// The sums of four vectors at once, which costs little more than one.
static inline four sums(vec a, vec b, vec c, vec d) {
    four p = fold(a), q = fold(b), r = fold(c), s = fold(d);
    four pq = SHUFFLE(p, q, 0, 4, 2, 6) + SHUFFLE(p, q, 1, 5, 3, 7);
    four rs = SHUFFLE(r, s, 0, 4, 2, 6) + SHUFFLE(r, s, 1, 5, 3, 7);
    return SHUFFLE(pq, rs, 0, 1, 4, 5) + SHUFFLE(pq, rs, 2, 3, 6, 7);
}

// e^x to about 2 units in the last place: 2^n by its exponent bits, the rest by a polynomial (Cephes' expf). What would
// be tiny is 0, so that no product with it is subnormal, and slow.
static inline vec exponential(vec x) {
    const vec given = x;
    x = x < -87.0f ? all(-87.0f) : x;
    x = x > 88.0f ? all(88.0f) : x;
    vec turns = x * 1.44269504f;
    ints n = __builtin_convertvector(turns + (turns < 0.0f ? all(-0.5f) : all(0.5f)), ints);  // to the nearest
    vec whole = __builtin_convertvector(n, vec);
    vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return given < -80.0f ? vec{} : p * (vec)((n + 127) << 23);
}
