/* Packing of matrices of GGUF files for integer products, without a copy in between. The layouts of blocks are those of
   ggml-common.h, and the numbers of types those of GGUF. */

enum { Q4_0 = 2, Q4_1 = 3, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, MXFP4 = 39 };

/* Arguments of `pack_rows`, as of `pack_blocks`. */
typedef struct {
    i64 type;
    const uint8_t *raw;
    i64 row_bytes;
    const i64 *order;
    i64 outputs, inputs;
    uint32_t *codes;
    void *scale, *scale_unit, *offset, *offset_unit;
    i64 wide;
} Packing;

#define NIBBLES 0x0f0f0f0fu

static uint32_t word_at(const uint8_t *p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return word;
}

static uint16_t half_at(const uint8_t *p) {
    uint16_t half;
    memcpy(&half, p, 2);
    return half;
}

/* Return the codes of 8 inputs from the low or high halves of 8 bytes. */
static uint32_t codes_of_8(const uint8_t *p, int high) {
    const uint32_t first = word_at(p), last = word_at(p + 4);
    return high ? (first >> 4 & NIBBLES) | (last & ~NIBBLES) : (first & NIBBLES) | (last & NIBBLES) << 4;
}

/* Write 8 scales and 8 offsets of 6 bits, each `times` times. */
static void factors_of_k(const uint8_t *b, uint8_t *scale, uint8_t *offset, i64 times) {
    for (i64 i = 0; i < 8 * times; i++) {
        const i64 group = i / times, at = group % 4;
        scale[i * LANES] = group < 4 ? b[4 + at] & 63 : (b[12 + at] & 15) | (b[4 + at] >> 2 & 48);
        offset[i * LANES] = group < 4 ? b[8 + at] & 63 : b[12 + at] >> 4 | (b[8 + at] >> 2 & 48);
    }
}

/* Return inputs and bytes of a block of a type, or 0. */
static i64 block_inputs(i64 type) {
    if (type == Q4_K || type == Q5_K || type == Q6_K) return 256;
    return type == Q4_0 || type == Q4_1 || type == Q8_0 || type == MXFP4 ? 32 : 0;
}
static i64 block_bytes(i64 type) {
    if (type == MXFP4) return 17;
    return type == Q4_0 ? 18 : type == Q4_1 ? 20 : type == Q8_0 ? 34 : type == Q4_K ? 144 : type == Q5_K ? 176 : 210;
}

/* Write 256 codes of 6 bits, of which each word holds 4. */
static void put_6_bits(const uint32_t *words, uint32_t *codes) {
    for (i64 i = 0; i < 64; i += 4, words += 4, codes += 3 * LANES) {
        uint32_t high = 0;
        for (i64 k = 0; k < 4; k++) high |= (words[k] >> 4 & 0x03030303u) << 2 * k;
        codes[0] = (words[0] & NIBBLES) | (words[1] & NIBBLES) << 4;
        codes[LANES] = (words[2] & NIBBLES) | (words[3] & NIBBLES) << 4;
        codes[2 * LANES] = high;
    }
}

/* Pack one block. `codes` and the factors are those of its output in its first group. With `wide`, Q4_K, Q5_K and Q6_K
   become codes of 6 bits with offsets, in so many groups per block. */
