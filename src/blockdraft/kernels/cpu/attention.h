/* The two products of attention, of queries with keys and of weights with values, for all queries that share a head.

   Weights are computed and used for SLOTS slots of a sequence at a time, wherever the queries are. Before that, sums are
   scaled to the largest score so far. So a query gets the same bits however many are computed together.

   With keys and values in float32, sums run in order. With bfloat16, queries and weights are rounded to it as well, and
   sums run as in AMX: of each CHAIN products those at even and those at odd places are summed separately, and both sums
   are added to the sum before. With 8 bits, queries are rounded to integers of up to MOST_QUERY, and the weights of SLOTS
   slots to integers of up to MOST_WEIGHT, with a scale of their own, and sums are of integers. So all instructions give
   the same bits. */
#include "kernels.h"

#define SLOTS 64 /* slots whose weights are computed and used before the next ones are */
#define AT_ONCE 6 /* queries whose scores, weights and sums are computed before those of the next ones */
#if LANES == 16 || defined(__ARM_NEON)
#define WIDTH 4
#else
#define WIDTH 2
#endif
#if STORE == BFLOAT16
#define PARTS 2 /* sums of a chain */
#define MOST_AT_ONCE 3 /* queries whose sums fit into registers, beside WIDTH vectors of keys or values */
#else
#define PARTS 1
#define MOST_AT_ONCE 6
#endif
#define AHEAD(row) (SLOTS * (row) > 8192 ? SLOTS * (row) : 8192) /* bytes that keys and values are prefetched ahead */
#define MOST_QUERY 127
#define MOST_WEIGHT 255
#define TOTALS 16 /* sums of a query's weights, each of every sixteenth slot */

/* Whether so many queries use AMX, which is faster where keys and values would else be read more than once. */
#define TILED(count, D) (AMX && STORE == BFLOAT16 && has_tiles && (count) > AT_ONCE && (D) % CHAIN == 0)
#define TILE_QUERIES 16

/* Round x to bfloat16, to the nearest, ties to even. */
INLINE vec narrowed(vec x) {
    const ints bits = (ints)x, rounded = bits + 0x7fff + (bits >> 16 & 1);
    return choose(x == x, (vec)(rounded & -65536), splat(NAN));
}

/* exp of x <= 0 for weights that are rounded, exact to 5e-6: 2^n times a polynomial of the rest; 0 below -87, and NaN
   of NaN. */
INLINE vec exp_short(vec x) {
    const vec shift = splat(12582912.0f), in_bits = FMA(x, splat(1.44269504f), shift); /* n in its lowest bits */
    const vec r = FMA(x, splat(1.44269504f), shift - in_bits);
    vec p = FMA(splat(9.5828551e-3f), r, splat(5.5906430e-2f));
    p = FMA(p, r, splat(2.4024099e-1f));
    p = FMA(p, r, splat(6.9312419e-1f));
    p = FMA(p, r, splat(1.0f));
    return (vec)(((uints)p + ((uints)in_bits << 23)) & ~(uints)(x < splat(-87.0f)));
}

/* PER: numbers that are multiplied at once, in 32 bits. */
#if STORE == INT8 && SHIFTED
#define PER 4 /* by instructions that take unsigned codes and signed ones */
#elif STORE == INT8
#define PER 2
#define IN_PAIRS(x) PICK(x, x, IN_FOURS(0, 2, 1, 3)) /* of each 4 the first and the third, then the others */
/* AMD's processors, which alone have SSE4a, multiply two numbers at once as fast as one; Intel's take longer. */
#elif STORE == BFLOAT16 && LANES == 16 && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__SSE4A__)
#define PER 2
#define IN_PAIRS(x) PICK(x, x, IN_FOURS(2, 0, 3, 1)) /* the instruction begins with the higher bits */
#else
#define PER 1
#endif
#ifndef IN_PAIRS
#define IN_PAIRS(x) (x)
#endif

/* Write query j of a tile, times `scale`, in the layout of the products. Return its factor. `start` gets what sums of products
   with keys begin with. */
