#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#if defined(__x86_64__)
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() __asm__ volatile("" ::: "memory")
#endif

enum { SPINS_BEFORE_YIELD = 2000, SPINS_BEFORE_SLEEP = 2000, STACK_BYTES = 1 << 20, CACHE_LINE = 64 };

typedef struct {
    _Alignas(CACHE_LINE) atomic_int taken;
    atomic_int finished;
} Progress;

struct Team {
    int num_threads;
    pid_t process; /* the one that started the threads: its forks have none */
    pthread_t *threads;
    pthread_mutex_t mutex;
    pthread_cond_t work;
    int stopping;
    const Loops *loops;
    Progress *progress; /* of each loop */
    int capacity;
    _Alignas(CACHE_LINE) atomic_uint generation; /* counts jobs */
    _Alignas(CACHE_LINE) atomic_int is_open;     /* whether a job may be joined */
    _Alignas(CACHE_LINE) atomic_int inside;      /* threads that may be looking at the job */
};

static void wait_until_equal(atomic_int *value, int expected) {
    for (int spins = 0; atomic_load(value) != expected; spins++) {
        if (spins < SPINS_BEFORE_YIELD)
            PAUSE();
        else
            sched_yield(); /* somebody else needs this processor, perhaps the thread we wait for */
    }
}

static int has_threads(const Team *team) { return team->num_threads > 1 && team->process == getpid(); }

static void take_part(Team *team) {
    const Loops *loops = team->loops;
    for (int i = 0; i < loops->count; i++) {
        Progress *progress = team->progress + i;
        const int pieces = loops->pieces(loops->work, i, team->num_threads);
        for (int piece; (piece = atomic_fetch_add_explicit(&progress->taken, 1, memory_order_relaxed)) < pieces;) {
            loops->run(loops->work, i, piece, team->num_threads);
            atomic_fetch_add_explicit(&progress->finished, 1, memory_order_acq_rel);
        }
        wait_until_equal(&progress->finished, pieces);
    }
}

static void *member_main(void *argument) {
    Team *team = argument;
    unsigned seen = 0;
    for (;;) {
        for (int spins = 0; atomic_load_explicit(&team->generation, memory_order_acquire) == seen; spins++) {
            if (spins < SPINS_BEFORE_SLEEP) {
                PAUSE();
                continue;
            }
            pthread_mutex_lock(&team->mutex);
            while (atomic_load_explicit(&team->generation, memory_order_acquire) == seen && !team->stopping)
                pthread_cond_wait(&team->work, &team->mutex);
            const int stopping = team->stopping;
            pthread_mutex_unlock(&team->mutex);
            if (stopping) return NULL;
        }
        seen = atomic_load_explicit(&team->generation, memory_order_acquire);
        atomic_fetch_add(&team->inside, 1);
        if (atomic_load(&team->is_open)) take_part(team);
        atomic_fetch_sub(&team->inside, 1);
    }
}

Team *team_create(int num_threads) {
    Team *team = NULL;
    if (posix_memalign((void **)&team, CACHE_LINE, sizeof *team)) return NULL;
    *team = (Team){.num_threads = 1, .process = getpid()};
    pthread_mutex_init(&team->mutex, NULL);
    pthread_cond_init(&team->work, NULL);
    team->threads = calloc(num_threads, sizeof *team->threads);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    for (int thread = 1; team->threads && thread < num_threads; thread++) {
        if (pthread_create(&team->threads[thread], &attributes, member_main, team)) break;
        team->num_threads = thread + 1;
    }
    pthread_attr_destroy(&attributes);
    if (team->num_threads == num_threads) return team;
    team_destroy(team);
    return NULL;
}

void team_destroy(Team *team) {
    if (has_threads(team)) {
        pthread_mutex_lock(&team->mutex);
        team->stopping = 1;
        pthread_cond_broadcast(&team->work);
        pthread_mutex_unlock(&team->mutex);
        for (int thread = 1; thread < team->num_threads; thread++) pthread_join(team->threads[thread], NULL);
        pthread_cond_destroy(&team->work);
        pthread_mutex_destroy(&team->mutex);
    }
    free(team->threads);
    free(team->progress);
    free(team);
}

int team_run(Team *team, const Loops *loops) {
    if (loops->count > team->capacity) {
        Progress *progress = NULL;
        if (posix_memalign((void **)&progress, CACHE_LINE, loops->count * sizeof *progress)) return -1;
        free(team->progress);
        team->progress = progress;
        team->capacity = loops->count;
    }
    for (int i = 0; i < loops->count; i++) {
        atomic_init(&team->progress[i].taken, 0);
        atomic_init(&team->progress[i].finished, 0);
    }
    team->loops = loops;
    if (!has_threads(team)) {
        take_part(team);
        return 0;
    }
    atomic_store(&team->is_open, 1);
    pthread_mutex_lock(&team->mutex);
    atomic_fetch_add_explicit(&team->generation, 1, memory_order_release);
    pthread_cond_broadcast(&team->work);
    pthread_mutex_unlock(&team->mutex);
    take_part(team);
    /* Late threads find nothing left, but must not look at a job that is gone: either they see that it is closed, or we
     * see that they are inside (hence sequentially consistent loads and stores of both). */
    atomic_store(&team->is_open, 0);
    wait_until_equal(&team->inside, 0);
    return 0;
}
