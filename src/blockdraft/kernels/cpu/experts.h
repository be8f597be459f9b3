/* Routed experts: a router chooses several of a layer's MLPs for each row. Rows that chose the same expert lie side by
   side, so its weights are read once for all of them. The numbers of a row do not depend on other rows.

   An assignment is a row with one expert that it chose. A slot is a place for one chosen expert. There are as many slots
   as experts that can be chosen at most, since loops over PIECES may not depend on what pieces write. */

/* Offsets in the memory of routed experts, in floats; those of i64 are even. */
typedef struct {
    i64 chosen, places, rows, counts, begins, experts, scores, shares, inputs, wide, rounded, end;
} RoutedPlaces;

/* chosen: expert of each assignment; places: where it lies among all, in the order of experts; rows: row of each place.
   counts: [experts], to work in. begins: first place of each slot, and the end; experts: expert of each slot. shares:
   factors of assignments. inputs: [places, hidden]; wide: [places, 2 * expert_inner]. */
typedef struct {
    i64 *chosen, *places, *rows, *counts, *begins, *experts, slots;
    float *scores, *shares, *inputs, *wide, *rounded;
} Routed;

static i64 most_slots(const Model *m, i64 rows) { return m->experts < rows * m->chosen ? m->experts : rows * m->chosen; }

static RoutedPlaces routed_places(const Model *m, i64 rows) {
    const i64 all = rows * m->chosen, slots = most_slots(m, rows);
    const i64 widest = m->hidden > m->expert_inner ? m->hidden : m->expert_inner;
    RoutedPlaces p = {0};
    if (!m->experts) return p;
    p.places = p.chosen + 2 * all;
    p.rows = p.places + 2 * all;
    p.counts = p.rows + 2 * all;
    p.begins = p.counts + 2 * m->experts;
    p.experts = p.begins + 2 * (slots + 1);
    p.scores = p.experts + 2 * slots;
    p.shares = p.scores + rows * m->experts;
    p.inputs = p.shares + all;
    p.wide = p.inputs + all * m->hidden;
    p.rounded = p.wide + all * 2 * m->expert_inner;
    p.end = p.rounded + rounded_size(all, widest);
    return p;
}

static Routed routed_at(const Model *m, float *memory, i64 rows) {
    const RoutedPlaces p = routed_places(m, rows);
    return (Routed){(i64 *)(memory + p.chosen), (i64 *)(memory + p.places), (i64 *)(memory + p.rows),
                    (i64 *)(memory + p.counts), (i64 *)(memory + p.begins), (i64 *)(memory + p.experts),
                    most_slots(m, rows), memory + p.scores, memory + p.shares, memory + p.inputs, memory + p.wide,
                    memory + p.rounded};
}

/* Mark the experts outside of a row's best groups as chosen. Of groups that are equally good the last are left out. `bias` of
   experts may be null. */
static void leave_groups(const Model *m, const float *bias, float *scores) {
    const i64 size = m->experts / m->groups;
    float sums[MOST_CHOSEN];
    for (i64 group = 0; group < m->groups; group++) {
        float first = -INFINITY, second = -INFINITY;
        for (i64 e = group * size; e < (group + 1) * size; e++) {
            const float x = bias ? scores[e] + bias[e] : scores[e];
            if (x > first) second = first, first = x;
            else if (x > second) second = x;
        }
        sums[group] = m->pair_of_group ? first + second : first;
    }
    for (i64 left = m->chosen_groups; left < m->groups; left++) {
        i64 worst = 0;
        for (i64 group = 1; group < m->groups; group++) worst = sums[group] <= sums[worst] ? group : worst;
        sums[worst] = INFINITY;
        for (i64 e = worst * size; e < (worst + 1) * size; e++) scores[e] = -1;
    }
}

/* Choose the experts of one row by the softmax of their scores, which is written over them. Of equal ones the first is
   chosen. Where scores are not finite, so are no shares. `factors` of experts, on shares, may be null. */
static void choose_experts(const Model *m, const float *factors, float *scores, i64 *chosen, float *shares) {
    const i64 E = m->experts;
    float largest = -INFINITY, sum = 0, total = 0;
    for (i64 e = 0; e < E; e++) largest = scores[e] > largest ? scores[e] : largest;
    i64 e = 0;
    for (; e + LANES <= E; e += LANES) *(vec *)(scores + e) = exp_vec(*(const vec *)(scores + e) - largest);
    for (; e < E; e++) scores[e] = exp_vec(splat(scores[e] - largest))[0];
    for (e = 0; e < E; e++) sum += scores[e];
    const int finite = sum >= 1 && sum <= (float)E; /* the largest adds 1 */
    if (finite && m->groups > 1) leave_groups(m, 0, scores);
    for (i64 k = 0; k < m->chosen; k++) {
        i64 best = finite ? 0 : k;
        for (e = 1; finite && e < E; e++) best = scores[e] > scores[best] ? e : best;
        chosen[k] = best;
        shares[k] = finite ? scores[best] / sum : NAN;
        total += shares[k];
        if (finite) scores[best] = -1;
    }
    for (i64 k = 0; m->normed && k < m->chosen; k++) shares[k] /= total;
    for (i64 k = 0; factors && k < m->chosen; k++) shares[k] *= factors[chosen[k]];
    for (i64 k = 0; k < m->chosen; k++) shares[k] *= m->share_scale;
}

