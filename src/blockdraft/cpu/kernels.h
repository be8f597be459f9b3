/* Arithmetic of decoder.c: packed products, norms, exponentials, and the two products of attention. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__SSSE3__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif
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
/* Macros given on the command line: WEIGHT, the kind of weights that are no integers; STORE, the kind of keys and values;
   MOST_LANES; and INTEGERS, 1 to accept weights of few bits, too, which takes the compiler longer. */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t small_codes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int64_t i64;
typedef long long pair __attribute__((vector_size(16)));
typedef short eight __attribute__((vector_size(16)));

/* x * y + z, rounded once. Compilers are told not to fuse by themselves, since each would do so in other places. */
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
#define FMA(x, y, z) (vec)vfmaq_f32(z, x, y)
#else
#define FMA(x, y, z) ((x) * (y) + (z))
#endif
#endif

enum { FLOAT32, BFLOAT16, INT8, INT4 };
#define BYTES(kind) ((kind) == FLOAT32 ? 4 : (kind) == BFLOAT16 ? 2 : 1)
#define SLOT(D) (STORE == INT8 ? (D) + 4 : (D)) /* numbers of a key or value in the store; with 8 bits a factor follows */

#include "calls.h"

/* Range of 0 .. count that this thread takes. */
#define SHARE(count, from, to)                                                                            \
    i64 from = (count) * omp_get_thread_num() / omp_get_num_threads(),                                    \
        to = (count) * (omp_get_thread_num() + 1) / omp_get_num_threads()

INLINE vec splat(float x) { return x - (vec){}; } /* + would turn -0 into 0, and cost an addition */
INLINE vec choose(ints mask, vec x, vec y) { return (vec)(((ints)x & mask) | ((ints)y & ~mask)); }
INLINE vec least(vec x, vec y) { return choose(x < y, x, y); }
INLINE vec most_of(vec x, vec y) { return choose(x > y, x, y); }

INLINE vec load(const void *w, i64 at, const int kind) {
    if (kind == FLOAT32) return *(const vec *)((const float *)w + at);
    if (kind == INT8) {
        const int8_t *from = (const int8_t *)w + at;
#if LANES == 16 /* instructions that gcc does not find */
        return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#elif LANES == 8 && defined(__AVX2__)
        return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
        return __builtin_convertvector(*(const small_codes *)from, vec);
#endif
    }
#if defined(__AVX2__) && LANES == 8 && !defined(__clang__) /* an instruction that gcc does not find */
    pair narrow;
    memcpy(&narrow, (const uint16_t *)w + at, 16);
    return (vec)((ints)__builtin_ia32_pmovzxwd256((eight)narrow) << 16);
#else
    return (vec)(__builtin_convertvector(*(const halves *)((const uint16_t *)w + at), ints) << 16);
#endif
}