static float place_query(const float *x, float scale, i64 D, i64 j, const int tiled, float *queries, int32_t *start) {
    float *to = queries + j * D / PER, inverse = 0, factor = 1;
    char *tile = (char *)queries + j / TILE_QUERIES * TILE_QUERIES * 2 * D + j % TILE_QUERIES * 4;
    ints most = {}, sums = {};
    for (i64 d = 0; STORE == INT8 && d < D; d += LANES) most = larger_bits(most, *(const vec *)(x + d));
    if (STORE == INT8) factor = scale * scale_of(most, MOST_QUERY, &inverse);
    for (i64 d = 0; d < D; d += LANES) {
        const vec own = *(const vec *)(x + d);
        ints y = (ints)(own * scale);
        if (STORE == INT8) y = rounded_codes(own, inverse);
        if (STORE == BFLOAT16) y = (ints)narrowed((vec)y);
        if (STORE == BFLOAT16 && (PER == 2 || tiled)) y >>= 16;
        if (STORE == INT8) sums += y;
        if (tiled)
            for (int i = 0; i < LANES; i += 2) {
                const uint16_t two[2] = {(uint16_t)y[i], (uint16_t)y[i + 1]};
                memcpy(tile + (d + i) * 32, two, 4);
            }
        else if (PER == 4) *(small_codes *)((int8_t *)to + d) = __builtin_convertvector(y, small_codes);
        else if (PER == 2) *(halves *)((uint16_t *)to + d) = __builtin_convertvector(IN_PAIRS(y), halves);
        else *(ints *)(to + d) = y;
    }
    *start = PER == 4 ? -SHIFTED * int_sum(sums) : 0;
    return factor;
}

/* Load 16 bytes of every fourth of LANES slots, which lie `row` bytes apart. */
INLINE ints every_fourth(const char *from, i64 row) {
#if LANES == 16
#define PIECE(k) _mm_loadu_si128((const __m128i *)(from + k * 4 * row))
    __m512i all = _mm512_castsi128_si512(PIECE(0));
    all = _mm512_inserti32x4(_mm512_inserti32x4(all, PIECE(1), 1), PIECE(2), 2);
    return (ints)_mm512_inserti32x4(all, PIECE(3), 3);
#elif LANES == 8
    const __m256i first = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)from));
    return (ints)_mm256_insertf128_si256(first, _mm_loadu_si128((const __m128i *)(from + 4 * row)), 1);
#else
    (void)row;
    return *(const ints *)from;
#endif
}

/* Load the first 16 bytes of LANES slots, which lie `row` bytes apart, as 4 vectors of 4 bytes per slot. */
INLINE void read_fours(const char *k, i64 row, ints words[4]) {
    const ints a = every_fourth(k, row), b = every_fourth(k + row, row);
    const ints c = every_fourth(k + 2 * row, row), e = every_fourth(k + 3 * row, row);
    const ints ab = PICK(a, b, IN_FOURS(0, LANES, 1, LANES + 1)), ce = PICK(c, e, IN_FOURS(0, LANES, 1, LANES + 1));
    const ints more_ab = PICK(a, b, IN_FOURS(2, LANES + 2, 3, LANES + 3));
    const ints more_ce = PICK(c, e, IN_FOURS(2, LANES + 2, 3, LANES + 3));
    words[0] = PICK(ab, ce, IN_FOURS(0, 1, LANES, LANES + 1));
    words[1] = PICK(ab, ce, IN_FOURS(2, 3, LANES + 2, LANES + 3));
    words[2] = PICK(more_ab, more_ce, IN_FOURS(0, 1, LANES, LANES + 1));
    words[3] = PICK(more_ab, more_ce, IN_FOURS(2, 3, LANES + 2, LANES + 3));
}

/* Join the higher halves of x and y; that of y becomes the lower half. */
INLINE ints higher_and(ints x, ints y) { return (x & -65536) | (y >> 16 & 0xffff); }

/* Write the keys of LANES slots, number d of slot t to the 32 bits at to[d * SLOTS + t]. With PER 4 they hold four numbers, and
   SHIFTED has been added. With PER 2 they hold two, and each 4 numbers take two rows. */
