/* Forward pass of a decoder or draft network on a CPU, for few nodes, in one call.

   Each node's numbers come from the same operations in the same order, however many nodes there are and wherever its
   ancestors lie. So a token gets the same bits alone, in a block and in a tree. Weights are float32 or bfloat16, their
   inputs are float32 or rounded to bfloat16, and sums are float32. Or weights are integers of 8 or 4 bits (integers.h).
   `rows` counts the nodes of all sequences of the batch, which are the rows of the matrices here. Threads share the work
   in stages (pool.h). compiled_decoder.py and compiled_runner.py fill the structs of calls.h. Exported functions check
   their arguments, and return minus the number of a problem. */
#include "attention.h"

static void norm_rows(const float *x, const float *weight, float eps, i64 size, i64 first, i64 last, float *y, int add) {
    for (i64 row = first; row < last; row++) rms_norm(x + row * size, weight, eps, size, y + row * size, add);
}

/* Norm rows of x to h, and round them for a product. Where threads share them, each computes the factors of all rows. */
static void norm_and_round(Thread *t, const Linear *l, const float *x, const float *weight, float eps, i64 rows, float *h,
                           Rounded in) {
    const i64 H = l->inputs;
    if (rows > 1 && by_groups(t, l, rows)) {
        const i64 size = SHARING(l), factors = H / size;
        PIECES(t, factors, factors, first, last) {
            for (i64 row = 0; row < rows; row++) {
                const float factor = norm_factor(x + row * H, eps, H);
                for (i64 i = row * H + first * size; i < row * H + last * size; i++)
                    h[i] = x[i] * factor * weight[i - row * H];
            }
            round_groups(l, h, H, rows, in, 0, rows, first, last);
        }
        return;
    }
    PIECES(t, rows, TILE_ROWS, first, last) {
        norm_rows(x, weight, eps, H, first, last, h, 0);
        round_rows(l, h, H, rows, in, first, last);
    }
}

/* Norm and rotate one head in place. */
static void rotate(const Model *m, const Layer *layer, const float *norm, float *x, i64 position) {
    if (norm) rms_norm(x, norm, m->eps, m->head_dim, x, 0);
    i64 half = (m->rotated ? m->rotated : m->head_dim) / 2;
    const float *cos = layer->cos + position * half, *sin = layer->sin + position * half;
    for (i64 i = 0; i < half; i++) {
        float left = x[i], right = x[i + half];
        x[i] = left * cos[i] - right * sin[i];
        x[i + half] = right * cos[i] + left * sin[i];
    }
}

/* Return the number of nodes of a row, including those of earlier calls. */
static i64 all_nodes(const Call *call) { return call->done + call->nodes; }

/* Write `mark` to the scores of slots that a node does not attend to. `node` also counts the nodes of earlier calls. */
static void hide(const Layer *layer, const Call *call, i64 row, i64 node, i64 begin, i64 slots, const i64 *depths,
                 float *scores, float mark) {
    const i64 length = call->lengths[row], *parents = call->parents + row * all_nodes(call);
    i64 first = layer->window ? length + depths[node] - layer->window + 1 : 0;
    if (first < length - call->reach) first = length - call->reach;
    if (first < call->hidden_slots) first = call->hidden_slots < length ? call->hidden_slots : length;
    for (i64 t = begin; t < first && t < length; t++) scores[t] = mark;
    const i64 nodes = slots - length;
    /* Tokens in hidden slots, to which others that are committed by the same call do not attend either. */
    const i64 hidden = call->num_logits || call->num_target_layer_ids ? 0 : call->hidden_slots - length;
    if (!layer->whole_block && depths[node] == node) { /* all earlier nodes are its ancestors, as in a chain */
        const i64 from = first - length > hidden ? first - length : hidden;
        for (i64 other = 0; other < from && other < node; other++) scores[length + other] = mark;
        for (i64 other = node + 1; other < nodes; other++) scores[length + other] = mark;
        return;
    }
    i64 seen = node; /* the next ancestor, while nodes are visited from the last to the first */
    for (i64 other = nodes - 1; other >= 0; other--) {
        int visible = layer->whole_block || other == seen;
        if (other == seen) seen = parents[other];
        if (layer->window && llabs(depths[other] - depths[node]) >= layer->window) visible = 0;
        if (other < hidden && other != node) visible = 0;
        if (!visible) scores[length + other] = mark;
    }
}

/* Offsets in a thread's own memory for attention, in floats. With 16 LANES all are multiples of 64 bytes. */
typedef struct {
    i64 queries, sums, keys, slots, weights, scores, path, end;
} Own;

static Own own_places(i64 D, i64 slots) {
    Own p = {0};
    p.sums = QUERIES * D;
    p.keys = p.sums + QUERIES * D;
    p.slots = p.keys + WEIGHED / 2 * D; /* also holds values of WEIGHED slots in 16 bits */
    p.weights = p.slots + WEIGHED / 2 * (D + 2); /* BLOCK slots, or WEIGHED of 16 bits a number or fewer */
    p.scores = p.weights + QUERIES * WEIGHED / 2;
    p.path = p.scores + QUERIES * STRIDE(slots);
    p.end = p.path + STRIDE(slots) + 15; /* to begin at a multiple of 64 bytes */
    return p;
}

/* Write the ancestors of a node and itself to `path`, by depth. Return how many there are. */
static i64 path_of(const i64 *parents, i64 node, i64 depth, int32_t *path) {
    for (i64 at = depth; at >= 0; at--, node = parents[node]) path[at] = (int32_t)node;
    return depth + 1;
}

/* Add to `sums` the values that `count` queries of a node attend to, from slot `begin` on, in the order of a chain. Sums of
   numbers in 16 or 8 bits depend on their order, and in a tree the ancestors lie elsewhere. */
