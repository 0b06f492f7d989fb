/* desync/fp_board.h -- the health board: ranks report in the store of their world why they end, and show each other that
 * they are alive. Plain C, under the rules of fp_torch.h. flatparam/fsdp/desync/liveness.py owns one a world, as
 * _C.HealthBoard, and decides when to call it. Ranks are those of the world.
 *
 *   why a rank does not come                                how the others learn it
 *   its process has ended with an exception                 the rank has posted the exception
 *   its process was killed, on this machine                 /proc does not list the process
 *   its process was killed, on another machine              the rank does not answer a call (fp_calls.hpp)
 *   it is stopped (SIGSTOP), or its network is down         the rank does not answer a call
 *
 * A thread of each rank answers calls without the GIL. So a rank that computes, or that holds the GIL, counts as alive.
 *
 * Threads: any thread may call these functions with the GIL held. They release it while they wait for the store, or for each
 * other. Failure: if the store is out of reach, they fail with the exception of torch's store, and may be called again. */
#pragma once

#include "tensor/fp_torch.h"

FP_BEGIN_C

typedef struct fp_board fp_board;

/* Make a board. It writes nothing to the store before fp_board_appear() or fp_board_post().
 *   group   the name under which torch registered the process group of the world; its store is used
 *   prefix  begins all keys of the board in the store
 *   beat    seconds: a rank that answers no call for so long counts as stopped; 0: no rank is called, none answers
 *   own     1: use a second connection to the store, so that the wait of another thread does not delay the board. A kind of
 *           store that has no second connection is shared
 * NULL with an exception: there is no such group, or it has no store in C++. */
fp_board *fp_board_new(const char *group, const char *prefix, double beat, int own);
/* Stop the board (fp_board_stop) and free it. NULL is allowed. */
void fp_board_free(fp_board *board);

/* Publish the place of this rank (its process and machine), and start the thread that answers calls. The thread is not
 * started if beat is 0, or if the store has no second connection: over a shared one it would answer late, and the rank would
 * seem to be stopped.
 * since: seconds from the machine's start (CLOCK_BOOTTIME) to the begin of this world, or of this process. Places that an
 * earlier world has left in the same store are ignored: on this machine those published before since; on another machine,
 * whose clock may differ, those published before this rank's. A place counts all the same if its rank has entered this
 * generation, or, on another machine, if the rank answers the call that this function makes, or answers no calls at all.
 * Call it once. */
int fp_board_appear(fp_board *board, double since);

/* Put later posts, and the numbers that belong to them, below generation in the store. All ranks pass the same generation. */
int fp_board_join(fp_board *board, const char *generation);

/* Count this rank as a member. Members read posts: a rank waits for readers only if the generation has members (see
 * fp_board_number). The place of a member belongs to this world, even if it was published before this world began. */
int fp_board_enter(fp_board *board);

/* Publish that this rank has finished: its program has ended, or it destroys the group. The others then report this, and not
 * that its process was killed. In a forked process it does nothing. */
int fp_board_finish(fp_board *board);

/* Stop the thread that answers, and let fp_watch() return. It waits 0.5 s at most: the thread may wait for a store that does
 * not answer, and ends later by itself. In a forked process, which has no such threads, it does nothing. */
void fp_board_stop(fp_board *board);

/* Post text (UTF-8) as this rank's reason. *number: the number of the post, counted from 1 in this generation. */
int fp_board_post(fp_board *board, const char *text, int64_t *number);
/* Read a counter of this generation: "members", the ranks that entered; "readers of N", the ranks that have read post N. 0: no
 * rank has. */
int fp_board_number(fp_board *board, const char *key, int64_t *number);

/* Look once for ranks that do not come: read new posts, and note their reasons for fp_board_said().
 *   waited     seconds for which this rank has waited for others. From 0.2 beat on one of the ranks that wait calls all ranks;
 *              a beat later a further look posts which ranks have not answered
 *   processes  1: look for processes of this machine that have ended, too
 * 1: all posts were read; 0: a post was announced and its text is not in the store yet; -1. */
int fp_board_look(fp_board *board, double waited, int processes);

/* How many ranks of this machine have a process that has ended; -1. */
int fp_board_ended(fp_board *board);

/* Call all ranks at once, without a wait: for a rank whose collective has failed. Returns the number of the call, from 1; 0: no
 * rank answers calls; -1. */
int fp_board_call(fp_board *board);
/* Note for fp_board_said() each rank that answers calls and has not answered this one. call: the number of the call. The caller
 * waits first: an answer takes up to 1.6 s. */
int fp_board_miss_silent(fp_board *board, int64_t call);

/* A new dict from ranks to texts (str): the reason why the rank does not come. Never waits for the store. */
PyObject *fp_board_said(fp_board *board);
/* A new dict with an entry for each rank that has appeared: its process number, the start of the process in ticks, the machine,
 * and " finished" once the rank has finished. */
PyObject *fp_board_entered(fp_board *board);

FP_END_C
