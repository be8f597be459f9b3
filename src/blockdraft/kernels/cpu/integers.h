/* Products of quantized weights with inputs rounded to int8. nn/quantization.py has a slow twin. Inputs that share a factor
   are a group, or with nested scales a run of groups. Their sums are of integers, so their order does not matter. Sums of
   several are added up in order. */
typedef uint8_t codes __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef int8_t signed_codes __attribute__((vector_size(4 * LANES), aligned(1), may_alias));
typedef int16_t shorts __attribute__((vector_size(4 * LANES), may_alias));
typedef uint16_t half_factors __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#if LANES == 16
#define WIDE(name) _mm512_##name
typedef __m512i register_;
#elif LANES == 8
#define WIDE(name) _mm256_##name
typedef __m256i register_;
#elif defined(__SSSE3__)
#define WIDE(name) _mm_##name
typedef __m128i register_;
#endif

#if (LANES == 16 && defined(__AVX512VNNI__)) || (LANES < 16 && defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define DOT4(sum, w, x) (ints)WIDE(dpbusd_epi32)((register_)(sum), (register_)(w), (register_)(x))
#define DOT2(sum, w, x) (ints)WIDE(dpwssd_epi32)((register_)(sum), (register_)(w), (register_)(x))
#define SHIFTED 128 /* added to codes of 8 bits, since the instruction takes unsigned ones */
#elif LANES < 16 && defined(__AVXVNNI__)
#define DOT4(sum, w, x) (ints)WIDE(dpbusd_avx_epi32)((register_)(sum), (register_)(w), (register_)(x))
#define DOT2(sum, w, x) (ints)WIDE(dpwssd_avx_epi32)((register_)(sum), (register_)(w), (register_)(x))
#define SHIFTED 128
#elif (LANES == 16 && defined(__AVX512BW__)) || (LANES == 8 && defined(__AVX2__)) || (LANES == 4 && defined(__SSSE3__))
#define PAIRS(w, x) (shorts)WIDE(maddubs_epi16)((register_)(w), (register_)(x))
#define DOT2(sum, w, x) ((sum) + (ints)WIDE(madd_epi16)((register_)(w), (register_)(x)))
#elif LANES == 4 && defined(__ARM_FEATURE_DOTPROD)
#define DOT4(sum, w, x) (ints)vdotq_s32((int32x4_t)(sum), (int8x16_t)(w), (int8x16_t)(x))
#endif
#ifndef SHIFTED
#define SHIFTED 0
#endif

/* sum[lane] + w[lane][0..3] . x[lane][0..3]; w and x hold 4 bytes for each lane, x signed ones. */
#if !defined(DOT4) && !defined(PAIRS)
INLINE ints dot4(ints sum, signed_codes w, signed_codes x) {
    for (int i = 0; i < 4 * LANES; i++) sum[i / 4] += (int)w[i] * x[i];
    return sum;
}
#define DOT4(sum, w, x) dot4(sum, (signed_codes)(w), (signed_codes)(x))
#endif

/* sum[lane] + w[lane][0..1] . x[lane][0..1]; w and x hold 2 numbers of 16 bits for each lane. */
#ifndef DOT2
#define DOT2(sum, w, x) ((sum) + ((w) << 16 >> 16) * ((x) << 16 >> 16) + ((w) >> 16) * ((x) >> 16))
#endif

/* Maximum rows that are multiplied at once: as many as fit into registers. */
#if LANES == 16 || defined(__ARM_NEON)
#define TILE_ROWS 8
#elif LANES == 8
#define TILE_ROWS 6
#else
#define TILE_ROWS 4
#endif

/* Rounded inputs. For quantized weights, rows are split evenly into `TILES(rows)` tiles. A tile of R rows has codes
   [inputs / 4, R, 4], so that one step reads adjacent memory. Factors are [inputs / SHARING(l), R]. `starts` and `products`
   are [groups, R]; with nested scales the place of `products` holds int16 [groups / 2, R, 2], sums of codes. For other
   weights, with NARROW, `codes` points to `input` [rows, ROW_SIZE(inputs)]. */
typedef struct {
    int8_t *codes;
    float *factors, *products; /* of codes; factors times sums of codes */
    int32_t *starts; /* sums of codes times -BASE: sums of products with codes that BASE was added to begin with this */
} Rounded;

#define SHARING(l) ((l)->group * ((l)->span ? (l)->span : 1)) /* inputs that share a factor */
#define BASE(l) /* makes codes positive */                                                               \
    ((l)->kind == INT4 ? (l)->offset ? 0 : 8 : (l)->kind == FLOAT4 ? MOST_FLOAT4 : (l)->kind == INT6 ? 32 : SHIFTED)