static void mix_path(const Call *call, i64 row, i64 node, i64 depth, i64 begin, i64 D, const char *values, float *scores,
                     i64 stride, i64 count, const float *largest, float *codes, float *scales, longs *totals, float *sums,
                     char *gathered, float *turned, int32_t *path) {
    const i64 length = call->lengths[row], size = SLOT(D) * BYTES(STORE);
    const i64 seen = path_of(call->parents + row * all_nodes(call), node, depth, path), end = length + seen;
    float factors[WEIGHED] = {0};
    for (i64 j = 0; j < count; j++) {
        float *s = scores + j * stride;
        for (i64 i = 0; i < seen; i++) s[length + i] = s[length + path[i]]; /* path[i] >= i */
        for (i64 t = end; t < stride; t++) s[t] = -INFINITY;
    }
    for (i64 t = begin; t < end; t += WEIGHED) {
        const i64 T = end - t < WEIGHED ? end - t : WEIGHED;
        for (i64 i = 0; i < T; i++) {
            const i64 slot = t + i < length ? t + i : length + path[t + i - length];
            memcpy(gathered + i * size, values + slot * size, size);
        }
        if (STORE == INT8) read_factors(gathered, T, D, factors);
        read_values(gathered, T, D, 0, turned);
        for (i64 j = 0; j < count; j++)
            totals[j] += __builtin_convertvector(weigh(scores + j * stride + t, largest[j], factors, 0,
                                                       (uint16_t *)codes + j * WEIGHED, scales + j), longs);
        mix(scores + t, stride, codes, scales, count, gathered, turned, T, D, 0, sums);
    }
}

/* Compute attention of up to QUERIES queries of one key/value head. All scores come first, then weights and sums. A running
   maximum would make sums depend on where blocks begin. Invisible slots get weight 0, which changes no sum if their
   values are finite. `strange` marks nodes whose values may not be; then sums leave invisible slots out. With 8 bits only
   factors can be not finite, and weights leave those out. */
static void attend(const Model *m, const Layer *layer, const Call *call, i64 row, i64 head, i64 from,
                   i64 to, const uint8_t *strange, const i64 *depths, const char *keys, const char *values,
                   const float *qkv, float *mixed, float *memory) {
    const i64 D = m->head_dim, N = call->nodes, G = m->heads / m->kv_heads, length = call->lengths[row];
    const i64 width = (m->heads + 2 * m->kv_heads) * D, behind = length + call->done;
    const i64 slots = behind + (layer->whole_block ? N : (to - 1) / G + 1), size = SLOT(D) * BYTES(STORE);
    const i64 stride = STRIDE(slots), count = to - from;
    const Own at = own_places(D, slots);
    memory = (float *)(((uintptr_t)memory + 63) / 64 * 64);
    float *queries = memory + at.queries, *sums = memory + at.sums, *codes = memory + at.weights;
    float *scores = memory + at.scores;
    char *last = (char *)(memory + at.slots); /* copy of the last block, since memory behind it may not be read */
    float largest[QUERIES], of_queries[QUERIES], scales[QUERIES], factors[WEIGHED] = {0};
    longs totals[QUERIES] = {0};
    const int skip = STORE != INT8 && memchr(strange, 1, slots - behind) != 0;
    int branches = 0; /* whether other nodes than ancestors come before a node, and the order matters */
    for (i64 node = call->done + from / G; STORE != FLOAT32 && !layer->whole_block && node < slots - length; node++)
        branches |= depths[node] != node;
    const int tiled = TILED(count, D) && !branches;
    const i64 shared = branches && !skip ? length / WEIGHED * WEIGHED : slots; /* slots that are the same in a chain */
    /* First slot that any query may attend to. All queries are behind the committed tokens. */
    i64 begin = length - call->reach;
    if (layer->window && length - layer->window > begin) begin = length - layer->window;
    begin = begin > 0 ? begin / WEIGHED * WEIGHED : 0;
    for (i64 j = 0; j < count; j++) {
        const float *own = qkv + (row * N + (from + j) / G) * width + (head * G + (from + j) % G) * D;
        place_query(own, m->attention_scale, D, j, tiled, queries, of_queries + j);
    }
    memset(sums, 0, 4 * count * D);
    for (i64 t = begin; t < slots; t += BLOCK) {
        const char *block = keys + t * size;
        if (slots - t < BLOCK) block = memcpy(last, block, (slots - t) * size);
        score(queries, of_queries, count, block, D, tiled, memory + at.keys, scores + t, stride);
    }
    for (i64 j = 0; j < count; j++) {
        float *s = scores + j * stride;
        hide(layer, call, row, call->done + (from + j) / G, begin, slots, depths, s, -INFINITY);
        for (i64 t = slots; t < stride; t++) s[t] = -INFINITY;
        largest[j] = largest_score(s + begin, stride - begin, m->attention_cap);
        if (!layer->sinks) continue;
        const float sink = layer->sinks[head * G + (from + j) % G];
        largest[j] = sink > largest[j] ? sink : largest[j];
        totals[j][0] = (i64)(exp_vec(splat(sink - largest[j]))[0] * UNIT);
    }
    for (i64 t = begin; t < shared; t += WEIGHED) {
        const i64 T = shared - t < WEIGHED ? shared - t : WEIGHED;
        if (STORE == INT8) read_factors(values + t * size, T, D, factors);
        if (!skip) read_values(values + t * size, T, D, tiled, memory + at.keys);
        for (i64 j = 0; j < count; j++)
            totals[j] += __builtin_convertvector(weigh(scores + j * stride + t, largest[j], factors, tiled,
                                                       (uint16_t *)codes + j * WEIGHED, scales + j), longs);
        if (!skip) mix(scores + t, stride, codes, scales, count, values + t * size, memory + at.keys, T, D, tiled, sums);
    }
    for (i64 j = 0, same; shared < slots && j < count; j += same) {
        const i64 node = call->done + (from + j) / G;
        same = G - (from + j) % G < count - j ? G - (from + j) % G : count - j;
        mix_path(call, row, node, depths[node], shared > begin ? shared : begin, D, values, scores + j * stride, stride, same,
                 largest + j, codes, scales, totals + j, sums + j * D, last, memory + at.keys, (int32_t *)(memory + at.path));
    }
    for (i64 j = 0; j < count; j++) {
        float *s = scores + j * stride, *own = sums + j * D;
        float *out = mixed + ((row * N + (from + j) / G) * m->heads + head * G + (from + j) % G) * D;
        if (skip) {
            hide(layer, call, row, call->done + (from + j) / G, begin, slots, depths, s, -1);
            mix_seen(s + begin, values + begin * size, slots - begin, D, own);
        }
        i64 total = 0;
        for (int i = 0; i < LANES; i++) total += totals[j][i];
        for (i64 d = 0; d < D; d += 4)
            for (i64 i = 0, at = tiled && !skip ? interleaved(d) : d; i < 4; i++)
                out[d + i] = own[at + i] / ((float)total / UNIT);
    }
}