/* Choose the experts of one row by the sigmoids of their scores, which are written over them, plus a bias. The shares are
   the sigmoids. Of equal ones the first is chosen. */
static void choose_by_sigmoid(const Model *m, const float *bias, float *scores, i64 *chosen, float *shares) {
    const i64 E = m->experts;
    float total = 1e-6f; /* to avoid division by zero */
    i64 e = 0;
    for (; e + LANES <= E; e += LANES) *(vec *)(scores + e) = sigmoid(*(const vec *)(scores + e));
    for (; e < E; e++) scores[e] = sigmoid(splat(scores[e]))[0];
    int finite = 1;
    for (e = 0; e < E; e++) finite &= scores[e] >= 0 && scores[e] + bias[e] == scores[e] + bias[e];
    if (finite && m->groups > 1) leave_groups(m, bias, scores);
    for (i64 k = 0; k < m->chosen; k++) {
        i64 best = finite ? -1 : k;
        for (e = 0; finite && e < E; e++)
            if (scores[e] >= 0 && (best < 0 || scores[e] + bias[e] > scores[best] + bias[best])) best = e;
        chosen[k] = best;
        shares[k] = finite ? scores[best] : NAN;
        total += shares[k];
        if (finite) scores[best] = -1;
    }
    for (i64 k = 0; k < m->chosen; k++) shares[k] = (m->normed ? shares[k] / total : shares[k]) * m->share_scale;
}

/* Order the assignments by expert. */
static void group_rows(const Model *m, i64 rows, Routed r) {
    const i64 all = rows * m->chosen;
    i64 slot = 0, place = 0;
    for (i64 e = 0; e < m->experts; e++) r.counts[e] = 0;
    for (i64 a = 0; a < all; a++) r.counts[r.chosen[a]]++;
    for (i64 e = 0; e < m->experts; e++) {
        const i64 count = r.counts[e];
        if (!count) continue;
        r.experts[slot] = e, r.begins[slot++] = place;
        r.counts[e] = place, place += count;
    }
    for (i64 s = slot; s < r.slots; s++) r.experts[s] = 0, r.begins[s] = place;
    r.begins[r.slots] = place;
    for (i64 a = 0; a < all; a++) {
        r.places[a] = r.counts[r.chosen[a]]++;
        r.rows[r.places[a]] = a / m->chosen;
    }
}

/* Return the memory of the rounded inputs of a slot's rows. */
static Rounded rounded_of_slot(Routed r, i64 slot, i64 inputs) {
    const i64 begin = r.begins[slot], count = r.begins[slot + 1] - begin;
    return rounded_at(r.rounded + rounded_size(begin, inputs), count, inputs);
}

/* Multiply the inputs of each slot, `xs` numbers apart, with the `outputs` outputs of its expert. `l` holds all experts one
   behind the other, each in whole blocks. */
static void project_experts(Thread *t, const Linear *l, i64 outputs, Routed r, const float *x, i64 xs, float *y) {
    const i64 blocks = outputs / LANES;
    PIECES(t, r.slots * blocks, TOGETHER, first, last)
        for (i64 work = first, end; work < last; work = end) {
            const i64 slot = work / blocks, before = slot * blocks, begin = r.begins[slot];
            const i64 rows = r.begins[slot + 1] - begin;
            end = before + blocks < last ? before + blocks : last;
            if (!rows) continue;
            const Linear own = outputs_from(l, r.experts[slot] * outputs, outputs);
            const Rounded in = rounded_of_slot(r, slot, l->inputs);
            float *out = y + begin * outputs;
            if (IS_INTEGER(l)) integer_project(&own, in, rows, work - before, end - before, out, outputs, 0);
#if NARROW
            else
                project_blocks(&own, (const input *)in.codes, ROW_SIZE(l->inputs), rows, work - before, end - before, out,
                               outputs, 0);
            (void)x, (void)xs;
#else
            else project_blocks(&own, x + begin * xs, xs, rows, work - before, end - before, out, outputs, 0);
#endif
        }
}