static void turn(const char *k, i64 D, float *to) {
    const i64 row = SLOT(D) * BYTES(STORE), each = 16 / BYTES(STORE); /* numbers of 16 bytes */
    i64 d = 0;
    for (; d + each <= D; d += each, k += 16, to += each / PER * SLOTS) {
        ints words[4];
        for (i64 slot = d / each; slot < LANES; slot += D / each) /* evenly, since many requests at once would be waited for */
            for (i64 i = 0; i < row; i += 64) __builtin_prefetch(k - d * BYTES(STORE) + AHEAD(row) + slot * row + i);
        read_fours(k, row, words);
#pragma GCC unroll 4
        for (int w = 0; w < 4; w++) {
            float *place = to + w * each / PER / 4 * SLOTS;
            const ints own = words[w];
            if (STORE == FLOAT32) *(ints *)place = own;
            if (STORE == BFLOAT16 && PER == 1) {
                *(ints *)place = own << 16;
                *(ints *)(place + SLOTS) = own & -65536;
            }
            if (STORE == BFLOAT16 && PER == 2)
                *(ints *)place = w % 2 ? higher_and(words[w - 1], own) : higher_and(own << 16, words[w + 1] << 16);
            if (PER == 4) *(ints *)place = own ^ (int)0x80808080;
            if (STORE == INT8 && PER == 2) {
                *(ints *)place = (ints)((shorts)own << 8 >> 8);
                *(ints *)(place + SLOTS) = (ints)((shorts)own >> 8);
            }
        }
    }
    for (i64 i = 0; d < D; d++, i++, k += BYTES(STORE)) /* bfloat16 is not in pairs here, where D is no multiple of 16 */
        for (int t = 0; t < LANES; t++)
            if (PER == 4)
                ((uint8_t *)(to + i / 4 * SLOTS + t))[i % 4] = (uint8_t)(((const uint8_t *)k)[t * row] ^ SHIFTED);
            else if (STORE == INT8) {
                int16_t *two = (int16_t *)(to + (i / 4 * 2 + i % 2) * SLOTS + t);
                two[i % 4 / 2] = *(const int8_t *)(k + t * row);
            } else to[i * SLOTS + t] = load_one(k + t * row, 0, STORE);
}

/* sum[lane] + w[lane][0..1] . x[lane][0..1], of 16 bits each */
INLINE ints dot2(ints sum, ints w, ints x) {
#if (LANES == 16 && defined(__AVX512VNNI__)) || (LANES < 16 && defined(__AVX512VNNI__) && defined(__AVX512VL__))
    return (ints)WIDE(dpwssd_epi32)((register_)sum, (register_)w, (register_)x);
#elif LANES < 16 && defined(__AVXVNNI__)
    return (ints)WIDE(dpwssd_avx_epi32)((register_)sum, (register_)w, (register_)x);
#elif defined(PAIRS)
    return sum + (ints)WIDE(madd_epi16)((register_)w, (register_)x);
#else
    return sum + (w << 16 >> 16) * (x << 16 >> 16) + (w >> 16) * (x >> 16);
#endif
}

/* Numbers of attention's products: sums of `rows` rows x, times factors w of each query. */
typedef struct {
    const float *w, *x; /* w: 32 bits for each query and row, x: 32 bits for each row and number */
    i64 apart, step, rows; /* between the w of two queries, and between two rows of x */
    const int32_t *starts; /* what sums of scores begin with, with PER 4 */
    const float *of_queries, *of_slots; /* factors of 8 bits */
    float *out;
    i64 stride; /* between the sums of two queries */
} Products;

#if STORE == INT8
typedef ints sum_;
#else
typedef vec sum_;
#endif

/* Return sum[lane] + product of the numbers in the 32 bits of x[lane] with those at w. */
INLINE sum_ product(sum_ sum, const float *w, sum_ x, const int SCORES) {
    (void)SCORES;
#if PER == 4
    const ints all = spread((const int8_t *)w);
    return SCORES ? DOT4(sum, x, all) : DOT4(sum, all, x);
#elif STORE == INT8
    return dot2(sum, x, spread((const int8_t *)w));
#elif PER == 2
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)spread((const int8_t *)w));
#else
    return FMA(splat(*w), x, sum);