#define HAS_4_BITS(l) ((l)->kind == INT4 || (l)->kind == FLOAT4)
#define BITS_OF(kind) ((kind) == INT8 ? 8 : (kind) == INT6 ? 6 : 4)
#define MOST_FLOAT4 12 /* twice the largest number of E2M1 */

#define TILES(rows) (((rows) + TILE_ROWS - 1) / TILE_ROWS)
#define TILE_BEGIN(rows, tile) ((rows) * (tile) / TILES(rows))

#define TOGETHER (64 / LANES) /* least blocks of a piece */
#define CACHED 131072 /* bytes of weights that stay in the cache while all tiles are multiplied with them */

#define ROUNDING 12582912.0f /* adding it rounds to the nearest integer, ties to even */

/* Return the larger absolute values of two vectors, as bits, in whose order NaN comes last. */
INLINE ints larger_bits(ints most, vec x) {
    const ints here = (ints)x & 0x7fffffff;
#if defined(__AVX2__) && LANES > 4 /* gcc does not find this instruction */
    return (ints)WIDE(max_epi32)((register_)here, (register_)most);
#else
    const ints larger = here > most;
    return (here & larger) | (most & ~larger);
#endif
}

/* Return the scale of integers of up to `limit` for numbers whose largest absolute value is in `most`: 0 if that is 0, NaN if
   a number is not finite. `inverse` is the factor from numbers to integers, or 0 in these two cases. */
INLINE float scale_of(ints most, float limit, float *inverse) {
#if LANES == 16
    const int32_t bits = _mm512_reduce_max_epi32((__m512i)most);
#else
    int32_t bits = most[0];
    for (int k = 1; k < LANES; k++) bits = most[k] > bits ? most[k] : bits;
#endif
    float largest;
    memcpy(&largest, &bits, 4);
    const int usual = largest > 1e-30f && largest <= 3.4028235e38f;
    *inverse = usual ? limit / largest : 0;
    return usual ? largest / limit : largest <= 1e-30f ? 0 : NAN;
}

INLINE int32_t int_sum(ints x) {
#if LANES == 16 /* gcc does not find these instructions */
    return _mm512_reduce_add_epi32((__m512i)x);
#else
    int32_t sum = 0;
    for (int k = 0; k < LANES; k++) sum += x[k];
    return sum;
#endif
}

INLINE ints rounded_codes(vec x, float inverse) {
    return ((ints)(x * inverse + ROUNDING) - 0x4b400000) & (inverse ? -1 : 0);
}

/* Return codes of up to 127 in 8 bits each. */
INLINE small_codes in_8_bits(ints code) {
#if LANES == 8 && defined(__AVX2__) /* gcc does not find these instructions */
    const __m256i words = _mm256_packs_epi32((__m256i)code, (__m256i)code), bytes = _mm256_packs_epi16(words, words);
    return (small_codes)_mm_cvtsi128_si64(
        _mm_unpacklo_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1)));
#else
    return __builtin_convertvector(code, small_codes);
#endif
}

/* Round one row's inputs of one factor. Each 4 codes begin `apart` bytes after the last 4. A number that is not finite makes
   the factor NaN. `sums` gets the sums of each `part` codes. */
static void round_group(const float *x, i64 size, i64 part, int8_t *to, i64 apart, float *factor, int32_t *sums) {
    float inverse;
    ints most = {};
    i64 i = 0;
    for (; i + LANES <= size; i += LANES) most = larger_bits(most, *(const vec *)(x + i));
    for (; i < size; i++) most = larger_bits(most, splat(x[i]));
    *factor = scale_of(most, 127, &inverse);
    for (i64 begin = 0; begin < size; begin += part) {
        ints sum = {};
        for (i = begin; i + LANES <= begin + part; i += LANES) {
            const ints code = rounded_codes(*(const vec *)(x + i), inverse);
            sum += code;
            const small_codes small = in_8_bits(code);
            if (apart == 4) *(small_codes *)(to + i) = small;
            else
#pragma GCC unroll 4 /* else gcc scatters them by one slow instruction */
                for (int k = 0; k < LANES; k += 4) memcpy(to + (i + k) / 4 * apart, (const int8_t *)&small + k, 4);
        }
        *sums = int_sum(sum);
        for (; i < begin + part; i++) {
            float code = inverse ? x[i] * inverse + ROUNDING - ROUNDING : 0;
            to[i / 4 * apart + i % 4] = (int8_t)code;
            *sums += (int32_t)code;
        }
        sums++;
    }
}

