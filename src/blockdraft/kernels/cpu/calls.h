/* Interface between Python (library.py) and C: structs with a description of their fields, and the problems of calls. */
#include <stddef.h>

#define MEMBER(S, type, name) type name;
#define ENTRY(S, type, name) {#S, #name, offsetof(S, name), sizeof(((S *)0)->name)},
#define STRUCT(S) typedef struct { S##_FIELDS(MEMBER, S) } S;
#define DESCRIBED(S) S##_FIELDS(ENTRY, S) {#S, "", 0, sizeof(S)},

/* weight: [blocks, inputs, LANES] of floats; with 8 bits [blocks, inputs / 4, LANES, 4]; with 4 bits [blocks,
   inputs / 8, LANES, 4], of each 8 inputs the first 4 in the low halves of bytes; with 6 bits [blocks, inputs / 16, 3,
   LANES, 4], of each 16 inputs the low 4 bits as with 4 bits, then bytes with the high 2 bits of 4 inputs that are 4 apart.
   scale, and offset or null: [blocks, inputs / group, LANES], each FLOAT32 or FLOAT16. If span is not 0 they are nested:
   INT8 times a unit, FLOAT16 [blocks, inputs / group / span, LANES]. Codes of 6 bits mean 32 less, and their scales are
   nested. INT8 and FLOAT4 have no span, and FLOAT4 no offset. bias: [blocks * LANES] or null. */
#define Linear_FIELDS(FIELD, S)                                                                           \
    FIELD(S, const void *, weight) FIELD(S, const void *, scale) FIELD(S, const void *, offset)           \
    FIELD(S, const float *, bias) FIELD(S, i64, inputs) FIELD(S, i64, outputs) FIELD(S, i64, kind)        \
    FIELD(S, i64, group) FIELD(S, i64, scale_kind) FIELD(S, i64, offset_kind)                             \
    FIELD(S, const uint16_t *, scale_unit) FIELD(S, const uint16_t *, offset_unit) FIELD(S, i64, span)
STRUCT(Linear)

/* Convolutions of a layer's input and output along the nodes of a row. base: taps [2, taps, hidden]. A projection of the
   input adds corrections to them, [2, taps, groups] for each node. Without convolutions, taps is 0. */
#define Convolution_FIELDS(FIELD, S)                                                                      \
    FIELD(S, Linear, projection) FIELD(S, const float *, base) FIELD(S, i64, taps) FIELD(S, i64, groups)
STRUCT(Convolution)

/* Norms may be null, but the first two only where the output is normed. whole_block: nodes attend to all nodes of their row, not to ancestors only.
   sinks: further scores of each head, or null. With a router (experts.h) gate_up and down hold all experts, one behind the
   other; expert_bias is [experts], with `sigmoid`. filter: null, or [kernel, hidden] of a short convolution in the place of
   attention (shortconv.h). With before_router the experts of all rows stand beside the shared one (Gemma 4): router and
   experts have norms of their own, outputs of both are normed, and expert_scale, [experts], are factors on shares.

   head_dim is not 0 if layers differ in shape (Gemma 4). Then head_dim, kv_heads and inner are those of the layer, values
   are normed without weights, and outputs are multiplied by `scale`. place: where the layer's keys and values are among
   those of its store, which is the second one with `second`. shared: they are those that an earlier layer wrote.
   values_are_keys: values are keys before their norm. input_gate and input_projection add the layer's embedding of the
   token, normed by after_input.

   delta_filter: null, or [delta_kernel, channels] of a recurrent net in the place of attention (deltanet.h). Of a gated delta
   net qkv gives channels and the gate of the output, and delta_gates shares and decays. Of Mamba-2 qkv gives gate, channels
   and step sizes. fading, fading_bias: [value_heads], factors on decays and what is added to them before. delta_norm:
   [value_dim], or [values] in Mamba-2, where delta_bias, [channels], is the filter's bias, and skip, [value_heads], are
   factors on values that are added to outputs.

   With latent attention (latent.h) qkv gives what queries are made from, by `queries` if the model has a query_rank, then
   the vector of the token and what is rotated. query_norm and key_norm are those of both vectors. absorbed_keys and values
   hold the matrices of all heads.

   A layer may lack qkv and output, or gate_up and down. */