#endif
}

/* Add the products of a row to the sums of R queries. */
INLINE void add_row(const Products *p, i64 i, i64 at, sum_ sums[MOST_AT_ONCE][WIDTH], const int SCORES, const int R,
                    const int C) {
    sum_ x[WIDTH];
#pragma GCC unroll 4
    for (int c = 0; c < C; c++) {
        x[c] = *(const sum_ *)(p->x + i * p->step + at + c * LANES);
        IN_REGISTER(x[c]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) sums[r][c] = product(sums[r][c], p->w + r * p->apart + i, x[c], SCORES);
}

/* Compute C vectors of sums for R queries: scores, or with SCORES 0 sums of values, which are added to those before. */
INLINE void sum_tile(const Products *given, i64 at, const int SCORES, const int R, const int C) {
    const Products own = *given, *p = &own;
    const i64 chain = PARTS == 2 ? CHAIN / PER : p->rows;
    for (i64 from = 0; from < p->rows; from += chain) {
        const i64 end = from + chain < p->rows ? from + chain : p->rows;
        sum_ sums[PARTS][MOST_AT_ONCE][WIDTH];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                for (int part = 0; part < PARTS; part++) sums[part][r][c] = (sum_){};
#if PER == 4
                if (SCORES) sums[0][r][c] += p->starts[r];
#endif
                if (STORE == FLOAT32 && !SCORES) sums[0][r][c] = *(const sum_ *)(p->out + r * p->stride + at + c * LANES);
            }
        i64 i = from;
        if (PARTS == 2 && end - from == CHAIN / PER)
#pragma GCC unroll 4
            for (int k = 0; k < CHAIN / PER; k += 2) {
                add_row(p, from + k, at, sums[0], SCORES, R, C);
                add_row(p, from + k + 1, at, sums[PARTS - 1], SCORES, R, C);
                i = end;
            }
        for (; i + PARTS <= end; i += PARTS)
#pragma GCC unroll 2
            for (int part = 0; part < PARTS; part++) add_row(p, i + part, at, sums[part], SCORES, R, C);
        if (PARTS == 2 && i < end) add_row(p, i, at, sums[0], SCORES, R, C);
        __asm__ volatile("" ::: "memory"); /* gcc would load what follows earlier, into registers that sums need */
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                vec *to = (vec *)(p->out + r * p->stride + at + c * LANES);
                const sum_ sum = sums[0][r][c];
#if STORE == INT8
                const vec x = __builtin_convertvector(sum, vec);
                if (SCORES) *to = x * *(const vec *)(p->of_slots + at + c * LANES) * p->of_queries[r];
                else *to = FMA(x, splat(p->of_queries[r]), *to);
#elif STORE == BFLOAT16
                const vec before = SCORES && !from ? (vec){} : *to;
                *to = before + (sum + sums[1][r][c]);
#else
                *to = sum;
#endif
            }
    }
}

/* Return the size of the next group of `left` queries, of at most `most`. The last two are of about the same size. */
INLINE i64 next_group(i64 left, i64 most) { return left <= most ? left : left < 2 * most ? (left + 1) / 2 : most; }

/* Functions that compute `size` sums of R queries. */
#define SUM_TILE(SCORES, R, C)                                                                         case R * 8 + C: sum_tile(&own, at, SCORES, R, C); break;
#if WIDTH == 4
#define SUM_TILES(S, R) SUM_TILE(S, R, 1) SUM_TILE(S, R, 2) SUM_TILE(S, R, 4)
#else
#define SUM_TILES(S, R) SUM_TILE(S, R, 1) SUM_TILE(S, R, 2)
#endif
#if MOST_AT_ONCE == 6
#define ALL_SUM_TILES(S) SUM_TILES(S, 1) SUM_TILES(S, 2) SUM_TILES(S, 3) SUM_TILES(S, 4) SUM_TILES(S, 5) SUM_TILES(S, 6)
#else
#define ALL_SUM_TILES(S) SUM_TILES(S, 1) SUM_TILES(S, 2) SUM_TILES(S, 3)
#endif
#define SUMS(name, SCORES)                                                                               \
    static __attribute__((noinline)) void name(const Products *given, i64 size, i64 R) {                 \
        Products own = *given;                                                                           \
        for (i64 first = 0, count; first < R; first += count) {                                          \
            count = next_group(R - first, MOST_AT_ONCE);                                                 \
            own.w = given->w + first * own.apart, own.out = given->out + first * own.stride;             \
            own.starts = given->starts + first, own.of_queries = given->of_queries + first;              \
            for (i64 at = 0, C; at < size; at += C * LANES) {                                            \
                C = size - at >= WIDTH * LANES ? WIDTH : size - at >= 2 * LANES ? 2 : 1;                 \
                switch (count * 8 + C) { ALL_SUM_TILES(SCORES) }                                         \
            }                                                                                            \
        }                                                                                                \
    }