/* Round the inputs of all slots, `xs` numbers apart. With `h` they are copied from there first. */
static void round_slots(Thread *t, const Linear *l, Routed r, const float *h, float *x, i64 xs) {
    if (!h && !IS_ROUNDED(l)) return;
    PIECES(t, r.slots, 1, first, last)
        for (i64 slot = first; slot < last; slot++) {
            const i64 begin = r.begins[slot], rows = r.begins[slot + 1] - begin;
            for (i64 place = begin; h && place < begin + rows; place++)
                memcpy(x + place * xs, h + r.rows[place] * xs, 4 * xs);
            if (IS_ROUNDED(l) && rows) round_rows(l, x + begin * xs, xs, rows, rounded_of_slot(r, slot, l->inputs), 0, rows);
        }
}

/* Norm the output of the shared expert, and add the normed output of the experts of one row. */
static void add_experts(const Model *m, const Layer *layer, Routed r, i64 row, float *to) {
    const i64 H = m->hidden, K = m->chosen, *places = r.places + row * K;
    const float *shares = r.shares + row * K;
    float *sum = r.inputs + places[0] * H;
    for (i64 i = 0; i < H; i++) sum[i] *= shares[0];
    for (i64 k = 1; k < K; k++)
        for (i64 i = 0; i < H; i++) sum[i] += shares[k] * r.inputs[places[k] * H + i];
    rms_norm(to, layer->after_shared, m->eps, H, to, 0);
    rms_norm(sum, layer->after_experts, m->eps, H, to, 1);
}

/* Add the MLP of a layer with routed experts to x. h and `wide` are memory for normed rows and for the shared expert. */
static void routed_mlp(Thread *t, const Model *m, const Layer *layer, Routed r, i64 rows, Rounded in, float *x, float *h,
                       float *wide) {
    const i64 H = m->hidden, K = m->chosen, inner = m->expert_inner, shared = m->shared_inner;
    const int beside = layer->before_router != 0; /* the shared expert, with norms of their own */
    norm_and_round(t, &layer->router, x, beside ? layer->before_router : layer->before_mlp, m->eps, rows, h, in);
    project(t, &layer->router, h, H, in, rows, r.scores, m->experts, 0);
    PIECES(t, rows, 1, first, last)
        for (i64 row = first; row < last; row++) {
            float *scores = r.scores + row * m->experts, *shares = r.shares + row * K;
            if (m->sigmoid) choose_by_sigmoid(m, layer->expert_bias, scores, r.chosen + row * K, shares);
            else choose_experts(m, layer->expert_scale, scores, r.chosen + row * K, shares);
        }
    PIECES(t, 1, 1, first, last) if (first < last) group_rows(m, rows, r);
    if (beside) PIECES(t, rows, 1, first, last) norm_rows(x, layer->before_experts, m->eps, H, first, last, h, 0);
    round_slots(t, &layer->gate_up, r, h, r.inputs, H);
    project_experts(t, &layer->gate_up, mlp_outputs(m, inner), r, r.inputs, H, r.wide);
    PIECES(t, rows * K * ((inner + LANES - 1) / LANES), 32, first, last) activate(m, inner, r.wide, first, last);
    round_slots(t, &layer->down, r, 0, r.wide, mlp_outputs(m, inner));
    project_experts(t, &layer->down, H, r, r.wide, mlp_outputs(m, inner), r.inputs);
    if (shared) {
        if (beside) norm_and_round(t, &layer->shared_gate_up, x, layer->before_mlp, m->eps, rows, h, in);
        else {
            if (layer->shared_gate.weight) {
                round_inputs(t, &layer->shared_gate, h, H, rows, in);
                project(t, &layer->shared_gate, h, H, in, rows, r.scores, 1, 0);
            }
            round_inputs(t, &layer->shared_gate_up, h, H, rows, in);
        }
        project(t, &layer->shared_gate_up, h, H, in, rows, wide, mlp_outputs(m, shared), 0);
        PIECES(t, rows * ((shared + LANES - 1) / LANES), 32, first, last) activate(m, shared, wide, first, last);
        round_inputs(t, &layer->shared_down, wide, mlp_outputs(m, shared), rows, in);
        project(t, &layer->shared_down, wide, mlp_outputs(m, shared), in, rows, h, H, 0);
    }
    PIECES(t, rows, 1, first, last)
        for (i64 row = first; row < last; row++) {
            float *to = x + row * H, *own = h + row * H;
            if (beside) add_experts(m, layer, r, row, own);
            if (beside) rms_norm(own, layer->after_mlp, m->eps, H, to, 1);
            if (beside) continue;
            for (i64 k = 0; k < K; k++) {
                const float share = r.shares[row * K + k], *from = r.inputs + r.places[row * K + k] * H;
                for (i64 i = 0; i < H; i++) to[i] += share * from[i];
            }
            if (!shared) continue;
            const float gate = layer->shared_gate.weight ? r.scores[row] : INFINITY;
            const float share = gate == gate ? sigmoid(splat(gate))[0] : NAN;
            for (i64 i = 0; i < H; i++) to[i] += share * h[row * H + i];
        }
}