#define Layer_FIELDS(FIELD, S)                                                                            \
    FIELD(S, Linear, qkv) FIELD(S, Linear, output) FIELD(S, Linear, gate_up) FIELD(S, Linear, down)       \
    FIELD(S, const float *, before_attention) FIELD(S, const float *, before_mlp)                         \
    FIELD(S, const float *, after_attention) FIELD(S, const float *, after_mlp)                           \
    FIELD(S, const float *, query_norm) FIELD(S, const float *, key_norm)                                 \
    FIELD(S, const float *, cos) FIELD(S, const float *, sin)                                             \
    FIELD(S, i64, window) FIELD(S, i64, whole_block)                                                      \
    FIELD(S, Convolution, attention_conv) FIELD(S, Convolution, mlp_conv)                                 \
    FIELD(S, Linear, router) FIELD(S, Linear, shared_gate_up) FIELD(S, Linear, shared_down)               \
    FIELD(S, Linear, shared_gate) FIELD(S, const float *, expert_bias) FIELD(S, const float *, filter)    \
    FIELD(S, const float *, sinks) FIELD(S, const float *, before_router)                                 \
    FIELD(S, const float *, before_experts) FIELD(S, const float *, after_shared)                         \
    FIELD(S, const float *, after_experts) FIELD(S, const float *, expert_scale)                          \
    FIELD(S, Linear, input_gate) FIELD(S, Linear, input_projection) FIELD(S, const float *, after_input)  \
    FIELD(S, i64, head_dim) FIELD(S, i64, kv_heads) FIELD(S, i64, inner) FIELD(S, i64, place)             \
    FIELD(S, i64, second) FIELD(S, i64, shared) FIELD(S, i64, values_are_keys) FIELD(S, float, scale)     \
    FIELD(S, Linear, delta_gates) FIELD(S, const float *, delta_filter) FIELD(S, const float *, fading)   \
    FIELD(S, const float *, fading_bias) FIELD(S, const float *, delta_norm)                              \
    FIELD(S, const float *, delta_bias) FIELD(S, const float *, skip)                                     \
    FIELD(S, Linear, queries) FIELD(S, Linear, absorbed_keys) FIELD(S, Linear, values)
STRUCT(Layer)

/* max_positions: size of the tables cos and sin. pairs: whether the input is a token's embedding and a hidden state, each
   normed, side by side. `joined` projects them to the input of the first layer. If it has no weight, qkv of the first
   layer reads the pairs, and its output is added to the hidden state, or with normed_stream to the normed one. rotated:
   number of first channels of a head that are rotated; 0 is all. experts, chosen: number of routed experts, and of those
   that a row chooses. expert_inner, shared_inner: inner size of each, and of the one that all rows use, or 0. normed:
   whether the shares of those that are chosen sum to one. sigmoid: whether shares are sigmoids of scores, and not
   softmaxes. share_scale: factor on shares. kernel: tokens that short convolutions read. clamp_alpha, clamp_limit: those
   of a clamped SwiGLU; without a limit there is none. head_dim, kv_heads, inner: the largest, if layers differ. input_size:
   size of each layer's embedding of a token, or 0. All of a token are a row of input_table; input_projection of its
   embedding is normed by input_norm and added. gated: whether qkv gives each head's query, then its gate, which the output
   of attention is multiplied with. key_heads to recurrent_layers: shape of gated delta nets, tokens that their
   convolutions read, whether value heads that share a key head are key_heads apart, and number of such layers.
   joint_norm: whether query_norm spans the queries of all heads, and key_norm all keys. mamba: whether recurrent nets are
   Mamba-2. delta_eps: eps of their norms. groups, chosen_groups: experts of a row are chosen from so many of the groups of
   neighbours, those whose best one sums to most, or best two with pair_of_group; 0 or 1 is no choice. latent to latent_eps:
   with latent attention, the size of vectors, the unrotated channels of a query, the values of a head, the size of the
   vector that queries are projected from or 0, and eps of the norms of vectors. */
