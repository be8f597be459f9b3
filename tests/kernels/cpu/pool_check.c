/* Runs many small calls in a pool with random delays, and a small decoder in pools of several sizes. test_pool.py builds it
   with the thread sanitizer. Returns 0 if every piece was computed once, in the order of the stages, and the decoder's bits
   do not depend on the threads. */
#include <pthread.h>
#include <stdio.h>
#include <time.h>
#include SOURCE

#define STAGES 40
#define MOST_COUNT 200

static uint32_t hash(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

/* Lose the core now and then. */
static void delay(uint32_t number) {
    const struct timespec some = {.tv_nsec = hash(number) % 100000};
    if (hash(number) % 97 == 0) nanosleep(&some, NULL);
}

typedef struct {
    uint32_t seed;
    uint32_t *values; /* [STAGES + 1, MOST_COUNT] */
} Stages;

/* Each stage adds a number that depends on all numbers of the stage before. */
static void run_stages(Thread *t, const void *argument) {
    const Stages *s = argument;
    for (uint32_t stage = 0; stage < STAGES; stage++) {
        const i64 count = hash(s->seed + stage) % MOST_COUNT, grain = 1 + hash(s->seed - stage) % 9;
        const uint32_t *before = s->values + stage * MOST_COUNT;
        uint32_t *now = s->values + (stage + 1) * MOST_COUNT;
        PIECES(t, count, grain, first, last) {
            delay(s->seed + stage * MOST_COUNT + (uint32_t)first);
            for (i64 i = first; i < last; i++) {
                uint32_t sum = 0;
                for (i64 k = 0; k < MOST_COUNT; k++) sum = hash(sum + before[k]);
                now[i] += sum + (uint32_t)i;
            }
        }
    }
}

static uint32_t digest(Pool *pool, uint32_t seed) {
    uint32_t values[(STAGES + 1) * MOST_COUNT] = {seed}, sum = 0;
    const Stages stages = {seed, values};
    pool_run(pool, run_stages, &stages);
    for (i64 i = 0; i < (STAGES + 1) * MOST_COUNT; i++) sum = hash(sum + values[i]);
    return sum;
}

static int calls = 200;

/* Compare a pool of so many threads with the caller alone. */
static void *stress(void *argument) {
    const i64 threads = (i64)(intptr_t)argument;
    Pool *pool = pool_new(threads, threads < 4);
    if (pool_threads(pool) != threads) return "threads were not started";
    char *wrong = NULL;
    for (int call = 0; call < calls && !wrong; call++) {
        const uint32_t seed = hash((uint32_t)(call + 1000 * threads));
        if (call % 10 == 9) nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL); /* workers fall asleep */
        if (digest(pool, seed) != digest(NULL, seed)) wrong = "a stage was not computed as alone";
    }
    pool_free(pool);
    return wrong;
}

static float *random_numbers(i64 count, uint32_t seed) {
    float *numbers = malloc(4 * count);
    for (i64 i = 0; i < count; i++) numbers[i] = (float)(hash(seed + (uint32_t)i) % 2001) / 1000 - 1;
    return numbers;
}

static Linear linear(i64 inputs, i64 outputs, uint32_t seed) {
    const i64 blocks = (outputs + LANES - 1) / LANES;
    return (Linear){.weight = random_numbers(blocks * LANES * inputs, seed), .inputs = inputs, .outputs = outputs};
}

#define HIDDEN 48
#define HEAD 16
#define VOCABULARY 300
#define NODES 11
#define SLOTS 40

/* Forward of a tree in two rows. Writes logits to `logits`. Returns 0. */
static i64 forward(Pool *pool, const Model *m, float *logits) {
    const i64 parents[2 * NODES] = {-1, 0, 0, 1, 2, 2, 4, 6, 7, 8, 9, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    const i64 lengths[2] = {9, 4}, starts[2] = {0, SLOTS}, layers[2] = {1, 2};
    i64 tokens[2 * NODES], best[2 * NODES];
    for (i64 i = 0; i < 2 * NODES; i++) tokens[i] = hash((uint32_t)i) % VOCABULARY;
    const i64 head_stride = 2 * SLOTS * HEAD, layer_stride = 2 * m->kv_heads * head_stride;
    Call call = {.tokens = tokens, .parents = parents, .lengths = lengths, .starts = starts, .batch = 2, .nodes = NODES};
    call.pool = pool, call.reach = MOST, call.slots = 2 * SLOTS, call.best = best, call.num_logits = 2 * NODES;
    call.layer_stride = layer_stride, call.head_stride = head_stride, call.logits = logits;
    call.target_layers = layers, call.num_target_layer_ids = 2;
    call.store = random_numbers(m->num_layers * layer_stride, 7);
    call.hidden_states = malloc(4 * 2 * NODES * 2 * HIDDEN);
    call.room = decoder_workspace(m, 2, NODES, 8);
    call.workspace = malloc(4 * call.room);
    const i64 result = decoder_forward(m, &call);
    free(call.store);
    free(call.hidden_states);
    free(call.workspace);
    return result;
}

static char *decode(void) {
    float *angles = random_numbers(64 * HEAD, 1), *norm = random_numbers(HIDDEN, 2);
    Layer layers[2] = {0};
    for (uint32_t i = 0; i < 2; i++) {
        Layer *l = layers + i;
        l->qkv = linear(HIDDEN, 7 * HEAD, 3 + i), l->output = linear(3 * HEAD, HIDDEN, 5 + i);
        l->gate_up = linear(HIDDEN, 2 * 70, 7 + i), l->down = linear(70, HIDDEN, 9 + i);
        l->before_attention = l->before_mlp = l->after_mlp = norm;
        l->cos = l->sin = angles;
    }
    Model m = {.layers = layers, .num_layers = 2, .hidden = HIDDEN, .heads = 3, .kv_heads = 1, .head_dim = HEAD};
    for (int i = 0; i < 2; i++) layers[i].qkv.outputs = (m.heads + 2) * HEAD;
    m.embedding = linear(HIDDEN, VOCABULARY, 11), m.head = linear(HIDDEN, VOCABULARY, 12), m.norm = norm;
    m.inner = 70, m.max_positions = 64, m.eps = 1e-5f, m.embedding_scale = m.attention_scale = 1, m.logit_cap = 5;
    static float alone[2 * NODES * VOCABULARY], found[2 * NODES * VOCABULARY];
    if (forward(NULL, &m, alone)) return "the decoder refused the call";
    for (i64 threads = 2; threads < 8; threads++) {
        Pool *pool = pool_new(threads, threads < 4);
        for (int call = 0; call < calls / 10; call++) {
            if (forward(pool, &m, found)) return "the decoder refused the call of a pool";
            if (memcmp(alone, found, sizeof alone)) return "the bits depend on the threads";
        }
        pool_free(pool);
    }
    return NULL;
}

int main(int count, char **arguments) {
    if (count > 1) calls = atoi(arguments[1]);
    char *wrong = decode();
    for (i64 threads = 2; threads < 8 && !wrong; threads++) wrong = stress((void *)(intptr_t)threads);
    pthread_t others[3]; /* pools at the same time */
    for (i64 i = 0; i < 3; i++) pthread_create(others + i, NULL, stress, (void *)(intptr_t)(i + 2));
    for (i64 i = 0; i < 3; i++) {
        void *other;
        pthread_join(others[i], &other);
        if (other) wrong = other;
    }
    if (wrong) printf("%s\n", wrong);
    return wrong != NULL;
}
