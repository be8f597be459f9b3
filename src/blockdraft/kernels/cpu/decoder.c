/* Forward pass of a decoder or draft network on a CPU, for few nodes, in one call.

   Each node's numbers come from the same operations in the same order, however many nodes there are and wherever its
   ancestors lie. So a token gets the same bits alone, in a block and in a tree. Weights are float32 or bfloat16, their
   inputs are float32 or rounded to bfloat16, and sums are float32. Or weights are integers of 8 or 4 bits (integers.h).
   `rows` counts the nodes of all sequences of the batch, which are the rows of the matrices here. Threads share the work
   in stages (pool.h). compiled_decoder.py and compiled_runner.py fill the structs of calls.h. Exported functions check
   their arguments, and return minus the number of a problem. */
#include "attention.h"

static i64 larger(i64 x, i64 y) { return x > y ? x : y; }

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

/* Return the position of a node of all rows. Without depths the nodes are a chain. */
static i64 position_of(const Model *m, const Call *call, const i64 *depths, i64 node) {
    const i64 row = node / call->nodes, own = call->done + node % call->nodes;
    const i64 position = call->lengths[row] + (depths ? depths[row * all_nodes(call) + own] : own);
    return position < m->max_positions ? position : m->max_positions - 1; /* nodes there are never committed */
}

/* Return the first slot that a node at this depth attends to, were its path a chain. `length` counts committed tokens. */
static i64 first_seen(const Layer *layer, const Call *call, i64 length, i64 depth) {
    i64 first = layer->window ? length + depth - layer->window + 1 : 0;
    if (first < length - call->reach) first = length - call->reach;
    /* A call without outputs commits its nodes, so that some of them may be in hidden slots too. */
    const i64 others = length + (call->num_logits || call->num_target_layer_ids ? 0 : depth);
    const i64 hidden = call->hidden_slots < others ? call->hidden_slots : others;
    return first < hidden ? hidden : first;
}

#define QUERIES 256 /* maximum queries that share a read of keys and values */
#define LEAST_QUERIES 64 /* of a piece of work */
#define FEW_QUERIES 10 /* of a piece with latent attention, where multiplying a key takes longer than reading it */
#define BRANCHED 32 /* maximum queries of branches that are computed together */
#define PADDED(slots) (((slots) + SLOTS - 1) / SLOTS * SLOTS)

/* Offsets in a thread's own memory for attention, in floats. With 16 LANES all are multiples of 64 bytes. */
typedef struct {
    i64 queries, sums, totals, keys, values, slots, codes, scores, tail, path, end;
} Own;

/* Return the offsets for rows of up to `nodes` nodes, including those of earlier calls. */
static Own own_places(i64 D, i64 nodes) {
    const i64 tail = PADDED(nodes + SLOTS - 1); /* slots of branches, and those before them that they share SLOTS with */
    Own p = {0};
    p.sums = QUERIES * D;
    p.totals = p.sums + QUERIES * D;
    p.keys = p.totals + QUERIES * TOTALS;
    p.values = p.keys + SLOTS * D;
    p.slots = p.values + SLOTS * D;
    p.codes = p.slots + SLOTS * (D + 2);
    p.scores = p.codes + TILE_QUERIES * SLOTS;
    p.tail = p.scores + TILE_QUERIES * SLOTS;
    p.path = p.tail + BRANCHED * tail;
    p.end = p.path + 2 * tail + 15; /* to begin at a multiple of 64 bytes */
    return p;
}

/* Queries that share a read of keys and values, and memory to work in. */
typedef struct {
    const Model *m;
    const Layer *layer;
    const Call *call;
    const i64 *depths;
    const char *stored_keys, *stored_values;
    i64 row, head, from, count, slots; /* from: number of the first of the queries that share the head */
    int tiled;
    float *queries, *sums, *totals, *keys, *values, *codes, *scores, *tail;
    char *copied; /* SLOTS keys or values: memory behind the last slot may not be read, and branches are gathered */
    i64 *path;
    float largest[QUERIES], of_queries[QUERIES];
    int32_t starts[QUERIES];
    i64 first[QUERIES], end[QUERIES]; /* a query sees no slot before, and none from the end on */
} Tile;