enum { SILU, GELU, SQUARED_RELU }; /* activations; MLPs with the last have no gate */

#define Model_FIELDS(FIELD, S)                                                                            \
    FIELD(S, const Layer *, layers) FIELD(S, Linear, embedding) FIELD(S, Linear, head)                    \
    FIELD(S, const float *, norm) FIELD(S, i64, num_layers) FIELD(S, i64, hidden) FIELD(S, i64, heads)    \
    FIELD(S, i64, kv_heads) FIELD(S, i64, head_dim) FIELD(S, i64, inner) FIELD(S, i64, activation)        \
    FIELD(S, i64, max_positions) FIELD(S, float, eps) FIELD(S, float, embedding_scale)                    \
    FIELD(S, float, attention_scale) FIELD(S, float, attention_cap) FIELD(S, float, logit_cap)            \
    FIELD(S, Linear, joined) FIELD(S, const float *, token_norm) FIELD(S, const float *, hidden_state_norm)    \
    FIELD(S, i64, pairs) FIELD(S, i64, normed_stream) FIELD(S, i64, rotated)                              \
    FIELD(S, i64, experts) FIELD(S, i64, chosen) FIELD(S, i64, expert_inner) FIELD(S, i64, shared_inner)  \
    FIELD(S, i64, normed) FIELD(S, i64, sigmoid) FIELD(S, float, share_scale) FIELD(S, i64, kernel)   \
    FIELD(S, float, clamp_alpha) FIELD(S, float, clamp_limit) FIELD(S, Linear, input_table)             \
    FIELD(S, Linear, input_projection) FIELD(S, const float *, input_norm) FIELD(S, i64, input_size)      \
    FIELD(S, i64, gated) FIELD(S, i64, key_heads) FIELD(S, i64, value_heads) FIELD(S, i64, key_dim)       \
    FIELD(S, i64, value_dim) FIELD(S, i64, delta_kernel) FIELD(S, i64, tiled) FIELD(S, i64, recurrent_layers) \
    FIELD(S, i64, joint_norm) FIELD(S, i64, mamba) FIELD(S, float, delta_eps) FIELD(S, i64, groups)       \
    FIELD(S, i64, chosen_groups) FIELD(S, i64, pair_of_group) FIELD(S, i64, latent)                       \
    FIELD(S, i64, unrotated) FIELD(S, i64, latent_value) FIELD(S, i64, query_rank) FIELD(S, float, latent_eps)
STRUCT(Model)

/* Recurrent states of a row, of all layers with a delta net. state: [layers, value_heads, value_dim / LANES, key_dim, LANES].
   window: last inputs of the convolutions, [layers, delta_kernel - 1, channels]. Both are those after the committed tokens
   once the `pending` nodes of an earlier call in `path` have been applied, whose trail is `past`. trail: gets what this
   call's nodes leave, [nodes, layers, trail_size]. Or state_after and window_after get those after the first `count` nodes of
   a chain. */
#define Recurrent_FIELDS(FIELD, S)                                                                        \
    FIELD(S, float *, state) FIELD(S, float *, window) FIELD(S, float *, past) FIELD(S, float *, trail)   \
    FIELD(S, float *, state_after) FIELD(S, float *, window_after) FIELD(S, const i64 *, path)            \
    FIELD(S, i64, pending) FIELD(S, i64, count)
STRUCT(Recurrent)

