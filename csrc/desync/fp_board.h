/* desync/fp_board.h -- the health board: ranks report in the store of their world why they end, and show each other that
 * they are alive. Plain C, under the rules of fp_torch.h. flatparam/fsdp/desync/liveness.py decides when to call it.
 *
 * Why a rank does not come, and how the others learn it:
 *
 *   it has ended with an exception                       it has posted the exception
 *   it has ended without a word, on this machine         /proc does not list its process
 *   it has ended without a word, on another machine      it does not answer a call (fp_calls.hpp)
 *   it is stopped (SIGSTOP), or its network is down      it does not answer a call
 *
 * A thread of each rank answers calls without the GIL. A rank that computes, or that holds the GIL, therefore counts as alive.
 *
 * Threads: any thread may call these functions with the GIL held. They release it while they wait for the store, or for each
 * other. A store that is out of reach makes them fail with the exception of torch's store; they may be called again. */
#pragma once

#include "tensor/fp_torch.h"

FP_BEGIN_C

typedef struct fp_board fp_board;

/* Make a board. It writes nothing to the store before fp_board_appear() or fp_board_post().
 *   group   the name under which torch registered the process group of the world; its store is used
 *   prefix  of all keys of the board
 *   beat    seconds: a rank that answers no call for so long counts as stopped; 0: no rank is called, none answers
 *   own     1: use a second connection to the store, so that the wait of another thread does not delay the board. A kind of
 *           store that has no second connection is shared
 * NULL with an exception: there is no such group, or it has no store in C++. */
fp_board *fp_board_new(const char *group, const char *prefix, double beat, int own);
/* Stop the board (fp_board_stop) and free it. NULL is allowed. */
void fp_board_free(fp_board *board);

/* Publish the process of this rank, and start the thread that answers calls. The thread is not started where beat is 0, or
 * where the store has no second connection: over a shared one it would answer late and seem to be stopped.
 * since: seconds of the wall clock at which this world, or this process, began. Places that were published before it are
 * ignored: an earlier world has left them in the same store. Call it once. */
int fp_board_appear(fp_board *board, double since);

/* Put later posts, and the numbers that belong to them, below generation in the store. All ranks pass the same generation. */
int fp_board_join(fp_board *board, const char *generation);

/* Count this rank as a member: it reads posts from now on. Ranks that post wait for members alone (see fp_board_number). */
int fp_board_enter(fp_board *board);

/* Publish that this rank has finished: its program has ended, or it destroys the group. The others then say so, and not that
 * its process was killed. A forked process publishes nothing. */
int fp_board_finish(fp_board *board);

/* Stop the thread that answers, and let fp_watch() return. Wait 0.5 s at most: a store that does not answer
 * may hold the thread, which ends by itself later. A forked process has no such threads, and does nothing. */
void fp_board_stop(fp_board *board);

/* Post text (UTF-8) as this rank's reason. *number: the number of the post, counted from 1 in this generation. */
int fp_board_post(fp_board *board, const char *text, int64_t *number);
/* Read a counter of this generation: "members", the ranks that entered; "readers of N", the ranks that have read post N. 0: no
 * rank has. */
int fp_board_number(fp_board *board, const char *key, int64_t *number);

/* Look once for ranks that do not come; fp_board_said() then has the reasons.
 *   waited     seconds for which this rank has waited for others. From 0.4 beat on one of the ranks that wait calls all ranks,
 *              and posts which ranks have not answered
 *   processes  1: look for processes of this machine that have ended, too
 * 1: all posts were read; 0: a post was announced and its text is not there yet; -1. */
int fp_board_look(fp_board *board, double waited, int processes);

/* Call all ranks at once, without a wait: for a rank whose collective has failed. Returns the number of the call, from 1; 0: no
 * rank answers calls; -1. */
int fp_board_call(fp_board *board);
/* Note each rank that answers calls and has not answered this one. The caller first waits as long as an answer takes. */
int fp_board_miss_silent(fp_board *board, int64_t call);

/* A new dict from ranks to texts (str). said: why the rank does not come; it never waits for the store. entered: the process
 * number, its begin in ticks and the machine of each rank that has appeared. */
PyObject *fp_board_said(fp_board *board);
PyObject *fp_board_entered(fp_board *board);

FP_END_C
