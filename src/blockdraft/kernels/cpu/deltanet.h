/* Gated delta nets (arXiv 2412.06464) and Mamba-2 (arXiv 2405.21060), in the place of attention in some layers; see
   nn/recurrent_mixer.py.

   Each value head of a layer has a state, a matrix that decays and is corrected with each token. Mamba-2 adds a value times
   a step size where a delta net adds a share of what the state lacks of the value. Columns of a state are
   independent, so a block of LANES columns stays in the first cache while a thread runs all nodes of a row. A node's state
   is the same however many nodes a call has, since each is computed from the state after its parent.

   A call changes no state beyond the committed tokens. It writes what a correction needs to a trail, and the next call
   applies the corrections of the nodes that have been committed since. Or it writes the state after a chain elsewhere. */
#define MOST_KEY 256 /* numbers of the longest key, for memory on the stack */
#define SUMS 4 /* partial sums over a column of a state, so that additions do not wait for each other */

static i64 delta_keys(const Model *m) { return m->key_heads * m->key_dim; }
static i64 delta_values(const Model *m) { return m->value_heads * m->value_dim; }
static i64 delta_channels(const Model *m) { return 2 * delta_keys(m) + delta_values(m); }

/* Return the outputs of a layer's first projection. */
static i64 delta_outputs(const Model *m) {
    return delta_channels(m) + delta_values(m) + (m->mamba ? m->value_heads : 0);
}

/* Return where the projection has the gate of the output and the channels, and these have queries, keys and values. */
static i64 gate_place(const Model *m) { return m->mamba ? 0 : delta_channels(m); }
static i64 channel_place(const Model *m) { return m->mamba ? delta_values(m) : 0; }
static i64 query_place(const Model *m) { return m->mamba ? delta_values(m) + delta_keys(m) : 0; }
static i64 key_place(const Model *m) { return m->mamba ? delta_values(m) : delta_keys(m); }
static i64 value_place(const Model *m) { return m->mamba ? 0 : 2 * delta_keys(m); }

/* Parts of a layer's trail for a node: inputs of the convolution, keys, corrections, and decays of the value heads. */
typedef struct {
    float *channels, *keys, *corrections, *decays;
} Trail;

static i64 trail_size(const Model *m) {
    return delta_channels(m) + delta_keys(m) + delta_values(m) + m->value_heads;
}

static Trail trail_at(const Model *m, float *trail, i64 node, i64 index) {
    Trail t = {trail + (node * m->recurrent_layers + index) * trail_size(m), 0, 0, 0};
    t.keys = t.channels + delta_channels(m);
    t.corrections = t.keys + delta_keys(m);
    t.decays = t.corrections + delta_values(m);
    return t;
}

static i64 check_delta_net(const Model *m) {
    const i64 K = m->key_heads, V = m->value_heads, tokens = m->delta_kernel;
    REFUSE(K < 1 || V < K || V > MOST || V % K || tokens < 1 || tokens > MOST_KEY, SIZES);
    REFUSE(m->key_dim < LANES || m->key_dim % LANES || m->key_dim > MOST_KEY || m->key_dim % SUMS, SIZES);
    REFUSE(m->value_dim < LANES || m->value_dim % LANES || m->value_dim > MOST / 4 / V, SIZES);
    REFUSE(m->recurrent_layers < 1 || m->recurrent_layers > m->num_layers, SIZES);
    return 0;
}

static i64 check_delta_layer(const Model *m, const Layer *layer) {
    REFUSE(layer->filter || layer->attention_conv.taps || layer->head_dim || m->pairs, SIZES);
    REFUSE(!layer->fading || !layer->fading_bias || !layer->delta_norm, POINTER);
    REFUSE(m->mamba && (!layer->delta_bias || !layer->skip || m->tiled), POINTER);
    i64 wrong = check_delta_net(m);
    if (!wrong) wrong = check_linear(&layer->qkv, m->hidden, delta_outputs(m));
    if (!wrong && !m->mamba) wrong = check_linear(&layer->delta_gates, m->hidden, 2 * m->value_heads);
    return wrong ? wrong : check_linear(&layer->output, delta_values(m), m->hidden);
}