/* embedded: embeddings in the place of tokens, or null. reach: number of last committed tokens that nodes attend to. pool:
   threads of the call, or null. slots: size of the store. room: size of the workspace, in floats. store: [layers, keys and
   then values of all heads, slot, SLOT(head_dim)], by strides. starts: first slot of each row. best: index of the largest
   of the logits as `best_of` returns it, or null. beside: hidden states of pairs, [batch, nodes, hidden]. hidden_slots:
   number of first tokens of a row that no other node attends to, committed or, in a call without outputs, about to be.
   done: nodes of each row that earlier calls have written behind
   the committed tokens. `parents`, [batch, done + nodes], includes them. inputs: inputs of short convolutions, [layers with
   one, slots, hidden]. second_store: the store of layers with `second`. recurrent: states of each row, or null. */
#define Call_FIELDS(FIELD, S)                                                                             \
    FIELD(S, const i64 *, tokens) FIELD(S, const i64 *, parents) FIELD(S, const i64 *, lengths)           \
    FIELD(S, const i64 *, target_layers) FIELD(S, const i64 *, logits_at) FIELD(S, const float *, embedded) \
    FIELD(S, i64, batch) FIELD(S, i64, nodes) FIELD(S, i64, num_target_layer_ids)                         \
    FIELD(S, i64, num_logits) FIELD(S, i64, reach) FIELD(S, Pool *, pool)                                 \
    FIELD(S, i64, slots) FIELD(S, i64, room) FIELD(S, void *, store)                                      \
    FIELD(S, i64, layer_stride) FIELD(S, i64, head_stride) FIELD(S, const i64 *, starts)                  \
    FIELD(S, float *, hidden_states) FIELD(S, float *, logits) FIELD(S, float *, workspace)               \
    FIELD(S, i64 *, best) FIELD(S, const float *, beside) FIELD(S, i64, hidden_slots) FIELD(S, i64, done)  \
    FIELD(S, float *, inputs) FIELD(S, void *, second_store) FIELD(S, i64, second_layer_stride)           \
    FIELD(S, i64, second_head_stride) FIELD(S, const Recurrent *, recurrent)
STRUCT(Call)

/* Chains of draft tokens. kept: tokens of the head's outputs. tokens: [batch, draft_tokens + 1], the first of which is given.
   made: number of draft tokens per row, set by `draft_chain`. current: [batch], and parents: [batch, draft_tokens], to work
   in. seconds: time of a step with 0, 1, ... draft_tokens draft tokens, or null to make all. calibration: as in Python's
   `Plan`. expected, survival and following: [batch], set where there are seconds: the expected number of accepted draft
   tokens, the probability that all are accepted, and that of one more that is as probable as the last. */
#define Chain_FIELDS(FIELD, S)                                                                            \
    FIELD(S, const i64 *, kept) FIELD(S, i64 *, tokens) FIELD(S, i64 *, current) FIELD(S, i64 *, parents) \
    FIELD(S, i64, draft_tokens) FIELD(S, i64, made) FIELD(S, const double *, seconds)                     \
    FIELD(S, double, calibration) FIELD(S, float *, expected) FIELD(S, float *, survival)                 \
    FIELD(S, float *, following)
STRUCT(Chain)

typedef struct {
    const char *structure, *name;
    i64 offset, size;
} Field;

/* Return the fields of all structs. The size of a struct, without a name, follows its fields; null ends the list. */
const Field *fields(void) {
    static const Field all[] = {
        DESCRIBED(Linear) DESCRIBED(Convolution) DESCRIBED(Layer) DESCRIBED(Model) DESCRIBED(Recurrent) DESCRIBED(Call)
            DESCRIBED(Chain){0}};
    return all;
}

/* Functions return 0, a size, or minus one of these problems, after which they have done nothing. */
#define PROBLEMS(P)                                                                                       \
    P(POINTER, "a pointer is null that must not be")                                                      \
    P(SIZES, "a size of the model is below 1, or does not fit the others")                                \
    P(COUNTS, "there are fewer than 0 rows, nodes or slots, or too many to count")                        \
    P(THREADS, "there are fewer threads than 1 or too many")                                              \
    P(LENGTHS, "a row begins before the store, has fewer than 0 tokens, or its nodes end beyond the store") \
    P(PARENTS, "the parent of a node is neither -1 nor a node before it")                                 \
    P(TARGET_LAYERS, "a target layer lies beyond the layers")                                             \
    P(LOGITS, "logits are wanted of a node that is not there, or of more nodes than there are")           \
    P(TOKENS, "a token lies outside the embedding")                                                       \
    P(KIND, "a weight is of a kind that this library was not built for, or its scales or offsets are, or it has no scale") \
    P(GROUP, "the groups of a weight are no multiples of 8, too large, or do not divide its inputs")       \
    P(MEMORY, "there is not enough memory")
