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
/* Macros given on the command line: WEIGHT, the kind of weights that are no integers; NARROW, 1 to round what these are
   multiplied with to bfloat16, which they have to be of, too; STORE, the kind of keys and values; MOST_LANES; and
   INTEGERS, 1 to accept weights of few bits, too, which takes the compiler longer. */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t small_codes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int64_t i64;
typedef i64 longs __attribute__((vector_size(8 * LANES)));
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

#define FLOAT32 0 /* kinds; `#if` does not know those of an enum */
#define BFLOAT16 1
#define INT8 2
#define INT4 3
#define FLOAT16 4
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

INLINE ints load_codes(const int8_t *from) {
#if LANES == 16 /* instructions that gcc does not find */
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif LANES == 8 && defined(__AVX2__)
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    return __builtin_convertvector(*(const small_codes *)from, ints);
#endif
}

INLINE vec load(const void *w, i64 at, const int kind) {
    if (kind == FLOAT32) return *(const vec *)((const float *)w + at);
    if (kind == INT8) return __builtin_convertvector(load_codes((const int8_t *)w + at), vec);
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

#if NARROW && LANES == 16 && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PAIRED 1 /* one instruction multiplies two inputs; it takes subnormal numbers for 0 */
typedef uint16_t input;
#else
#define PAIRED 0
typedef float input;
#endif

/* Most rows whose sums fit into registers. */
#if LANES == 16
#define ROWS 8
#else
#define ROWS 6
#endif

#if PAIRED
/* Of two inputs, of which the second may be missing, the weights of LANES outputs side by side. */
INLINE __m512i paired_weights(const uint16_t *w, const int both) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, both ? _mm512_loadu_si512(w) : _mm512_maskz_loadu_epi16(0xffff, w));
}

/* sums[r][c] += products of two inputs, or of one, the second product first. */
INLINE void add_products(const uint16_t *w, i64 apart, const uint16_t *x, i64 xs, vec sums[ROWS][8], const int both,
                         const int R, const int C) {
    __m512i weights[8];
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) weights[c] = paired_weights(w + c * apart, both);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        uint32_t two = x[r * xs];
        if (both) memcpy(&two, x + r * xs, 4);
        const __m512bh given = (__m512bh)_mm512_set1_epi32((int)two);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++)
            sums[r][c] = (vec)_mm512_dpbf16_ps((__m512)sums[r][c], (__m512bh)weights[c], given);
    }
}
#endif

/* R rows times C blocks of outputs. Sums over inputs run in order, whatever R and C are; with NARROW of each two inputs
   the second comes first, as in the instruction. With `fetch` the next C blocks of weights are prefetched. */
INLINE void tile(const Linear *l, const input *x, i64 xs, i64 block, float *y, i64 ys, int add, int fetch,
                 const int R, const int C) {
    vec sums[ROWS][8];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[r][c] = (vec){};
    const i64 size = l->inputs * LANES, step = C * LANES * BYTES(WEIGHT);
    const char *next = (const char *)l->weight + (block + C) * size * BYTES(WEIGHT);
#if PAIRED
    const uint16_t *w = (const uint16_t *)l->weight + block * size;
    const i64 pairs = l->inputs / 2 * 2;
    for (i64 i = 0; i < pairs; i += 2) {
#pragma GCC unroll 8
        for (int k = 0; k < 2 * step; k += 64) __builtin_prefetch(next + k, 0, 2);
        next += fetch ? 2 * step : 0;
        add_products(w + i * LANES, size, x + i, xs, sums, 1, R, C);
    }
    if (pairs < l->inputs) add_products(w + pairs * LANES, size, x + pairs, xs, sums, 0, R, C);
#else
    for (i64 at = 0; at < l->inputs; at++) {
        const i64 i = NARROW && (at ^ 1) < l->inputs ? at ^ 1 : at;
#pragma GCC unroll 8
        for (int k = 0; k < step; k += 64) __builtin_prefetch(next + k, 0, 2);
        next += fetch ? step : 0;
        vec w[8];
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) w[c] = load(l->weight, (block + c) * size + i * LANES, WEIGHT);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vec given = splat(x[r * xs + i]);
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) sums[r][c] = FMA(given, w[c], sums[r][c]);
        }
    }
