/* Arithmetic of decoder.c: packed products, norms, exponentials, and the two products of attention. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#else
#define omp_get_thread_num() 0
#define omp_get_num_threads() 1
#endif

#if defined(__AVX512F__) && MOST_LANES >= 16
#define LANES 16
#elif defined(__AVX__) && MOST_LANES >= 8
#define LANES 8
#else
#define LANES 4
#endif
/* Given when compiled: WEIGHT and STORE, the kinds of weights and of the key/value cache, and MOST_LANES. */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int64_t i64;
typedef long long pair __attribute__((vector_size(16)));
typedef char sixteen __attribute__((vector_size(16)));

/* x * y + z rounded once. Compilers may or may not fuse by themselves, here so and there so; they are told not to. */
#ifdef __has_builtin
#if __has_builtin(__builtin_elementwise_fma)
#define FMA(x, y, z) __builtin_elementwise_fma(x, y, z)
#endif
#endif
#ifndef FMA
#if defined(__FMA__) && LANES == 16
#define FMA(x, y, z) (vec)__builtin_ia32_vfmaddps512_mask(x, y, z, -1, 4)
#elif defined(__FMA__) && LANES == 8
#define FMA(x, y, z) (vec)__builtin_ia32_vfmaddps256(x, y, z)
#elif defined(__FMA__)
#define FMA(x, y, z) (vec)__builtin_ia32_vfmaddps(x, y, z)
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#define FMA(x, y, z) (vec)vfmaq_f32(z, x, y)
#else
#define FMA(x, y, z) ((x) * (y) + (z))
#endif
#endif

enum { FLOAT32, BFLOAT16, INT8 };

typedef struct { /* weight [blocks, in, LANES], scale and bias [blocks * LANES] or null */
    const void *weight;
    const float *scale, *bias;
    i64 in, out;
} Linear;

INLINE vec splat(float x) { return x - (vec){}; } /* not +: that would turn -0 into 0 and cost an addition */
INLINE vec least(vec x, vec y) {
    ints first = x < y;
    return (vec)(((ints)x & first) | ((ints)y & ~first));
}

INLINE vec load(const void *w, i64 at, const int kind) {
    if (kind == FLOAT32) return *(const vec *)((const float *)w + at);
    if (kind == INT8) {
        const int8_t *from = (const int8_t *)w + at;
#if defined(__AVX2__) && LANES == 8 && !defined(__clang__) /* which gcc does not find by itself */
        i64 eight;
        memcpy(&eight, from, 8);
        ints wide = (ints)__builtin_ia32_pmovsxbd256((sixteen)(pair){eight, 0});
        return __builtin_convertvector(wide, vec);
#else
        return __builtin_convertvector(*(const bytes *)from, vec);
#endif
    }
    ints wide = __builtin_convertvector(*(const halves *)((const uint16_t *)w + at), ints) << 16;
    return (vec)wide;
}

static float load_one(const void *w, i64 at, int kind) {
    if (kind == FLOAT32) return ((const float *)w)[at];
    if (kind == INT8) return ((const int8_t *)w)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)w)[at] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static void store_one(void *to, i64 at, int kind, float x) {
    if (kind == FLOAT32) {
        ((float *)to)[at] = x;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, 4);
    ((uint16_t *)to)[at] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* to the nearest, ties to even */
}

/* exp by 2^n times a polynomial (Cephes), to about one unit in the last place; 0 below -87. */
INLINE vec exp_vec(vec x) {
    ints small = x < splat(-87.0f);
    x = least(x, splat(88.0f));
    vec shift = splat(12582912.0f), n = FMA(x, splat(1.44269504f), shift) - shift;
    vec r = FMA(n, splat(-0.693359375f), x), p = splat(1.9875691500e-4f);
    r = FMA(n, splat(2.12194440e-4f), r);
    p = FMA(p, r, splat(1.3981999507e-3f));
    p = FMA(p, r, splat(8.3334519073e-3f));
    p = FMA(p, r, splat(4.1665795894e-2f));
    p = FMA(p, r, splat(1.6666665459e-1f));
    p = FMA(p, r, splat(5.0000001201e-1f));
    p = FMA(p, r * r, r + 1.0f);
    ints power = (__builtin_convertvector(n, ints) + 127) << 23;
    return (vec)((ints)(p * (vec)power) & ~small);
}

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exp_vec(-x)); }

static float cap(float x, float limit) { return limit ? limit * tanhf(x / limit) : x; }