#define CODE(name, words) name,
#define WORDS(name, words) words,
enum { NOTHING, PROBLEMS(CODE) ALL_PROBLEMS };

/* Return the message of a problem, or null for an unknown one. */
const char *problem(i64 code) {
    static const char *const words[] = {"nothing", PROBLEMS(WORDS)};
    return code >= 0 && code < ALL_PROBLEMS ? words[code] : 0;
}

#define MOST ((i64)1 << 31) /* largest count, so that no product of counts overflows */
#define MOST_GROUP 65536 /* inputs of the largest group, so that no sum of their products overflows */
#define MOST_CHOSEN 1024 /* experts that a row chooses */
#define MOST_NESTED 256 /* inputs of nested scales that share a unit, for the same reason */
#define MOST_HEAD 1024 /* numbers of the largest head in 8 bits, so that no score overflows */
#define REFUSE(condition, code) if (condition) return -(code)

static i64 check_shape(const Model *m, i64 batch, i64 nodes, i64 slots, i64 threads) {
    REFUSE(!m || !m->layers, POINTER);
    REFUSE(m->num_layers < 1 || m->hidden < 1 || m->inner < 1 || m->kv_heads < 1 || m->heads < m->kv_heads, SIZES);
    REFUSE(m->heads % m->kv_heads || m->head_dim < LANES || m->head_dim % LANES, SIZES);
    REFUSE(m->rotated < 0 || m->rotated > m->head_dim || m->rotated % 2, SIZES);
    REFUSE(STORE == INT8 && m->head_dim > MOST_HEAD, SIZES);
    REFUSE(m->experts < 0 || m->experts > MOST || m->chosen < 0 || m->chosen > MOST_CHOSEN, SIZES);
    REFUSE(m->kernel < 0 || m->kernel > MOST, SIZES);
    REFUSE(m->expert_inner < 0 || m->expert_inner > MOST || m->shared_inner < 0 || m->shared_inner > MOST, SIZES);
    REFUSE(batch < 0 || nodes < 0 || slots < 0 || batch > MOST || slots > MOST, COUNTS);
    REFUSE(nodes > MOST / (batch ? batch : 1), COUNTS);
    REFUSE(threads < 1 || threads > MOST_THREADS, THREADS);
    return 0;
}

/* Return whether scales or offsets of this kind can be read. */
static int are_factors(const Linear *l, i64 kind, const void *unit) {
    return l->span ? kind == INT8 && unit : kind == FLOAT32 || kind == FLOAT16;
}

static i64 check_kind(const Linear *l) {
    REFUSE(!l->weight, POINTER);
    if (l->kind == WEIGHT) return 0;
    REFUSE(!IS_INTEGER(l) || !l->scale, KIND);
    REFUSE(l->kind == FLOAT4 && l->offset, KIND);
    REFUSE((l->kind != INT4 && l->span) != (l->kind == INT6), KIND);
    REFUSE(l->group < 8 || l->group % 8 || l->group > MOST_GROUP || l->inputs % l->group, GROUP);
    REFUSE(l->span < 0 || l->span % 2 || l->span > MOST_NESTED / l->group, GROUP);
    REFUSE(l->span && (l->group % 16 || l->inputs / l->group % l->span), GROUP);
    REFUSE(!are_factors(l, l->scale_kind, l->scale_unit), KIND);
    REFUSE(l->offset && !are_factors(l, l->offset_kind, l->offset_unit), KIND);
    return 0;
}

