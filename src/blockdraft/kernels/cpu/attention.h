/* The two products of attention, of queries with keys and of weights with values, for all queries that share a head.

   With keys and values in float32, sums run in order. With bfloat16, queries and weights are rounded to it as well, and
   sums run as in AMX: of each CHAIN products those at even and those at odd places are summed separately, and both sums
   are added to the sum before. With 8 bits, queries and weights are rounded to integers of up to MOST_CODE, weights of
   each WEIGHED slots with a scale of their own, and sums are of integers. So all instructions give the same bits. */
#include "kernels.h"

#define BLOCK (2 * LANES) /* slots that are scored at once */
#define QUERIES 32 /* maximum queries that share a read of keys and values */
#define AT_ONCE 6 /* queries whose sums fit into registers, beside two vectors of keys or MIXED of values */
#if LANES == 16 || defined(__ARM_NEON)
#define MIXED 4
#else
#define MIXED 2
#endif
#define WEIGHED 64 /* slots whose weights are computed and used before the next ones are */
#define STRIDE(slots) (((slots) + WEIGHED - 1) / WEIGHED * WEIGHED) /* between the scores of two queries */
#define AHEAD 8192 /* bytes that keys and values are prefetched ahead */
#define PARTS (STORE == BFLOAT16 ? 2 : 1) /* sums of a chain */
#define MOST_CODE 16383 /* so that sums of MOST_HEAD products with 8 bits do not overflow */
#define UNIT 67108864.0f /* weights are added up as integers, 1 as this one, so that their order does not matter */

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

#if STORE == INT8
#define PER 2 /* numbers that are multiplied at once, in 32 bits */
#define IN_PAIRS(x) PICK(x, x, IN_FOURS(0, 2, 1, 3)) /* of each 4 the first and the third, then the others */
/* AMD's processors, which alone have SSE4a, multiply two numbers at once as fast as one; Intel's take longer. */
#elif STORE == BFLOAT16 && LANES == 16 && defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__SSE4A__)
#define PER 2
#define IN_PAIRS(x) PICK(x, x, IN_FOURS(2, 0, 3, 1)) /* the instruction begins with the higher bits */
#else
#define PER 1
#define IN_PAIRS(x) (x)
#endif