static float load_one(const void *w, i64 at, int kind) {
    if (kind == FLOAT32) return ((const float *)w)[at];
    uint32_t bits = (uint32_t)((const uint16_t *)w)[at] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static float half_to_float(uint16_t half) {
    uint32_t bits = (half & 0x7fff) << 13;
    float size;
    memcpy(&size, &bits, 4);
    size *= 5.192296858534828e33f; /* 2^112, by which the biases of the exponents differ */
    if ((half & 0x7c00) == 0x7c00) size = half & 0x3ff ? NAN : INFINITY;
    return half & 0x8000 ? -size : size;
}

static void store_one(void *to, i64 at, int kind, float x) {
    if (kind == FLOAT32) {
        ((float *)to)[at] = x;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &x, 4);
    ((uint16_t *)to)[at] = (bits + 0x7fff + (bits >> 16 & 1)) >> 16; /* rounds to the nearest, ties to even */
}

/* Whether a number is NaN or infinite, or becomes infinite when it is rounded to bfloat16. */
static int any_strange(const float *x, i64 size) {
    int found = 0;
    for (i64 i = 0; i < size; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        found |= (bits & 0x7fffffff) >= 0x7f7f8000;
    }
    return found;
}

/* exp as 2^n times a polynomial (Cephes), exact to about one unit in the last place; 0 below -87. */
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

/* y = sum + bias, or y += sum + bias with `add`, for the outputs from `at` on. */
INLINE void put_sums(const Linear *l, vec sum, i64 at, float *y, int add) {
    const i64 left = l->outputs - at;
    if (l->bias) sum += *(const vec *)(l->bias + at);
    if (left < LANES) { /* the last block is padded */
        for (int k = 0; k < left; k++) y[at + k] = add ? y[at + k] + sum[k] : sum[k];
        return;
    }
    if (add) sum += *(vec *)(y + at);
    *(vec *)(y + at) = sum;
}

/* R rows times C blocks of outputs. Sums over inputs run in order, whatever R and C are. With `fetch` the next C blocks
   of weights are prefetched. */
INLINE void tile(const Linear *l, const float *x, i64 xs, i64 block, float *y, i64 ys, int add, int fetch,
                 const int R, const int C) {
    vec sums[6][8];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[r][c] = (vec){};
    const i64 size = l->inputs * LANES, step = C * LANES * BYTES(WEIGHT);
    const char *next = (const char *)l->weight + (block + C) * size * BYTES(WEIGHT);
    for (i64 i = 0; i < l->inputs; i++) {
#pragma GCC unroll 8
        for (int k = 0; k < step; k += 64) __builtin_prefetch(next + k, 0, 2);
        next += fetch ? step : 0;
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
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) put_sums(l, sums[r][c], (block + c) * LANES, y + r * ys, add);
}

#define TILE(R, C) case R * 16 + C: tile(l, x, xs, block, y, ys, add, fetch, R, C); break;
static void tiles(const Linear *l, const float *x, i64 xs, i64 block, float *y, i64 ys, int add, int fetch, int R,
                  int C) {
    switch (R * 16 + C) {
        TILE(1, 1) TILE(1, 2) TILE(1, 4) TILE(1, 8) TILE(2, 1) TILE(2, 2) TILE(2, 4) TILE(3, 1) TILE(3, 2)
        TILE(3, 3) TILE(4, 1) TILE(4, 2) TILE(4, 3) TILE(5, 1) TILE(5, 2) TILE(6, 1) TILE(6, 2)
    }
}

/* Index of the largest number, of equals the first; -1 if it is not finite, or a number is NaN. */
static i64 best_of(const float *x, i64 size) {
    vec most = splat(-INFINITY);
    ints strange = {};
    i64 i = 0;
    for (; i + LANES <= size; i += LANES) {
        vec here = *(const vec *)(x + i);
        strange |= here != here;
        most = most_of(here, most);
    }
    float largest = -INFINITY;
    int odd = 0;
    for (int k = 0; k < LANES; k++) {
        odd |= strange[k];
        if (most[k] > largest) largest = most[k];
    }
    for (; i < size; i++) {
        odd |= x[i] != x[i];
        if (x[i] > largest) largest = x[i];
    }
    if (odd || largest == INFINITY || largest == -INFINITY) return -1;
    for (i = 0; i + LANES <= size; i += LANES) {
        ints same = *(const vec *)(x + i) == splat(largest);
        int any = 0;
        for (int k = 0; k < LANES; k++) any |= same[k];
        if (any) break;
    }
    while (x[i] != largest) i++;
    return i;
}

#include "integers.h"

/* y = x W^T + bias, or y += x W^T + bias with `add`; each thread computes some of the outputs. Where weights are
   integers, `in` holds x as `round_inputs` has rounded it. */
static void project(const Linear *l, const float *x, i64 xs, Rounded in, i64 rows, float *y, i64 ys, int add) {
    if (IS_INTEGER(l)) {
        integer_project(l, in, rows, y, ys, add);
        return;
    }
    SHARE((l->outputs + LANES - 1) / LANES, first, last);
    const i64 groups = (rows + 5) / 6, largest = (rows + groups - 1) / groups;
    /* As many sums at once as fit into registers. */
    const i64 most = largest == 1 ? 8 : largest == 2 ? 4 : largest <= 4 ? 3 : 2;
    for (i64 block = first, C = most; block < last; block += C) {
        while (C > last - block) C = C == 3 ? 2 : C / 2;
        for (i64 group = 0; group < groups; group++) {
            i64 row = rows * group / groups, R = rows * (group + 1) / groups - row;
            tiles(l, x + row * xs, xs, block, y + row * ys, ys, add, group == groups - 1, R, C);
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

/* y = rms_norm(x) * weight, or y += rms_norm(x) * weight with `add`. */
static void rms_norm(const float *x, const float *weight, float eps, i64 size, float *y, int add) {
    float factor = 1 / sqrtf(mean_square(x, size) + eps);
    if (add)
        for (i64 i = 0; i < size; i++) y[i] += x[i] * factor * weight[i];
    else
        for (i64 i = 0; i < size; i++) y[i] = x[i] * factor * weight[i];
}

#ifdef __clang__
#define PICK(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define PICK(x, y, ...) __builtin_shuffle(x, y, (ints){__VA_ARGS__})
#endif

/* Sums of neighbours in each 4 lanes: those of x, then those of y. */
INLINE vec fold(vec x, vec y) {
#if LANES == 16
    return PICK(x, y, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30)
        + PICK(x, y, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
#elif LANES == 8
    return PICK(x, y, 0, 2, 8, 10, 4, 6, 12, 14) + PICK(x, y, 1, 3, 9, 11, 5, 7, 13, 15);
#else
    return PICK(x, y, 0, 2, 4, 6) + PICK(x, y, 1, 3, 5, 7);
#endif
}

#if LANES > 4
/* `fold` on fours of lanes. */
INLINE vec fold_fours(vec x, vec y) {
#if LANES == 16
    return PICK(x, y, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
        + PICK(x, y, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#elif LANES == 8
    return PICK(x, y, 0, 1, 2, 3, 8, 9, 10, 11) + PICK(x, y, 4, 5, 6, 7, 12, 13, 14, 15);
#endif
}
#endif

#if LANES == 16 || defined(__ARM_NEON)
#define SUMS 16 /* vectors that fit into registers beside the sums */
#else
#define SUMS 8
#endif

/* Factor of a slot's numbers. */
INLINE float factor_of(const void *store, i64 slot, i64 D) {
    float factor = 1;
    if (STORE == INT8) memcpy(&factor, (const int8_t *)store + slot * SLOT(D) + D, 4);
    return factor;
}

/* scores[r * stride + t] = q[r] . k[t] for R queries and LANES slots; slots after `last` repeat it. Each slot is read
   and widened once for all queries. */
INLINE void dots(const float *const *q, const void *k, i64 D, i64 last, vec factors, float *scores, i64 stride,
                 const int R) {
    const int together = SUMS / R < LANES ? SUMS / R : LANES; /* by slot; by four slots */
    vec fours[4][4];
#pragma GCC unroll 4
    for (int from = 0; from < LANES; from += together) {
        vec sums[4][16], key[16];
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 16
            for (int t = 0; t < together; t++) sums[r][t] = (vec){};
        for (i64 d = 0; d < D; d += LANES) {
#pragma GCC unroll 16
            for (int t = 0; t < together; t++) key[t] = load(k, (from + t < last ? from + t : last) * SLOT(D) + d, STORE);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
#pragma GCC unroll 16
                for (int t = 0; t < together; t++) sums[r][t] = FMA(*(const vec *)(q[r] + d), key[t], sums[r][t]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int t = 0; t < together; t += 4)
                fours[r][(from + t) / 4] = fold(fold(sums[r][t], sums[r][t + 1]), fold(sums[r][t + 2], sums[r][t + 3]));
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
#if LANES == 16
        vec all = fold_fours(fold_fours(fours[r][0], fours[r][1]), fold_fours(fours[r][2], fours[r][3]));
#elif LANES == 8
        vec all = fold_fours(fours[r][0], fours[r][1]);
#else
        vec all = fours[r][0];
#endif
        if (STORE == INT8) all *= factors;
        *(vec *)(scores + r * stride) = all;
    }
}

#define AHEAD 4096 /* bytes that keys and values are prefetched ahead */

/* `dots` for `count` queries. */
static void score(const float *const *q, i64 count, const void *k, i64 D, i64 last, float *scores, i64 stride) {
    for (i64 i = 0; i < LANES * SLOT(D) * BYTES(STORE); i += 64) __builtin_prefetch((const char *)k + AHEAD + i);
    vec factors = {};
    for (int t = 0; STORE == INT8 && t < LANES; t++) factors[t] = factor_of(k, t < last ? t : last, D);
    i64 r = 0;
#if SUMS == 16
    for (; r + 4 <= count; r += 4) dots(q + r, k, D, last, factors, scores + r * stride, stride, 4);
#endif
    for (; r + 2 <= count; r += 2) dots(q + r, k, D, last, factors, scores + r * stride, stride, 2);
    if (r < count) dots(q + r, k, D, last, factors, scores + r * stride, stride, 1);
}

/* sums[r][c] = sum of p[r][t] v[t] over slots in order, for C vectors of v from `d` on. With FIRST also `totals`, the
   sums of p[r][t] in order, and the next values are prefetched. With `skip`, which needs R = 1, slots of negative p are
   left out. */
INLINE void mix_part(const float *p, i64 stride, const void *v, i64 T, i64 D, i64 d, vec sums[4][4], float *totals,
                     const int R, const int C, const int skip, const int FIRST) {
    const i64 row = SLOT(D) * BYTES(STORE);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[r][c] = (vec){};
    for (i64 t = 0; t < T; t++) {
        if (skip && p[t] < 0) continue;
        for (i64 i = 0; FIRST && i < row; i += 64) __builtin_prefetch((const char *)v + t * row + AHEAD + i);
        vec value[4];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) value[c] = load(v, t * SLOT(D) + d + c * LANES, STORE);
        const float factor = factor_of(v, t, D);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            if (FIRST) totals[r] += p[r * stride + t];
            const float weight = STORE == INT8 ? p[r * stride + t] * factor : p[r * stride + t];
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) sums[r][c] = FMA(splat(weight), value[c], sums[r][c]);
        }
    }
}

/* out[r] = sum of p[r][t] v[t] / sum of p[r][t], both over slots in order. */
INLINE void mix(const float *p, i64 stride, const void *v, i64 T, i64 D, float *const *out, const int R,
                const int C, const int skip) {
    float totals[4] = {};
    for (i64 d = 0; d < D; d += C * LANES) {
        vec sums[4][4];
        if (d) mix_part(p, stride, v, T, D, d, sums, totals, R, C, skip, 0);
        else mix_part(p, stride, v, T, D, d, sums, totals, R, C, skip, 1);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) *(vec *)(out[r] + d + c * LANES) = sums[r][c] / totals[r];
    }
}

static void mix_rows(const float *p, i64 stride, const void *v, i64 T, i64 D, float *const *out, i64 rows) {
    switch (rows * 8 + (D % (4 * LANES) == 0 ? 4 : D % (2 * LANES) == 0 ? 2 : 1)) {
#define MIX(R)                                                                                            \
    case R * 8 + 4: mix(p, stride, v, T, D, out, R, R * 4 > SUMS ? 2 : 4, 0); break;                             \
    case R * 8 + 2: mix(p, stride, v, T, D, out, R, 2, 0); break;                                         \
    case R * 8 + 1: mix(p, stride, v, T, D, out, R, 1, 0); break;
        MIX(1) MIX(2) MIX(3) MIX(4)
    }
}

/* `mix_rows` without slots of negative p. It is rare, and inlined it would slow down the common case. */
static __attribute__((noinline)) void mix_seen(const float *p, i64 stride, const void *v, i64 T, i64 D,
                                               float *const *out, i64 rows) {
    for (i64 r = 0; r < rows; r++) mix(p + r * stride, stride, v, T, D, out + r, 1, 1, 1);
}

/* s = exp(s * scale - most), where s * scale is capped and `most` is the largest; 0 where s is -infinity. `size` is a
   multiple of LANES. */
static void softmax_weights(float *s, i64 size, float scale, float limit) {
    vec most = splat(-INFINITY);
    for (i64 t = 0; t < size; t += LANES) {
        vec x = *(vec *)(s + t) * scale;
        for (int i = 0; limit && i < LANES; i++)
            if (x[i] != -INFINITY) x[i] = limit * tanhf(x[i] / limit);
        *(vec *)(s + t) = x;
        most = most_of(x, most);
    }
    float largest = most[0];
    for (int i = 1; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    for (i64 t = 0; t < size; t += LANES) *(vec *)(s + t) = exp_vec(*(vec *)(s + t) - largest);
}
