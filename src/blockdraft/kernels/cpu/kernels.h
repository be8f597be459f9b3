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

typedef int64_t i64;

#define MOST_THREADS 4096
#include "pool.h"

#if defined(__AVX512F__) && MAX_LANES >= 16
#define LANES 16
#elif defined(__AVX__) && MAX_LANES >= 8
#define LANES 8
#else
#define LANES 4
#endif
/* Macros of the command line. WEIGHT: type of the floating-point weights. NARROW: 1 to round their inputs to bfloat16; the
   weights must then be bfloat16. STORE: type of keys and values. MAX_LANES: maximum vector width. INTEGERS: 1 to accept
   quantized weights as well, which takes longer to compile. PARALLEL: defined where threads can be started. */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t uints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef int8_t small_codes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef i64 longs __attribute__((vector_size(8 * LANES)));
typedef long long pair __attribute__((vector_size(16)));
typedef short eight __attribute__((vector_size(16)));

/* x * y + z, rounded once. Compilers may not fuse by themselves, since each would do so in other places. */
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

#define FLOAT32 0 /* kinds; `#if` cannot read an enum */
#define BFLOAT16 1
#define INT8 2
#define INT4 3
#define FLOAT16 4
#define FLOAT4 5 /* floating-point numbers of 4 bits, E2M1 */
#define INT6 6
#define IS_INTEGER_KIND(kind) ((kind) == INT8 || (kind) == INT6 || (kind) == INT4 || (kind) == FLOAT4)
#define IS_INTEGER(l) (INTEGERS && IS_INTEGER_KIND((l)->kind))
#define BYTES(kind) ((kind) == FLOAT32 ? 4 : (kind) == BFLOAT16 ? 2 : 1)
#define SLOT(D) (STORE == INT8 ? (D) + 4 : (D)) /* size of a key or value in the store; with 8 bits a factor follows */

#include "calls.h"

/* Have a vector in a register here. Else gcc reads factors from memory for each product, or computes many products before it
   adds them up, so that they do not fit into registers. */
#ifdef __SSE2__
#define IN_REGISTER(x) __asm__("" : "+v"(x))
#else
#define IN_REGISTER(x)
#endif

INLINE vec splat(float x) { return x - (vec){}; } /* + would turn -0 into 0 */
INLINE vec choose(ints mask, vec x, vec y) { return (vec)(((ints)x & mask) | ((ints)y & ~mask)); }
#if LANES == 16 /* gcc does not find these instructions */
INLINE vec least(vec x, vec y) { return (vec)_mm512_min_ps((__m512)x, (__m512)y); }
INLINE vec most_of(vec x, vec y) { return (vec)_mm512_max_ps((__m512)x, (__m512)y); }
#elif LANES == 8
INLINE vec least(vec x, vec y) { return (vec)_mm256_min_ps((__m256)x, (__m256)y); }
INLINE vec most_of(vec x, vec y) { return (vec)_mm256_max_ps((__m256)x, (__m256)y); }
#else
INLINE vec least(vec x, vec y) { return choose(x < y, x, y); }
INLINE vec most_of(vec x, vec y) { return choose(x > y, x, y); }
#endif

