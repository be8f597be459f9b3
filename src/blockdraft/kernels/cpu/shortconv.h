/* Short convolutions (LFM2). The qkv projection of such a layer gives each row three vectors of `hidden` numbers: a gate, a
   gate of the output, and a value. The convolution runs over gate * value of the row and of the tokens before it on its
   path. Inputs of committed tokens are in their KV slots, like keys and values. */
#define CHANNELS 64 /* that are convolved at once */

/* Convolve the inputs of layer number `index` among those with a convolution, and write them to their slots. `projected` is
   [rows, 3 * hidden], and `out` [rows, hidden]. */
static void short_convolution(Thread *t, const Model *m, const Layer *layer, const Call *call, i64 index,
                              const float *projected, float *out) {
    const i64 H = m->hidden, N = call->nodes, done = call->done, parts = (H + CHANNELS - 1) / CHANNELS;
    PIECES(t, call->batch * N * parts, 4, first, last)
        for (i64 work = first; work < last; work++) {
            const i64 node = work / parts, row = node / N, from = work % parts * CHANNELS, length = call->lengths[row];
            const i64 count = H - from < CHANNELS ? H - from : CHANNELS, *parents = call->parents + row * (done + N);
            const float *x = projected + node * 3 * H + from;
            float *store = call->inputs + (index * call->slots + call->starts[row] + length) * H + from;
            float product[CHANNELS], sum[CHANNELS];
            i64 at = done + node % N; /* a node, or -1 for the last committed token, -2 for the one before, ... */
            for (i64 i = 0; i < count; i++) product[i] = x[i] * x[2 * H + i];
            memcpy(store + at * H, product, 4 * count);
            for (i64 i = 0; i < count; i++) sum[i] = layer->filter[from + i] * product[i];
            for (i64 tap = 1; tap < m->kernel; tap++) {
                at = at >= 0 ? parents[at] : at - 1;
                if (at < -length) break;
                const float *in = store + at * H, *weight = layer->filter + tap * H + from;
                if (at >= done) { /* of this call; its input may not be in its slot yet */
                    const float *other = projected + (row * N + at - done) * 3 * H + from;
                    for (i64 i = 0; i < count; i++) product[i] = other[i] * other[2 * H + i];
                    in = product;
                }
                for (i64 i = 0; i < count; i++) sum[i] += weight[i] * in[i];
            }
            for (i64 i = 0; i < count; i++) out[node * H + from + i] = x[H + i] * sum[i];
        }
}
