/* Compares attention with sums in double precision, at all sizes where something is left over, and the bits of a chain's nodes
   with those that each gets alone and in a tree; test_attention.py builds it with sanitizers and for processors that Python
   does not run on here. Its argument N lets it run every Nth case. Prints the number of cases and a digest of the numbers of
   heads that all processors have, or the wrong case. */
#include <stdio.h>
#include SOURCE

static uint32_t seed = 1;

static uint32_t digest = 1;

static float random_number(void) { /* in -1 .. 1 */
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 9) / 4194304.0f - 1;
}

static void fill(char *slot, i64 D) {
    const float factor = 1 / 127.0f;
    for (i64 d = 0; d < D; d++) {
        if (STORE == INT8) ((int8_t *)slot)[d] = (int8_t)(127 * random_number());
        else store_one(slot, d, STORE, random_number());
    }
    if (STORE == INT8) memcpy(slot + D, &factor, 4);
}

static double number(const char *slot, i64 D, i64 d) {
    float factor;
    if (STORE != INT8) return load_one(slot, d, STORE);
    memcpy(&factor, slot + D, 4);
    return (double)((const int8_t *)slot)[d] * factor;
}

static int expected(const Layer *layer, const Call *call, const i64 *depths, i64 node, i64 slot) {
    const i64 length = call->lengths[0], other = slot - length;
    if (slot < length)
        return slot >= length - call->reach && (!layer->window || slot > length + depths[node] - layer->window);
    if (layer->window && llabs(depths[other] - depths[node]) >= layer->window) return 0;
    for (i64 seen = node; seen >= 0; seen = call->parents[seen])
        if (seen == other) return 1;
    return layer->whole_block;
}

/* Round a query, times `scale`, as attention does. */
static void round_query(const float *x, i64 D, float scale, double *to) {
    float largest = 0;
    for (i64 d = 0; d < D; d++) largest = fabsf(x[d]) > largest ? fabsf(x[d]) : largest;
    for (i64 d = 0; d < D; d++) {
        uint16_t half;
        to[d] = (double)x[d] * scale;
        if (STORE == INT8) to[d] = (double)scale * largest * rint((double)x[d] / largest * MOST_QUERY) / MOST_QUERY;
        if (STORE == BFLOAT16) {
            store_one(&half, 0, BFLOAT16, x[d] * scale);
            to[d] = load_one(&half, 0, BFLOAT16);
        }
    }
}

