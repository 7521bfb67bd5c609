/* Threads that help with a loop if they are free, and are not waited for if not.
 *
 * An OpenMP loop ends at a barrier that every thread must reach. On a small machine,
 * where the server's other processes take a core now and then, the loop then waits for
 * a thread that has nothing to do but is not running. Here pieces are claimed one by
 * one; the caller claims them too, and waits only for pieces that someone has begun.
 *
 * `ticket` holds the loop's number in its upper half and the pieces still to be claimed
 * in its lower one. A piece is claimed by taking one from the lower half; that succeeds
 * only while this very loop has pieces left, and the description of a loop does not
 * change while it has any. So a helper that comes late, with an old description, claims
 * nothing.
 */
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#define MAX_HELPERS 63
#define PIECES_PER_THREAD 8
/* Looking for a new loop before sleeping: about as long as Python takes between two
 * kernels of a forward. */
#define SPINS 4000
/* Waiting for a begun piece before letting other processes run. */
#define PATIENCE 200

static struct {
    _Atomic loop_body body;
    void *_Atomic context;
    _Atomic int64_t count, grain, pieces;
    _Atomic int64_t helpers; /* those with a lower number may take part */
} loop;
static _Atomic uint64_t ticket;
static _Atomic int64_t unfinished;
static _Atomic int sleepers;
static int64_t started;
static pthread_mutex_t one_loop = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t sleeping = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wake = PTHREAD_COND_INITIALIZER;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

int64_t num_threads(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

int64_t even_grain(int64_t count) {
    int64_t pieces = num_threads() * PIECES_PER_THREAD;
    return (count + pieces - 1) / pieces;
}

static inline uint64_t loop_of(uint64_t t) { return t >> 32; }
static inline uint64_t left_in(uint64_t t) { return t & 0xffffffffu; }

/* Claim and do pieces until none is left. */
static void take_pieces(int64_t helper) {
    uint64_t now = atomic_load(&ticket);
    while (left_in(now) > 0) {
        loop_body body = loop.body;
        void *context = loop.context;
        int64_t count = loop.count, grain = loop.grain, pieces = loop.pieces;
        if (helper >= loop.helpers) return;
        if (!atomic_compare_exchange_weak(&ticket, &now, now - 1)) continue;
        int64_t begin = (pieces - (int64_t)left_in(now)) * grain;
        body(context, begin, begin + grain < count ? begin + grain : count);
        atomic_fetch_sub(&unfinished, 1);
        now = atomic_load(&ticket);
    }
}

static void *help(void *number) {
    int64_t helper = (int64_t)(intptr_t)number;
    uint64_t seen = 0;
    for (;;) {
        int spins = 0;
        while (loop_of(atomic_load(&ticket)) == seen && spins++ < SPINS) relax();
        if (loop_of(atomic_load(&ticket)) == seen) {
            pthread_mutex_lock(&sleeping);
            atomic_fetch_add(&sleepers, 1);
            while (loop_of(atomic_load(&ticket)) == seen)
                pthread_cond_wait(&wake, &sleeping);
            atomic_fetch_sub(&sleepers, 1);
            pthread_mutex_unlock(&sleeping);
        }
        seen = loop_of(atomic_load(&ticket));
        take_pieces(helper);
    }
    return NULL;
}

/* A forked child has none of the parent's helpers. */
static void forget_helpers(void) {
    started = 0;
    atomic_store(&sleepers, 0);
    atomic_store(&ticket, loop_of(atomic_load(&ticket)) << 32);
    pthread_mutex_init(&one_loop, NULL);
    pthread_mutex_init(&sleeping, NULL);
    pthread_cond_init(&wake, NULL);
}

static void start_helpers(int64_t wanted) {
    static int registered;
    if (!registered) registered = pthread_atfork(NULL, NULL, forget_helpers) == 0;
    if (wanted > MAX_HELPERS) wanted = MAX_HELPERS;
    while (started < wanted) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, (void *)(intptr_t)started)) return;
        pthread_detach(thread);
        started++;
    }
}

void parallel_for(int64_t count, int64_t grain, loop_body body, void *context) {
    int64_t helpers = num_threads() - 1;
    /* A second caller at the same time does its loop alone. */
    if (helpers <= 0 || count <= grain || pthread_mutex_trylock(&one_loop)) {
        if (count > 0) body(context, 0, count);
        return;
    }
    if (started < helpers) start_helpers(helpers);
    int64_t pieces = (count + grain - 1) / grain;
    loop.body = body;
    loop.context = context;
    loop.count = count;
    loop.grain = grain;
    loop.pieces = pieces;
    loop.helpers = helpers;
    atomic_store(&unfinished, pieces);
    uint64_t number = (loop_of(atomic_load(&ticket)) + 1) & 0xffffffffu;
    atomic_store(&ticket, number << 32 | (uint64_t)pieces);
    if (atomic_load(&sleepers) > 0) {
        pthread_mutex_lock(&sleeping);
        pthread_cond_broadcast(&wake);
        pthread_mutex_unlock(&sleeping);
    }
    take_pieces(-1);
    for (int waited = 0; atomic_load(&unfinished) > 0; waited++) {
        if (waited < PATIENCE)
            relax();
        else
            sched_yield();
    }
    pthread_mutex_unlock(&one_loop);
}