#define IS_ROUNDED(l) (NARROW || IS_INTEGER(l)) /* whether `round_inputs` comes before a product */

#if NARROW
/* Round a row to bfloat16, to the nearest, ties to even. Its numbers are written in order, or as `tile` reads them. */
static void narrow_row(const float *x, i64 size, int in_order, input *to) {
    (void)in_order;
    for (i64 i = 0; i < size; i++) {
        uint32_t bits;
        memcpy(&bits, x + i, 4);
        bits = x[i] == x[i] ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
#if PAIRED
        to[i] = (uint16_t)bits;
#else
        bits <<= 16;
        memcpy(to + i, &bits, 4);
#endif
    }
#if PAIRED
    for (i64 i = size; i < ROW_SIZE(size); i++) to[i] = 0;
    for (i64 i = 0; !in_order && i < size; i += CHUNK) {
        uint64_t four; /* 0, 1, 2, 3 becomes 2, 0, 3, 1 */
        memcpy(&four, to + i, 8);
        four = (four >> 32 & 0xffff) | (four & 0xffff) << 16 | (four >> 48) << 32 | (four >> 16 & 0xffff) << 48;
        memcpy(to + i, &four, 8);
    }
#endif
}
#endif

/* Return whether threads share the factors of all rows. Codes of rows lie side by side, so threads that share the rows of a
   tile would write to the same cache lines, which is slow. */
static int by_groups(const Thread *t, const Linear *l, i64 rows) {
    return IS_INTEGER(l) && rows < TILE_ROWS * t->threads && TILES(rows) < l->inputs / SHARING(l);
}

/* Round the inputs of the factors from `first` to `last`, of the rows from `begin` to `end`. */
static void round_groups(const Linear *l, const float *x, i64 xs, i64 rows, Rounded in, i64 begin, i64 end, i64 first,
                         i64 last) {
    const i64 size = SHARING(l), factors = l->inputs / size;
    for (i64 tile = 0; tile < TILES(rows); tile++) {
        const i64 of_tile = TILE_BEGIN(rows, tile), R = TILE_BEGIN(rows, tile + 1) - of_tile;
        const i64 from = begin > of_tile ? begin : of_tile, to = end < of_tile + R ? end : of_tile + R;
        for (i64 f = first; f < last; f++)
            for (i64 row = from; row < to; row++) {
                const i64 at = of_tile * factors + f * R + row - of_tile;
                int8_t *own = in.codes + of_tile * l->inputs + f * size * R + (row - of_tile) * 4;
                int32_t sums[MOST_NESTED / 8];
                round_group(x + row * xs + f * size, size, l->group, own, 4 * R, in.factors + at, sums);
                const i64 count = l->span ? l->span : 1, first_group = (of_tile * factors + f * R) * count + row - of_tile;
                int16_t *pairs = (int16_t *)in.products + (of_tile * factors + f * R) * count + 2 * (row - of_tile);
                for (i64 g = 0; g < count; g++) in.starts[first_group + g * R] = -BASE(l) * sums[g];
                for (i64 g = 0; g < l->span; g++) pairs[g / 2 * 2 * R + g % 2] = (int16_t)sums[g];
                if (!l->span) in.products[at] = in.factors[at] * (float)sums[0];
            }
    }
}

/* Round the rows from `first` to `last` for a product, where IS_ROUNDED. */
static void round_rows(const Linear *l, const float *x, i64 xs, i64 rows, Rounded in, i64 first, i64 last) {
    if (IS_INTEGER(l)) round_groups(l, x, xs, rows, in, first, last, 0, l->inputs / SHARING(l));
#if NARROW
    else
        for (i64 row = first; row < last; row++)
            narrow_row(x + row * xs, l->inputs, TILED_PRODUCT(l), (input *)in.codes + row * ROW_SIZE(l->inputs));
#endif
}

/* Round all rows for a product, where IS_ROUNDED. */
static void round_inputs(Thread *t, const Linear *l, const float *x, i64 xs, i64 rows, Rounded in) {
    if (!IS_ROUNDED(l)) return;
    if (by_groups(t, l, rows))
        PIECES(t, l->inputs / SHARING(l), (255 + SHARING(l)) / SHARING(l), first, last)
            round_groups(l, x, xs, rows, in, 0, rows, first, last);
    else PIECES(t, rows, TILE_ROWS, first, last) round_rows(l, x, xs, rows, in, first, last);
}

