/* Forward of a decoder for few rows on a CPU, in one call: no time between its operations, weights read once.

   Each number of a row is computed by the same operations in the same order, however many rows there are and wherever
   its ancestors lie: a token gets the same bits alone, in a block and in a tree. Weights are float32, bfloat16 or int8
   with a scale for each output channel; arithmetic is float32. nn/compiled.py fills the structs. */
#include <math.h>
#include <stdint.h>
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
#define QUERIES 8 /* of one work item of attention */

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

typedef struct {
    Linear qkv, o, gate_up, down;
    const float *input_norm, *mlp_norm, *after_attention, *after_mlp, *q_norm, *k_norm, *cos, *sin;
    i64 window;
} Layer;

typedef struct {
    const Layer *layers;
    Linear embedding, head;
    const float *norm;
    i64 num_layers, hidden, heads, kv_heads, head_dim, inner, gelu, max_positions;
    float eps, embedding_scale, attention_scale, attention_cap, logit_cap;
} Model;

typedef struct { /* store: [layers, batch, keys and then values of all heads, slot, head_dim], by strides */
    const i64 *tokens, *parents, *lengths, *taps, *logits_at;
    i64 batch, nodes, num_taps, num_logits, threads;
    void *store;
    i64 layer_stride, row_stride, head_stride;
    float *features, *logits, *workspace;
} Call;

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

static void norm_rows(const float *x, const float *weight, float eps, i64 size, i64 rows, float *y, int add) {
    SHARE(rows, first, last);
    for (i64 row = first; row < last; row++) rms_norm(x + row * size, weight, eps, size, y + row * size, add);
}