/* Write query j of a group, times `scale`, in the layout of the products, and its factor. */
static void place_query(const float *x, float scale, i64 D, i64 j, const int tiled, float *queries, float *factor) {
    float *to = queries + j * D / PER, inverse = 0;
    char *tile = (char *)queries + j / TILE_QUERIES * TILE_QUERIES * 2 * D + j % TILE_QUERIES * 4;
    ints most = {};
    for (i64 d = 0; STORE == INT8 && d < D; d += LANES) most = larger_bits(most, *(const vec *)(x + d));
    *factor = STORE == INT8 ? scale * scale_of(most, MOST_CODE, &inverse) : 1;
    for (i64 d = 0; d < D; d += LANES) {
        const vec own = *(const vec *)(x + d);
        ints y = (ints)(own * scale);
        if (STORE == INT8) y = rounded_codes(own, inverse);
        if (STORE == BFLOAT16) y = (ints)narrowed((vec)y);
        if (STORE == BFLOAT16 && (PER == 2 || tiled)) y >>= 16;
        if (tiled)
            for (int i = 0; i < LANES; i += 2) {
                const uint16_t two[2] = {(uint16_t)y[i], (uint16_t)y[i + 1]};
                memcpy(tile + (d + i) * 32, two, 4);
            }
        else if (PER == 2) *(halves *)((uint16_t *)to + d) = __builtin_convertvector(IN_PAIRS(y), halves);
        else *(ints *)(to + d) = y;
    }
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

/* Write the keys of LANES slots, number d of slot t to the 32 bits at to[d * BLOCK + t]. With PER 2 they hold two numbers, and
   each 4 numbers take two rows. */
static void turn(const char *k, i64 D, float *to) {
    const i64 row = SLOT(D) * BYTES(STORE), each = 16 / BYTES(STORE); /* numbers of 16 bytes */
    i64 d = 0;
    for (; d + each <= D; d += each, k += 16, to += each / PER * BLOCK) {
        ints words[4];
        read_fours(k, row, words);
#pragma GCC unroll 4
        for (int w = 0; w < 4; w++) {
            float *place = to + w * each / PER / 4 * BLOCK;
            const ints own = words[w];
            if (STORE == FLOAT32) *(ints *)place = own;
            if (STORE == BFLOAT16 && PER == 1) {
                *(ints *)place = own << 16;
                *(ints *)(place + BLOCK) = own & -65536;
            }
            if (STORE == BFLOAT16 && PER == 2)
                *(ints *)place = w % 2 ? higher_and(words[w - 1], own) : higher_and(own << 16, words[w + 1] << 16);
            if (STORE == INT8) {
                *(ints *)place = (ints)((shorts)own << 8 >> 8);
                *(ints *)(place + BLOCK) = (ints)((shorts)own >> 8);
            }
        }
    }
    for (i64 i = 0; d < D; d++, i++, k += BYTES(STORE)) /* bfloat16 is not in pairs here, where D is no multiple of 16 */
        for (int t = 0; t < LANES; t++)
            if (STORE == INT8) {
                int16_t *two = (int16_t *)(to + (i / 4 * 2 + i % 2) * BLOCK + t);
                two[i % 4 / 2] = *(const int8_t *)(k + t * row);
            } else to[i * BLOCK + t] = load_one(k + t * row, 0, STORE);
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

/* sum[lane] + product of the numbers in the 32 bits of w[lane] with those at x. */
#if STORE == INT8
typedef ints sum_;
#define PRODUCT(sum, w, x) dot2(sum, w, spread((const int8_t *)(x)))
#else
typedef vec sum_;
#if PER == 2
#define PRODUCT(sum, w, x) \
    (vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(w), (__m512bh)spread((const int8_t *)(x)))
#else
#define PRODUCT(sum, w, x) FMA(splat(*(x)), w, sum)
#endif
#endif

/* Return the sum after a chain: `before` plus the sums of its parts. A single part includes `before`. */
INLINE sum_ added(sum_ before, sum_ first, sum_ second) {
    if (PARTS == 1) return first;
    return before + (first + second);
}

/* scores[r * stride + t] = q[r] . k[t] for R queries and the slots of a block. With `fetch` a block's memory from `next`
   on is prefetched, evenly, since many requests at once would be waited for. */
INLINE void dots(const float *q, const float *of_queries, i64 D, const float *keys, const float *factors, float *scores,
                 i64 stride, const char *next, i64 fetch, const int R) {
    (void)of_queries, (void)factors;
    const i64 rows = D / PER, chain = PARTS == 2 ? CHAIN / PER : rows;
    sum_ totals[AT_ONCE][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) totals[r][0] = totals[r][1] = (sum_){};
    for (i64 from = 0; from < rows; from += chain) {
        const i64 end = from + chain < rows ? from + chain : rows;
        sum_ parts[2][AT_ONCE][2];
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            sum_ sums[AT_ONCE][2];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = (sum_){};
            for (i64 d = from + part; d < end; d += PARTS) {
                __builtin_prefetch(next + d * fetch);
                const sum_ first = *(const sum_ *)(keys + d * BLOCK), second = *(const sum_ *)(keys + d * BLOCK + LANES);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    sums[r][0] = PRODUCT(sums[r][0], first, q + r * rows + d);
                    sums[r][1] = PRODUCT(sums[r][1], second, q + r * rows + d);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                for (int c = 0; c < 2; c++) parts[part][r][c] = sums[r][c];
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int c = 0; c < 2; c++) totals[r][c] = added(totals[r][c], parts[0][r][c], parts[1][r][c]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int c = 0; c < 2; c++) {
            vec *to = (vec *)(scores + r * stride + c * LANES);
#if STORE == INT8
            *to = __builtin_convertvector(totals[r][c], vec) * *(const vec *)(factors + c * LANES) * of_queries[r];
#else
            *to = totals[r][c];
#endif
        }
}

/* Return the place of 4 numbers from d on in the order of `interleave`. */
INLINE i64 interleaved(i64 d) { return d / 32 * 32 + d % 8 / 4 * 16 + d % 32 / 8 * 4; }

#if AMX && STORE == BFLOAT16
/* `score` by AMX: tiles of 16 slots by 64 bytes of their keys, times tiles of the same numbers of 16 queries. */
static void score_tiles(const char *q, i64 count, const char *k, i64 D, float *scores, i64 stride) {
    const i64 row = 2 * D;
    __attribute__((aligned(64))) float sums[2][16][16]; /* of both halves of the block */
    WRITTEN(q);
    for (i64 group = 0; group < count; group += TILE_QUERIES) {
        _tile_zero(0);
        _tile_zero(1);
        for (i64 at = 0; at < 2 * D; at += 64, q += 1024) {
            _tile_loadd(4, k + at, row);
            _tile_loadd(5, k + at + 16 * row, row);
            _tile_loadd(6, q, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        for (i64 r = group; r < count && r < group + TILE_QUERIES; r += 4)
            for (int half = 0; half < 2; half++) {
                ints words[4];
                read_fours((const char *)(sums[half][0] + r - group), 64, words);
                for (int i = 0; i < 4 && r + i < count; i++)
                    *(ints *)(scores + (r + i) * stride + half * LANES) = words[i];
            }
    }
}

/* Write 32 values of each of T slots, and zeros up to WEIGHED, as tiles that weights are multiplied with. Values of two
   slots are side by side; values 0 to 3, 8 to 11, 16 to 19 and 24 to 27 are in one tile, the others in the next. */
static void interleave(const char *v, i64 T, i64 D, i64 fetch, char *to) {
    for (i64 t = 0; t < WEIGHED; t += 2, v += 4 * D, to += 64) {
        for (i64 i = 0; i < fetch; i += 64) __builtin_prefetch(v + AHEAD + i);
        const __m512i first = t < T ? _mm512_loadu_si512(v) : _mm512_setzero_si512();
        const __m512i second = t + 1 < T ? _mm512_loadu_si512(v + 2 * D) : _mm512_setzero_si512();
        if (t == CHAIN) to += 1024;
        _mm512_store_si512(to, _mm512_unpacklo_epi16(first, second));
        _mm512_store_si512(to + 1024, _mm512_unpackhi_epi16(first, second));
    }
}

/* `mix` by AMX, to sums in the order of `interleave`. */
static void mix_tiles(const char *codes, i64 count, const char *values, i64 T, i64 D, float *sums) {
    WRITTEN(codes);
    for (i64 group = 0; group < count; group += TILE_QUERIES) {
        const char *w = codes + group * 2 * WEIGHED, *own = values;
        for (float *out = sums + group * D; out < sums + (group + 1) * D; out += 32, own += 4096) {
            _tile_loadd(0, out, 4 * D);
            _tile_loadd(1, out + 16, 4 * D);
            for (i64 t = 0; t < T; t += CHAIN) {
                _tile_loadd(2, w + 2 * t, 2 * WEIGHED);
                _tile_loadd(3, own + t * 64, 64);
                _tile_loadd(4, own + t * 64 + 1024, 64);
                _tile_dpbf16ps(0, 2, 3);
                _tile_dpbf16ps(1, 2, 4);
            }
            _tile_stored(0, out, 4 * D);
            _tile_stored(1, out + 16, 4 * D);
        }
    }
}
#endif

/* Read the factors of `count` slots with keys or values in 8 bits. */
static void read_factors(const char *slots, i64 count, i64 D, float *factors) {
    for (i64 t = 0; t < count; t++) memcpy(factors + t, slots + t * SLOT(D) + D, 4);
}

/* Compute the scores of `count` queries with the slots of a block, whose keys are read once, into `keys`. */
static void score(const float *q, const float *of_queries, i64 count, const char *k, i64 D, const int tiled,
                  float *keys, float *scores, i64 stride) {
    (void)tiled;
    const i64 row = SLOT(D) * BYTES(STORE), groups = (count + AT_ONCE - 1) / AT_ONCE;
    float factors[BLOCK];
    if (STORE == INT8) read_factors(k, BLOCK, D, factors);
    const char *next = k + (BLOCK * row > AHEAD ? BLOCK * row : AHEAD);
#if AMX && STORE == BFLOAT16
    if (tiled) {
        for (i64 i = 0; i < BLOCK * row; i += 64) __builtin_prefetch(next + i);
        score_tiles((const char *)q, count, k, D, scores, stride);
        return;
    }
#endif
    turn(k, D, keys);
    turn(k + LANES * row, D, keys + LANES);
    for (i64 group = 0; group < groups; group++) {
        const i64 r = count * group / groups;
        const i64 fetch = group ? 0 : BLOCK * BYTES(STORE) * PER; /* bytes for each row of keys */
        switch (count * (group + 1) / groups - r) {
#define DOTS(R)                                                                                           \
    case R:                                                                                               \
        dots(q + r * D / PER, of_queries + r, D, keys, factors, scores + r * stride, stride, next, fetch, R); \
        break;
            DOTS(1) DOTS(2) DOTS(3) DOTS(4) DOTS(5) DOTS(6)
        }
    }
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

/* Read values of T slots as products take them: for tiles interleaved, or with PER 2 in pairs, of each 4 slots in two rows.
   Others are multiplied as they lie. */
static void read_values(const char *v, i64 T, i64 D, const int tiled, float *to) {
    (void)tiled;
#if AMX && STORE == BFLOAT16
    if (tiled) {
        for (i64 at = 0; at < 2 * D; at += 64) interleave(v + at, T, D, at ? 0 : 4 * D, (char *)to + at * WEIGHED);
        return;
    }
#endif
    const i64 row = SLOT(D) * BYTES(STORE);
    for (i64 t = 0; PER == 2 && t < T; t += 4)
        for (i64 first = t; first < t + 2; first++) {
            /* The weights of missing slots are 0. */
            const char *own = v + (first < T ? first : t) * row, *other = v + (first + 2 < T ? first + 2 : t) * row;
            for (i64 i = 0; i < 2 * row; i += 64) __builtin_prefetch(v + (2 * first - t) * row + AHEAD + i);
#pragma GCC unroll 4
            for (i64 d = 0; d < D; d += LANES, to += LANES)
                *(ints *)to = paired_values(own + d * BYTES(STORE), other + d * BYTES(STORE));
        }
}

/* out[r][c] += sum of weights[r][t] v[t][c] over T slots, for C vectors of R queries, whose weights are `apart`. With
   PER 2 `values` has been read, and there are weights of two slots in each 32 bits. */
INLINE void mix_part(const float *w, i64 apart, const float *scales, const char *v, const float *values, i64 T, i64 D,
                     float *out, i64 fetch, const int R, const int C) {
    (void)scales, (void)v, (void)values, (void)fetch;
    const i64 rows = PER == 2 ? (T + 3) / 4 * 2 : T, chain = PARTS == 2 ? CHAIN / PER : rows;
    for (i64 from = 0; from < rows; from += chain) {
        const i64 end = from + chain < rows ? from + chain : rows;
        sum_ parts[2][AT_ONCE][MIXED];
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
            sum_ sums[AT_ONCE][MIXED];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int c = 0; c < C; c++)
                    sums[r][c] = STORE == FLOAT32 ? *(const sum_ *)(out + r * D + c * LANES) : (sum_){};
            for (i64 t = from + part; t < end; t += PARTS) {
                sum_ value[MIXED];
#if PER == 2
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) value[c] = *(const sum_ *)(values + t * D + c * LANES);
#else
                const char *own = v + t * D * BYTES(STORE);
                for (i64 i = 0; i < fetch; i += 64) __builtin_prefetch(own + AHEAD + i);
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) value[c] = load(own, c * LANES, STORE);
#endif
#pragma GCC unroll 8
                for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                    for (int c = 0; c < C; c++) sums[r][c] = PRODUCT(sums[r][c], value[c], w + r * apart + t);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) parts[part][r][c] = sums[r][c];
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                vec *to = (vec *)(out + r * D + c * LANES);
#if STORE == INT8
                *to = FMA(__builtin_convertvector(parts[0][r][c], vec), splat(scales[r]), *to);
#else
                *to = added(*to, parts[0][r][c], parts[1][r][c]);
#endif
            }
    }
}

/* Add the sum of weights[r][t] v[t] over T slots to out[r], for `count` queries. Weights are in p, or `codes` with `scales`. */
static void mix(const float *p, i64 stride, const float *codes, const float *scales, i64 count, const char *v,
                const float *values, i64 T, i64 D, const int tiled, float *out) {
    (void)tiled;
    const i64 groups = (count + AT_ONCE - 1) / AT_ONCE, apart = PER == 2 ? WEIGHED / 2 : stride;
    const float *weights = PER == 2 ? codes : p;
#if AMX && STORE == BFLOAT16
    if (tiled) {
        mix_tiles((const char *)codes, count, (const char *)values, T, D, out);
        return;
    }
#endif
    for (i64 group = 0; group < groups; group++) {
        const i64 r = count * group / groups, R = count * (group + 1) / groups - r;
        for (i64 d = 0, C; d < D; d += C * LANES) {
            C = D - d >= MIXED * LANES ? MIXED : D - d >= 2 * LANES ? 2 : 1;
            const i64 fetch = group || d ? 0 : D * BYTES(STORE);
            switch (R * 8 + C) {
#define MIX_PART(R, C)                                                                                    \
    case R * 8 + C:                                                                                       \
        mix_part(weights + r * apart, apart, scales + r, v + d * BYTES(STORE), values + d, T, D,          \
                 out + r * D + d, fetch, R, C);                                                           \
        break;
#if MIXED == 4
#define MIX_PARTS(R) MIX_PART(R, 1) MIX_PART(R, 2) MIX_PART(R, 4)
#else
#define MIX_PARTS(R) MIX_PART(R, 1) MIX_PART(R, 2)
#endif
                MIX_PARTS(1) MIX_PARTS(2) MIX_PARTS(3) MIX_PARTS(4) MIX_PARTS(5) MIX_PARTS(6)
            }
        }
    }
}

/* `mix` for one query, without the slots whose p is negative. With 8 bits only factors can be not finite. */
static void mix_seen(const float *p, const char *v, i64 T, i64 D, float *out) {
    const i64 chain = STORE == BFLOAT16 ? CHAIN : T;
    for (i64 d = 0; d < D; d += LANES)
        for (i64 from = 0; from < T; from += chain) {
            vec parts[2] = {};
            if (PARTS == 1) parts[0] = *(const vec *)(out + d);
            for (i64 t = from; t < from + chain && t < T; t++)
                if (!(p[t] < 0))
                    parts[t % PARTS] = FMA(splat(p[t]), load(v + t * D * BYTES(STORE), d, STORE), parts[t % PARTS]);
            if (PARTS == 2) parts[0] = *(const vec *)(out + d) + (parts[0] + parts[1]);
            *(vec *)(out + d) = parts[0];
        }
}

/* Cap scores, and return the largest. `size` is a multiple of WEIGHED. */
static float largest_score(float *s, i64 size, float limit) {
    for (i64 t = 0; limit && t < size; t++)
        if (s[t] != -INFINITY) s[t] = limit * tanhf(s[t] / limit);
    vec most[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) most[i] = splat(-INFINITY);
    for (i64 t = 0; t < size; t += 4 * LANES)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) most[i] = most_of(*(vec *)(s + t + i * LANES), most[i]);
    const vec all = most_of(most_of(most[0], most[1]), most_of(most[2], most[3]));
    float largest = all[0];
    for (int i = 1; i < LANES; i++) largest = all[i] > largest ? all[i] : largest;
    return largest;
}

/* s = exp(s - largest) for WEIGHED slots, and 0 where s is -infinity; returns sums in units. In bfloat16 s is rounded, and
   for tiles and pairs written to `codes`, too. With 8 bits weights are multiplied by `factors` of the values and rounded to
   `codes`, whose scale is `scale`; s stays. */
static ints weigh(float *s, float largest, const float *factors, const int tiled, uint16_t *codes, float *scale) {
    (void)factors, (void)tiled, (void)codes, (void)scale;
    ints sums = {}, most = {};
    vec p[WEIGHED / LANES];
#pragma GCC unroll 16
    for (int i = 0; i < WEIGHED / LANES; i++) {
        const vec x = *(vec *)(s + i * LANES) - largest;
        p[i] = STORE == FLOAT32 ? exp_vec(x) : exp_short(x);
        if (STORE == BFLOAT16) p[i] = (vec)(((ints)p[i] + 0x8000) & -65536);
        sums += __builtin_convertvector(p[i] * UNIT, ints);
#if STORE == INT8
        p[i] = (vec)((ints)(p[i] * *(const vec *)(factors + i * LANES)) & (p[i] != 0)); /* a factor may be NaN */
        most = larger_bits(most, p[i]);
#else
        *(vec *)(s + i * LANES) = p[i];
        const ints higher = (ints)p[i] >> 16;
        if (tiled) *(halves *)(codes + i * LANES) = __builtin_convertvector(higher, halves);
        else if (PER == 2) *(halves *)(codes + i * LANES) = __builtin_convertvector(IN_PAIRS(higher), halves);
#endif
    }
#if STORE == INT8
    float inverse;
    *scale = scale_of(most, MOST_CODE, &inverse);
#pragma GCC unroll 16
    for (int i = 0; i < WEIGHED / LANES; i++) { /* codes are lower bits of what `rounded_codes` begins with */
        const ints lower = (ints)(p[i] * inverse + ROUNDING);
        *(halves *)(codes + i * LANES) = __builtin_convertvector(IN_PAIRS(lower), halves);
    }
#else
    (void)most;
#endif
    return sums;
}