#define FACTOR_BYTES(kind) ((kind) == FLOAT16 ? 2 : (kind) == INT8 ? 1 : 4)

INLINE vec load_halves(const uint16_t *half) {
#if LANES == 16
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)half));
#elif LANES == 8 && defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)half));
#elif defined(__F16C__)
    return (vec)_mm_cvtph_ps(_mm_loadl_epi64((const __m128i *)half));
#elif defined(__ARM_FEATURE_DOTPROD)
    return (vec)vcvt_f32_f16(vld1_f16((const __fp16 *)half));
#else
    ints bits = __builtin_convertvector(*(const half_factors *)half, ints);
    /* The biases of the exponents differ by 112. Multiplying by 2^112 corrects that, also for subnormal numbers. */
    vec size = (vec)((bits & 0x7fff) << 13) * 5.192296858534828e33f;
    ints strange = (bits & 0x7c00) == 0x7c00; /* infinite or NaN */
    return choose(strange, splat(NAN), (vec)((ints)size | (bits & 0x8000) << 16));
#endif
}

/* Load scales or offsets of LANES outputs. */
INLINE vec load_factors(const void *factors, i64 at, i64 kind) {
    return kind == FLOAT32 ? *(const vec *)((const float *)factors + at) : load_halves((const uint16_t *)factors + at);
}

static float one_factor(const void *factors, i64 at, i64 kind, const uint16_t *unit, i64 unit_at) {
    if (kind == FLOAT32) return ((const float *)factors)[at];
    if (kind == FLOAT16) return half_to_float(((const uint16_t *)factors)[at]);
    return (float)((const int8_t *)factors)[at] * half_to_float(unit[unit_at]);
}

/* Repeat 4 bytes in each lane. */
INLINE ints spread(const int8_t *four) {
    int32_t word;
    memcpy(&word, four, 4);
    return word - (ints){};
}

/* Twice the numbers of E2M1, plus MOST_FLOAT4, by their bits. */
static const uint8_t float4_codes[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

/* Return the codes of 4 bits each. */
INLINE codes of_4_bits(codes bits, const int KIND) {
    if (KIND == INT4) return bits;
#if LANES == 16 && defined(__AVX512BW__)
    const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)float4_codes));
    return (codes)_mm512_shuffle_epi8(table, (__m512i)bits);
#elif LANES == 8 && defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)float4_codes));
    return (codes)_mm256_shuffle_epi8(table, (__m256i)bits);
#elif LANES == 4 && defined(__SSSE3__)
    return (codes)_mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)float4_codes), (__m128i)bits);
#elif defined(__aarch64__)
    return (codes)vqtbl1q_u8(vld1q_u8(float4_codes), (uint8x16_t)bits);
#else
    for (int i = 0; i < 4 * LANES; i++) bits[i] = float4_codes[bits[i]];
    return bits;
#endif
}

/* Return 4 of 16 codes of 6 bits each: those from number 4 * `four` on. */
INLINE codes of_6_bits(const uint8_t *w, const int four) {
    const codes low = *(const codes *)(w + four / 2 * 4 * LANES), high = *(const codes *)(w + 8 * LANES);
    const codes top = (codes)(four < 2 ? (shorts)high << (4 - 2 * four) : (shorts)high >> (2 * four - 4)) & 48;
    return top | ((four % 2 ? (codes)((shorts)low >> 4) : low) & 15);
}

/* Prefetch `size` bytes. */
INLINE void fetch(const uint8_t *at, const int size) {
#pragma GCC unroll 4
    for (int i = 0; i < size; i += 64) __builtin_prefetch(at + i, 0, 2);
}

#ifdef PAIRS
#define ONES ((shorts){} + 1)

/* `group_sums` for at most 32 inputs, or 16 of FLOAT4. */
INLINE void add_pairs(const uint8_t *w, i64 ahead, const int8_t *x, int size, ints *sums, const int KIND, const int R) {
    const int BITS = BITS_OF(KIND);
    shorts pairs[8]; /* with 4 bits: 16 bits hold twice 8 products of at most 15 * 127, or twice 4 of 24 * 127 */
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) pairs[r] = (shorts){};
#pragma GCC unroll 8
    for (int i = 0; i < size; i += 32 / BITS, w += 4 * LANES) {
        codes own = *(const codes *)w;
        __builtin_prefetch(w + ahead, 0, 2);
        if (BITS == 4) {
            codes low = of_4_bits(own & 15, KIND), high = of_4_bits((codes)((shorts)own >> 4) & 15, KIND);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                pairs[r] += PAIRS(low, spread(x + i * R + r * 4));
                IN_REGISTER(pairs[r]);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                pairs[r] += PAIRS(high, spread(x + (i + 4) * R + r * 4));
                IN_REGISTER(pairs[r]);
            }
            continue;
        }
        register_ largest = WIDE(abs_epi8)((register_)own);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            ints here = spread(x + i * R + r * 4);