/* Compute attention of the queries from `first` to `last` of all rows and heads. `own` is the memory of the thread. */
static void attend_all(const Model *m, const Layer *layer, const Call *call, i64 index, i64 first, i64 last,
                       const uint8_t *strange, const i64 *depths, const float *qkv, float *mixed, float *own) {
    const i64 N = call->nodes, queries = N * m->heads / m->kv_heads, size = BYTES(STORE);
#if AMX && STORE == BFLOAT16
    if (has_tiles) set_tiles(16);
#endif
    for (i64 work = first, count; work < last; work += count) {
        const i64 from = work % queries, head = work / queries % m->kv_heads, row = work / queries / m->kv_heads;
        count = queries - from < last - work ? queries - from : last - work;
        if (count > QUERIES) count = QUERIES;
        const char *keys = (char *)call->store
            + size * (index * call->layer_stride + head * call->head_stride + call->starts[row] * SLOT(m->head_dim));
        const char *values = keys + size * m->kv_heads * call->head_stride;
        const uint8_t *of_head = strange + (row * m->kv_heads + head) * N;
        const i64 *of_row = depths + row * all_nodes(call);
        attend(m, layer, call, row, head, from, from + count, of_head, of_row, keys, values, qkv, mixed, own);
    }
#if AMX && STORE == BFLOAT16
    if (has_tiles) _tile_release();
#endif
}

/* Compute attention of all queries. `memory` holds `own_size` floats for each thread. */
static void attention(Thread *t, const Model *m, const Layer *layer, const Call *call, i64 index, const uint8_t *strange,
                      const i64 *depths, const float *qkv, float *mixed, float *memory, i64 own_size) {
    PIECES(t, call->batch * m->heads * call->nodes, QUERIES, first, last)
        attend_all(m, layer, call, index, first, last, strange, depths, qkv, mixed, memory + t->index * own_size);
}

/* Write a key or value to the store. */
static void store_head(const Call *call, i64 at, i64 D, const float *x) {
    if (STORE == INT8) {
        int8_t *to = (int8_t *)call->store + at;
        float factor;
        int32_t sum;
        round_group(x, D, D, to, 4, &factor, &sum);
        memcpy(to + D, &factor, 4);
    }
    for (i64 i = 0; STORE != INT8 && i < D; i++) store_one(call->store, at + i, STORE, x[i]);
}

/* Norm a value where the layer does, and write it. */
static void store_value(const Model *m, const Layer *layer, const Call *call, i64 at, float *x, uint8_t *flag) {
    const i64 D = m->head_dim;
    const float factor = layer->head_dim ? norm_factor(x, m->eps, D) : 1;
    for (i64 i = 0; layer->head_dim && i < D; i++) x[i] *= factor;
    store_head(call, at, D, x);
    if (flag) *flag = any_strange(x, D);
}

/* `place` for one head of one node: number `work` of all. */
static void place_head(const Model *m, const Layer *layer, const Call *call, i64 index, const i64 *depths, float *qkv,
                       i64 heads, uint8_t *strange, i64 work) {
    const i64 all = heads + 2 * m->kv_heads, D = m->head_dim;
    const i64 node = work / all, head = work % all, row = node / call->nodes, own = call->done + node % call->nodes;
    i64 position = call->lengths[row] + (depths ? depths[row * all_nodes(call) + own] : own);
    /* Nodes that are never committed may lie past the last position. */
    if (position >= m->max_positions) position = m->max_positions - 1;
    float *x = qkv + work * D;
    const i64 number = head - heads, value = number - m->kv_heads;
    const i64 at = index * call->layer_stride + (call->starts[row] + call->lengths[row] + own) * SLOT(D);
    uint8_t *flag = strange ? strange + (row * m->kv_heads + value) * call->nodes + node % call->nodes : 0;
    if (layer->shared && number >= 0) { /* an earlier layer has written them; values are read again */
        if (value < 0 || STORE == INT8 || !flag) return;
        for (i64 i = 0; i < D; i++) x[i] = load_one(call->store, at + number * call->head_stride + i, STORE);
        *flag = any_strange(x, D);
        return;
    }
    if (value >= 0 && layer->values_are_keys) return;
    if (number >= 0 && value < 0 && layer->values_are_keys) { /* values come before keys change */
        float *copy = memcpy(x + m->kv_heads * D, x, 4 * D);
        const i64 of_value = m->kv_heads * call->nodes;
        store_value(m, layer, call, at + (number + m->kv_heads) * call->head_stride, copy, flag ? flag + of_value : 0);
    }
    if (value < 0) rotate(m, layer, number < 0 ? layer->query_norm : layer->key_norm, x, position);
    if (number < 0) return;
    if (value >= 0) store_value(m, layer, call, at + number * call->head_stride, x, flag);
    else store_head(call, at + number * call->head_stride, D, x);
}

/* Norm and rotate keys, and `heads` heads of queries. Write keys and values to the store, behind the committed tokens of
   each row. Without depths the nodes are a chain. `strange`, unless null, gets a 1 for each head and node whose values are
   not finite, or not in the dtype of the store. */