/* Largest error of a forward's attention, infinite if a number is not finite. */
static double error_of(i64 D, i64 length, i64 group, i64 nodes, int mode) {
    const i64 kv = 2, heads = kv * group, slots = length + nodes, row = SLOT(D) * BYTES(STORE), width = (heads + 2 * kv) * D;
    const i64 start = 0;
    seed = 1;
    Model m = {.heads = heads, .kv_heads = kv, .head_dim = D, .num_layers = 1, .attention_scale = 1 / sqrtf(D)};
    float sinks[64];
    for (i64 i = 0; i < heads; i++) sinks[i] = random_number();
    Layer layer = {.window = mode == 1 ? 7 : 0, .whole_block = mode == 2, .sinks = mode == 5 ? sinks : 0};
    if (mode == 3) m.attention_cap = 2;
    char *store = malloc(slots * 2 * kv * row);
    for (i64 slot = 0; slot < slots * 2 * kv; slot++) fill(store + slot * row, D);
    float *qkv = malloc(4 * nodes * width), *mixed = malloc(4 * nodes * heads * D);
    /* In bfloat16 scores are so large that weights, although they are rounded, show the order of sums. */
    for (i64 i = 0; i < nodes * width; i++) qkv[i] = (STORE == BFLOAT16 ? 60 : 3) * random_number();
    i64 *parents = malloc(8 * nodes), *depths = malloc(8 * nodes);
    for (i64 node = 0; node < nodes; node++) {
        parents[node] = !node ? -1 : mode == 4 ? (node - 1) / 2 : node - 1;
        depths[node] = node ? depths[parents[node]] + 1 : 0;
    }
    uint8_t *strange = calloc(kv * nodes, 1);
    strange[nodes - 1] = nodes % 2; /* the first head's sums leave out what is not seen */
    float *memory = malloc(4 * own_places(D, nodes).end);
    double *weights = malloc(8 * slots), *query = malloc(8 * D), worst = 0;
    Call call = {.batch = 1, .nodes = nodes, .lengths = &length, .starts = &start, .parents = parents, .slots = slots};
    call.store = store, call.head_stride = slots * SLOT(D), call.reach = mode ? MOST : 50;
    Thread alone = {.threads = 1};
    attention(&alone, &m, &layer, &call, 0, strange, depths, qkv, mixed, memory, 0);
    for (i64 work = 0; work < nodes * heads; work++) {
        const i64 node = work / heads, head = work % heads;
        const char *keys = store + head / group * slots * row, *values = keys + kv * slots * row;
        double most = mode == 5 ? sinks[head] : -INFINITY, total = 0;
        round_query(qkv + node * width + head * D, D, m.attention_scale, query);
        for (i64 slot = 0; slot < slots; slot++) {
            double score = 0;
            for (i64 d = 0; d < D; d++) score += query[d] * number(keys + slot * row, D, d);
            if (m.attention_cap) score = m.attention_cap * tanh(score / m.attention_cap);
            weights[slot] = expected(&layer, &call, depths, node, slot) ? score : -INFINITY;
            if (weights[slot] > most) most = weights[slot];
        }
        if (mode == 5) total = exp(sinks[head] - most);
        for (i64 slot = 0; slot < slots; slot++) total += weights[slot] = exp(weights[slot] - most);
        for (i64 d = 0; d < D; d++) {
            double right = 0;
            for (i64 slot = 0; slot < slots; slot++) right += weights[slot] / total * number(values + slot * row, D, d);
            const double error = fabs(right - mixed[work * D + d]);
            if (!(error <= worst)) worst = error == error ? error : INFINITY;
        }
    }
    for (i64 i = 0; D % 32 == 0 && i < nodes * heads * D; i++) {
        uint32_t bits;
        memcpy(&bits, mixed + i, 4);
        digest = digest * 31 + bits;
    }
    free(query), free(store), free(qkv), free(mixed), free(parents), free(depths), free(strange), free(memory), free(weights);
    return worst;
}

/* Compute attention of nodes whose keys and values lie in `store`. */
static void attend_to(const Model *m, const Layer *layer, char *store, i64 slots, i64 length, i64 nodes, const i64 *parents,
                      const uint8_t *strange, const float *qkv, float *mixed) {
    const i64 start = 0, D = m->head_dim;
    i64 *depths = malloc(8 * nodes);
    for (i64 node = 0; node < nodes; node++) depths[node] = parents[node] < 0 ? 0 : depths[parents[node]] + 1;
    float *memory = malloc(4 * own_places(D, nodes).end);
    Call call = {.batch = 1, .nodes = nodes, .lengths = &length, .starts = &start, .parents = parents, .slots = slots};
    call.store = store, call.head_stride = slots * SLOT(D), call.reach = MOST;
    Thread alone = {.threads = 1};
    attention(&alone, m, layer, &call, 0, strange, depths, qkv, mixed, memory, 0);
    free(depths), free(memory);
}