#if LANES == 16
            __mmask64 negative = _mm512_movepi8_mask((register_)own);
            here = (ints)_mm512_mask_sub_epi8((register_)here, negative, (register_)(ints){}, (register_)here);
#else
            here = (ints)WIDE(sign_epi8)((register_)here, (register_)own);
#endif
            sums[r] = DOT2(sums[r], PAIRS(largest, here), ONES);
            IN_REGISTER(sums[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R && BITS == 4; r++) sums[r] = DOT2(sums[r], pairs[r], ONES);
}

/* `add_scaled` for 32 or 16 inputs. 16 bits hold 4 products of codes of 6 bits, or 16 with 4 bits. */
INLINE void add_scaled_pairs(const uint8_t *w, const int8_t *x, const int size, ints twice, ints *sums, const int KIND,
                             const int R) {
#pragma GCC unroll 2
    for (int four = 0; KIND == INT6 && four < 4; four += 2) {
        const codes first = of_6_bits(w, four), second = of_6_bits(w, four + 1);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const int8_t *own = x + 4 * (four * R + r);
            sums[r] = DOT2(sums[r], PAIRS(first, spread(own)) + PAIRS(second, spread(own + 4 * R)), twice);
        }
    }
    if (KIND == INT6) return;
    shorts pairs[8];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) pairs[r] = (shorts){};