static void place(Thread *t, const Model *m, const Layer *layer, const Call *call, i64 index, const i64 *depths, float *qkv,
                  i64 heads, uint8_t *strange) {
    const i64 work = call->batch * call->nodes * (heads + 2 * m->kv_heads);
    PIECES(t, work, 4, first, last)
        for (i64 i = first; i < last; i++) place_head(m, layer, call, index, depths, qkv, heads, strange, i);
}

/* Return the inner values of an MLP. */
INLINE vec gated(const Model *m, vec gate, vec up) {
    const vec limit = splat(m->clamp_limit);
    vec turn = gate;
    if (m->clamp_limit) { /* NaN stays NaN */
        gate = least(limit, gate);
        up = most_of(-limit, least(limit, up)) + 1.0f;
        turn = gate * m->clamp_alpha;
    }
    if (m->gelu) turn = 1.5957691216f * (gate + 0.044715f * gate * gate * gate); /* gelu in its tanh form */
    return gate * sigmoid(turn) * up;
}

static void activate(const Model *m, i64 inner, float *gate_up, i64 first, i64 last) {
    const i64 parts = (inner + LANES - 1) / LANES;
    for (i64 work = first; work < last; work++) {
        i64 at = work % parts * LANES, count = inner - at;
        float *gate = gate_up + work / parts * 2 * inner + at, *up = gate + inner;
        if (count >= LANES) *(vec *)gate = gated(m, *(vec *)gate, *(vec *)up);
        else {
            vec x = {}, y = {};
            for (i64 i = 0; i < count; i++) x[i] = gate[i], y[i] = up[i];
            x = gated(m, x, y);
            for (i64 i = 0; i < count; i++) gate[i] = x[i];
        }
    }
}

static i64 corrections_of(const Convolution *c) { return 2 * c->taps * c->groups; }

/* Convolve the nodes from `first` to `last` along their row to `out`, with one side of the taps and their corrections.
   Nodes before the row's first count as zero. */
static void convolve(const Model *m, const Call *call, const Convolution *c, i64 side, const float *corrections,
                     const float *y, i64 first, i64 last, float *out, int add) {
    const i64 H = m->hidden, size = H / c->groups;
    for (i64 row = first; row < last; row++) {
        const i64 node = row % call->nodes, taps = c->taps <= node ? c->taps : node + 1;
        const float *corrected = corrections + row * corrections_of(c) + side * c->taps * c->groups;
        for (i64 group = 0; group < c->groups; group++) {
            const i64 from = group * size;
            float *to = out + row * H + from;
            for (i64 tap = 0; tap < taps; tap++) {
                const float *base = c->base + (side * c->taps + tap) * H + from, *in = y + (row - tap) * H + from;
                const float delta = corrected[tap * c->groups + group];
                if (tap || add)
                    for (i64 i = 0; i < size; i++) to[i] += (base[i] + delta) * in[i];
                else
                    for (i64 i = 0; i < size; i++) to[i] = (base[i] + delta) * in[i];
            }
        }
    }
}

/* Norm x to h, and convolve it where the layer does. Return this input of its projection `l`, rounded for it. */
static const float *input_of(Thread *t, const Linear *l, const Model *m, const Call *call, const Convolution *c,
                             const float *norm, const float *x, float *h, Rounded in, float *corrections, float *turned) {
    const i64 H = m->hidden, rows = call->batch * call->nodes;
    if (!c->taps) {
        norm_and_round(t, l, x, norm, m->eps, rows, h, in);
        return h;
    }
    PIECES(t, rows, TILE_ROWS, first, last) {
        norm_rows(x, norm, m->eps, H, first, last, h, 0);
        round_rows(&c->projection, h, H, rows, in, first, last);
    }
    project(t, &c->projection, h, H, in, rows, corrections, corrections_of(c), 0);
    PIECES(t, rows, TILE_ROWS, first, last) {
        convolve(m, call, c, 0, corrections, h, first, last, turned, 0);
        round_rows(l, turned, H, rows, in, first, last);
    }
    return turned;
}

/* Add the output h of a layer's last projection to x, convolved or normed. Without either, the projection has added it. */
static void add_output(Thread *t, const Model *m, const Call *call, const Convolution *c, const float *norm,
                       const float *corrections, const float *h, float *x) {
    if (!c->taps && !norm) return;
    PIECES(t, call->batch * call->nodes, 1, first, last) {
        if (c->taps) convolve(m, call, c, 1, corrections, h, first, last, x, 1);
        else norm_rows(h, norm, m->eps, m->hidden, first, last, x, 1);
    }
}

/* Copy the output x of a target layer to `hidden_states`. */
static void tap(Thread *t, const Model *m, const Call *call, i64 layer, const float *x) {
    const i64 H = m->hidden, count = call->num_target_layer_ids;
    for (i64 k = 0; k < count; k++) {
        if (call->target_layers[k] != layer) continue;
        PIECES(t, call->batch * call->nodes, 1, first, last)
            for (i64 row = first; row < last; row++)
                memcpy(call->hidden_states + (row * count + k) * H, x + row * H, 4 * H);
    }
}

/* Offsets in the workspace, in floats. `end` is the size that is needed. */
typedef struct {
    i64 depths, x, h, qkv, wide, pairs, turned, corrections, own, own_size, strange, rounded, routed, given, end;
} Places;

/* Return whether inputs of a layer or of the head are rounded. */
static int rounds(const Model *m) {
    int any = IS_ROUNDED(&m->head) || IS_INTEGER(&m->joined) || IS_INTEGER(&m->input_projection);
    for (i64 index = 0; index < m->num_layers && !any; index++) {
        const Layer *layer = m->layers + index;
        any = IS_INTEGER(&layer->qkv) || IS_INTEGER(&layer->output) || IS_INTEGER(&layer->gate_up)
            || IS_INTEGER(&layer->down) || IS_INTEGER(&layer->router) || IS_INTEGER(&layer->shared_gate)
            || IS_INTEGER(&layer->shared_gate_up) || IS_INTEGER(&layer->shared_down) || IS_INTEGER(&layer->input_gate)
            || IS_INTEGER(&layer->input_projection);
    }
    return any;
}

