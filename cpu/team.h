/* A team of threads that run one loop after another together, and sleep when there is nothing to do.
 *
 * A loop has numbered pieces of work. Threads take pieces as they get to it, and the next loop begins when all pieces
 * are finished: there is no barrier at which every thread must arrive. So a thread that the operating system keeps
 * waiting holds up nobody, unless it has taken a piece.
 *
 * Plain POSIX threads, not OpenMP: macOS compilers have none, its barriers wait for every thread, and how long its idle
 * threads spin is not ours to say.
 */
#ifndef MINIPAGED_TEAM_H
#define MINIPAGED_TEAM_H

typedef struct Team Team;

typedef struct {
    const void *work;
    int count;                                                  /* of loops */
    int (*pieces)(const void *work, int loop, int num_threads); /* how many a loop has; the same for all threads */
    void (*run)(const void *work, int loop, int piece, int num_threads);
} Loops;

Team *team_create(int num_threads); /* NULL if threads or memory cannot be had */
void team_destroy(Team *team);

/* Run all loops; the caller takes part, and in a process that was forked since does everything. Returns 0, or -1 if
 * memory cannot be had. One caller at a time. */
int team_run(Team *team, const Loops *loops);

#endif
