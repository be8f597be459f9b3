/* Threads that share the work of a call.

   A pool has workers; the thread that calls `pool_run` is one thread more. All threads run the same function, a sequence
   of stages. A stage is a loop over PIECES of a range, and ends for every thread once the whole range is done. Each
   thread takes the pieces of its own part of the range first, then those that are left of other parts. A thread that
   loses its core therefore delays the piece that it works on and no other, and when it returns it skips the stages that
   have ended. Which thread computes a piece changes no bit of it.

   Outside pieces the function may write nothing that threads share, and may read nothing that pieces write.

   Threads that wait spin for a limited time, then sleep. A pool serves one call at a time. Libraries of the same sources
   may share a pool. Without PARALLEL there are no workers. */
#ifdef PARALLEL
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <time.h>
#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(PORTABLE) && defined(__GLIBC__)
#ifdef __x86_64__
#define OLDEST(name) __asm__(".symver " #name ", " #name "@GLIBC_2.2.5")
#else
#define OLDEST(name) __asm__(".symver " #name ", " #name "@GLIBC_2.17")
#endif
OLDEST(pthread_create); /* glibc 2.34 has new versions, which older systems lack */
OLDEST(pthread_join);
OLDEST(pthread_sigmask);
#endif
#endif

typedef struct Pool Pool;

/* A thread in `pool_run`. */
typedef struct {
    Pool *pool; /* null if there are no workers */
    i64 index, threads;
    uint32_t stage; /* number of the stage that the thread is in */
    i64 passed; /* parts of this stage in which it has found no more pieces */
    i64 taken; /* size of the pieces that it has done and not yet reported */
} Thread;

typedef void Work(Thread *, const void *);

/* Loop over pieces of 0 .. count. Their sizes are multiples of `grain`, except at the end of a thread's part. The loop must
   not be left before its end. */
#define PIECES(t, count, grain, from, to) for (i64 from, to; take(t, count, grain, &from, &to);)

#ifdef PARALLEL
#define LINE 128 /* bytes of two cache lines, since processors prefetch the second */
#define PER_THREAD 4 /* a piece is this part of what is left of a thread's range, so that the last pieces are small */
#define STAGE_SPIN 50000 /* nanoseconds that a thread spins before it sleeps, while it waits for the end of a stage */
#define IDLE_SPIN 1000000 /* and while it waits for a call */
#define BRIEF 32 /* pauses before a thread takes pieces of others, which are usually done by then */

/* A number that threads wait for, and how many of them sleep. */
typedef struct {
    _Alignas(LINE) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
#ifndef __linux__
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
} Signal;

/* Parts of the gate's value. The bits above count the calls. */
#define INSIDE 0x1fffu /* number of workers in the call */
#define OPEN 0x2000u /* whether workers may enter it */
#define END 0x4000u /* whether workers must end */
#define CALL 0x8000u

struct Pool {
    i64 threads;
    int spins; /* whether threads spin before they sleep */
    void *memory; /* as allocated */
    Work *work;
    const void *argument;
    pthread_t *workers;
    Signal gate, stage;
    _Alignas(LINE) _Atomic i64 done; /* size of the pieces of this stage that are reported */
    struct {
        _Alignas(LINE) _Atomic uint64_t next; /* number of a stage, then the offset of the next piece in the part */
    } parts[];
};

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

static i64 nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * (i64)1000000000 + now.tv_nsec;
}