#endif
    for (int c = 0; c < C; c++)
        for (int r = 0; r < R; r++) put_sums(l, sums[r][c], (block + c) * LANES, y + r * ys, add);
}

#define TILE(R, C) case R * 16 + C: tile(l, x, xs, block, y, ys, add, fetch, R, C); break;
static void tiles(const Linear *l, const input *x, i64 xs, i64 block, float *y, i64 ys, int add, int fetch, int R,
                  int C) {
    switch (R * 16 + C) {
        TILE(1, 1) TILE(1, 2) TILE(1, 4) TILE(1, 8) TILE(2, 1) TILE(2, 2) TILE(2, 4) TILE(3, 1) TILE(3, 2)
        TILE(3, 3) TILE(4, 1) TILE(4, 2) TILE(4, 3) TILE(5, 1) TILE(5, 2) TILE(6, 1) TILE(6, 2)
#if ROWS == 8
        TILE(7, 1) TILE(7, 2) TILE(8, 1) TILE(8, 2)
#endif
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

/* y = x W^T + bias, or y += x W^T + bias with `add`; each thread computes some of the outputs. Where IS_ROUNDED, `in`
   holds x as `round_inputs` has rounded it. */
static void project(const Linear *l, const float *x, i64 xs, Rounded in, i64 rows, float *y, i64 ys, int add) {
    if (IS_INTEGER(l)) {
        integer_project(l, in, rows, y, ys, add);
        return;
    }
#if NARROW
    const input *given = (const input *)in.codes;
    xs = l->inputs;
    (void)x;
#else
    const input *given = x;
#endif
    SHARE((l->outputs + LANES - 1) / LANES, first, last);
    const i64 groups = (rows + ROWS - 1) / ROWS, largest = (rows + groups - 1) / groups;
    /* As many sums at once as fit into registers. */
    const i64 most = largest == 1 ? 8 : largest == 2 ? 4 : largest <= 4 ? 3 : 2;
    for (i64 block = first, C = most; block < last; block += C) {
        while (C > last - block) C = C == 3 ? 2 : C / 2;
        for (i64 group = 0; group < groups; group++) {
            i64 row = rows * group / groups, R = rows * (group + 1) / groups - row;
            tiles(l, given + row * xs, xs, block, y + row * ys, ys, add, group == groups - 1, R, C);
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

static float norm_factor(const float *x, float eps, i64 size) { return 1 / sqrtf(mean_square(x, size) + eps); }

/* y = rms_norm(x) * weight, or y += rms_norm(x) * weight with `add`. */
static void rms_norm(const float *x, const float *weight, float eps, i64 size, float *y, int add) {
    float factor = norm_factor(x, eps, size);
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

/* Indices of a shuffle within each 4 lanes; those of its second vector begin with LANES. */
#if LANES == 16
#define IN_FOURS(a, b, c, d) FROM(0, a, b, c, d), FROM(4, a, b, c, d), FROM(8, a, b, c, d), FROM(12, a, b, c, d)
#elif LANES == 8
#define IN_FOURS(a, b, c, d) FROM(0, a, b, c, d), FROM(4, a, b, c, d)
#else
#define IN_FOURS(a, b, c, d) a, b, c, d
#endif
#define FROM(lane, a, b, c, d) a + lane, b + lane, c + lane, d + lane

/* Probability of the largest of some logits. */
static float chance_of(const float *x, i64 size, float largest) {
    vec sums = {};
    i64 i = 0;
    for (; i + LANES <= size; i += LANES) sums += exp_vec(*(const vec *)(x + i) - largest);
    float sum = 0;
    for (int k = 0; k < LANES; k++) sum += sums[k];
    for (; i < size; i++) sum += exp_vec(splat(x[i] - largest))[0];
    return 1.0f / sum;
}
