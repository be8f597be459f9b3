/* Latent attention (MLA). A token has one vector for the keys and values of all heads, which is followed by channels that
   are rotated: the key of a single key/value head, whose value it is too. Only its first `latent` numbers count as the
   value. A query is multiplied by the matrix that would project vectors to keys of its head, and the output of attention
   by the one that would project them to values. Matrices of all heads lie one behind the other. */

static i64 query_size(const Model *m) { return m->unrotated + m->rotated; }

/* Return the outputs of the qkv projection that queries are made from. */
static i64 latent_queries(const Model *m) { return m->query_rank ? m->query_rank : m->heads * query_size(m); }

static i64 latent_outputs(const Model *m) { return m->latent ? latent_queries(m) + m->head_dim : 0; }

/* Return the inputs of all heads, each in whole eights, as memory for rounded rows counts them. */
static i64 inputs_of_heads(const Model *m) {
    const i64 most = m->unrotated > m->latent ? m->unrotated : m->latent;
    return m->latent ? m->heads * ((most + 7) / 8 * 8) : 0;
}

static i64 check_latent(const Model *m, const Layer *layer) {
    REFUSE(m->latent < 1 || m->unrotated < 1 || m->unrotated > MOST || m->latent_value < 1 || m->query_rank < 0, SIZES);
    REFUSE(m->rotated < 1 || m->head_dim != m->latent + m->rotated || m->kv_heads != 1 || m->gated || m->joint_norm, SIZES);
    REFUSE(m->latent % LANES || m->latent_value % LANES || latent_queries(m) % LANES || m->latent_value > MOST, SIZES);
    REFUSE(layer->head_dim || layer->filter || layer->attention_conv.taps || layer->mlp_conv.taps, SIZES);
    REFUSE(!layer->key_norm || (m->query_rank && !layer->query_norm) || !layer->cos || !layer->sin, POINTER);
    REFUSE(!layer->before_attention || (has_mlp(layer) && !layer->before_mlp), POINTER);
    i64 wrong = check_linear(&layer->qkv, m->hidden, latent_outputs(m));
    if (!wrong && m->query_rank) wrong = check_linear(&layer->queries, m->query_rank, m->heads * query_size(m));
    if (!wrong) wrong = check_linear(&layer->absorbed_keys, m->unrotated, m->heads * m->latent);
    if (!wrong) wrong = check_linear(&layer->values, m->latent, m->heads * m->latent_value);
    return wrong ? wrong : check_linear(&layer->output, m->heads * m->latent_value, m->hidden);
}

/* Multiply the inputs of each head with its `outputs` outputs. Those of a row's heads are `x_apart` and `y_apart` numbers
   apart, and those of rows `xs` and `ys`. */
static void project_heads(Thread *t, const Model *m, const Linear *l, i64 outputs, const float *x, i64 xs, i64 x_apart,
                          float *memory, i64 rows, float *y, i64 ys, i64 y_apart) {
    const i64 blocks = outputs / LANES, size = rounded_size(rows, l->inputs);
    if (IS_ROUNDED(l))
        PIECES(t, m->heads, 1, first, last)
            for (i64 head = first; head < last; head++)
                round_rows(l, x + head * x_apart, xs, rows, rounded_at(memory + head * size, rows, l->inputs), 0, rows);
    PIECES(t, m->heads * blocks, TOGETHER, first, last)
        for (i64 work = first, end; work < last; work = end) {
            const i64 head = work / blocks, before = head * blocks;
            end = before + blocks < last ? before + blocks : last;
            const Linear own = outputs_from(l, head * outputs, outputs);
            const Rounded in = rounded_at(memory + head * size, rows, l->inputs);
            float *out = y + head * y_apart;
            if (IS_INTEGER(l)) integer_project(&own, in, rows, work - before, end - before, out, ys, 0);
#if NARROW
            else
                project_blocks(&own, (const input *)in.codes, ROW_SIZE(l->inputs), rows, work - before, end - before, out,
                               ys, 0);
#else
            else project_blocks(&own, x + head * x_apart, xs, rows, work - before, end - before, out, ys, 0);
#endif
        }
}

/* Norm the vector of a node at `x`, rotate the channels behind it, and write both to the store. `strange`, unless null,
   gets a 1 if they are not finite, or not in the dtype of the store. */
static void place_vector(const Model *m, const Layer *layer, const Call *call, i64 index, const i64 *depths, i64 node,
                         float *x, uint8_t *strange) {
    const i64 D = m->head_dim, row = node / call->nodes, slot = call->lengths[row] + call->done + node % call->nodes;
    rms_norm(x, layer->key_norm, m->latent_eps, m->latent, x, 0);
    rotate(m, layer, 0, x + m->latent, position_of(m, call, depths, node));
    store_head(call, index * call->layer_stride + (call->starts[row] + slot) * SLOT(D), D, x);
    if (strange) strange[node] = any_strange(x, D);
}

/* Write the vectors of all nodes to the store, and their queries to `qkv`, [rows, heads + 2, head_dim]. `projected` is the
   output of the qkv projection, and `wide` memory. */
static void place_latent(Thread *t, const Model *m, const Layer *layer, const Call *call, i64 index, const i64 *depths,
                         float *projected, float *wide, float *memory, float *qkv, uint8_t *strange) {
    const i64 rows = call->batch * call->nodes, D = m->head_dim, outputs = latent_outputs(m), Q = m->query_rank;
    const i64 size = query_size(m), width = (m->heads + 2) * D, stride = Q ? m->heads * size : outputs;
    const Rounded in = rounded_at(memory, rows, Q);
    PIECES(t, rows, TILE_ROWS, first, last) {
        for (i64 node = first; node < last; node++) {
            float *x = projected + node * outputs;
            place_vector(m, layer, call, index, depths, node, x + outputs - D, strange);
            if (Q) rms_norm(x, layer->query_norm, m->latent_eps, Q, x, 0);
        }
        if (Q) round_rows(&layer->queries, projected, outputs, rows, in, first, last);
    }
    if (Q) project(t, &layer->queries, projected, outputs, in, rows, wide, stride, 0);
    const float *queries = Q ? wide : projected;
    project_heads(t, m, &layer->absorbed_keys, m->latent, queries, stride, size, memory, rows, qkv, width, D);
    PIECES(t, rows * m->heads, 8, first, last)
        for (i64 work = first; work < last; work++) {
            const i64 node = work / m->heads, head = work % m->heads;
            float *to = qkv + node * width + head * D + m->latent;
            memcpy(to, queries + node * stride + head * size + m->unrotated, 4 * m->rotated);
            rotate(m, layer, 0, to, position_of(m, call, depths, node));
        }
}