/* Return whether the nodes of a chain get other bits alone, or between branches whose values are NaN if `invalid`. */
static int differs(i64 D, i64 length, i64 group, i64 nodes, i64 window, int invalid) {
    const i64 kv = 2, heads = kv * group, all = 2 * nodes, slots = length + all, row = SLOT(D) * BYTES(STORE);
    const i64 width = (heads + 2 * kv) * D, size = heads * D;
    const float nan = NAN;
    seed = 1;
    Model m = {.heads = heads, .kv_heads = kv, .head_dim = D, .num_layers = 1, .attention_scale = 1 / sqrtf(D)};
    Layer layer = {.window = window};
    char *store = malloc(slots * 2 * kv * row), *tree = malloc(slots * 2 * kv * row);
    for (i64 slot = 0; slot < slots * 2 * kv; slot++) fill(store + slot * row, D);
    float *qkv = malloc(4 * all * width), *own = malloc(4 * all * width), *rest = malloc(4 * all * size);
    float *chain = malloc(4 * all * size), *mixed = malloc(4 * all * size);
    for (i64 i = 0; i < all * width; i++) own[i] = qkv[i] = (STORE == BFLOAT16 ? 60 : 3) * random_number();
    i64 *parents = malloc(8 * all);
    uint8_t *strange = calloc(kv * all, 1);
    for (i64 node = 0; node < nodes; node++) parents[node] = node - 1;
    attend_to(&m, &layer, store, slots, length, nodes, parents, strange, qkv, chain);
    int different = 0;
    for (i64 node = 0; node < nodes; node++) {
        attend_to(&m, &layer, store, slots, length + node, 1, parents, strange, qkv + node * width, rest);
        different |= memcmp(rest, chain + node * size, 4 * size) != 0;
    }
    memcpy(tree, store, slots * 2 * kv * row);
    for (i64 node = 0; node < all; node++) { /* nodes with even numbers are the chain, others have no children */
        parents[node] = node % 2 ? node - 1 : node - 2 < 0 ? -1 : node - 2;
        memcpy(own + node * width, qkv + node / 2 * width, 4 * width);
        for (i64 head = 0; head < 2 * kv; head++) {
            char *to = tree + (head * slots + length + node) * row;
            memcpy(to, store + (head * slots + length + node / 2) * row, row);
            if (node % 2 && head >= kv && invalid) {
                if (STORE == INT8) memcpy(to + D, &nan, 4);
                else store_one(to, 0, STORE, nan);
                strange[(head - kv) * all + node] = 1;
            } else if (node % 2) fill(to, D);
        }
    }
    attend_to(&m, &layer, tree, slots, length, all, parents, strange, own, mixed);
    for (i64 node = 0; node < nodes; node++)
        different |= memcmp(mixed + 2 * node * size, chain + node * size, 4 * size) != 0;
    /* A number that is not finite is seen in what attends to it. */
    if (invalid && nodes > 1) different |= mixed[size] == mixed[size];
    free(store), free(tree), free(qkv), free(own), free(rest), free(chain), free(mixed), free(parents), free(strange);
    return different;
}

int main(int count, char **arguments) {
    const i64 sizes[] = {LANES, 3 * LANES, 32, 64, 80, 96, 128, 256}, lengths[] = {0, 1, 31, 33, 64, 65, 200};
    const i64 groups[] = {1, 3, 7}, counts[] = {1, 2, 5, 9, 40};
    const double most = STORE == BFLOAT16 ? 3e-3 : STORE == INT8 ? 8e-3 : 1e-5; /* as weights are rounded */
    const i64 every = count > 1 ? atoi(arguments[1]) : 1;
    i64 cases = 0;
    for (int a = 0; a < 8; a++)
        for (int b = 0; b < 7; b++)
            for (int c = 0; c < 3; c++)
                for (int d = 0; d < 5; d++) {
                    if (a > 3 && (b + c + d) % 4) continue; /* takes long with large heads */
                    if (cases++ % every) continue;
                    const double error = error_of(sizes[a], lengths[b], groups[c], counts[d], (a + b + c + d) % 6);
                    const i64 window = (a + b + d) % 2 ? 0 : 7;
                    if (error < most && !differs(sizes[a], lengths[b], groups[c], counts[d], window, (b + c + d) % 2)) continue;
                    printf("%d, %d, %d, %d: %g\n", a, b, c, d, error);
                    return 1;
                }
    printf("%d %08x\n", (int)cases, digest);
    return 0;
}
