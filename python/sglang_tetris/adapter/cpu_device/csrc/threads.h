/* Sharing the pieces of one loop among threads. */
#ifndef TETRIS_THREADS_H
#define TETRIS_THREADS_H

#include <stdint.h>

/* Does items [begin, end) of the loop that `context` describes. */
typedef void (*loop_body)(void *context, int64_t begin, int64_t end);

/* How many threads a loop may use: what torch.set_num_threads said. */
int64_t num_threads(void);

/* Run a loop over [0, count), in pieces of at most `grain` items, any piece on any
 * thread. Returns when all are done. Items must not depend on one another. */
void parallel_for(int64_t count, int64_t grain, loop_body body, void *context);

/* A grain that leaves a few pieces to every thread. */
int64_t even_grain(int64_t count);

#endif