/* Return the number of floats that hold rounded rows. */
static i64 rounded_size(i64 rows, i64 inputs) {
    return rows * ((inputs + 7) / 8 * (3 + (NARROW ? 2 * (i64)sizeof(input) : 2)));
}

/* Return the rounded rows in that memory. */
static Rounded rounded_at(float *memory, i64 rows, i64 inputs) {
    const i64 groups = rows * ((inputs + 7) / 8);
    return (Rounded){(int8_t *)(memory + 3 * groups), memory, memory + groups, (int32_t *)(memory + 2 * groups)};
}

/* Return the `count` outputs of a weight from `first` on, which begins a block. */
static Linear outputs_from(const Linear *l, i64 first, i64 count) {
    Linear part = *l;
    const i64 size = first * l->inputs, factors = IS_INTEGER(l) ? first * (l->inputs / l->group) : 0;
    const i64 bytes = IS_INTEGER(l) ? size * BITS_OF(l->kind) / 8 : size * BYTES(WEIGHT);
    part.weight = (const char *)part.weight + bytes;
    const i64 units = l->span ? factors / l->span : 0;
    if (part.scale) part.scale = (const char *)part.scale + factors * FACTOR_BYTES(l->scale_kind);
    if (part.offset) part.offset = (const char *)part.offset + factors * FACTOR_BYTES(l->offset_kind);
    if (part.scale_unit) part.scale_unit += units;
    if (part.offset_unit) part.offset_unit += units;
    if (part.bias) part.bias += first;
    part.outputs = count;
    return part;
}

#include "experts.h"
#include "shortconv.h"

/* Return the inner size of the largest MLP that all rows use. */
static i64 widest_inner(const Model *m) {
    const i64 inner = m->inner > m->shared_inner ? m->inner : m->shared_inner;
    return inner > m->input_size ? inner : m->input_size;
}

static i64 widest_input(const Model *m) {
    const i64 mixed = m->heads * m->head_dim, inner = widest_inner(m), more = mixed > inner ? mixed : inner;
    const i64 own = m->pairs ? 2 * m->hidden : m->hidden;
    return more > own ? more : own;
}

/* Return the offsets for `rows` nodes behind `done` earlier ones. */
static Places places(const Model *m, i64 rows, i64 done, i64 slots, i64 threads) {
    const i64 mix_width = m->heads * m->head_dim, width = (m->heads + 2 * m->kv_heads) * m->head_dim;
    Places p = {0};
    p.x = p.depths + 2 * (done + rows);
    p.h = p.x + rows * m->hidden;
    p.qkv = p.h + rows * m->hidden;
    p.wide = p.qkv + rows * (m->kernel && 3 * m->hidden > width ? 3 * m->hidden : width);
    i64 most = 0; /* corrections of a node */
    for (i64 index = 0; index < m->num_layers; index++) {
        const i64 first = corrections_of(&m->layers[index].attention_conv);
        const i64 second = corrections_of(&m->layers[index].mlp_conv);
        if (first > most) most = first;
        if (second > most) most = second;
    }
    const i64 mixed = m->kernel && m->hidden > mix_width ? m->hidden : mix_width;
    p.pairs = p.wide + rows * (2 * widest_inner(m) > mixed ? 2 * widest_inner(m) : mixed);
    p.turned = p.pairs + (m->pairs ? 2 * rows * m->hidden : 0);
    p.corrections = p.turned + (most ? rows * m->hidden : 0);
    p.own = p.corrections + rows * most;
    p.own_size = rows ? own_places(m->head_dim, slots).end : 0;
    p.strange = p.own + threads * p.own_size;
    p.rounded = p.strange + (rows * m->kv_heads + 3) / 4;
    p.routed = p.rounded + (rounds(m) ? rounded_size(rows, widest_input(m)) : 0);
    if (m->experts) p.routed += p.routed % 2; /* integers of 8 bytes come first */
    p.given = p.routed + routed_places(m, rows).end;
    p.end = p.given + 2 * rows * m->num_layers * m->input_size;
    return p;
}

/* Return the number of floats in the workspace of `decoder_forward`, for sequences that reach `slots` slots, including
   those of their nodes. Nodes of earlier calls take less. */
i64 decoder_workspace(const Model *m, i64 batch, i64 nodes, i64 slots, i64 threads) {
    i64 wrong = check_shape(m, batch, nodes, slots, threads);
    return wrong ? wrong : places(m, batch * nodes, 0, slots, threads).end;
}

/* Write a row of a table, times `factor`. */
static void look_up(const Linear *l, i64 token, float factor, float *to) {
    const i64 begin = token / LANES * l->inputs * LANES + token % LANES;
    if (IS_INTEGER(l)) integer_row(l, token, factor, to);
    else
        for (i64 i = 0; i < l->inputs; i++) to[i] = factor * load_one(l->weight, begin + i * LANES, WEIGHT);
}

/* Write the embeddings of the rows from `first` to `last` to x. */
static void embed(const Model *m, const Call *call, i64 first, i64 last, float *x) {
    const i64 H = m->hidden;
    for (i64 i = first * H; call->embedded && i < last * H; i++) x[i] = m->embedding_scale * call->embedded[i];
    for (i64 row = first; !call->embedded && row < last; row++)
        look_up(&m->embedding, call->tokens[row], m->embedding_scale, x + row * H);
}

/* Write the embeddings of the rows from `first` to `last` for all layers, from their projections in `given`. `table` is
   memory of the same size. */
static void embed_for_layers(const Model *m, const Call *call, i64 first, i64 last, float *given, float *table) {
    const i64 size = m->input_size, all = m->num_layers * size;
    for (i64 row = first; row < last; row++) {
        float *own = given + row * all, *of_token = table + row * all;
        look_up(&m->input_table, call->tokens[row], sqrtf((float)size), of_token);
        for (i64 at = 0; at < all; at += size) /* eps is that of projections over sqrt(hidden) */
            rms_norm(own + at, m->input_norm, m->eps * m->hidden, size, own + at, 0);
        for (i64 i = 0; i < all; i++) own[i] = (own[i] + of_token[i]) * 0.70710678118654752f;
    }
}