#pragma GCC unroll 4
    for (int i = 0; i < size; i += 8) {
        const codes own = *(const codes *)(w + i / 2 * LANES), low = own & 15, high = (codes)((shorts)own >> 4) & 15;
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            pairs[r] += PAIRS(low, spread(x + i * R + r * 4)) + PAIRS(high, spread(x + (i + 4) * R + r * 4));
            if (R > 2) IN_REGISTER(pairs[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[r] = DOT2(sums[r], pairs[r], twice);
}

/* Add the products of a group's codes with the codes of R rows, and with `has_base` what they start with, times the group's
   scales, to `sums`. */
INLINE void add_scaled(const uint8_t *w, i64 ahead, const int8_t *x, const int32_t *starts, int has_base, i64 size,
                       ints scale, ints *sums, const int KIND, const int R) {
    const ints twice = (scale & 0xffff) | scale << 16;
    const int most = KIND == INT6 || R < 3 ? 16 : 32, bytes = BITS_OF(KIND) * LANES / 8;
    const int8_t *end = x + size * R;
    for (; x + most * R <= end; x += most * R, w += most * bytes) {
        fetch(w + ahead, most * bytes);
        add_scaled_pairs(w, x, most, twice, sums, KIND, R);
    }
    if (most == 32 && x < end) add_scaled_pairs(w, x, 16, twice, sums, KIND, R);
    if (!has_base) return;
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[r] += (starts[r] - (ints){}) * scale;
}
#endif

#if LANES == 4 && defined(__ARM_FEATURE_MATMUL_INT8)
/* `group_sums` for two rows. One instruction multiplies 8 inputs of both with two outputs. */
INLINE void pair_sums(const uint8_t *w, const int8_t *x, i64 size, ints *sums, const int KIND, const int R) {
    const int BITS = BITS_OF(KIND);
    int32x4_t first = vdupq_n_s32(0), second = first; /* sums of the first two outputs and of the others, row by row */
#pragma GCC unroll 2
    for (i64 i = 0; i < size; i += 8, w += KIND == INT6 ? i % 16 * 6 : 4 * BITS) {
        codes low = *(const codes *)w, high = *(const codes *)(w + (BITS == 4 ? 0 : 16));
        if (BITS == 6) low = of_6_bits(w, i % 16 / 4), high = of_6_bits(w, i % 16 / 4 + 1);
        if (BITS == 4) low = of_4_bits(low & 15, KIND), high = of_4_bits(high >> 4, KIND);
        const int32x2x2_t rows = vzip_s32((int32x2_t)vld1_s8(x + i * R), (int32x2_t)vld1_s8(x + (i + 4) * R));
        const int8x16_t both = (int8x16_t)vcombine_s32(rows.val[0], rows.val[1]);
        first = vmmlaq_s32(first, both, (int8x16_t)vzip1q_s32((int32x4_t)low, (int32x4_t)high));
        second = vmmlaq_s32(second, both, (int8x16_t)vzip2q_s32((int32x4_t)low, (int32x4_t)high));
    }
    sums[0] += (ints)vcombine_s32(vget_low_s32(first), vget_low_s32(second));
    sums[1] += (ints)vcombine_s32(vget_high_s32(first), vget_high_s32(second));
}
#endif

/* Add the products of a group's codes with the codes of R rows to `sums`. The highest bit of codes is changed where `shift`
   is 128. Weights `ahead` bytes further are prefetched. */
INLINE void group_sums(const uint8_t *w, i64 ahead, const int8_t *x, i64 size, ints *sums, const int KIND, const int shift,
                       const int R) {
    const int BITS = BITS_OF(KIND);
#ifdef PAIRS
    (void)shift;
    const int most = KIND == FLOAT4 ? 16 : 32;
    i64 i = 0;
    for (; i + most <= size; i += most) add_pairs(w + i * LANES * BITS / 8, ahead, x + i * R, most, sums, KIND, R);
    if (i < size) add_pairs(w + i * LANES * BITS / 8, ahead, x + i * R, (int)(size - i), sums, KIND, R);
#else
#if LANES == 4 && defined(__ARM_FEATURE_MATMUL_INT8)
#pragma GCC unroll 4
    for (int r = 0; r + 2 <= R; r += 2) pair_sums(w, x + r * 4, size, sums + r, KIND, R);
    const int begun = R / 2 * 2; /* rows that are done */
    if (begun == R) return;
#else
    const int begun = 0;
#endif
    for (i64 i = 0; BITS == 6 && i < size; i += 16, w += 12 * LANES) {
        fetch(w + ahead, 12 * LANES);
#pragma GCC unroll 4
        for (int four = 0; four < 4; four++) {
            const codes own = of_6_bits(w, four);
#pragma GCC unroll 8
            for (int r = begun; r < R; r++) sums[r] = DOT4(sums[r], own, spread(x + (i + 4 * four) * R + r * 4));
        }
    }
    for (i64 i = 0; BITS != 6 && i < size; i += 32 / BITS, w += 4 * LANES) {
        codes own = *(const codes *)w;
        __builtin_prefetch(w + ahead, 0, 2);
        codes low = own ^ (uint8_t)shift, high = low;
        if (BITS == 4) low = of_4_bits(own & 15, KIND), high = of_4_bits((codes)((shorts)own >> 4) & 15, KIND);
#pragma GCC unroll 8
        for (int r = begun; r < R; r++) sums[r] = DOT4(sums[r], low, spread(x + i * R + r * 4));
#pragma GCC unroll 8
        for (int r = begun; r < R && BITS == 4; r++) sums[r] = DOT4(sums[r], high, spread(x + (i + 4) * R + r * 4));
    }
#endif
}

#ifndef PAIRS
INLINE void add_scaled(const uint8_t *w, i64 ahead, const int8_t *x, const int32_t *starts, int has_base, i64 size,
                       ints scale, ints *sums, const int KIND, const int R) {
    (void)has_base; /* loading zeros takes no longer than setting them */
    ints own[TILE_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) own[r] = starts[r] - (ints){};
    group_sums(w, ahead, x, size, own, KIND, 0, R);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) sums[r] += own[r] * scale;
}
#endif

/* `integer_tile` with nested scales. Sums of groups are multiplied with the scales' integers before they are added. */
INLINE void nested_tile(const Linear *l, Rounded in, i64 block, i64 ahead, vec *totals, const int KIND, const int R) {
    const i64 group = l->group, span = l->span, groups = l->inputs / group, bytes = group * LANES * BITS_OF(KIND) / 8;
    const i64 numbers_ahead = ahead / bytes * LANES;
    const uint8_t *w = (const uint8_t *)l->weight + block * groups * bytes;
    const int8_t *scale = (const int8_t *)l->scale + block * groups * LANES;
    const int8_t *offset = l->offset ? (const int8_t *)l->offset + block * groups * LANES : 0;
    const int16_t *pairs = (const int16_t *)in.products;
    const int has_base = KIND == INT6 || !offset;
    for (i64 g = 0, unit = block * (groups / span) * LANES; g < groups; g += span, unit += LANES) {
        ints sums[TILE_ROWS], shifts[TILE_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r] = shifts[r] = (ints){};
        for (i64 i = 0; i < span * LANES; i += 64) {
            __builtin_prefetch(scale + g * LANES + i + numbers_ahead, 0, 2);
            if (offset) __builtin_prefetch(offset + g * LANES + i + numbers_ahead, 0, 2);
        }
        for (i64 k = g; k < g + span; k++)
            add_scaled(w + k * bytes, ahead, in.codes + k * group * R, in.starts + k * R, has_base, group,
                       load_codes(scale + k * LANES), sums, KIND, R);
        for (i64 k = g; offset && k < g + span; k += 2) {
            const int8_t *two = offset + k * LANES;
            const ints pair = (load_codes(two) & 0xffff) | load_codes(two + LANES) << 16;
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) shifts[r] = DOT2(shifts[r], pair, spread((const int8_t *)(pairs + k * R + 2 * r)));
        }
        const vec scale_unit = load_halves(l->scale_unit + unit);
        const vec offset_unit = offset ? load_halves(l->offset_unit + unit) : (vec){};
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            vec sum = __builtin_convertvector(sums[r], vec) * scale_unit;
            if (offset) sum = FMA(__builtin_convertvector(shifts[r], vec), offset_unit, sum);
            totals[r] = FMA(sum, splat(in.factors[g / span * R + r]), totals[r]);
        }
    }
}