INLINE ints load_codes(const int8_t *from) {
#if LANES == 16 /* gcc does not find these instructions */
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
#if defined(__AVX2__) && LANES == 8 && !defined(__clang__) /* gcc does not find this instruction */
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

/* Return whether a number is NaN or infinite, or becomes infinite when rounded to bfloat16. */
static int any_strange(const float *x, i64 size) {
    int any = 0;
    for (i64 i = 0; i < size; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        any |= (bits & 0x7fffffff) >= 0x7f7f8000;
    }
    return any;
}

/* Compute exp as 2^n times a polynomial (Cephes), exact to about one unit in the last place; 0 below -87. */
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

/* Compute y = sum + bias, or y += sum + bias with `add`, for the outputs from `at` on. */
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
#define PAIRED 1 /* one instruction multiplies two inputs, with subnormal numbers as 0 */
typedef uint16_t input;
#else
#define PAIRED 0
typedef float input;
#endif

/* Maximum rows whose sums fit into registers. */
#if LANES == 16
#define ROWS 8
#else
#define ROWS 6
#endif

#define AT_A_TIME 8 /* maximum blocks of outputs that are computed together */

#define CHAIN 32 /* AMX sums the products at even and at odd places of so many inputs separately */

#if LANES == 16 && (NARROW || STORE == BFLOAT16) && defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define AMX 1
#define TILE_ROWS_OF_AMX 16
static int has_tiles; /* whether Linux lets this process use AMX */
__attribute__((constructor)) static void ask_for_tiles(void) {
    const int permission = 0x1023, tiles = 18;
    has_tiles = !syscall(SYS_arch_prctl, permission, tiles);
}

/* Loads of tiles do not tell the compiler what they read, so all memory, including that at `p`, is written before. */
#define WRITTEN(p) __asm__ volatile("" ::"r"(p) : "memory")

/* Configure 8 tiles of 64 bytes per row. The first 5, for sums and inputs, have `rows` rows, the others 16. */
static void set_tiles(i64 rows) {
    struct {
        uint8_t palette, begun, zeros[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = (uint8_t)(i < 5 ? rows : 16);
    WRITTEN(&shape);
    _tile_loadconfig(&shape);
}
#else
#define AMX 0
#define has_tiles 0
#endif

#if PAIRED
#define CHUNK 4 /* inputs of a row lie in the order 2, 0, 3, 1: pairs of one chain, as the instruction reads them */

/* Interleave the weights of LANES outputs for two inputs. `first` may be null. */
INLINE __m512i paired_weights(const uint16_t *first, const uint16_t *second) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m256i before = first ? _mm256_loadu_si256((const __m256i *)first) : _mm256_setzero_si256();
    const __m512i both = _mm512_castsi256_si512(before);
    return _mm512_permutexvar_epi16(order, _mm512_inserti64x4(both, _mm256_loadu_si256((const __m256i *)second), 1));
}

/* Add the products of inputs i and i + 2 to sums[r][c], in this order. */
INLINE void add_products(const uint16_t *w, i64 apart, i64 i, i64 inputs, const uint16_t *x, i64 xs, vec sums[ROWS][8],
                         const int R, const int C) {
    __m512i weights[8];
    const uint16_t *first = w + i * LANES, *second = i + 2 < inputs ? first + 2 * LANES : NULL;
#pragma GCC unroll 8
    for (int c = 0; c < C; c++) /* the instruction begins with the second of two numbers */
        weights[c] = paired_weights(second ? second + c * apart : NULL, first + c * apart);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        int32_t two;
        memcpy(&two, x + r * xs + i / CHUNK * CHUNK + i % 2 * 2, 4);
        const __m512bh given = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++)
            sums[r][c] = (vec)_mm512_dpbf16_ps((__m512)sums[r][c], (__m512bh)weights[c], given);
    }
}
#else
#define CHUNK 1
#endif
#define ROW_SIZE(inputs) (((inputs) + CHUNK - 1) / CHUNK * CHUNK) /* size of a row that is rounded to bfloat16 */

/* Multiply R rows with C blocks of outputs. Sums over inputs run in order, whatever R and C are. With NARROW they run as in
   AMX: of each CHAIN inputs those at even and those at odd places, then both are added to the sum before. With `fetch`
   the next C blocks of weights are prefetched. */
INLINE void tile(const Linear *l, const input *x, i64 xs, i64 block, float *y, i64 ys, int add, int fetch,
                 const int R, const int C) {
    vec sums[ROWS][8];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[r][c] = (vec){};
    const i64 size = l->inputs * LANES, step = C * LANES * BYTES(WEIGHT);
    const char *next = (const char *)l->weight + (block + C) * size * BYTES(WEIGHT);
    vec totals[ROWS][8], odd[ROWS][8];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) totals[r][c] = (vec){};
    const i64 chain = NARROW ? CHAIN : l->inputs, parts = NARROW ? 2 : 1, at_once = PAIRED ? 2 : 1;
    for (i64 from = 0; from < l->inputs; from += chain) {
        const i64 end = from + chain < l->inputs ? from + chain : l->inputs;
#pragma GCC unroll 2
        for (i64 part = parts - 1; part >= 0; part--) {
#pragma GCC unroll 8
            for (int r = 0; NARROW && r < R; r++)
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) odd[r][c] = sums[r][c], sums[r][c] = (vec){};
            for (i64 i = from + part; i < end; i += parts * at_once) {
#pragma GCC unroll 8
                for (int k = 0; k < at_once * step; k += 64) __builtin_prefetch(next + k, 0, 2);
                next += fetch ? at_once * step : 0;
#if PAIRED
                add_products((const uint16_t *)l->weight + block * size, size, i, l->inputs, x, xs, sums, R, C);
#else
                vec w[8];
#pragma GCC unroll 8
                for (int c = 0; c < C; c++) w[c] = load(l->weight, (block + c) * size + i * LANES, WEIGHT);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    vec given = splat(x[r * xs + i]);
#pragma GCC unroll 8
                    for (int c = 0; c < C; c++) sums[r][c] = FMA(given, w[c], sums[r][c]);
                }
#endif
            }
        }
#pragma GCC unroll 8
        for (int r = 0; NARROW && r < R; r++)
#pragma GCC unroll 8
            for (int c = 0; c < C; c++) totals[r][c] += sums[r][c] + odd[r][c];
    }
#pragma GCC unroll 8
    for (int r = 0; NARROW && r < R; r++)
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) sums[r][c] = totals[r][c];
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

/* Return the index of the first of the largest numbers; -1 if it is not finite, or a number is NaN. */
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

#define TILED_PRODUCT(l) (AMX && PAIRED && has_tiles && (l)->inputs % CHAIN == 0)

#include "integers.h"

#if AMX && PAIRED
#define AT_ONCE_TILED 4 /* tiles of rows that share interleaved weights */