/* Add a layer's embedding of the tokens to its output x, and scale it. */
static void finish_layer(Thread *t, const Model *m, const Layer *layer, i64 index, i64 rows, Rounded in, float *x, float *h,
                         float *wide, const float *given) {
    const i64 H = m->hidden, size = m->input_size, parts = (size + LANES - 1) / LANES;
    if (size) {
        round_inputs(t, &layer->input_gate, x, H, rows, in);
        project(t, &layer->input_gate, x, H, in, rows, wide, 2 * size, 0);
        PIECES(t, rows, 1, first, last)
            for (i64 row = first; row < last; row++) {
                memcpy(wide + (2 * row + 1) * size, given + (row * m->num_layers + index) * size, 4 * size);
                activate(m, size, wide, row * parts, (row + 1) * parts);
            }
        round_inputs(t, &layer->input_projection, wide, 2 * size, rows, in);
        project(t, &layer->input_projection, wide, 2 * size, in, rows, h, H, 0);
    }
    PIECES(t, rows, 1, first, last) {
        if (size) norm_rows(h, layer->after_input, m->eps, H, first, last, x, 1);
        for (i64 i = first * H; i < last * H; i++) x[i] *= layer->scale;
    }
}

/* Write the normed embedding x and the normed hidden state of some rows side by side, and replace x by the stream that
   layers add to. */
static void side_by_side(const Model *m, const Call *call, i64 first, i64 last, float *x, float *pairs) {
    const i64 H = m->hidden;
    for (i64 row = first; row < last; row++) {
        const float *beside = call->beside + row * H;
        float *token = pairs + 2 * row * H, *normed = token + H;
        rms_norm(x + row * H, m->token_norm, m->eps, H, token, 0);
        rms_norm(beside, m->hidden_state_norm, m->eps, H, normed, 0);
        memcpy(x + row * H, m->normed_stream ? normed : beside, 4 * H);
    }
}

/* Arguments of `run_layers`. */
typedef struct {
    const Model *m;
    const Call *call;
    Places at;
} Forward;

static void run_layers(Thread *t, const void *argument) {
    const Forward *f = argument;
    const Model *m = f->m;
    const Call *call = f->call;
    const Places at = f->at;
    const i64 rows = call->batch * call->nodes, H = m->hidden;
    float *w = call->workspace, *x = w + at.x, *h = w + at.h, *qkv = w + at.qkv, *wide = w + at.wide;
    float *turned = w + at.turned, *corrections = w + at.corrections, *pairs = w + at.pairs;
    float *given = w + at.given;
    const i64 *depths = (i64 *)(w + at.depths);
    uint8_t *strange = (uint8_t *)(w + at.strange);
    const Rounded in = rounded_at(w + at.rounded, rows, widest_input(m));
    PIECES(t, rows, TILE_ROWS, first, last) {
        embed(m, call, first, last, x);
        if (m->pairs) side_by_side(m, call, first, last, x, pairs);
    }
    if (m->pairs && m->joined.weight) {
        round_inputs(t, &m->joined, pairs, 2 * H, rows, in);
        project(t, &m->joined, pairs, 2 * H, in, rows, x, H, 0);
    }
    if (m->input_size) {
        const i64 all = m->num_layers * m->input_size;
        round_inputs(t, &m->input_projection, x, H, rows, in);
        project(t, &m->input_projection, x, H, in, rows, given, all, 0);
        PIECES(t, rows, 1, first, last) embed_for_layers(m, call, first, last, given, given + rows * all);
    }
    i64 attends = 0, convolves = 0; /* layers so far */
    for (i64 index = 0; index < f->m->num_layers; index++) {
        const Layer *layer = f->m->layers + index;
        const Model own = shaped(f->m, layer);
        Call stored = *f->call;
        if (layer->second) {
            stored.store = call->second_store, stored.layer_stride = call->second_layer_stride;
            stored.head_stride = call->second_head_stride;
        }
        m = &own, call = &stored;
        const i64 mix_width = m->heads * m->head_dim, keys = 2 * m->kv_heads * m->head_dim;
        const i64 place_of_layer = layer->head_dim ? layer->place : attends;
        const Convolution *of_attention = &layer->attention_conv, *of_mlp = &layer->mlp_conv;
        const float *read = pairs;
        if (reads_pairs(m, index)) round_inputs(t, &layer->qkv, pairs, layer->qkv.inputs, rows, in);
        else
            read = input_of(t, &layer->qkv, m, call, of_attention, layer->before_attention, x, h, in, corrections, turned);
        const int unused = index + 1 == m->num_layers && !call->num_target_layer_ids && !call->num_logits;
        if (unused && !layer->filter) { /* only keys and values */
            if (layer->shared) return;
            const Linear part = outputs_from(&layer->qkv, mix_width, layer->qkv.outputs - mix_width);
            project(t, &part, read, part.inputs, in, rows, qkv, keys, 0);
            place(t, m, layer, call, place_of_layer, depths, qkv, 0, 0);
            return;
        }
        project(t, &layer->qkv, read, layer->qkv.inputs, in, rows, qkv, layer->filter ? 3 * H : mix_width + keys, 0);
        if (layer->filter) {
            short_convolution(t, m, layer, call, convolves++, qkv, wide);
            if (unused) return;
        } else {
            place(t, m, layer, call, place_of_layer, depths, qkv, m->heads, strange);
            attention(t, m, layer, call, place_of_layer, strange, depths, qkv, wide, w + at.own, at.own_size);
            attends++;
        }
        const i64 mixed = layer->output.inputs;
        round_inputs(t, &layer->output, wide, mixed, rows, in);
        int added = !layer->after_attention && !of_attention->taps;
        project(t, &layer->output, wide, mixed, in, rows, added ? x : h, H, added);
        add_output(t, m, call, of_attention, layer->after_attention, corrections, h, x);
        if (layer->router.weight) {
            routed_mlp(t, m, layer, routed_at(m, w + at.routed, rows), rows, in, x, h, wide);
            if (layer->head_dim) finish_layer(t, m, layer, index, rows, in, x, h, wide, given);
            tap(t, m, call, index, x);
            continue;
        }
        read = input_of(t, &layer->gate_up, m, call, of_mlp, layer->before_mlp, x, h, in, corrections, turned);
        project(t, &layer->gate_up, read, H, in, rows, wide, 2 * m->inner, 0);
        PIECES(t, rows * ((m->inner + LANES - 1) / LANES), 32, first, last) activate(m, m->inner, wide, first, last);
        round_inputs(t, &layer->down, wide, 2 * m->inner, rows, in);
        added = !layer->after_mlp && !of_mlp->taps;
        project(t, &layer->down, wide, 2 * m->inner, in, rows, added ? x : h, H, added);
        add_output(t, m, call, of_mlp, layer->after_mlp, corrections, h, x);
        if (layer->head_dim) finish_layer(t, m, layer, index, rows, in, x, h, wide, given);
        tap(t, m, call, index, x);
    }
    m = f->m, call = f->call;
    PIECES(t, rows, 1, first, last) norm_rows(x, m->norm, m->eps, H, first, last, h, 0);
    tap(t, m, call, m->num_layers, h);
    if (!call->num_logits) return;
    const i64 scored = call->num_logits, outputs = m->head.outputs;
    if (call->logits_at) /* move rows with logits together */
        PIECES(t, scored, 1, first, last)
            for (i64 k = first; k < last; k++) memcpy(x + k * H, h + call->logits_at[k] * H, 4 * H);
    round_inputs(t, &m->head, call->logits_at ? x : h, H, scored, in);
    project(t, &m->head, call->logits_at ? x : h, H, in, scored, call->logits, outputs, 0);
    if (m->logit_cap)
        PIECES(t, (scored * outputs + LANES - 1) / LANES, 64, first, last)
            for (i64 i = first * LANES; i < last * LANES && i < scored * outputs; i++)
                call->logits[i] = cap(call->logits[i], m->logit_cap);
    if (call->best)
        PIECES(t, scored, 1, first, last)
            for (i64 row = first; row < last; row++) call->best[row] = best_of(call->logits + row * outputs, outputs);
}