/* Check the states of all rows. Parents are checked before. */
static i64 check_recurrent(const Model *m, const Call *call) {
    i64 layers = 0;
    for (i64 index = 0; index < m->num_layers; index++) layers += m->layers[index].delta_filter != 0;
    REFUSE(layers != m->recurrent_layers, SIZES);
    if (!layers) return 0;
    REFUSE(call->done, COUNTS);
    REFUSE(!call->recurrent, POINTER);
    for (i64 row = 0; row < call->batch; row++) {
        const Recurrent *r = call->recurrent + row;
        REFUSE(!r->state || !r->window || (!r->trail && !r->state_after), POINTER);
        REFUSE(r->pending < 0 || r->pending > MOST, COUNTS);
        REFUSE(r->pending && (!r->past || !r->path || r->past == r->trail), POINTER);
        for (i64 i = 0; i < r->pending; i++) REFUSE(r->path[i] < 0 || r->path[i] > MOST, PARENTS);
        REFUSE(!r->state_after != !r->window_after, POINTER);
        if (!r->state_after) continue;
        REFUSE(r->count < 1 || r->count > call->nodes, COUNTS);
        for (i64 node = 0; node < call->nodes; node++)
            REFUSE(call->parents[row * call->nodes + node] != node - 1, PARENTS);
    }
    return 0;
}

/* Move the windows of all layers behind the committed nodes of the earlier call. */
static void move_windows(Thread *t, const Model *m, const Call *call) {
    const i64 before = m->delta_kernel - 1, size = delta_channels(m), layers = m->recurrent_layers;
    PIECES(t, call->batch * layers, 1, first, last)
        for (i64 work = first; work < last; work++) {
            const Recurrent *r = call->recurrent + work / layers;
            float *window = r->window + work % layers * before * size;
            for (i64 place = 0; r->pending && place < before; place++) {
                const i64 at = place + r->pending; /* among the window's tokens, then those of the path */
                const float *from = window + at * size;
                if (at >= before) from = trail_at(m, r->past, r->path[at - before], work % layers).channels;
                memcpy(window + place * size, from, 4 * size);
            }
        }
}

/* Replace the projections of one node by the shares of its corrections and the decays of its states. Those of Mamba-2 are
   its `steps`. */
static void delta_shares(const Model *m, const Layer *layer, const float *steps, float *gates, float *decays) {
    for (i64 head = 0; head < m->value_heads; head++) {
        const float before = m->mamba ? steps[head] : gates[m->value_heads + head];
        const float share = m->mamba ? 0 : gates[head], x = before + layer->fading_bias[head];
        const float softplus = x > 20 ? x : log1pf(exp_vec(splat(x))[0]);
        const float decay = exp_vec(splat(layer->fading[head] * softplus))[0];
        gates[head] = m->mamba ? x == x ? softplus : NAN : share == share ? sigmoid(splat(share))[0] : NAN;
        gates[m->value_heads + head] = x == x ? decay : NAN;
        if (decays) decays[head] = gates[m->value_heads + head];
    }
}

/* Convolve one head's channels of a node from channel `from` on, along its path. Rows of `projected`, which begins at the
   first channel, are `width` numbers apart. Queries and keys are normed to length `scale`, unless it is 0. */