SUMS(scores_of, 1)
SUMS(sums_of, 0)
#undef SUMS

/* Return the place of 4 numbers from d on in the order of `interleave`. */
INLINE i64 interleaved(i64 d) { return d / 32 * 32 + d % 8 / 4 * 16 + d % 32 / 8 * 4; }

#if AMX && STORE == BFLOAT16
/* Compute the scores of up to TILE_QUERIES queries with SLOTS slots by AMX: tiles of 16 slots by 64 bytes of their keys, times
   tiles of the same numbers of the queries. */
static void score_tiles(const char *q, i64 count, const char *k, i64 D, float *scores) {
    const i64 row = 2 * D;
    __attribute__((aligned(64))) float sums[2][16][16]; /* of 16 slots each */
    WRITTEN(q);
    for (i64 t = 0; t < SLOTS; t += 32) {
        _tile_zero(0);
        _tile_zero(1);
        for (i64 at = 0; at < row; at += 64) {
            _tile_loadd(4, k + t * row + at, row);
            _tile_loadd(5, k + (t + 16) * row + at, row);
            _tile_loadd(6, q + at * 16, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        for (i64 r = 0; r < count; r += 4)
            for (int half = 0; half < 2; half++) {
                ints words[4];
                read_fours((const char *)(sums[half][0] + r), 64, words);
                for (int i = 0; i < 4 && r + i < count; i++)
                    *(ints *)(scores + (r + i) * SLOTS + t + half * LANES) = words[i];
            }
    }
}

/* Write 32 values of each of T slots, and zeros up to SLOTS, as tiles that weights are multiplied with. Values of two
   slots are side by side; values 0 to 3, 8 to 11, 16 to 19 and 24 to 27 are in one tile, the others in the next. */
static void interleave(const char *v, i64 T, i64 D, i64 fetch, char *to) {
    for (i64 t = 0; t < SLOTS; t += 2, v += 4 * D, to += 64) {
        for (i64 i = 0; i < fetch; i += 64) __builtin_prefetch(v + AHEAD(2 * D) + i);
        const __m512i first = t < T ? _mm512_loadu_si512(v) : _mm512_setzero_si512();
        const __m512i second = t + 1 < T ? _mm512_loadu_si512(v + 2 * D) : _mm512_setzero_si512();
        if (t == CHAIN) to += 1024;
        _mm512_store_si512(to, _mm512_unpacklo_epi16(first, second));
        _mm512_store_si512(to + 1024, _mm512_unpackhi_epi16(first, second));
    }
}

/* Add the values of T slots, times the weights of TILE_QUERIES queries, to sums in the order of `interleave`, by AMX. */
static void mix_tiles(const char *codes, const char *values, i64 T, i64 D, float *sums) {
    WRITTEN(codes);
    for (float *out = sums; out < sums + D; out += 32, values += 4096) {
        _tile_loadd(0, out, 4 * D);
        _tile_loadd(1, out + 16, 4 * D);
        for (i64 t = 0; t < T; t += CHAIN) {
            _tile_loadd(2, codes + 2 * t, 2 * SLOTS);
            _tile_loadd(3, values + t * 64, 64);
            _tile_loadd(4, values + t * 64 + 1024, 64);
            _tile_dpbf16ps(0, 2, 3);
            _tile_dpbf16ps(1, 2, 4);
        }
        _tile_stored(0, out, 4 * D);
        _tile_stored(1, out + 16, 4 * D);
    }
}
#endif

/* Read the factors of `count` slots with keys or values in 8 bits. */
static void read_factors(const char *slots, i64 count, i64 D, float *factors) {
    for (i64 t = 0; STORE == INT8 && t < count; t++) memcpy(factors + t, slots + t * SLOT(D) + D, 4);
}

/* Load LANES values of two slots, in 16 bits each. */
INLINE ints paired_values(const char *first, const char *second) {
#if STORE == BFLOAT16
    return higher_and((ints)load(first, 0, STORE), (ints)load(second, 0, STORE));
#elif LANES == 8 && defined(__AVX2__)
    const __m128i both[] = {_mm_loadl_epi64((const __m128i *)first), _mm_loadl_epi64((const __m128i *)second)};
    return (ints)_mm256_cvtepi8_epi16(_mm_unpacklo_epi8(both[0], both[1]));
#else
    return (load_codes((const int8_t *)first) & 0xffff) | load_codes((const int8_t *)second) << 16;
#endif
}

/* Write the values of T slots as products take them, number d of row i to the 32 bits at to[i * D + d]: for tiles interleaved;
   with PER 4 those of 4 slots, and with PER 2 of each 4 slots two rows. Return the number of rows. Slots that are missing in
   the last 4 are any; their weights are 0. */
static i64 read_values(const char *v, i64 T, i64 D, const int tiled, float *to) {
    const i64 row = SLOT(D) * BYTES(STORE), last = (T - 1) / 4 * 4;
    (void)tiled, (void)last;
#if AMX && STORE == BFLOAT16
    if (tiled) {
        for (i64 at = 0; at < 2 * D; at += 64) interleave(v + at, T, D, at ? 0 : 4 * D, (char *)to + at * SLOTS);
        return T;
    }
#endif
#if PER == 4
    for (i64 t = 0; t < T; t += 4) {
        const int8_t *four[4];
        for (i64 i = 0; i < 4; i++) four[i] = (const int8_t *)v + (t + i < T ? t + i : last) * row;
        for (i64 i = 0; i < 4 * row; i += 64) __builtin_prefetch(v + t * row + AHEAD(row) + i);
        for (i64 d = 0; d < D; d += LANES, to += LANES)
            *(ints *)to = (load_codes(four[0] + d) & 0xff) | (load_codes(four[1] + d) & 0xff) << 8
                | (load_codes(four[2] + d) & 0xff) << 16 | load_codes(four[3] + d) << 24;
    }
    return (T + 3) / 4;
#elif PER == 2
    for (i64 t = 0; t < T; t += 4)
        for (i64 first = t; first < t + 2; first++) {
            const char *own = v + (first < T ? first : last) * row, *other = v + (first + 2 < T ? first + 2 : last) * row;
            for (i64 i = 0; i < 2 * row; i += 64) __builtin_prefetch(v + (2 * first - t) * row + AHEAD(row) + i);
#pragma GCC unroll 4
            for (i64 d = 0; d < D; d += LANES, to += LANES)
                *(ints *)to = paired_values(own + d * BYTES(STORE), other + d * BYTES(STORE));
        }
    return (T + 3) / 4 * 2;
#else
    for (i64 t = 0; t < T; t++, v += row) {
        for (i64 i = 0; i < row; i += 64) __builtin_prefetch(v + AHEAD(row) + i);
        for (i64 d = 0; d < D; d += LANES, to += LANES) *(vec *)to = load(v, d, STORE);
    }
    return T;
#endif
}

/* Return whether a number of x is larger than y. */
INLINE int any_larger(vec x, float y) {
#if LANES == 16
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(y), _CMP_GT_OQ) != 0;
#elif LANES == 8
    return _mm256_movemask_ps((__m256)(x > splat(y))) != 0;
#else
    const ints larger = x > splat(y);
    return (larger[0] | larger[1] | larger[2] | larger[3]) != 0;
#endif
}

/* State of a query. largest: largest score so far. totals: TOTALS sums of weights. sums: D sums of values. */
typedef struct {
    float *largest, *totals, *sums;
} State;

/* Scale what a query has summed, before scores whose largest is larger than those before. */
static __attribute__((noinline)) void rescale(State q, vec most, i64 D) {
    float largest = most[0];
    for (int i = 1; i < LANES; i++) largest = most[i] > largest ? most[i] : largest;
    const vec factor = exp_vec(splat(*q.largest - largest));
    for (i64 d = 0; d < D; d += LANES) *(vec *)(q.sums + d) *= factor;
    for (int i = 0; i < TOTALS; i += LANES) *(vec *)(q.totals + i) *= factor;
    *q.largest = largest;
}

/* Limit the scores that are seen to `limit`. */
static __attribute__((noinline)) void cap_scores(float *s, float limit) {
    for (i64 t = 0; t < SLOTS; t++)
        if (s[t] != -INFINITY) s[t] = limit * tanhf(s[t] / limit);
}

/* Write the weights exp(s - largest) of SLOTS scores to `codes`, as products take them, and add them to the totals. Scores of
   slots that are not seen are -infinity, and get the weight 0. With 8 bits weights are multiplied by the `factors` of the
   values and replace the scores, for `round_weights`, which needs their largest absolute value: it is that of the result. */
INLINE ints weigh(float *s, float limit, const float *factors, State q, i64 D, const int tiled, float *codes) {
    enum { COUNT = SLOTS / LANES, EACH = TOTALS / LANES };
    (void)factors, (void)tiled, (void)codes;
    if (limit) cap_scores(s, limit);
    vec p[COUNT], most = splat(-INFINITY);
    ints largest_weight = {};
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++) p[i] = *(vec *)(s + i * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++) most = most_of(p[i], most);
    if (any_larger(most, *q.largest)) rescale(q, most, D);
    const float largest = *q.largest == -INFINITY ? 0 : *q.largest; /* no slot is seen so far */
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++) {
        const vec x = p[i] - largest;
        p[i] = STORE == FLOAT32 ? exp_vec(x) : exp_short(x);
        if (STORE == BFLOAT16) p[i] = (vec)(((ints)p[i] + 0x8000) & -65536);
    }