static void pack_block(i64 type, i64 wide, const uint8_t *b, uint32_t *codes, uint8_t *scale, uint16_t *unit,
                       uint8_t *offset, uint16_t *offset_unit) {
    uint16_t *halves = (uint16_t *)scale, *half_offsets = (uint16_t *)offset;
    uint32_t words[64];
    switch (type) {
    case Q4_0:
    case Q4_1:
        halves[0] = half_at(b);
        if (type == Q4_1) half_offsets[0] = half_at(b + 2);
        b += type == Q4_1 ? 4 : 2;
        for (i64 w = 0; w < 4; w++) codes[w * LANES] = codes_of_8(b + w % 2 * 8, w >= 2);
        return;
    case MXFP4: /* 2^(exponent - 128), which must be a float16 */
        halves[0] = (uint16_t)(b[0] < 114 ? 1 << (b[0] - 104) : (b[0] - 113) << 10);
        for (i64 w = 0; w < 4; w++) codes[w * LANES] = codes_of_8(b + 1 + w % 2 * 8, w >= 2);
        return;
    case Q8_0:
        halves[0] = half_at(b);
        for (i64 w = 0; w < 8; w++) codes[w * LANES] = word_at(b + 2 + 4 * w);
        return;
    case Q4_K:
    case Q5_K:
        unit[0] = half_at(b), offset_unit[0] = half_at(b + 2) ^ 0x8000;
        factors_of_k(b, scale, offset, wide == 16 ? 2 : 1);
        b += 16;
        for (i64 w = 0; type == Q4_K && !wide && w < 32; w++)
            codes[w * LANES] = codes_of_8(b + w / 8 * 32 + w % 4 * 8, w % 8 >= 4);
        for (i64 w = 0; (type == Q5_K || wide) && w < 64; w++) {
            const i64 group = w / 8, at = w % 8 * 4;
            const uint32_t high = type == Q5_K ? word_at(b + at) >> group & 0x01010101u : 0;
            const uint32_t low = word_at(b + (type == Q5_K ? 32 : 0) + group / 2 * 32 + at) >> group % 2 * 4 & NIBBLES;
            words[w] = (low | high << 4) + 0x20202020u;
        }
        if (type == Q5_K || wide) put_6_bits(words, codes);
        return;
    default: /* Q6_K */
        unit[0] = half_at(b + 208);
        if (wide) offset_unit[0] = 0;
        for (i64 i = 0; i < 16; i++) {
            scale[i * LANES] = b[192 + i];
            if (wide) offset[i * LANES] = 0;
        }
        for (i64 w = 0; w < 64; w++) {
            const i64 half = w / 32, part = w % 32 / 8, at = w % 8 * 4;
            const uint32_t low = word_at(b + half * 64 + part % 2 * 32 + at) >> part / 2 * 4 & NIBBLES;
            const uint32_t high = word_at(b + 128 + half * 32 + at) >> 2 * part & 0x03030303u;
            words[w] = low | high << 4;
        }
        put_6_bits(words, codes);
    }
}

#define PART(type, p, i) ((p) ? (type *)(p) + (i) : 0)

static void pack_rows(Thread *t, const void *argument) {
    const Packing *p = argument;
    const i64 type = p->type, wide = p->wide, size = block_inputs(type), blocks = p->inputs / size;
    const i64 words = size == 32 ? type == Q8_0 ? 8 : 4 : type == Q4_K && !wide ? 32 : 48; /* of codes in a block */
    const i64 groups = size == 32 ? 2 : type == Q6_K ? 16 : wide ? wide : 8, step = size == 32 ? 2 : 1; /* bytes of scales */
    PIECES(t, p->outputs / LANES, 1, first, last)
        for (i64 at = first; at < last; at++)
            for (i64 block = 0; block < blocks; block++)
                for (i64 lane = 0; lane < LANES; lane++) {
                    const i64 output = at * LANES + lane, row = p->order ? p->order[output] : output;
                    const i64 place = at * blocks + block, factors = place * groups * LANES + lane * step;
                    const uint8_t *raw = p->raw + row * p->row_bytes + block * block_bytes(type);
                    pack_block(type, wide, raw, p->codes + place * words * LANES + lane, PART(uint8_t, p->scale, factors),
                               PART(uint16_t, p->scale_unit, place * LANES + lane), PART(uint8_t, p->offset, factors),
                               PART(uint16_t, p->offset_unit, place * LANES + lane));
                }
}

/* Pack a matrix whose outputs fill blocks of LANES. raw: its first row of blocks; rows are `row_bytes` apart. order: row of
   each output, or null. codes, scale, scale_unit, offset, offset_unit: where to write, as in Linear. wide: 0, or for
   a product with several of Q4_K, Q5_K and Q6_K the groups of a block that they have in common: 16 with Q6_K, else 8. */
i64 pack_blocks(i64 type, const uint8_t *raw, i64 row_bytes, const i64 *order, i64 outputs, i64 inputs, uint32_t *codes,
                void *scale, void *scale_unit, void *offset, void *offset_unit, i64 wide, Pool *pool) {
    const i64 size = block_inputs(type);
    REFUSE(!raw || !codes || !scale, POINTER);
    REFUSE(!size || (wide && (size != 256 || (wide != 8 && wide != 16) || (wide == 8 && type == Q6_K))), KIND);
    REFUSE(outputs < 0 || outputs > MOST || outputs % LANES || inputs < 0 || inputs % size, SIZES);
    REFUSE(row_bytes < inputs / size * block_bytes(type), SIZES);
    const i64 has_offset = wide || type == Q4_1 || type == Q4_K || type == Q5_K;
    REFUSE((has_offset && !offset) || (size == 256 && (!scale_unit || (has_offset && !offset_unit))), POINTER);
    const Packing packing = {type,  raw,        row_bytes, order,       outputs, inputs, codes,
                             scale, scale_unit, offset,    offset_unit, wide};
    pool_run(pool, pack_rows, &packing);
    return 0;
}