/* `integer_tile` with scales that are not nested. */
INLINE void flat_tile(const Linear *l, Rounded in, i64 block, i64 ahead, vec *totals, const int KIND, const int R) {
    const i64 group = l->group, groups = l->inputs / group, bytes = group * LANES * BITS_OF(KIND) / 8;
    const uint8_t *w = (const uint8_t *)l->weight + block * groups * bytes;
    const int has_base = BASE(l) != 0; /* else all starts are 0, and loading them takes longer than setting them */
    for (i64 g = 0; g < groups; g++) {
        const i64 at = (block * groups + g) * LANES;
        ints sums[TILE_ROWS];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) sums[r] = (ints){};
        if (has_base)
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sums[r] = in.starts[g * R + r] - (ints){};
        group_sums(w + g * bytes, ahead, in.codes + g * group * R, group, sums, KIND, SHIFTED, R);
        const vec scale = load_factors(l->scale, at, l->scale_kind);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
            totals[r] = FMA(__builtin_convertvector(sums[r], vec), scale * splat(in.factors[g * R + r]), totals[r]);
        if (KIND == FLOAT4 || !l->offset) continue;
        const vec offset = load_factors(l->offset, at, l->offset_kind);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) totals[r] = FMA(offset, splat(in.products[g * R + r]), totals[r]);
    }
}

/* `tile` for one block of outputs and a tile of `in`. Several blocks at once are slower, since one stream of memory is
   prefetched best. */
INLINE void integer_tile(const Linear *l, Rounded in, i64 block, i64 ahead, float *y, i64 ys, int add, const int KIND,
                         const int R) {
    vec totals[TILE_ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) totals[r] = (vec){};
    if (KIND == INT6 || (KIND == INT4 && l->span)) nested_tile(l, in, block, ahead, totals, KIND, R);
    else flat_tile(l, in, block, ahead, totals, KIND, R);
    for (int r = 0; r < R; r++) put_sums(l, totals[r], block * LANES, y + r * ys, add);
}

#if INTEGERS
#define INTEGER_TILE(KIND, R)                                                                             \
    case R:                                                                                               \
        for (i64 k = 0; k < count; k++) /* each tile prefetches other blocks */                           \
            integer_tile(l, in, block + k, tile == k * tiles / count ? ahead : 0, y, ys, add, KIND, R);   \
        break;
#if TILE_ROWS == 8
#define INTEGER_CASES(K)                                                                                  \
    INTEGER_TILE(K, 1) INTEGER_TILE(K, 2) INTEGER_TILE(K, 3) INTEGER_TILE(K, 4)                           \
    INTEGER_TILE(K, 5) INTEGER_TILE(K, 6) INTEGER_TILE(K, 7) INTEGER_TILE(K, 8)
#elif TILE_ROWS == 6
#define INTEGER_CASES(K)                                                                                  \
    INTEGER_TILE(K, 1) INTEGER_TILE(K, 2) INTEGER_TILE(K, 3)                                              \
    INTEGER_TILE(K, 4) INTEGER_TILE(K, 5) INTEGER_TILE(K, 6)
#else
#define INTEGER_CASES(K) INTEGER_TILE(K, 1) INTEGER_TILE(K, 2) INTEGER_TILE(K, 3) INTEGER_TILE(K, 4)
#endif

/* A function that multiplies a tile of R rows with `count` blocks. Each kind of weights has its own: in one function for all
   kinds, gcc made the loops of each 7 % slower. */