/* Return the node of a query. */
static i64 node_of(const Tile *x, i64 j) { return x->call->done + (x->from + j) / (x->m->heads / x->m->kv_heads); }

/* Return whether a query sees a slot, given that it is of a chain or a whole block. */
static int sees(const Tile *x, i64 j, i64 slot) {
    const i64 other = slot - x->call->lengths[x->row], node = node_of(x, j), window = x->layer->window;
    if (slot < x->first[j] || slot >= x->end[j]) return 0;
    return other < 0 || !x->layer->whole_block || !window || llabs(x->depths[other] - x->depths[node]) < window;
}

/* Set the scores of SLOTS slots from t on that a query does not see to -infinity. */
static void hide(const Tile *x, i64 j, i64 t, float *scores) {
    const int all = !x->layer->whole_block || !x->layer->window || t + SLOTS <= x->call->lengths[x->row];
    if (all && x->first[j] <= t && t + SLOTS <= x->end[j]) return;
    for (i64 i = 0; i < SLOTS; i++)
        if (!sees(x, j, t + i)) scores[i] = -INFINITY;
}

/* Return SLOTS keys from slot t on, as products take them if not `tiled`, and read their factors. */
static const char *read_keys(const Tile *x, i64 t, float *factors) {
    const i64 D = x->m->head_dim, size = SLOT(D) * BYTES(STORE), T = x->slots - t < SLOTS ? x->slots - t : SLOTS;
    const char *keys = x->stored_keys + t * size;
    read_factors(keys, T, D, factors);
    if (T < SLOTS) keys = memcpy(x->copied, keys, T * size);
    for (i64 i = 0; !x->tiled && i < SLOTS; i += LANES) turn(keys + i * size, D, x->keys + i);
    return keys;
}

/* Compute the scores of R queries from j on with the keys that have been read. */
static void score(const Tile *x, i64 j, i64 R, const char *keys, const float *factors, float *scores, i64 stride) {
    const i64 D = x->m->head_dim;
    (void)keys;
#if AMX && STORE == BFLOAT16
    if (x->tiled) {
        score_tiles((const char *)x->queries + j * 2 * D, R, keys, D, scores);
        return;
    }
#endif
    const Products p = {.w = x->queries + j * D / PER, .x = x->keys, .apart = D / PER, .step = SLOTS, .rows = D / PER,
                        .starts = x->starts + j, .of_queries = x->of_queries + j, .of_slots = factors, .out = scores,
                        .stride = stride};
    scores_of(&p, SLOTS, R);
}

/* Add T values in `rows` rows, times the weights in `codes`, to the sums of R queries from j on. */
static void mix(const Tile *x, i64 j, i64 R, const float *values, i64 T, i64 rows, const float *scales) {
    const i64 D = x->m->head_dim;
    (void)T;
#if AMX && STORE == BFLOAT16
    if (x->tiled) {
        mix_tiles((const char *)x->codes, (const char *)x->values, T, D, x->sums + j * D);
        return;
    }
#endif
    const Products p = {.w = x->codes, .x = values, .apart = SLOTS / PER, .step = D, .rows = rows, .of_queries = scales,
                        .out = x->sums + j * D, .stride = D};
    sums_of(&p, D, R);
}

/* Write the weights of R queries from j on for SLOTS scores each to `codes`. Get their scales. */
static void weigh_all(Tile *x, i64 j, i64 R, float *scores, const float *factors, float *scales) {
    const i64 D = x->m->head_dim, apart = SLOTS / (x->tiled ? 2 : PER);
    ints largest[TILE_QUERIES];
    for (i64 r = 0; r < R; r++) {
        const State own = {x->largest + j + r, x->totals + (j + r) * TOTALS, x->sums + (j + r) * D};
        largest[r] = weigh(scores + r * SLOTS, x->m->attention_cap, factors, own, D, x->tiled, x->codes + r * apart);
    }
    for (i64 r = 0; STORE == INT8 && r < R; r++) /* apart, so that queries do not wait for each other's divisions */
        scales[r] = round_weights(scores + r * SLOTS, largest[r], x->codes + r * apart);
}