#pragma GCC unroll 4
    for (int i = 0; i < EACH; i++)
        *(vec *)(q.totals + i * LANES) += (p[i] + p[EACH + i]) + (p[2 * EACH + i] + p[3 * EACH + i]);
#pragma GCC unroll 16
    for (int i = 0; i < COUNT; i++) {
#if STORE == INT8
        p[i] = (vec)((ints)(p[i] * *(const vec *)(factors + i * LANES)) & (p[i] != 0)); /* a factor may be NaN */
        largest_weight = larger_bits(largest_weight, p[i]);
        *(vec *)(s + i * LANES) = p[i];
#else
        const ints higher = (ints)p[i] >> 16;
        if (tiled) *(halves *)((uint16_t *)codes + i * LANES) = __builtin_convertvector(higher, halves);
        else if (PER == 2) *(halves *)((uint16_t *)codes + i * LANES) = __builtin_convertvector(IN_PAIRS(higher), halves);
        else *(vec *)(codes + i * LANES) = p[i];
#endif
    }
    return largest_weight;
}

/* Round SLOTS weights of 8 bits, whose largest absolute value is in `most`, to `codes`, and return their scale. */
INLINE float round_weights(const float *s, ints most, float *codes) {
    float inverse;
    const float scale = scale_of(most, MOST_WEIGHT, &inverse);
#pragma GCC unroll 16
    for (int i = 0; i < SLOTS; i += LANES) { /* codes are lower bits of what `rounded_codes` begins with */
        const ints lower = (ints)(*(const vec *)(s + i) * inverse + ROUNDING);
        if (PER == 4) *(small_codes *)((int8_t *)codes + i) = __builtin_convertvector(lower & 0xff, small_codes);
        else *(halves *)((uint16_t *)codes + i) = __builtin_convertvector(IN_PAIRS(lower), halves);
    }
    return scale;
}