static i64 check_linear(const Linear *l, i64 inputs, i64 outputs) {
    REFUSE(!l->weight, POINTER);
    REFUSE(l->inputs != inputs || l->outputs != outputs, SIZES);
    return check_kind(l);
}

static i64 check_convolution(const Convolution *c, i64 size) {
    if (!c->taps) return 0;
    REFUSE(c->taps < 0 || c->groups < 1 || size % c->groups || c->taps > MOST / 2 / c->groups, SIZES);
    REFUSE(!c->base, POINTER);
    REFUSE(c->projection.kind != WEIGHT, KIND);
    return check_linear(&c->projection, size, 2 * c->taps * c->groups);
}

/* Return whether a layer reads pairs. */
static int reads_pairs(const Model *m, i64 index) { return m->pairs && !m->joined.weight && !index; }

/* Return the model with the shape of one layer. */
static Model shaped(const Model *m, const Layer *layer) {
    Model own = *m;
    if (layer->head_dim)
        own.head_dim = layer->head_dim, own.kv_heads = layer->kv_heads, own.inner = layer->inner, own.rotated = 0;
    return own;
}

static i64 check_shaped(const Model *m, const Layer *layer) {
    if (!layer->head_dim) return 0;
    REFUSE(layer->head_dim < LANES || layer->head_dim % LANES || layer->head_dim > m->head_dim || m->pairs, SIZES);
    REFUSE(layer->kv_heads < 1 || layer->kv_heads > m->kv_heads || m->heads % layer->kv_heads, SIZES);
    REFUSE(layer->inner < 1 || layer->inner > m->inner || layer->place < 0 || layer->place >= m->num_layers, SIZES);
    REFUSE(layer->filter || layer->attention_conv.taps || layer->mlp_conv.taps || m->input_size < 0, SIZES);
    if (!m->input_size) return 0;
    REFUSE(!layer->after_input, POINTER);
    const i64 wrong = check_linear(&layer->input_gate, m->hidden, m->input_size);
    return wrong ? wrong : check_linear(&layer->input_projection, m->input_size, m->hidden);
}

/* Return the outputs of the first projection of an MLP with this inner size. */
static i64 mlp_outputs(const Model *m, i64 inner) { return m->activation == SQUARED_RELU ? inner : 2 * inner; }

/* Return whether a layer has attention or what replaces it. */
static int mixes(const Layer *layer) { return layer->qkv.weight != 0; }

static int has_mlp(const Layer *layer) { return layer->gate_up.weight != 0; }

static i64 check_mlp(const Model *m, const Layer *layer) {
    const i64 H = m->hidden, E = m->experts, shared = m->shared_inner;
    if (!has_mlp(layer)) {
        REFUSE(!mixes(layer) || layer->router.weight || layer->down.weight || layer->mlp_conv.taps, POINTER);
        return 0;
    }
    if (!layer->router.weight) {
        const i64 wrong = check_linear(&layer->gate_up, H, mlp_outputs(m, m->inner));
        return wrong ? wrong : check_linear(&layer->down, m->inner, H);
    }
    REFUSE(E < 1 || E > MOST || m->expert_inner < 1 || m->expert_inner > MOST / E || H > MOST / E, SIZES);
    REFUSE(m->chosen < 1 || m->chosen > E || m->chosen > MOST_CHOSEN || shared < 0 || shared > MOST, SIZES);
    REFUSE(mlp_outputs(m, m->expert_inner) % LANES || H % LANES || layer->mlp_conv.taps, SIZES);
    REFUSE(!layer->before_router != !layer->after_mlp || (layer->before_router && !shared), SIZES);
    REFUSE(layer->before_router && (!layer->before_experts || !layer->after_experts || !layer->after_shared), POINTER);
    REFUSE(layer->before_router && !layer->expert_scale, POINTER);
    REFUSE(m->sigmoid && !layer->expert_bias, POINTER);
    const i64 groups = m->groups ? m->groups : 1;
    REFUSE(groups < 0 || groups > MOST_CHOSEN || E % groups || m->chosen_groups < 0 || m->chosen_groups > groups, SIZES);
    REFUSE(groups > 1 && (E / groups <= m->pair_of_group || m->chosen > E / groups * m->chosen_groups), SIZES);
    i64 wrong = check_linear(&layer->router, H, E);
    if (!wrong) wrong = check_linear(&layer->gate_up, H, E * mlp_outputs(m, m->expert_inner));
    if (!wrong) wrong = check_linear(&layer->down, m->expert_inner, E * H);
    if (!wrong && shared) wrong = check_linear(&layer->shared_gate_up, H, mlp_outputs(m, shared));
    if (!wrong && shared) wrong = check_linear(&layer->shared_down, shared, H);
    if (!wrong && shared && layer->shared_gate.weight) wrong = check_linear(&layer->shared_gate, H, 1);
    return wrong;
}