/* Let all queries attend to the slots from `begin` to `end`. */
static void attend_slots(Tile *x, i64 begin, i64 end) {
    const i64 D = x->m->head_dim, size = SLOT(D) * BYTES(STORE), most = x->tiled ? TILE_QUERIES : AT_ONCE;
    float key_factors[SLOTS] = {0}, factors[SLOTS] = {0}, scales[TILE_QUERIES];
    i64 all_from = begin, all_to = x->call->lengths[x->row]; /* slots that all queries see */
    for (i64 j = 0; j < x->count; j++) {
        all_from = larger(all_from, x->first[j]);
        all_to = x->end[j] < all_to ? x->end[j] : all_to;
    }
    for (i64 t = begin; t < end; t += SLOTS) {
        const i64 T = x->slots - t < SLOTS ? x->slots - t : SLOTS;
        const int all = all_from <= t && t + SLOTS <= all_to;
        const char *keys = read_keys(x, t, key_factors), *stored = x->stored_values + t * size;
        const float *values = STORE == FLOAT32 ? (const float *)stored : x->values;
        read_factors(stored, T, D, factors);
        const i64 rows = STORE == FLOAT32 ? T : read_values(stored, T, D, x->tiled, x->values);
        for (i64 j = 0, R; j < x->count; j += R) {
            const i64 left = x->count - j;
            R = !x->tiled ? next_group(left, most) : left < most ? left : most;
            int any = all;
            for (i64 r = j; !any && r < j + R; r++) any = x->first[r] < t + SLOTS && x->end[r] > t;
            if (!any) continue;
            score(x, j, R, keys, key_factors, x->scores, SLOTS);
            for (i64 r = 0; !all && r < R; r++) hide(x, j + r, t, x->scores + r * SLOTS);
            weigh_all(x, j, R, x->scores, factors, scales);
            mix(x, j, R, values, T, rows, scales);
        }
    }
}

/* Let the queries attend to the slots from `begin`, a multiple of SLOTS, on, where branches end or values may be not finite.
   The slots that a node sees are gathered in the order of a chain, since sums depend on their order. */
static void attend_path(Tile *x, i64 begin) {
    const i64 D = x->m->head_dim, size = SLOT(D) * BYTES(STORE), length = x->call->lengths[x->row];
    const i64 width = PADDED(x->slots - begin), *parents = x->call->parents + x->row * all_nodes(x->call);
    float factors[SLOTS] = {0}, scales[AT_ONCE];
    for (i64 from = 0; from < x->count; from += BRANCHED) {
        const i64 to = from + BRANCHED < x->count ? from + BRANCHED : x->count;
        for (i64 t = begin; t < x->slots; t += SLOTS) {
            read_keys(x, t, factors);
            for (i64 j = from, R; j < to; j += R) {
                R = to - j < AT_ONCE ? to - j : AT_ONCE;
                score(x, j, R, 0, factors, x->tail + (j - from) * width + t - begin, width);
            }
        }
        for (i64 j = from, R; j < to; j += R) {
            const i64 node = node_of(x, j), seen = x->layer->whole_block ? x->slots - length : x->depths[node] + 1;
            const i64 end = length + seen;
            for (R = 1; R < AT_ONCE && j + R < to && node_of(x, j + R) == node;) R++;
            for (i64 slot = begin; slot < length; slot++) x->path[slot - begin] = slot;
            for (i64 i = seen - 1, other = x->layer->whole_block ? i : node; i >= 0; i--) {
                x->path[length - begin + i] = length + other;
                other = x->layer->whole_block ? i - 1 : parents[other];
            }
            for (i64 t = begin; t < end; t += SLOTS) {
                const i64 T = end - t < SLOTS ? end - t : SLOTS, *path = x->path + t - begin;
                float *scores = x->scores;
                for (i64 i = 0; i < SLOTS * R; i++) scores[i] = -INFINITY;
                memset(x->copied, 0, SLOTS * size);
                for (i64 i = 0; i < T; i++) {
                    /* In a chain of its ancestors the node would be the last one. */
                    const int visible = x->layer->whole_block ? sees(x, j, path[i]) : t + i >= x->first[j];
                    if (visible) memcpy(x->copied + i * size, x->stored_values + path[i] * size, size);
                    for (i64 r = 0; visible && r < R; r++)
                        scores[r * SLOTS + i] = x->tail[(j - from + r) * width + path[i] - begin];
                }
                read_factors(x->copied, T, D, factors);
                const float *values = STORE == FLOAT32 ? (const float *)x->copied : x->values;
                const i64 rows = STORE == FLOAT32 ? T : read_values(x->copied, T, D, 0, x->values);
                weigh_all(x, j, R, scores, factors, scales);
                mix(x, j, R, values, T, rows, scales);
            }
        }
    }
}