/* Run the layers. Return 0, or the size of workspace that is needed if it is larger; then nothing has been done. */
i64 decoder_forward(const Model *m, const Call *call) {
    REFUSE(!m || !call, POINTER);
    const i64 threads = pool_threads(call->pool);
    i64 wrong = check_shape(m, call->batch, call->nodes, call->slots, threads);
    if (!wrong) wrong = check_rows(m, call);
    if (!wrong) wrong = check_nodes(m, call);
    if (wrong) return wrong;
    const i64 rows = call->batch * call->nodes, all = all_nodes(call);
    i64 longest = 0;
    for (i64 row = 0; row < call->batch; row++)
        if (call->lengths[row] > longest) longest = call->lengths[row];
    const Forward f = {m, call, places(m, rows, call->batch * call->done, longest + all, threads)};
    if (!rows) return 0;
    if (call->room < f.at.end) return f.at.end;
    REFUSE(!call->workspace, POINTER);
    i64 *depths = (i64 *)(call->workspace + f.at.depths);
    for (i64 node = 0; node < call->batch * all; node++)
        depths[node] = call->parents[node] < 0 ? 0 : depths[node - node % all + call->parents[node]] + 1;
    pool_run(call->pool, run_layers, &f);
    return 0;
}

/* Return whether one more draft token per row saves time, as `next_pays` of decode/tree.py. */
static int pays(const Chain *c, i64 batch) {
    double now = batch, more = batch;
    for (i64 row = 0; row < batch; row++) {
        now += c->calibration * c->expected[row];
        more += c->calibration * ((double)c->expected[row] + c->following[row]);
    }
    return more / c->seconds[c->made + 1] > now / c->seconds[c->made];
}

/* Arguments of `extend_chains`. */
typedef struct {
    const Call *call;
    const Chain *chain;
    i64 outputs;
} Extension;

/* Add the most probable token to the chain of each row. */
static void extend_chains(Thread *t, const void *argument) {
    const Extension *e = argument;
    const Chain *c = e->chain;
    PIECES(t, e->call->batch, 1, first, last)
        for (i64 row = first; row < last; row++) {
            const float *logits = e->call->logits + row * e->outputs;
            const i64 best = e->call->best[row] < 0 ? 0 : e->call->best[row]; /* any token where no number is finite */
            c->tokens[row * (c->draft_tokens + 1) + c->made + 1] = c->kept[best];
            if (!c->seconds) continue;
            const float probability = largest_probability(logits, e->outputs, logits[best]);
            c->survival[row] *= probability;
            c->following[row] = c->survival[row] * probability;
            c->expected[row] += c->survival[row];
        }
}

/* Draft chains with a network of pairs. Each draft token is the most probable one after the token before it, whose hidden
   state it reads. `call` is that of the first tokens. Return as `decoder_forward` does; what is done may be done again. */
i64 draft_chain(const Model *m, const Call *call, Chain *c) {
    REFUSE(!m || !call || !c || !c->kept || !c->tokens || !c->current || !c->parents, POINTER);
    REFUSE(!call->hidden_states || !call->logits || !call->best, POINTER);
    REFUSE(c->seconds && (!c->expected || !c->survival || !c->following), POINTER);
    REFUSE(call->nodes != 1 || call->done || call->num_target_layer_ids != 1 || call->num_logits != call->batch, COUNTS);
    REFUSE(call->batch < 1 || call->batch > MOST || c->draft_tokens < 0 || c->draft_tokens > MOST / call->batch, COUNTS);
    const i64 batch = call->batch;
    const Extension extension = {call, c, m->head.outputs};
    Call node = *call;
    node.tokens = c->current, node.parents = c->parents;
    for (i64 row = 0; c->seconds && row < batch; row++) c->expected[row] = 0, c->survival[row] = c->following[row] = 1;
    for (c->made = 0; c->made < c->draft_tokens && (!c->seconds || pays(c, batch)); c->made++) {
        node.done = c->made;
        for (i64 row = 0; row < batch; row++) {
            c->current[row] = c->tokens[row * (c->draft_tokens + 1) + c->made];
            for (i64 i = 0; i <= c->made; i++) c->parents[row * (c->made + 1) + i] = i - 1;
        }
        const i64 wrong = decoder_forward(m, &node);
        if (wrong) return wrong;
        node.beside = call->hidden_states;
        pool_run(batch > 1 ? call->pool : 0, extend_chains, &extension);
    }
    return 0;
}

