/* Forward of a decoder, or of a draft network, for few rows on a CPU, in one call: no time between its operations,
   weights read once.

   Each number of a row is computed by the same operations in the same order, however many rows there are and wherever
   its ancestors lie: a token gets the same bits alone, in a block and in a tree. Weights are float32, bfloat16 or int8
   with a scale for each output channel; arithmetic is float32. cpu/compiled.py fills the structs, and
   cpu/compiled_draft.py. */
#include "kernels.h"

#define QUERIES 8 /* of one work item of attention */

typedef struct {
    Linear qkv, o, gate_up, down;
    const float *input_norm, *mlp_norm, *after_attention, *after_mlp, *q_norm, *k_norm, *cos, *sin;
    i64 window, whole_block; /* whole_block: nodes see all nodes of their row, not their ancestors only */
} Layer;

typedef struct {
    const Layer *layers;
    Linear embedding, head;
    const float *norm;
    i64 num_layers, hidden, heads, kv_heads, head_dim, inner, gelu, max_positions;
    float eps, embedding_scale, attention_scale, attention_cap, logit_cap;
} Model;

typedef struct { /* embedded: rows in the place of tokens, or null; reach: how many committed tokens are seen, the last;
                    best: the likeliest token of each row of logits, see `best_of`; store: [layers, keys and then values of all heads, slot, head_dim], by strides; starts: the first slot of each row */
    const i64 *tokens, *parents, *lengths, *taps, *logits_at;
    const float *embedded;
    i64 batch, nodes, num_taps, num_logits, reach, threads;
    void *store;
    i64 layer_stride, head_stride;
    const i64 *starts;
    float *features, *logits, *workspace;
    i64 *best;
} Call;

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

/* Up to QUERIES queries of one key/value head. Invisible slots get weight 0, which changes no sum. */
static void attend(const Model *m, const Layer *layer, const Call *call, i64 row, i64 head, i64 from,
                   i64 to, const uint8_t *within, const i64 *depths, const void *keys, const void *values,
                   const float *qkv, float *mixed, float *scores) {
    const i64 D = m->head_dim, N = call->nodes, G = m->heads / m->kv_heads, length = call->lengths[row];
    const i64 width = (m->heads + 2 * m->kv_heads) * D, slots = length + (layer->whole_block ? N : (to - 1) / G + 1);
    const i64 stride = (length + N + LANES - 1) / LANES * LANES, count = to - from, item = BYTES(STORE);
    /* No query sees a slot before this one, since none lies before the committed tokens' end. */
    i64 begin = length - call->reach;
    if (layer->window && length - layer->window > begin) begin = length - layer->window;
    begin = begin > 0 ? begin / LANES * LANES : 0;
    const float *q[QUERIES];
    float *out[QUERIES];
    for (i64 j = 0; j < count; j++) {
        i64 node = row * N + (from + j) / G, h = head * G + (from + j) % G;
        q[j] = qkv + node * width + h * D;
        out[j] = mixed + (node * m->heads + h) * D;
    }
    for (i64 t = begin; t < slots; t += LANES)
        for (i64 j = 0; j < count; j++)
            dots(q[j], (const char *)keys + t * D * item, D, slots - 1 - t, scores + j * stride + t);
    for (i64 j = 0; j < count; j++) {
        i64 node = (from + j) / G, first = layer->window ? length + depths[node] - layer->window + 1 : 0;
        if (first < length - call->reach) first = length - call->reach;
        float *s = scores + j * stride;
        for (i64 t = begin; t < first && t < length; t++) s[t] = -INFINITY;
        for (i64 t = length; t < slots; t++) {
            i64 distance = llabs(depths[t - length] - depths[node]);
            int visible = layer->whole_block || within[node * N + t - length];
            if (!visible || (layer->window && distance >= layer->window)) s[t] = -INFINITY;
        }
        for (i64 t = slots; t < stride; t++) s[t] = -INFINITY;
        softmax_weights(s + begin, stride - begin, m->attention_scale, m->attention_cap);
    }
    const void *v = (const char *)values + begin * D * item;
    for (i64 j = 0; j < count; j += 4)
        mix_rows(scores + j * stride + begin, stride, v, slots - begin, D, out + j, count - j < 4 ? count - j : 4);
}

static void attention(const Model *m, const Layer *layer, const Call *call, i64 index, const uint8_t *within,
                      const i64 *depths, const float *qkv, float *mixed, float *scores) {
    const i64 N = call->nodes, queries = N * m->heads / m->kv_heads, items = (queries + QUERIES - 1) / QUERIES;
    SHARE(call->batch * m->kv_heads * items, first, last);
    for (i64 work = first; work < last; work++) {
        i64 from = work % items * QUERIES, head = work / items % m->kv_heads, row = work / items / m->kv_heads;
        i64 to = from + QUERIES < queries ? from + QUERIES : queries, size = BYTES(STORE);
        const char *keys = (char *)call->store
            + size * (index * call->layer_stride + head * call->head_stride + call->starts[row] * m->head_dim);
        const char *values = keys + size * m->kv_heads * call->head_stride;
        const uint8_t *sees = within + row * N * N;
        attend(m, layer, call, row, head, from, to, sees, depths + row * N, keys, values, qkv, mixed, scores);
    }
}