static void delta_convolve(const Model *m, const Layer *layer, const Call *call, i64 index, i64 row, i64 node, i64 from,
                           i64 size, float scale, const float *projected, i64 width, float *y) {
    const i64 C = delta_channels(m), before = m->delta_kernel - 1, *parents = call->parents + row * call->nodes;
    const float *x = projected + (row * call->nodes + node) * width + from;
    const float *window = call->recurrent[row].window + index * before * C + from, *weight = layer->delta_filter + from;
    for (i64 i = 0; i < size; i += LANES) {
        const vec own = *(const vec *)(weight + before * C + i), in = *(const vec *)(x + i);
        if (m->mamba) *(vec *)(y + i) = FMA(own, in, *(const vec *)(layer->delta_bias + from + i));
        else *(vec *)(y + i) = own * in;
    }
    i64 at = node; /* a node, or -1 for the last committed token, -2 for the one before, ... */
    for (i64 tap = 1; tap <= before; tap++) {
        at = at >= 0 ? parents[at] : at - 1;
        const float *in = at >= 0 ? x + (at - node) * width : window + (before + at) * C;
        const float *own = weight + (before - tap) * C;
        for (i64 i = 0; i < size; i += LANES)
            *(vec *)(y + i) = FMA(*(const vec *)(own + i), *(const vec *)(in + i), *(vec *)(y + i));
    }
    for (i64 i = 0; i < size; i += LANES) *(vec *)(y + i) *= sigmoid(*(vec *)(y + i));
    if (!scale) return;
    const float factor = scale / sqrtf(mean_square(y, size) * size + 1e-6f);
    for (i64 i = 0; i < size; i += LANES) *(vec *)(y + i) *= factor;
}

/* Write a node's part of the window after a chain, and with the first node that of earlier tokens. */
static void keep_window(const Model *m, const Recurrent *r, i64 index, i64 node, i64 from, i64 size, const float *x) {
    const i64 C = delta_channels(m), before = m->delta_kernel - 1, place = node - (r->count - before);
    const float *window = r->window + index * before * C + from;
    float *to = r->window_after + index * before * C + from;
    if (place >= 0 && place < before) memcpy(to + place * C, x, 4 * size);
    for (i64 i = 0; !node && i < before - r->count; i++) memcpy(to + i * C, window + (i + r->count) * C, 4 * size);
}

/* Write queries, keys and values of all nodes to `convolved`, [rows, channels]. `gates` becomes what `delta_shares` says.
   A piece is one head of a node, or its gates. */
static void delta_inputs(Thread *t, const Model *m, const Layer *layer, const Call *call, i64 index, const float *projected,
                         float *gates, float *convolved) {
    const i64 C = delta_channels(m), width = delta_outputs(m), N = call->nodes, K = m->key_dim;
    const i64 queries = m->key_heads, keys = 2 * queries, parts = keys + m->value_heads + 1;
    const float *channels = projected + channel_place(m);
    PIECES(t, call->batch * N * parts, 4, first, last)
        for (i64 work = first; work < last; work++) {
            const i64 part = work % parts, row = work / parts / N, node = work / parts % N, at = row * N + node;
            const Recurrent *r = call->recurrent + row;
            const Trail trail = r->trail ? trail_at(m, r->trail, node, index) : (Trail){0, 0, 0, 0};
            if (part == parts - 1) {
                const float *steps = channels + at * width + C;
                delta_shares(m, layer, steps, gates + at * 2 * m->value_heads, trail.decays);
                continue;
            }
            const i64 size = part < keys ? K : m->value_dim;
            const i64 from = part < queries ? query_place(m) + part * K
                : part < keys ? key_place(m) + (part - queries) * K : value_place(m) + (part - keys) * size;
            const float scale = part >= keys || m->mamba ? 0 : part >= queries ? 1 : 1 / sqrtf((float)K);
            const float *x = channels + at * width + from;
            float *y = convolved + at * C + from;
            delta_convolve(m, layer, call, index, row, node, from, size, scale, channels, width, y);
            if (r->window_after) keep_window(m, r, index, node, from, size, x);
            if (!r->trail) continue;
            memcpy(trail.channels + from, x, 4 * size);
            if (part >= queries && part < keys) memcpy(trail.keys + (part - queries) * K, y, 4 * K);
        }
}