/* Return the number of floats in the workspace of `draft_context`, for hidden states of `inputs` numbers. */
i64 draft_context_workspace(const Model *m, i64 batch, i64 nodes, i64 inputs) {
    i64 wrong = check_shape(m, batch, nodes, 0, 1);
    if (wrong) return wrong;
    REFUSE(inputs < 1 || inputs > MOST, SIZES);
    const i64 numbers = m->hidden + m->num_layers * 2 * m->kv_heads * m->head_dim;
    return batch * nodes * numbers + rounded_size(batch * nodes, m->hidden > inputs ? m->hidden : inputs);
}

/* Arguments of `fill_context`. */
typedef struct {
    const Model *m;
    const Call *call;
    const Linear *hidden_states;
    const float *norm;
} Context;

static void fill_context(Thread *t, const void *argument) {
    const Context *c = argument;
    const Model *m = c->m;
    const Call *call = c->call;
    const Linear *fuse = c->hidden_states;
    const i64 rows = call->batch * call->nodes, H = m->hidden, width = 2 * m->kv_heads * m->head_dim;
    const i64 queries = m->heads * m->head_dim; /* these are whole blocks, since head_dim is a multiple of LANES */
    float *h = call->workspace, *keys_values = h + rows * H;
    const Rounded in = rounded_at(keys_values + m->num_layers * rows * width, rows, H > fuse->inputs ? H : fuse->inputs);
    round_inputs(t, fuse, call->embedded, fuse->inputs, rows, in);
    project(t, fuse, call->embedded, fuse->inputs, in, rows, h, H, 0);
    PIECES(t, rows, 1, first, last) norm_rows(h, c->norm, m->eps, H, first, last, h, 0);
    for (i64 index = 0; index < m->num_layers; index++) {
        const Linear part = outputs_from(&m->layers[index].qkv, queries, width);
        const Linear *before = index ? &m->layers[index - 1].qkv : 0;
        if (!before || SHARING(&part) != SHARING(before) || part.group != before->group || part.kind != before->kind)
            round_inputs(t, &part, h, H, rows, in);
        project(t, &part, h, H, in, rows, keys_values + index * rows * width, width, 0);
    }
    for (i64 index = 0; index < m->num_layers; index++)
        place(t, m, m->layers + index, call, index, 0, keys_values + index * rows * width, 0, 0);
}

/* Write keys and values of committed tokens for all layers of a draft network. They are computed from the target's
   hidden states, given as `embedded`, by a projection, a norm, and the key and value part of each layer's qkv. Return as
   `decoder_forward` does. */
i64 draft_context(const Model *m, const Call *call, const Linear *hidden_states, const float *norm) {
    REFUSE(!m || !call || !hidden_states || !norm || !hidden_states->weight, POINTER);
    i64 wrong = check_shape(m, call->batch, call->nodes, call->slots, pool_threads(call->pool));
    if (!wrong) wrong = check_rows(m, call);
    REFUSE(hidden_states->inputs < 1 || hidden_states->outputs != m->hidden || m->pairs || call->done, SIZES);
    if (!wrong) wrong = check_kind(hidden_states);
    const i64 rows = call->batch * call->nodes;
    if (wrong || !rows) return wrong;
    const i64 needed = draft_context_workspace(m, call->batch, call->nodes, hidden_states->inputs);
    if (call->room < needed) return needed;
    REFUSE(!call->embedded || !call->workspace, POINTER);
    const Context context = {m, call, hidden_states, norm};
    pool_run(call->pool, fill_context, &context);
    return 0;
}

#include "pack.h"

i64 lanes(void) { return LANES; }
i64 weight_kind(void) { return WEIGHT; }
i64 store_kind(void) { return STORE; }
i64 is_narrow(void) { return NARROW; }
i64 has_integer_kernels(void) { return INTEGERS; }

/* Arguments of `multiply`. */
typedef struct {
    const Linear *l;
    const float *x;
    i64 xs, rows;
    Rounded in;
    float *y;
} Product;

static void multiply(Thread *t, const void *argument) {
    const Product *p = argument;
    round_inputs(t, p->l, p->x, p->xs, p->rows, p->in);
    project(t, p->l, p->x, p->xs, p->in, p->rows, p->y, p->l->outputs, 0);
}

/* Compute y = x W^T + bias, for rows of x that are `xs` numbers apart. */
i64 packed_linear(const Linear *l, const float *x, i64 xs, i64 rows, float *y, Pool *pool) {
    REFUSE(!l || !l->weight, POINTER);
    REFUSE(l->inputs < 0 || l->outputs < 0, SIZES);
    REFUSE(rows < 0 || rows > MOST || xs < 0, COUNTS);
    if (!rows) return 0;
    REFUSE(!x || !y, POINTER);
    const i64 wrong = check_kind(l);
    REFUSE(wrong, -wrong);
    Product product = {l, x, xs, rows, {0}, y};
    float *memory = 0;
    if (IS_ROUNDED(l)) {
        memory = malloc(4 * rounded_size(rows, l->inputs));
        REFUSE(!memory, MEMORY);
        product.in = rounded_at(memory, rows, l->inputs);
    }
    pool_run(pool, multiply, &product);
    free(memory);
    return 0;
}