/* R rows times C blocks of outputs. The sum over inputs runs in order, whatever R and C are. */
INLINE void tile(const Linear *l, const float *x, i64 xs, i64 block, float *y, i64 ys, int add, const int R,
                 const int C) {
    vec sums[6][8];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[r][c] = (vec){};
    const i64 size = l->in * LANES;
    for (i64 i = 0; i < l->in; i++) {
        vec w[8];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) w[c] = load(l->weight, (block + c) * size + i * LANES, WEIGHT);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vec input = splat(x[r * xs + i]);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) sums[r][c] = FMA(input, w[c], sums[r][c]);
        }
    }
    for (int c = 0; c < C; c++) {
        i64 at = (block + c) * LANES, left = l->out - at;
        for (int r = 0; r < R; r++) {
            vec sum = sums[r][c];
            float *out = y + r * ys + at;
            if (l->scale) sum *= *(const vec *)(l->scale + at);
            if (l->bias) sum += *(const vec *)(l->bias + at);
            if (left < LANES) { /* the last block holds rows that no output has */
                for (int k = 0; k < left; k++) out[k] = add ? out[k] + sum[k] : sum[k];
                continue;
            }
            if (add) sum += *(vec *)out;
            *(vec *)out = sum;
        }
    }
}

#define TILE(R, C) case R * 16 + C: tile(l, x, xs, block, y, ys, add, R, C); break;
static void tiles(const Linear *l, const float *x, i64 xs, i64 block, float *y, i64 ys, int add, int R, int C) {
    switch (R * 16 + C) {
        TILE(1, 1) TILE(1, 2) TILE(1, 4) TILE(1, 8) TILE(2, 1) TILE(2, 2) TILE(2, 4) TILE(3, 1) TILE(3, 3)
        TILE(3, 4) TILE(3, 2) TILE(4, 1) TILE(4, 3) TILE(4, 2) TILE(5, 1) TILE(5, 2) TILE(6, 1) TILE(6, 2)
    }
}

/* This thread's share of 0 .. count. */
#define SHARE(count, from, to)                                                                            \
    i64 from = (count) * omp_get_thread_num() / omp_get_num_threads(),                                    \
        to = (count) * (omp_get_thread_num() + 1) / omp_get_num_threads()

/* y = x W^T + bias, or y += that; each thread computes some of the outputs. */
static void project(const Linear *l, const float *x, i64 xs, i64 rows, float *y, i64 ys, int add) {
    SHARE((l->out + LANES - 1) / LANES, first, last);
    const i64 groups = (rows + 5) / 6, largest = (rows + groups - 1) / groups;
    for (i64 block = first, C = largest == 1 ? 8 : largest <= 3 ? 4 : largest == 4 ? 3 : 2; block < last; block += C) {
        while (C > last - block) C /= 2;
        for (i64 group = 0; group < groups; group++) {
            i64 row = rows * group / groups, R = rows * (group + 1) / groups - row;
            tiles(l, x + row * xs, xs, block, y + row * ys, ys, add, R, C);
        }
    }
}

INLINE float sum_of(vec x) {
    float sum[LANES];
    memcpy(sum, &x, sizeof sum);
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) sum[i] += sum[i + half];
    return sum[0];
}

static float mean_square(const float *x, i64 size) {
    vec sums = {};
    i64 i = 0;
    for (; i + LANES <= size; i += LANES) sums = FMA(*(const vec *)(x + i), *(const vec *)(x + i), sums);
    float sum = sum_of(sums);
    for (; i < size; i++) sum += x[i] * x[i];
    return sum / size;
}

/* y = rms_norm(x) * weight, or y += that. */
static void rms_norm(const float *x, const float *weight, float eps, i64 size, float *y, int add) {
    float factor = 1 / sqrtf(mean_square(x, size) + eps);
    for (i64 i = 0; i < size; i++) y[i] = add ? y[i] + x[i] * factor * weight[i] : x[i] * factor * weight[i];
}

/* scores[r][t] = q[r] . k[t] for R queries and T slots. */
INLINE void dots(const float *const *q, const void *k, i64 D, float *scores, i64 stride, const int R,
                 const int T) {
    vec sums[2][4];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) sums[r][t] = (vec){};
    for (i64 d = 0; d < D; d += LANES)
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) {
            vec key = load(k, t * D + d, STORE);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[r][t] = FMA(*(const vec *)(q[r] + d), key, sums[r][t]);
        }
    for (int r = 0; r < R; r++)
        for (int t = 0; t < T; t++) scores[r * stride + t] = sum_of(sums[r][t]);
}

/* out[r] = sum of p[r][t] v[t] over slots in order, over the sum of p[r][t] in order. */
INLINE void mix(const float *p, i64 stride, const void *v, i64 T, i64 D, float *const *out, const int R,
                const int C) {
    for (i64 d = 0; d < D; d += C * LANES) {
        vec sums[2][4];
        float totals[2];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            totals[r] = 0;
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) sums[r][c] = (vec){};
        }
        for (i64 t = 0; t < T; t++)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                totals[r] += p[r * stride + t];
#pragma GCC unroll 8
                for (int c = 0; c < C; c++)
                    sums[r][c] = FMA(splat(p[r * stride + t]), load(v, t * D + d + c * LANES, STORE), sums[r][c]);
            }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) *(vec *)(out[r] + d + c * LANES) = sums[r][c] / totals[r];
    }
}