#define INTEGER_TILES(name, KIND)                                                                         \
    static __attribute__((noinline)) void name(const Linear *l, Rounded in, i64 tile, i64 tiles,          \
                                               i64 block, i64 count, i64 ahead, float *y, i64 ys,         \
                                               int add, int R) {                                          \
        switch (R) { INTEGER_CASES(KIND) }                                                                \
    }
INTEGER_TILES(int4_tiles, INT4)
INTEGER_TILES(int6_tiles, INT6)
INTEGER_TILES(int8_tiles, INT8)
INTEGER_TILES(float4_tiles, FLOAT4)

static void integer_tiles(const Linear *l, Rounded in, i64 tile, i64 tiles, i64 block, i64 count, i64 ahead, float *y,
                          i64 ys, int add, int R) {
    switch (l->kind) {
    case INT4: int4_tiles(l, in, tile, tiles, block, count, ahead, y, ys, add, R); break;
    case INT6: int6_tiles(l, in, tile, tiles, block, count, ahead, y, ys, add, R); break;
    case INT8: int8_tiles(l, in, tile, tiles, block, count, ahead, y, ys, add, R); break;
    case FLOAT4: float4_tiles(l, in, tile, tiles, block, count, ahead, y, ys, add, R);
    }
}

/* `project` for quantized weights and the blocks of outputs from `first` to `last`. All tiles are multiplied with some blocks
   that fit into the cache, while the next ones are prefetched. */
static void integer_project(const Linear *l, Rounded in, i64 rows, i64 first, i64 last, float *y, i64 ys, int add) {
    const i64 tiles = TILES(rows), factors = l->inputs / SHARING(l), bytes = l->inputs * LANES * BITS_OF(l->kind) / 8;
    const i64 most = tiles == 1 ? last - first : bytes < CACHED ? CACHED / bytes : 1;
    for (i64 begin = first, count; begin < last; begin += count) {
        count = most < last - begin ? most : last - begin;
        for (i64 tile = 0; tile < tiles; tile++) {
            const i64 row = TILE_BEGIN(rows, tile), R = TILE_BEGIN(rows, tile + 1) - row, at = row * factors;
            const i64 groups = at * (l->span ? l->span : 1);
            const Rounded own = {in.codes + row * l->inputs, in.factors + at,
                                 in.products + (l->span ? groups / 2 : groups), in.starts + groups};
            const i64 ahead = tiles == 1 ? bytes : count * bytes;
            integer_tiles(l, own, tile, tiles, begin, count, ahead, y + row * ys, ys, add, (int)R);
        }
    }
}
#else
static void integer_project(const Linear *l, Rounded in, i64 rows, i64 first, i64 last, float *y, i64 ys, int add) {
    (void)l, (void)in, (void)rows, (void)first, (void)last, (void)y, (void)ys, (void)add;
}
#endif

/* Write the weights of one output, times `factor`, to `to`. */
static void integer_row(const Linear *l, i64 output, float factor, float *to) {
    const i64 lane = output % LANES, groups = l->inputs / l->group, block = output / LANES;
    const int is4 = HAS_4_BITS(l), base = l->kind == INT8 ? 0 : BASE(l);
    const uint8_t *w = (const uint8_t *)l->weight + block * l->inputs * LANES * BITS_OF(l->kind) / 8;
    for (i64 i = 0; i < l->inputs; i++) {
        const i64 g = i / l->group, at = (block * groups + g) * LANES + lane, k = i % 8;
        const i64 unit_at = l->span ? (block * (groups / l->span) + g / l->span) * LANES + lane : 0;
        int code = is4 ? w[(i / 8 * LANES + lane) * 4 + k % 4] >> (k < 4 ? 0 : 4) & 15
                       : (int8_t)w[(i / 4 * LANES + lane) * 4 + i % 4];
        if (l->kind == FLOAT4) code = float4_codes[code];
        if (l->kind == INT6) {
            const uint8_t *own = w + (i / 16 * 3 * LANES + lane) * 4 + i % 4;
            const i64 four = i % 16 / 4;
            code = (own[four / 2 * 4 * LANES] >> four % 2 * 4 & 15) | (own[8 * LANES] >> 2 * four & 3) << 4;
        }
        float weight = (float)(code - base) * one_factor(l->scale, at, l->scale_kind, l->scale_unit, unit_at);
        if (l->offset) weight += one_factor(l->offset, at, l->offset_kind, l->offset_unit, unit_at);
        to[i] = factor * weight;
    }
}