/* Return the output of LANES columns of a state for a key. */
INLINE vec ask(const float *state, const float *key, i64 size) {
    vec sums[SUMS] = {};
    for (i64 i = 0; i < size; i += SUMS)
#pragma GCC unroll 4
        for (int k = 0; k < SUMS; k++)
            sums[k] = FMA(splat(key[i + k]), *(const vec *)(state + (i + k) * LANES), sums[k]);
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

#define WRITES 1 /* what `correct` does */
#define OUTPUTS 2
#define ASKS 4

/* Let LANES columns of the state `from` decay, and correct them. `does` says whether to write the result to `to`, whether to
   set `output` to its output for `query`, and whether to set `asked` to that for the key `next`, as `ask` returns it. */
INLINE void correct(const int does, const float *from, float *to, i64 size, float decay, const float *key, vec correction,
                    const float *query, vec *output, const float *next, vec *asked) {
    vec sums[SUMS] = {}, others[SUMS] = {};
    for (i64 i = 0; i < size; i += SUMS)
#pragma GCC unroll 4
        for (int k = 0; k < SUMS; k++) {
            const vec state = FMA(splat(key[i + k]), correction, *(const vec *)(from + (i + k) * LANES) * decay);
            if (does & WRITES) *(vec *)(to + (i + k) * LANES) = state;
            if (does & OUTPUTS) sums[k] = FMA(splat(query[i + k]), state, sums[k]);
            if (does & ASKS) others[k] = FMA(splat(next[i + k]), state, others[k]);
        }
    if (does & OUTPUTS) *output = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    if (does & ASKS) *asked = (others[0] + others[1]) + (others[2] + others[3]);
}

/* Arguments of `run_columns`: one value head of a row. Rows of keys and queries are `stride` numbers apart, those of values
   too. `corrections` of the call's trail, `trail` numbers apart, are null without one. */
typedef struct {
    const Model *m;
    const Call *call;
    const Recurrent *r;
    const i64 *parents, *depths;
    const float *queries, *keys, *values, *shares, *decays;
    i64 index, head, key_head, stride;
    float skip;
} DeltaHead;

/* Write the columns of the state after a node to `own`, from those before all nodes. */
static void replay(const DeltaHead *h, const float *state, i64 node, i64 column, float *own) {
    const Model *m = h->m;
    for (i64 depth = 0; depth <= h->depths[node]; depth++) {
        i64 at = node;
        while (h->depths[at] > depth) at = h->parents[at];
        const float *corrections = trail_at(m, h->r->trail, at, h->index).corrections + h->head * m->value_dim + column;
        correct(WRITES, depth ? own : state, own, m->key_dim, h->decays[at * 2 * m->value_heads],
                h->keys + at * h->stride, *(const vec *)corrections, 0, 0, 0, 0);
    }
}

/* Run the nodes of a row on LANES columns of a head's state. `out` rows are `outs` numbers apart. `corrects`: whether
   corrections depend on the state. */
INLINE void run_columns(const int corrects, const DeltaHead *h, i64 column, float *out, i64 outs) {
    const int asking = corrects ? ASKS : 0;
    const Model *m = h->m;
    const Recurrent *r = h->r;
    const i64 N = h->call->nodes, K = m->key_dim, place = h->head * m->value_dim + column, last = r->pending - 1;
    const i64 begin = h->index * delta_values(m) * K + place * K;
    float own[MOST_KEY * LANES], *state = r->state + begin;
    const float *source = state; /* the state after node `at` */
    i64 at = -1, asks = -1; /* `asked` is the output of `source` for the key of node `asks` */
    vec asked = {}, output;
    for (i64 i = 0; i <= last; i++) {
        const Trail past = trail_at(m, r->past, r->path[i], h->index);
        const float *key = past.keys + h->key_head * K;
        const vec correction = *(const vec *)(past.corrections + place);
        const float decay = past.decays[h->head];
        if (i < last || !corrects) correct(WRITES, state, state, K, decay, key, correction, 0, 0, 0, 0);
        else correct(WRITES | ASKS, state, state, K, decay, key, correction, 0, 0, h->keys, &asked), asks = 0;
    }
    for (i64 node = 0; node < N; node++) {
        const float *query = h->queries + node * h->stride, *key = h->keys + node * h->stride;
        const float decay = h->decays[node * 2 * m->value_heads], share = h->shares[node * 2 * m->value_heads];
        if (h->parents[node] != at) {
            at = h->parents[node], source = state;
            if (at >= 0) replay(h, state, at, column, own), source = own;
        }
        if (corrects && asks != node) asked = ask(source, key, K);
        const vec value = *(const vec *)(h->values + node * h->stride + column);
        vec correction = value;
        if (corrects) correction -= asked * decay;
        correction *= share;
        if (r->trail) *(vec *)(trail_at(m, r->trail, node, h->index).corrections + place) = correction;
        if (node + 1 < N && h->parents[node + 1] == node) {
            const float *next = key + h->stride;
            correct(WRITES | OUTPUTS | asking, source, own, K, decay, key, correction, query, &output, next, &asked);
            source = own, at = node, asks = node + 1;
            if (r->state_after && node + 1 == r->count) memcpy(r->state_after + begin, own, 4 * K * LANES);
        } else if (r->state_after && node + 1 == r->count)
            correct(WRITES | OUTPUTS, source, r->state_after + begin, K, decay, key, correction, query, &output, 0, 0);
        else correct(OUTPUTS, source, 0, K, decay, key, correction, query, &output, 0, 0);
        if (!corrects) output = FMA(splat(h->skip), value, output);
        *(vec *)(out + node * outs + column) = output;
    }
}

/* Compute layer number `index` of those with a recurrent net. `projected` is [rows, delta_outputs], and `gates` [rows, 2 *
   value heads]. The output is `out`, [rows, values]. Outputs of a delta net are normed by head, then gated; those of Mamba-2
   are gated, then normed by group of heads that share a key. */
static void delta_net(Thread *t, const Model *m, const Layer *layer, const Call *call, i64 index, const i64 *depths,
                      const float *projected, float *gates, float *convolved, float *out) {
    const i64 C = delta_channels(m), values = delta_values(m), N = call->nodes, heads = m->value_heads, D = m->value_dim;
    delta_inputs(t, m, layer, call, index, projected, gates, convolved);
    PIECES(t, call->batch * heads, 1, first, last)
        for (i64 work = first; work < last; work++) {
            const i64 row = work / heads, head = work % heads;
            const i64 key_head = m->tiled ? head % m->key_heads : head / (heads / m->key_heads);
            const float *own = convolved + row * N * C, *own_gates = gates + row * N * 2 * heads;
            const DeltaHead h = {m, call, call->recurrent + row, call->parents + row * N, depths + row * N,
                                 own + query_place(m) + key_head * m->key_dim, own + key_place(m) + key_head * m->key_dim,
                                 own + value_place(m) + head * D, own_gates + head, own_gates + heads + head,
                                 index, head, key_head, C, m->mamba ? layer->skip[head] : 0};
            float *to = out + row * N * values + head * D;
            for (i64 column = 0; column < D; column += LANES) {
                if (m->mamba) run_columns(0, &h, column, to, values);
                else run_columns(1, &h, column, to, values);
            }
            for (i64 node = 0; node < N; node++) {
                float *y = to + node * values;
                const float *gate = projected + (row * N + node) * delta_outputs(m) + gate_place(m) + head * D;
                if (!m->mamba) rms_norm(y, layer->delta_norm, m->delta_eps, D, y, 0);
                for (i64 i = 0; i < D; i += LANES)
                    *(vec *)(y + i) *= *(const vec *)(gate + i) * sigmoid(*(const vec *)(gate + i));
            }
        }
    if (!m->mamba) return;
    const i64 groups = m->key_heads, size = values / groups;
    PIECES(t, call->batch * N * groups, 4, first, last)
        for (i64 work = first; work < last; work++) {
            float *y = out + work * size;
            rms_norm(y, layer->delta_norm + work % groups * size, m->delta_eps, size, y, 0);
        }
}