/* `project_blocks` by AMX. Rows lie in order. */
static void project_tiles(const Linear *l, const input *x, i64 rows, i64 first, i64 last, float *y, i64 ys, int add) {
    const i64 size = l->inputs * LANES, R = rows < TILE_ROWS_OF_AMX ? rows : TILE_ROWS_OF_AMX, xs = 2 * l->inputs;
    __attribute__((aligned(64))) uint16_t weights[CHAIN * LANES];
    __attribute__((aligned(64))) float sums[TILE_ROWS_OF_AMX][LANES];
    set_tiles(R);
    WRITTEN(x);
    for (i64 block = first; block < last; block++) {
        for (i64 begin = 0; begin < rows; begin += AT_ONCE_TILED * R) {
            const char *at[AT_ONCE_TILED]; /* the last tile may overlap the one before */
            i64 count = 0;
            for (i64 row = begin; row < rows && count < AT_ONCE_TILED; row += R)
                at[count++] = (const char *)(x + (row + R < rows ? row : rows - R) * l->inputs);
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            const uint16_t *w = (const uint16_t *)l->weight + block * size;
            for (i64 i = 0; i < l->inputs; i += CHAIN, w += CHAIN * LANES) {
#pragma GCC unroll 16
                for (int k = 0; k < CHAIN; k += 2) {
                    __builtin_prefetch(w + size + k * LANES, 0, 2); /* of the next block */
                    _mm512_store_si512(weights + k * LANES, paired_weights(w + k * LANES, w + (k + 1) * LANES));
                }
                WRITTEN(weights);
                _tile_loadd(5, weights, 64);
                _tile_loadd(4, at[0] + 2 * i, xs);
                _tile_dpbf16ps(0, 4, 5);
                if (count > 1) {
                    _tile_loadd(4, at[1] + 2 * i, xs);
                    _tile_dpbf16ps(1, 4, 5);
                }
                if (count > 2) {
                    _tile_loadd(4, at[2] + 2 * i, xs);
                    _tile_dpbf16ps(2, 4, 5);
                }
                if (count > 3) {
                    _tile_loadd(4, at[3] + 2 * i, xs);
                    _tile_dpbf16ps(3, 4, 5);
                }
            }
            for (i64 group = 0; group < count; group++) {
                if (group == 0) _tile_stored(0, sums, 64);
                if (group == 1) _tile_stored(1, sums, 64);
                if (group == 2) _tile_stored(2, sums, 64);
                if (group == 3) _tile_stored(3, sums, 64);
                WRITTEN(sums);
                const i64 row = begin + group * R, from = row + R < rows ? row : rows - R;
                for (i64 r = row; r < from + R; r++)
                    put_sums(l, *(const vec *)sums[r - from], block * LANES, y + r * ys, add);
            }
        }
    }
    _tile_release();
}
#endif

/* `project` for the blocks of outputs from `first` to `last`. */
static void project_blocks(const Linear *l, const input *x, i64 xs, i64 rows, i64 first, i64 last, float *y, i64 ys,
                           int add) {
#if AMX && PAIRED
    if (TILED_PRODUCT(l)) {
        project_tiles(l, x, rows, first, last, y, ys, add);
        return;
    }
#endif
    const i64 groups = (rows + ROWS - 1) / ROWS, largest = (rows + groups - 1) / groups;
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

/* Compute y = x W^T + bias, or y += x W^T + bias with `add`. Where IS_ROUNDED, `in` holds x as `round_inputs` has rounded
   it. */
static void project(Thread *t, const Linear *l, const float *x, i64 xs, Rounded in, i64 rows, float *y, i64 ys, int add) {
    const i64 blocks = (l->outputs + LANES - 1) / LANES;
    if (IS_INTEGER(l)) {
        PIECES(t, blocks, TOGETHER, first, last) integer_project(l, in, rows, first, last, y, ys, add);
        return;
    }
#if NARROW
    const input *given = (const input *)in.codes;
    xs = ROW_SIZE(l->inputs);
    (void)x;
#else
    const input *given = x;
#endif
    PIECES(t, blocks, AT_A_TIME, first, last) project_blocks(l, given, xs, rows, first, last, y, ys, add);
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

/* Compute y = rms_norm(x) * weight, or y += rms_norm(x) * weight with `add`. */
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

/* Indices of a shuffle within each 4 lanes. Those of its second vector begin with LANES. */
#if LANES == 16
#define IN_FOURS(a, b, c, d) FROM(0, a, b, c, d), FROM(4, a, b, c, d), FROM(8, a, b, c, d), FROM(12, a, b, c, d)
#elif LANES == 8
#define IN_FOURS(a, b, c, d) FROM(0, a, b, c, d), FROM(4, a, b, c, d)
#else
#define IN_FOURS(a, b, c, d) a, b, c, d
#endif
#define FROM(lane, a, b, c, d) a + lane, b + lane, c + lane, d + lane

/* Return the probability of the largest of some logits. */
static float largest_probability(const float *x, i64 size, float largest) {
    vec sums = {};
    i64 i = 0;
    for (; i + LANES <= size; i += LANES) sums += exp_vec(*(const vec *)(x + i) - largest);
    float sum = 0;
    for (int k = 0; k < LANES; k++) sum += sums[k];
    for (; i < size; i++) sum += exp_vec(splat(x[i] - largest))[0];
    return 1.0f / sum;
}