/* Norm and rotate keys, and queries where there are heads of them; keys and values go to the store, behind each row's
   committed tokens. Without depths the nodes are a line. */
static void place(const Model *m, const Layer *layer, const Call *call, i64 index, const i64 *depths, float *qkv,
                  i64 heads) {
    const i64 all = heads + 2 * m->kv_heads, D = m->head_dim;
    SHARE(call->batch * call->nodes * all, first, last);
    for (i64 work = first; work < last; work++) {
        i64 node = work / all, head = work % all, row = node / call->nodes;
        i64 position = call->lengths[row] + (depths ? depths[node] : node % call->nodes);
        /* Nodes that a shorter row of the batch will never commit may lie past the last position. */
        if (position >= m->max_positions) position = m->max_positions - 1;
        float *x = qkv + work * D;
        if (head < heads + m->kv_heads)
            rotate(m, layer, head < heads ? layer->q_norm : layer->k_norm, x, position);
        if (head < heads) continue;
        i64 at = index * call->layer_stride + (head - heads) * call->head_stride
            + (call->starts[row] + call->lengths[row] + node % call->nodes) * D;
        for (i64 i = 0; i < D; i++) store_one(call->store, at + i, STORE, x[i]);
    }
}

INLINE vec activated(vec x, i64 gelu) {
    vec turn = x;
    if (gelu) turn = 1.5957691216f * (x + 0.044715f * x * x * x); /* the tanh form */
    return x * sigmoid(turn);
}

static void activate(const Model *m, float *gate_up, i64 rows) {
    const i64 parts = (m->inner + LANES - 1) / LANES;
    SHARE(rows * parts, first, last);
    for (i64 work = first; work < last; work++) {
        i64 at = work % parts * LANES, count = m->inner - at;
        float *gate = gate_up + work / parts * 2 * m->inner + at, *up = gate + m->inner;
        if (count >= LANES) *(vec *)gate = activated(*(vec *)gate, m->gelu) * *(vec *)up;
        else {
            vec x = {};
            for (i64 i = 0; i < count; i++) x[i] = gate[i];
            x = activated(x, m->gelu);
            for (i64 i = 0; i < count; i++) gate[i] = x[i] * up[i];
        }
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
        for (i64 i = first * H; call->embedded && i < last * H; i++) x[i] = m->embedding_scale * call->embedded[i];
        for (i64 row = first; !call->embedded && row < last; row++) {
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
            place(m, layer, call, index, depths, qkv, m->heads);
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
        if (call->num_logits)
            project(&m->head, call->logits_at ? x : h, H, call->num_logits, call->logits, m->head.out, 0);
#pragma omp barrier
        if (m->logit_cap) {
            SHARE(call->num_logits * m->head.out, from, to);
            for (i64 i = from; i < to; i++) call->logits[i] = cap(call->logits[i], m->logit_cap);
#pragma omp barrier
        }
        SHARE(call->best ? call->num_logits : 0, from, to);
        for (i64 row = from; row < to; row++) call->best[row] = best_of(call->logits + row * m->head.out, m->head.out);
    }
}

/* Numbers of `float` that `draft_context` needs for its work. */
i64 draft_context_workspace(const Model *m, i64 rows) {
    return rows * (m->hidden + m->num_layers * 2 * m->kv_heads * m->head_dim);
}

/* Write the keys and values of committed tokens, for all layers of a draft network, from its target's features, which
   are the embedded rows here: through a projection, a norm, and the keys' and values' part of each layer's qkv. */
void draft_context(const Model *m, const Call *call, const Linear *features, const float *norm) {
    const i64 rows = call->batch * call->nodes, H = m->hidden, width = 2 * m->kv_heads * m->head_dim;
    const i64 queries = m->heads * m->head_dim; /* whole blocks, since head_dim is a multiple of LANES */
    float *h = call->workspace, *keys_values = h + rows * H;
#pragma omp parallel num_threads(call->threads)
    {
        project(features, call->embedded, features->in, rows, h, H, 0);
#pragma omp barrier
        norm_rows(h, norm, m->eps, H, rows, h, 0);
#pragma omp barrier
        for (i64 index = 0; index < m->num_layers; index++) {
            Linear part = m->layers[index].qkv;
                        part.weight = (const char *)part.weight + queries * H * BYTES(WEIGHT);
            if (part.scale) part.scale += queries;
            if (part.bias) part.bias += queries;
            part.out = width;
            project(&part, h, H, rows, keys_values + index * rows * width, width, 0);
        }
#pragma omp barrier
        for (i64 index = 0; index < m->num_layers; index++)
            place(m, m->layers + index, call, index, 0, keys_values + index * rows * width, 0);
    }
}

i64 lanes(void) { return LANES; }
i64 weight_kind(void) { return WEIGHT; }

/* y = x W^T + bias for rows `xs` numbers apart. */
void packed_linear(const Linear *l, const float *x, i64 xs, i64 rows, float *y, i64 threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
    project(l, x, xs, rows, y, l->out, 0);
}