static i64 check_delta_layer(const Model *m, const Layer *layer);
static i64 check_latent(const Model *m, const Layer *layer);
static i64 check_recurrent(const Model *m, const Call *call);

static i64 check_layers(const Model *m) {
    const i64 H = m->hidden, inputs = m->num_layers * m->input_size;
    REFUSE(m->pairs && (!m->token_norm || !m->hidden_state_norm), POINTER);
    const i64 unfit = m->pairs && m->joined.weight ? check_linear(&m->joined, 2 * H, H) : 0;
    REFUSE(unfit, -unfit);
    REFUSE(m->input_size < 0 || m->input_size > MOST / m->num_layers || (m->input_size && !m->input_norm), SIZES);
    i64 odd = m->input_size ? check_linear(&m->input_projection, H, inputs) : 0;
    if (!odd && m->input_size) odd = check_linear(&m->input_table, inputs, m->input_table.outputs);
    REFUSE(odd, -odd);
    for (i64 index = 0; index < m->num_layers; index++) {
        const Layer *layer = m->layers + index;
        REFUSE(reads_pairs(m, index) && layer->attention_conv.taps, SIZES);
        REFUSE(layer->filter && (m->kernel < 1 || reads_pairs(m, index) || layer->attention_conv.taps), SIZES);
        i64 wrong = check_shaped(m, layer);
        REFUSE(wrong, -wrong);
        if (!mixes(layer)) {
            REFUSE(layer->output.weight || layer->delta_filter || layer->filter || layer->attention_conv.taps, POINTER);
            REFUSE(layer->head_dim || reads_pairs(m, index) || (!layer->before_mlp && !layer->before_router), POINTER);
            wrong = check_mlp(m, layer);
            if (!wrong) wrong = check_convolution(&layer->mlp_conv, H);
            REFUSE(wrong, -wrong);
            continue;
        }
        if (layer->delta_filter) {
            wrong = check_delta_layer(m, layer);
            if (!wrong) wrong = check_mlp(m, layer);
            REFUSE(wrong, -wrong);
            REFUSE(layer->mlp_conv.taps, SIZES);
            REFUSE(!layer->before_attention || (has_mlp(layer) && !layer->before_mlp), POINTER);
            continue;
        }
        if (m->latent) {
            wrong = check_latent(m, layer);
            if (!wrong) wrong = check_mlp(m, layer);
            REFUSE(wrong, -wrong);
            continue;
        }
        const Model own = shaped(m, layer);
        const i64 mixed = m->heads * own.head_dim, parts = layer->shared ? 0 : layer->values_are_keys ? 1 : 2;
        const i64 queries = m->gated ? 2 * mixed : mixed;
        const i64 outputs = layer->filter ? 3 * H : queries + parts * own.kv_heads * own.head_dim;
        REFUSE((parts < 2 && !layer->head_dim) || (m->gated && (layer->head_dim || layer->filter)), SIZES);
        REFUSE(m->joint_norm && (layer->head_dim || m->gated), SIZES);
        wrong = check_linear(&layer->qkv, reads_pairs(m, index) ? 2 * H : H, outputs);
        if (!wrong) wrong = check_linear(&layer->output, layer->filter ? H : mixed, H);
        if (!wrong) wrong = check_mlp(&own, layer);
        if (!wrong) wrong = check_convolution(&layer->attention_conv, H);
        if (!wrong) wrong = check_convolution(&layer->mlp_conv, H);
        REFUSE(wrong, -wrong);
        REFUSE(!layer->before_attention && (!layer->after_attention || layer->attention_conv.taps), POINTER);
        REFUSE(has_mlp(layer) && !layer->before_mlp && (!layer->after_mlp || layer->mlp_conv.taps || layer->router.weight), POINTER);
        REFUSE(!layer->cos || !layer->sin || (m->joint_norm && (!layer->query_norm || !layer->key_norm)), POINTER);
    }
    return 0;
}