/* Norm and rotation of one head, in place; its halves turn together. */
static void rotate(const Model *m, const Layer *layer, const float *norm, float *x, i64 position) {
    if (norm) rms_norm(x, norm, m->eps, m->head_dim, x, 0);
    i64 half = m->head_dim / 2;
    const float *cos = layer->cos + position * half, *sin = layer->sin + position * half;
    for (i64 i = 0; i < half; i++) {
        float left = x[i], right = x[i + half];
        x[i] = left * cos[i] - right * sin[i];
        x[i + half] = right * cos[i] + left * sin[i];
    }
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

/* Up to QUERIES queries of one key/value head. Invisible slots get weight 0, which changes no sum. */
static void attend(const Model *m, const Layer *layer, const Call *call, i64 row, i64 head, i64 from,
                   i64 to, const uint8_t *within, const i64 *depths, const void *keys, const void *values,
                   const float *qkv, float *mixed, float *scores) {
    const i64 D = m->head_dim, N = call->nodes, G = m->heads / m->kv_heads, length = call->lengths[row];
    const i64 width = (m->heads + 2 * m->kv_heads) * D, last = (to - 1) / G, slots = length + last + 1;
    const i64 stride = (length + N + LANES - 1) / LANES * LANES, count = to - from, item = STORE == FLOAT32 ? 4 : 2;
    const float *q[QUERIES];
    float *out[QUERIES];
    for (i64 j = 0; j < count; j++) {
        i64 node = row * N + (from + j) / G, h = head * G + (from + j) % G;
        q[j] = qkv + node * width + h * D;
        out[j] = mixed + (node * m->heads + h) * D;
    }
    i64 t = 0;
    for (; t + 4 <= slots; t += 4) {
        i64 j = 0;
        const void *k = (const char *)keys + t * D * item;
        for (; j + 2 <= count; j += 2) dots(q + j, k, D, scores + j * stride + t, stride, 2, 4);
        for (; j < count; j++) dots(q + j, k, D, scores + j * stride + t, stride, 1, 4);
    }
    for (; t < slots; t++)
        for (i64 j = 0; j < count; j++)
            dots(q + j, (const char *)keys + t * D * item, D, scores + j * stride + t, stride, 1, 1);
    for (i64 j = 0; j < count; j++) {
        i64 node = (from + j) / G, position = length + depths[node], first = 0;
        const uint8_t *sees = within + node * N;
        float *s = scores + j * stride, most = -INFINITY;
        if (layer->window && position - layer->window + 1 > 0) first = position - layer->window + 1;
        for (t = 0; t < slots; t++) {
            int visible = t < length ? t >= first : sees[t - length] && length + depths[t - length] >= first;
            s[t] = visible ? cap(s[t] * m->attention_scale, m->attention_cap) : -INFINITY;
            if (s[t] > most) most = s[t];
        }
        for (; t < stride; t++) s[t] = -INFINITY;
        for (t = 0; t < slots; t += LANES) *(vec *)(s + t) = exp_vec(*(vec *)(s + t) - most);
    }
    i64 j = 0;
    const int C = D % (4 * LANES) ? 1 : 4;
    for (; j + 2 <= count; j += 2)
        if (C == 4) mix(scores + j * stride, stride, values, slots, D, out + j, 2, 4);
        else mix(scores + j * stride, stride, values, slots, D, out + j, 2, 1);
    for (; j < count; j++)
        if (C == 4) mix(scores + j * stride, stride, values, slots, D, out + j, 1, 4);
        else mix(scores + j * stride, stride, values, slots, D, out + j, 1, 1);
}

static void attention(const Model *m, const Layer *layer, const Call *call, i64 index, const uint8_t *within,
                      const i64 *depths, const float *qkv, float *mixed, float *scores) {
    const i64 N = call->nodes, queries = N * m->heads / m->kv_heads, items = (queries + QUERIES - 1) / QUERIES;
    SHARE(call->batch * m->kv_heads * items, first, last);
    for (i64 work = first; work < last; work++) {
        i64 from = work % items * QUERIES, head = work / items % m->kv_heads, row = work / items / m->kv_heads;
        i64 to = from + QUERIES < queries ? from + QUERIES : queries, size = STORE == FLOAT32 ? 4 : 2;
        const char *keys = (char *)call->store
            + size * (index * call->layer_stride + row * call->row_stride + head * call->head_stride);
        const char *values = keys + size * m->kv_heads * call->head_stride;
        const uint8_t *sees = within + row * N * N;
        attend(m, layer, call, row, head, from, to, sees, depths + row * N, keys, values, qkv, mixed, scores);
    }
}

/* Norm and rotate queries and keys; keys and values go to the store, behind each row's committed tokens. */
static void place(const Model *m, const Layer *layer, const Call *call, i64 index, const i64 *depths, float *qkv) {
    const i64 all = m->heads + 2 * m->kv_heads, D = m->head_dim;
    SHARE(call->batch * call->nodes * all, first, last);
    for (i64 work = first; work < last; work++) {
        i64 node = work / all, head = work % all, row = node / call->nodes;
        i64 position = call->lengths[row] + depths[node];
        /* Nodes that a shorter row of the batch will never commit may lie past the last position. */
        if (position >= m->max_positions) position = m->max_positions - 1;
        float *x = qkv + work * D;
        if (head < m->heads + m->kv_heads)
            rotate(m, layer, head < m->heads ? layer->q_norm : layer->k_norm, x, position);
        if (head < m->heads) continue;
        i64 at = index * call->layer_stride + row * call->row_stride + (head - m->heads) * call->head_stride
            + (call->lengths[row] + node % call->nodes) * D;
        for (i64 i = 0; i < D; i++) store_one(call->store, at + i, STORE, x[i]);
    }
}

static void activate(const Model *m, float *gate_up, i64 rows) {
    const i64 parts = (m->inner + LANES - 1) / LANES;
    SHARE(rows * parts, first, last);
    for (i64 work = first; work < last; work++) {
        i64 at = work % parts * LANES, count = m->inner - at < LANES ? m->inner - at : LANES;
        float *gate = gate_up + work / parts * 2 * m->inner + at, *up = gate + m->inner;
        vec x = {};
        memcpy(&x, gate, 4 * count);
        vec turn = x;
        if (m->gelu) turn = 1.5957691216f * (x + 0.044715f * x * x * x); /* the tanh form */
        vec y = x * sigmoid(turn);
        for (i64 i = 0; i < count; i++) gate[i] = y[i] * up[i];
    }
}

static void tap(const Model *m, const Call *call, i64 layer, const float *x) {
    const i64 H = m->hidden;
    SHARE(call->batch * call->nodes, first, last);
    for (i64 k = 0; k < call->num_taps; k++)
        if (call->taps[k] == layer)
            for (i64 row = first; row < last; row++)
                memcpy(call->features + (row * call->num_taps + k) * H, x + row * H, 4 * H);
}

/* Numbers of `float` that `decoder_forward` needs for its work. */
i64 decoder_workspace(const Model *m, i64 batch, i64 nodes, i64 slots, i64 threads) {
    i64 rows = batch * nodes, inner = 2 * m->inner > m->heads * m->head_dim ? 2 * m->inner : m->heads * m->head_dim;
    i64 row = 2 * m->hidden + (m->heads + 2 * m->kv_heads) * m->head_dim + inner;
    return rows * row + threads * QUERIES * (slots + LANES) + rows * nodes / 4 + 2 * rows + 64;
}

void decoder_forward(const Model *m, const Call *call) {
    const i64 N = call->nodes, rows = call->batch * N, H = m->hidden, D = m->head_dim, mix_width = m->heads * D;
    const i64 width = (m->heads + 2 * m->kv_heads) * D, inner = 2 * m->inner > mix_width ? 2 * m->inner : mix_width;
    i64 longest = 0;
    for (i64 row = 0; row < call->batch; row++)
        if (call->lengths[row] > longest) longest = call->lengths[row];
    i64 *depths = (i64 *)call->workspace;
    float *x = (float *)(depths + rows), *h = x + rows * H, *qkv = h + rows * H, *wide = qkv + rows * width;
    float *all_scores = wide + rows * inner;
    i64 scores_size = QUERIES * ((longest + N + LANES - 1) / LANES * LANES);
    uint8_t *within = (uint8_t *)(all_scores + call->threads * scores_size);
    for (i64 node = 0; node < rows; node++) { /* a node sees what its parent sees, and itself */
        i64 i = node % N, parent = call->parents[node], start = node - i;
        depths[node] = parent < 0 ? 0 : depths[start + parent] + 1;
        if (parent < 0) memset(within + node * N, 0, N);
        else memcpy(within + node * N, within + (start + parent) * N, N);
        within[node * N + i] = 1;
    }
#pragma omp parallel num_threads(call->threads)
    {
        float *scores = all_scores + omp_get_thread_num() * scores_size;
        SHARE(rows, first, last);
        for (i64 row = first; row < last; row++) {
            i64 token = call->tokens[row], at = token / LANES * H * LANES + token % LANES;
            float scale = m->embedding_scale * (m->embedding.scale ? m->embedding.scale[token] : 1);
            for (i64 i = 0; i < H; i++)
                x[row * H + i] = scale * load_one(m->embedding.weight, at + i * LANES, WEIGHT);
        }
        for (i64 index = 0; index < m->num_layers; index++) {
            const Layer *layer = m->layers + index;
            /* The rows of x that this thread wrote last are those it reads now, unless a projection wrote them. */
            norm_rows(x, layer->input_norm, m->eps, H, rows, h, 0);
#pragma omp barrier
            project(&layer->qkv, h, H, rows, qkv, width, 0);
#pragma omp barrier
            place(m, layer, call, index, depths, qkv);
#pragma omp barrier
            attention(m, layer, call, index, within, depths, qkv, wide, scores);
#pragma omp barrier
            project(&layer->o, wide, mix_width, rows, layer->after_attention ? h : x, H, !layer->after_attention);
#pragma omp barrier
            if (layer->after_attention) norm_rows(h, layer->after_attention, m->eps, H, rows, x, 1);
            norm_rows(x, layer->mlp_norm, m->eps, H, rows, h, 0);
#pragma omp barrier
            project(&layer->gate_up, h, H, rows, wide, 2 * m->inner, 0);
#pragma omp barrier
            activate(m, wide, rows);
#pragma omp barrier
            project(&layer->down, wide, 2 * m->inner, rows, layer->after_mlp ? h : x, H, !layer->after_mlp);
#pragma omp barrier
            if (layer->after_mlp) norm_rows(h, layer->after_mlp, m->eps, H, rows, x, 1);
            tap(m, call, index, x);
        }
        norm_rows(x, m->norm, m->eps, H, rows, h, 0);
        tap(m, call, m->num_layers, h);
#pragma omp barrier
        for (i64 k = 0; call->logits_at && k < call->num_logits; k++) /* rows whose logits are wanted, moved together */
            if (omp_get_thread_num() == 0) memcpy(x + k * H, h + call->logits_at[k] * H, 4 * H);
#pragma omp barrier
        project(&m->head, call->logits_at ? x : h, H, call->num_logits, call->logits, m->head.out, 0);
#pragma omp barrier
        if (m->logit_cap) {
            SHARE(call->num_logits * m->head.out, from, to);
            for (i64 i = from; i < to; i++) call->logits[i] = cap(call->logits[i], m->logit_cap);
        }
    }
}

i64 lanes(void) { return LANES; }

/* y = x W^T + bias for rows `xs` numbers apart. */
void packed_linear(const Linear *l, const float *x, i64 xs, i64 rows, float *y, i64 threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    project(l, x, xs, rows, y, l->out, 0);
}