/* Wait until the value is no longer `value`. */
static void wait_while(Signal *s, uint32_t value, i64 spin) {
    for (i64 end = 0; spin;) {
        for (int i = 0; i < BRIEF; i++) {
            if (atomic_load_explicit(&s->value, memory_order_acquire) != value) return;
            relax();
        }
        const i64 now = nanoseconds();
        if (!end) end = now + spin;
        if (now > end) break;
    }
    atomic_fetch_add(&s->sleepers, 1); /* before the value is read; `wake` reads it after the value has changed */
#ifdef __linux__
    while (atomic_load(&s->value) == value) syscall(SYS_futex, &s->value, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    pthread_mutex_lock(&s->mutex);
    while (atomic_load(&s->value) == value) pthread_cond_wait(&s->changed, &s->mutex);
    pthread_mutex_unlock(&s->mutex);
#endif
    atomic_fetch_sub(&s->sleepers, 1);
}

/* Wake the threads that sleep, after the value has changed. */
static void wake(Signal *s) {
    if (!atomic_load(&s->sleepers)) return;
#ifdef __linux__
    syscall(SYS_futex, &s->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
#else
    pthread_mutex_lock(&s->mutex);
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->mutex);
#endif
}

/* Claim the next piece of the part of thread `owner`. Return 0 if none is left. */
static int claim(Pool *p, i64 owner, uint32_t stage, i64 count, i64 grain, i64 *from, i64 *to) {
    const i64 begin = count * owner / p->threads, size = count * (owner + 1) / p->threads - begin;
    if (!size) return 0;
    _Atomic uint64_t *next = &p->parts[owner].next;
    uint64_t seen = atomic_load_explicit(next, memory_order_relaxed);
    i64 offset;
    do {
        if (seen >> 32 > stage) return 0; /* this thread is late */
        offset = seen >> 32 == stage ? (i64)(uint32_t)seen : 0;
        if (offset >= size) return 0;
        const i64 piece = ((size - offset) / PER_THREAD + grain) / grain * grain; /* smaller and smaller */
        *to = offset + piece < size ? offset + piece : size;
    } while (!atomic_compare_exchange_weak_explicit(next, &seen, (uint64_t)stage << 32 | (uint64_t)*to,
                                                    memory_order_relaxed, memory_order_relaxed));
    *from = begin + offset;
    *to += begin;
    return 1;
}

/* Report the pieces that a thread has done. The last report ends the stage. */
static void report(Thread *t, i64 count) {
    Pool *p = t->pool;
    if (!t->taken) return;
    const i64 done = atomic_fetch_add(&p->done, t->taken) + t->taken;
    t->taken = 0;
    if (done < count) return;
    atomic_store_explicit(&p->done, 0, memory_order_relaxed);
    atomic_store(&p->stage.value, t->stage + 1);
    wake(&p->stage);
}

static int has_ended(const Thread *t) {
    return atomic_load_explicit(&t->pool->stage.value, memory_order_acquire) != t->stage;
}
#endif

/* Set `from` and `to` to the thread's next piece, or wait for the end of the stage and return 0. */
static int take(Thread *t, i64 count, i64 grain, i64 *from, i64 *to) {
    if (count <= 0) return 0;
#ifdef PARALLEL
    Pool *p = t->pool;
    if (p) {
        for (; t->passed < p->threads && !has_ended(t); t->passed++) {
            const i64 owner = (t->index + t->passed) % p->threads;
            if (claim(p, owner, t->stage, count, grain, from, to)) {
                t->taken += *to - *from;
                return 1;
            }
            report(t, count);
            for (int i = 0; !t->passed && p->spins && i < BRIEF && !has_ended(t); i++) relax();
        }
        wait_while(&p->stage, t->stage, p->spins ? STAGE_SPIN : 0);
        t->stage++;
        t->passed = 0;
        return 0;
    }
#endif
    (void)grain;
    *from = 0;
    *to = count;
    return t->passed = !t->passed;
}

/* Run `work` in all threads of the pool, and return when all have left it. Without a pool the caller runs it alone. */
static void pool_run(Pool *p, Work *work, const void *argument) {
    Thread caller = {.threads = 1};
    (void)p;
#ifdef PARALLEL
    if (p) {
        p->work = work;
        p->argument = argument;
        for (i64 i = 0; i < p->threads; i++) atomic_store_explicit(&p->parts[i].next, 0, memory_order_relaxed);
        atomic_store_explicit(&p->stage.value, 1, memory_order_relaxed);
        atomic_store(&p->gate.value, (atomic_load(&p->gate.value) + CALL) | OPEN);
        wake(&p->gate);
        caller = (Thread){.pool = p, .index = p->threads - 1, .threads = p->threads, .stage = 1};
    }
#endif
    work(&caller, argument);
#ifdef PARALLEL
    if (p) {
        uint32_t gate = atomic_fetch_and(&p->gate.value, ~OPEN) & ~OPEN;
        while (gate & INSIDE) {
            wait_while(&p->gate, gate, p->spins ? STAGE_SPIN : 0);
            gate = atomic_load(&p->gate.value);
        }
    }
#endif
}

#ifdef PARALLEL
typedef struct {
    Pool *pool;
    i64 index;
} Place;

static void *serve(void *argument) {
    Pool *p = ((Place *)argument)->pool;
    const i64 index = ((Place *)argument)->index;
    free(argument);
    uint32_t served = 0; /* the last call that this worker has entered */
    for (;;) {
        uint32_t gate = atomic_load(&p->gate.value);
        if (gate & END) return NULL;
        if (!(gate & OPEN) || gate / CALL == served) {
            wait_while(&p->gate, gate, p->spins ? IDLE_SPIN : 0);
            continue;
        }
        if (!atomic_compare_exchange_weak(&p->gate.value, &gate, gate + 1)) continue;
        served = gate / CALL;
        Thread t = {.pool = p, .index = index, .threads = p->threads, .stage = 1};
        p->work(&t, p->argument);
        gate = atomic_fetch_sub(&p->gate.value, 1) - 1;
        if (!(gate & (INSIDE | OPEN))) wake(&p->gate);
    }
}

static void init_signal(Signal *s) {
#ifndef __linux__
    pthread_mutex_init(&s->mutex, NULL);
    pthread_cond_init(&s->changed, NULL);
#endif
    (void)s;
}

static void free_signal(Signal *s) {
#ifndef __linux__
    pthread_mutex_destroy(&s->mutex);
    pthread_cond_destroy(&s->changed);
#endif
    (void)s;
}

/* Start worker `index`. Return whether it has started. */
static int start(Pool *p, i64 index) {
    Place *place = malloc(sizeof *place);
    if (!place) return 0;
    *place = (Place){p, index};
    if (!pthread_create(p->workers + index, NULL, serve, place)) return 1;
    free(place);
    return 0;
}

/* Return the number of threads that a call has, which is 1 without a pool. */
static i64 pool_threads(const Pool *p) { return p ? p->threads : 1; }

/* Return a pool of `threads` threads, the caller included, or of fewer if no more can be started; null if none can. With
   more threads than cores none may spin. */
Pool *pool_new(i64 threads, i64 spins) {
    if (threads < 2 || threads > MOST_THREADS) return NULL;
    const size_t size = sizeof(Pool) + threads * sizeof(((Pool *)0)->parts[0]) + LINE;
    void *memory = calloc(1, size);
    pthread_t *workers = calloc(threads, sizeof *workers);
    if (!memory || !workers) {
        free(memory);
        free(workers);
        return NULL;
    }
    Pool *p = (Pool *)(((uintptr_t)memory + LINE - 1) / LINE * LINE);
    p->spins = (int)spins, p->memory = memory, p->workers = workers;
    init_signal(&p->gate);
    init_signal(&p->stage);
    i64 started = 0;
#ifndef _WIN32
    sigset_t all, before; /* signals are for the threads of the program */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
    while (started < threads - 1 && start(p, started)) started++;
#ifndef _WIN32
    pthread_sigmask(SIG_SETMASK, &before, NULL);
#endif
    p->threads = started + 1; /* no worker reads it before the first call */
    return p;
}

/* End the workers, and free the pool. */
void pool_free(Pool *p) {
    if (!p) return;
    atomic_fetch_or(&p->gate.value, END);
    wake(&p->gate);
    for (i64 i = 0; i < p->threads - 1; i++) pthread_join(p->workers[i], NULL);
    free_signal(&p->gate);
    free_signal(&p->stage);
    free(p->workers);
    free(p->memory);
}
#else
static i64 pool_threads(const Pool *p) { return (void)p, 1; }
Pool *pool_new(i64 threads, i64 spins) { return (void)threads, (void)spins, NULL; }
void pool_free(Pool *p) { (void)p; }
#endif