/* Check the arguments that all calls which write to the store share. */
static i64 check_rows(const Model *m, const Call *call) {
    REFUSE(call->nodes && m->max_positions < 1, SIZES);
    REFUSE(call->done < 0 || call->done > MOST / (call->batch ? call->batch : 1) || call->hidden_slots < 0, COUNTS);
    const i64 nodes = call->done + call->nodes;
    const i64 wrong = call->batch && call->nodes ? check_layers(m) : 0;
    REFUSE(wrong, -wrong);
    REFUSE(call->batch && (!call->lengths || !call->starts || !call->store), POINTER);
    for (i64 row = 0; row < call->batch; row++) {
        REFUSE(call->starts[row] < 0 || call->starts[row] > call->slots || call->lengths[row] < 0, LENGTHS);
        REFUSE(call->lengths[row] > call->slots - nodes - call->starts[row], LENGTHS);
    }
    return 0;
}

static i64 check_nodes(const Model *m, const Call *call) {
    const i64 rows = call->batch * call->nodes, all = call->done + call->nodes;
    REFUSE(rows && (!call->parents || !(call->tokens || call->embedded) || !m->norm), POINTER);
    REFUSE(rows && m->pairs && !call->beside, POINTER);
    for (i64 index = 0; rows && index < m->num_layers; index++) REFUSE(m->layers[index].filter && !call->inputs, POINTER);
    for (i64 index = 0; rows && index < m->num_layers; index++)
        REFUSE(m->layers[index].second && !call->second_store, POINTER);
    REFUSE(rows && m->input_size && (!call->tokens || call->embedded), POINTER);
    REFUSE(call->num_target_layer_ids < 0, TARGET_LAYERS);
    REFUSE(call->num_logits < 0 || call->num_logits > rows, LOGITS);
    REFUSE(call->num_target_layer_ids && rows && (!call->target_layers || !call->hidden_states), POINTER);
    REFUSE(call->num_logits && !call->logits, POINTER);
    i64 wrong = rows && !call->embedded ? check_linear(&m->embedding, m->hidden, m->embedding.outputs) : 0;
    if (!wrong && call->num_logits) wrong = check_linear(&m->head, m->hidden, m->head.outputs);
    REFUSE(wrong, -wrong);
    for (i64 node = 0; rows && node < call->batch * all; node++)
        REFUSE(call->parents[node] < -1 || call->parents[node] >= node % all, PARENTS);
    const i64 unfit = rows ? check_recurrent(m, call) : 0;
    REFUSE(unfit, -unfit);
    for (i64 k = 0; k < call->num_target_layer_ids; k++)
        REFUSE(call->target_layers[k] < 0 || call->target_layers[k] > m->num_layers, TARGET_LAYERS);
    REFUSE(call->num_logits && call->num_logits != rows && !call->logits_at, LOGITS);
    for (i64 k = 0; k < call->num_logits && call->logits_at; k++)
        REFUSE(call->logits_at[k] < 0 || call->logits_at[k] >= rows, LOGITS);
    for (i64 node = 0; node < rows && !call->embedded; node++)
        REFUSE(call->tokens[node] < 0 || call->tokens[node] >= m->embedding.outputs
                   || (m->input_size && call->tokens[node] >= m->input_table.outputs), TOKENS);
    return 0;
}