/* Compute attention of up to QUERIES queries of one key/value head. Invisible slots get weight 0, which changes no sum if their
   values are finite. `strange` marks nodes whose values may not be; then sums leave invisible slots out. */
static void attend(const Model *m, const Layer *layer, const Call *call, i64 row, i64 head, i64 from,
                   i64 to, const uint8_t *strange, const i64 *depths, const char *keys, const char *values,
                   const float *qkv, float *mixed, float *memory) {
    const i64 D = m->head_dim, N = call->nodes, G = m->heads / m->kv_heads, length = call->lengths[row];
    const i64 width = (m->heads + 2 * m->kv_heads) * D, behind = length + call->done, count = to - from;
    const i64 slots = behind + (layer->whole_block ? N : (to - 1) / G + 1);
    const Own at = own_places(D, all_nodes(call));
    memory = (float *)(((uintptr_t)memory + 63) / 64 * 64);
    Tile x = {.m = m, .layer = layer, .call = call, .depths = depths, .stored_keys = keys, .stored_values = values,
              .row = row, .head = head, .from = from, .count = count, .slots = slots, .queries = memory + at.queries,
              .sums = memory + at.sums, .totals = memory + at.totals, .keys = memory + at.keys,
              .values = memory + at.values, .codes = memory + at.codes, .scores = memory + at.scores,
              .tail = memory + at.tail, .copied = (char *)(memory + at.slots), .path = (i64 *)(memory + at.path)};
    /* Whether other nodes than ancestors come before a node, or what is not seen must be left out. */
    int branches = memchr(strange, 1, slots - behind) != 0;
    for (i64 node = call->done + from / G; !layer->whole_block && node < slots - length; node++)
        branches |= depths[node] != node;
    x.tiled = TILED(count, D) && !branches;
    i64 begin = slots;
    memset(x.sums, 0, 4 * count * D);
    memset(x.totals, 0, 4 * count * TOTALS);
    for (i64 j = 0; j < count; j++) {
        const i64 node = node_of(&x, j), number = head * G + (from + j) % G;
        const float *own = qkv + (row * N + (from + j) / G) * width + number * D;
        x.of_queries[j] = place_query(own, m->attention_scale, D, j, x.tiled, x.queries, x.starts + j);
        x.first[j] = first_seen(layer, call, length, depths[node]);
        if (layer->whole_block && x.first[j] > length) x.first[j] = length;
        x.end[j] = layer->whole_block ? slots : length + node + 1;
        begin = x.first[j] < begin ? x.first[j] : begin;
        x.largest[j] = layer->sinks ? layer->sinks[number] : -INFINITY;
        if (layer->sinks) x.totals[j * TOTALS] = 1;
    }
    const i64 shared = branches ? length / SLOTS * SLOTS : slots; /* slots that are the same in a chain */
    attend_slots(&x, begin > 0 ? begin / SLOTS * SLOTS : 0, shared);
    if (branches) attend_path(&x, shared);
    for (i64 j = 0; j < count; j++) {
        float *own = x.sums + j * D, *totals = x.totals + j * TOTALS;
        float *out = mixed + ((row * N + (from + j) / G) * m->heads + head * G + (from + j) % G) * D;
        for (int half = TOTALS / 2; half; half /= 2)
            for (int i = 0; i < half; i++) totals[i] += totals[i + half];
        for (i64 d = 0; d < D; d += 4)
            for (i64 i = 0, place = x.tiled ? interleaved(d) : d; i < 4; i++) out[d + i] = own[place + i] / totals[0];
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
        const char *values = keys + (m->latent ? 0 : size * m->kv_heads * call->head_stride);
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
    const i64 queries = call->batch * m->heads * call->nodes;
    const i64 least = m->latent && queries < LEAST_QUERIES * t->threads ? FEW_QUERIES : LEAST_QUERIES;
    PIECES(t, queries, least, first, last)
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

/* Return where the projection of a gated layer has the head that number `work` of `place` is. */
static const float *in_projection(const Model *m, const float *projected, i64 work) {
    const i64 all = m->heads + 2 * m->kv_heads, head = work % all;
    const i64 before = work / all * (all + m->heads) + (head < m->heads ? 2 * head : head + m->heads);
    return projected + before * m->head_dim;
}

/* `place` for one head of one node: number `work` of all. */
static void place_head(const Model *m, const Layer *layer, const Call *call, i64 index, const i64 *depths, float *qkv,
                       i64 heads, uint8_t *strange, i64 work) {
    const i64 all = heads + 2 * m->kv_heads, D = m->head_dim;
    const i64 node = work / all, head = work % all, row = node / call->nodes, own = call->done + node % call->nodes;
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
    const float *norm = m->joint_norm ? 0 : number < 0 ? layer->query_norm : layer->key_norm;
    if (value < 0) rotate(m, layer, norm, x, position_of(m, call, depths, node));
    if (number < 0) return;
    if (value >= 0) store_value(m, layer, call, at + number * call->head_stride, x, flag);
    else store_head(call, at + number * call->head_stride, D, x);
}

/* Norm and rotate keys, and `heads` heads of queries. Write keys and values to the store, behind the committed tokens of
   each row. Without depths the nodes are a chain. `strange`, unless null, gets a 1 for each head and node whose values are
   not finite, or not in the dtype of the store. Unless `gated` is null, it is the projection of a gated layer that `qkv` is
   copied from. */
static void place(Thread *t, const Model *m, const Layer *layer, const Call *call, i64 index, const i64 *depths, float *qkv,
                  i64 heads, uint8_t *strange, const float *gated) {
    const i64 rows = call->batch * call->nodes, D = m->head_dim, width = (heads + 2 * m->kv_heads) * D;
    const i64 work = rows * (heads + 2 * m->kv_heads);
    if (m->joint_norm)
        PIECES(t, rows, 1, first, last)
            for (float *x = qkv + first * width; x < qkv + last * width; x += width) {
                if (heads) rms_norm(x, layer->query_norm, m->eps, heads * D, x, 0);
                rms_norm(x + heads * D, layer->key_norm, m->eps, m->kv_heads * D, x + heads * D, 0);
            }
    PIECES(t, work, 4, first, last)
        for (i64 i = first; i < last; i++) {
            if (gated) memcpy(qkv + i * D, in_projection(m, gated, i), 4 * D);
            place_head(m, layer, call, index, depths, qkv, heads, strange, i);
        }
}

/* Multiply the output of attention with its gates. */
static void gate_heads(Thread *t, const Model *m, i64 rows, const float *projected, float *mixed) {
    const i64 D = m->head_dim, all = m->heads + 2 * m->kv_heads;
    PIECES(t, rows * m->heads, 4, first, last)
        for (i64 work = first; work < last; work++) {
            const float *gate = in_projection(m, projected, work / m->heads * all + work % m->heads) + D;
            for (i64 i = 0; i < D; i += LANES) {
                const vec x = *(const vec *)(gate + i), share = sigmoid(x);
                *(vec *)(mixed + work * D + i) *= choose(x == x, share, x);
            }
        }
}

/* Return the inner values of an MLP, whose gates are used alone by SQUARED_RELU. */
INLINE vec gated(const Model *m, vec gate, vec up) {
    const vec limit = splat(m->clamp_limit);
    if (m->activation == SQUARED_RELU) {
        const vec positive = choose(gate < (vec){}, (vec){}, gate); /* NaN stays NaN */
        return positive * positive;
    }
    vec turn = gate;
    if (m->clamp_limit) { /* NaN stays NaN */
        gate = least(limit, gate);
        up = most_of(-limit, least(limit, up)) + 1.0f;
        turn = gate * m->clamp_alpha;
    }
    if (m->activation == GELU) turn = 1.5957691216f * (gate + 0.044715f * gate * gate * gate); /* gelu in its tanh form */
    return gate * sigmoid(turn) * up;
}

static void activate(const Model *m, i64 inner, float *gate_up, i64 first, i64 last) {
    const i64 parts = (inner + LANES - 1) / LANES, width = mlp_outputs(m, inner);
    for (i64 work = first; work < last; work++) {
        i64 at = work % parts * LANES, count = inner - at;
        float *gate = gate_up + work / parts * width + at, *up = gate + width - inner;
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

/* Norm x to h, unless `norm` is null, and convolve it where the layer does. Return this input of its projection `l`, rounded for it. */
static const float *input_of(Thread *t, const Linear *l, const Model *m, const Call *call, const Convolution *c,
                             const float *norm, const float *x, float *h, Rounded in, float *corrections, float *turned) {
    const i64 H = m->hidden, rows = call->batch * call->nodes;
    if (!norm) {
        round_inputs(t, l, x, H, rows, in);
        return x;
    }
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
    i64 depths, x, h, qkv, wide, pairs, turned, corrections, own, own_size, strange, rounded, routed, given, projected;
    i64 gates, end;
} Places;

/* Return whether inputs of a layer or of the head are rounded. */
static int rounds(const Model *m) {
    int any = IS_ROUNDED(&m->head) || IS_INTEGER(&m->joined) || IS_INTEGER(&m->input_projection);
    for (i64 index = 0; index < m->num_layers && !any; index++) {
        const Layer *layer = m->layers + index;
        any = IS_INTEGER(&layer->qkv) || IS_INTEGER(&layer->output) || IS_INTEGER(&layer->gate_up)
            || IS_INTEGER(&layer->down) || IS_INTEGER(&layer->router) || IS_INTEGER(&layer->shared_gate)
            || IS_INTEGER(&layer->shared_gate_up) || IS_INTEGER(&layer->shared_down) || IS_INTEGER(&layer->input_gate)
            || IS_INTEGER(&layer->input_projection) || IS_INTEGER(&layer->delta_gates) || IS_INTEGER(&layer->queries)
            || IS_INTEGER(&layer->absorbed_keys) || IS_INTEGER(&layer->values);
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

#include "deltanet.h"
#include "experts.h"
#include "latent.h"
#include "shortconv.h"

/* Return the inner size of the largest MLP that all rows use. */
static i64 widest_inner(const Model *m) {
    const i64 inner = m->inner > m->shared_inner ? m->inner : m->shared_inner;
    return inner > m->input_size ? inner : m->input_size;
}

static i64 widest_input(const Model *m) {
    const i64 mixed = m->heads * m->head_dim, inner = widest_inner(m), more = mixed > inner ? mixed : inner;
    const i64 own = m->pairs ? 2 * m->hidden : m->hidden, values = delta_values(m);
    const i64 widest = more > own ? more : own;
    const i64 latent = larger(larger(inputs_of_heads(m), m->query_rank), m->heads * m->latent_value);
    return larger(larger(widest, values), latent);
}

/* Return the offsets for `batch` rows of `nodes` nodes behind `done` earlier ones. */
static Places places(const Model *m, i64 batch, i64 nodes, i64 done, i64 threads) {
    const i64 rows = batch * nodes;
    const i64 mix_width = m->heads * m->head_dim, width = (m->heads + 2 * m->kv_heads) * m->head_dim;
    Places p = {0};
    p.x = p.depths + 2 * batch * (done + nodes);
    p.h = p.x + rows * m->hidden;
    p.qkv = p.h + rows * m->hidden;
    const i64 channels = larger(m->kernel ? 3 * m->hidden : 0, delta_channels(m));
    p.wide = p.qkv + rows * larger(larger(width, channels), m->heads * m->latent_value);
    i64 most = 0; /* corrections of a node */
    for (i64 index = 0; index < m->num_layers; index++) {
        const i64 first = corrections_of(&m->layers[index].attention_conv);
        const i64 second = corrections_of(&m->layers[index].mlp_conv);
        if (first > most) most = first;
        if (second > most) most = second;
    }
    const i64 mixed = larger(larger(m->kernel ? m->hidden : 0, mix_width), m->latent ? m->heads * query_size(m) : 0);
    p.pairs = p.wide + rows * larger(larger(2 * widest_inner(m), mixed), delta_values(m));
    p.turned = p.pairs + (m->pairs ? 2 * rows * m->hidden : 0);
    p.corrections = p.turned + (most ? rows * m->hidden : 0);
    p.own = p.corrections + rows * most;
    p.own_size = rows ? own_places(m->head_dim, done + nodes).end : 0;
    p.strange = p.own + threads * p.own_size;
    p.rounded = p.strange + (rows * m->kv_heads + 3) / 4;
    p.routed = p.rounded + (rounds(m) ? rounded_size(rows, widest_input(m)) : 0);
    if (m->experts) p.routed += p.routed % 2; /* integers of 8 bytes come first */
    p.given = p.routed + routed_places(m, rows).end;
    p.projected = p.given + 2 * rows * m->num_layers * m->input_size;
    p.gates = p.projected + rows * larger(larger(m->gated ? width + mix_width : 0, delta_outputs(m)), latent_outputs(m));
    p.end = p.gates + rows * 2 * m->value_heads;
    return p;
}

/* Return the number of floats in the workspace of `decoder_forward`. Nodes of earlier calls take less. */
i64 decoder_workspace(const Model *m, i64 batch, i64 nodes, i64 threads) {
    i64 wrong = check_shape(m, batch, nodes, 0, threads);
    return wrong ? wrong : places(m, batch, nodes, 0, threads).end;
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
    float *given = w + at.given, *projected = w + at.projected, *gates = w + at.gates;
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
    if (m->recurrent_layers) move_windows(t, m, call);
    i64 attends = 0, convolves = 0, recurs = 0; /* layers so far */
    for (i64 index = 0; index < f->m->num_layers; index++) {
        const Layer *layer = f->m->layers + index;
        const Model own = shaped(f->m, layer);
        Call stored = *f->call;
        if (layer->second) {
            stored.store = call->second_store, stored.layer_stride = call->second_layer_stride;
            stored.head_stride = call->second_head_stride;
        }
        m = &own, call = &stored;
        const int unused = index + 1 == m->num_layers && !call->num_target_layer_ids && !call->num_logits;
        if (mixes(layer)) {
            const i64 mix_width = m->heads * m->head_dim, keys = 2 * m->kv_heads * m->head_dim;
            const i64 place_of_layer = layer->head_dim ? layer->place : attends, mixed = layer->output.inputs;
            const Convolution *conv = &layer->attention_conv;
            const float *read = pairs;
            if (reads_pairs(m, index)) round_inputs(t, &layer->qkv, pairs, layer->qkv.inputs, rows, in);
            else read = input_of(t, &layer->qkv, m, call, conv, layer->before_attention, x, h, in, corrections, turned);
            const i64 queries = m->latent ? latent_queries(m) : m->gated ? 2 * mix_width : mix_width;
            if (unused && m->latent) { /* only vectors */
                const Linear part = outputs_from(&layer->qkv, queries, m->head_dim);
                project(t, &part, read, part.inputs, in, rows, projected, m->head_dim, 0);
                PIECES(t, rows, 4, first, last)
                    for (i64 node = first; node < last; node++)
                        place_vector(m, layer, call, attends, depths, node, projected + node * m->head_dim, 0);
                return;
            }
            if (unused && !layer->filter && !layer->delta_filter) { /* only keys and values */
                if (layer->shared) return;
                const Linear part = outputs_from(&layer->qkv, queries, layer->qkv.outputs - queries);
                project(t, &part, read, part.inputs, in, rows, qkv, keys, 0);
                place(t, m, layer, call, place_of_layer, depths, qkv, 0, 0, 0);
                return;
            }
            float *to = m->gated || m->latent || layer->delta_filter ? projected : qkv;
            const int whole = m->latent || layer->filter || layer->delta_filter;
            const i64 outputs = whole ? layer->qkv.outputs : queries + keys;
            const float *attended = m->latent ? qkv : wide;
            project(t, &layer->qkv, read, layer->qkv.inputs, in, rows, to, outputs, 0);
            if (layer->delta_filter) {
                if (!m->mamba) {
                    round_inputs(t, &layer->delta_gates, read, H, rows, in);
                    project(t, &layer->delta_gates, read, H, in, rows, gates, 2 * m->value_heads, 0);
                }
                delta_net(t, m, layer, call, recurs++, depths, projected, gates, qkv, wide);
            } else if (layer->filter) {
                short_convolution(t, m, layer, call, convolves++, qkv, wide);
            } else if (m->latent) {
                float *memory = w + at.rounded;
                place_latent(t, m, layer, call, attends, depths, projected, wide, memory, qkv, strange);
                attention(t, m, layer, call, attends++, strange, depths, qkv, wide, w + at.own, at.own_size);
                project_heads(t, m, &layer->values, m->latent_value, wide, mix_width, m->head_dim, memory, rows, qkv, mixed,
                              m->latent_value);
            } else {
                place(t, m, layer, call, place_of_layer, depths, qkv, m->heads, strange, m->gated ? projected : 0);
                attention(t, m, layer, call, place_of_layer, strange, depths, qkv, wide, w + at.own, at.own_size);
                if (m->gated) gate_heads(t, m, rows, projected, wide);
                attends++;
            }
            if (unused) return;
            round_inputs(t, &layer->output, attended, mixed, rows, in);
            const int added = !layer->after_attention && !conv->taps;
            project(t, &layer->output, attended, mixed, in, rows, added ? x : h, H, added);
            add_output(t, m, call, conv, layer->after_attention, corrections, h, x);
        }
        if (layer->router.weight) routed_mlp(t, m, layer, routed_at(m, w + at.routed, rows), rows, in, x, h, wide);
        else if (has_mlp(layer)) {
            const i64 width = mlp_outputs(m, m->inner);
            const Convolution *conv = &layer->mlp_conv;
            const float *read = input_of(t, &layer->gate_up, m, call, conv, layer->before_mlp, x, h, in, corrections, turned);
            project(t, &layer->gate_up, read, H, in, rows, wide, width, 0);
            PIECES(t, rows * ((m->inner + LANES - 1) / LANES), 32, first, last) activate(m, m->inner, wide, first, last);
            round_inputs(t, &layer->down, wide, width, rows, in);
            const int added = !layer->after_mlp && !conv->taps;
            project(t, &layer->down, wide, width, in, rows, added ? x : h, H, added);
            add_output(t, m, call, conv, layer->after_mlp, corrections, h, x);
        }
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
    const Forward f = {m, call, places(m, call->batch, call->nodes, call->done, threads)};
    if (!rows) return 0;
    if (call->room < f.at.end) return f.at.end;
    REFUSE(!call->workspace, POINTER);
    i64 *depths = (i64 *)(call->workspace + f.at.depths);
    for (i64 node = 0; node < call->batch * all; node++)
        depths[node] = call->parents[node] < 0 ? 0 : depths[node - node % all + call->parents[node]] + 1;
    pool_run(call->pool, run_layers, &f);
    return 0;
}

/* Return whether one more draft token per row saves time, as `GrowingChain` of decode/drafting.py. */
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
        place(t, m, m->layers + index, call, index, 0, keys_values + index * rows * width, 0, 0, 0);
}

/* Write keys and values of committed tokens for all layers of a draft network. They are computed from the target's
   hidden states, given as `embedded`, by a projection, a norm, and the key and value part of each layer's qkv. Return as
   `decoder_forward` does. */
i64 draft_context(const Model *m, const Call *call, const Linear *hidden_states, const float *norm) {
    REFUSE(!m || !call || !hidden_states || !norm || !hidden_states->weight, POINTER);
    i64 wrong = check_shape(m, call->batch, call->nodes, call->slots, pool_threads(call->pool));
    if (!wrong) wrong = check_rows(m, call);
    REFUSE(hidden_states->inputs < 1 || hidden_states->outputs != m->hidden || m->pairs || m->latent || call->done, SIZES);
    if (!wrong) wrong = check_kind(hidden_states);
    for (i64 index = 0; !wrong && index < m->num_layers; index++)
        REFUSE(!mixes(m->layers + index) || m->layers[index].delta_filter || m->layers[index].filter, POINTER);
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
