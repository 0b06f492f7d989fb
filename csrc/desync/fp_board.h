/* desync/fp_board.h -- what the ranks of a world tell each other through its store: why they end, and that they live. Plain
 * C, under the rules of fp_torch.h.
 *
 * A rank that ends posts why. One that ends without a word is missed by those on its machine, and by others as it answers
 * no calls: a thread of each rank answers them, without the GIL, so a rank that computes, or holds the GIL, is not taken for
 * one that is stopped.
 *
 * Any thread may call these. They wait for the store without the GIL; what torch raises where it is out of reach is
 * raised. */
#pragma once

#include "tensor/fp_torch.h"

FP_BEGIN_C

typedef struct fp_board fp_board;

/* In the store of the process group that torch registered as group, below prefix. beat: seconds without a sign of generation after
 * which a process counts as stopped; 0: never. own: over a connection of its own, which no other thread's wait delays, if the
 * store has such. NULL with an exception. */
fp_board *fp_board_new(const char *group, const char *prefix, double beat, int own);
void fp_board_free(fp_board *board); /* stops it; NULL is allowed */

/* Say where the process of this rank is, and answer calls, before any other rank may have come here. since: when its world or
 * process began, in seconds of the wall clock: signs of others from before are not of this world. */
int fp_board_appear(fp_board *board, double since);

/* What is posted from now on has a generation of its own in the store, to whose name ranks have come alike. */
int fp_board_join(fp_board *board, const char *generation);

/* This rank reads posts from now on, which others count on. */
int fp_board_enter(fp_board *board);

/* Say that this rank comes to nothing any more, as its program has ended, or destroys the group. */
int fp_board_finish(fp_board *board);

/* It answers none any more, and fp_watch() returns. */
void fp_board_stop(fp_board *board);

int fp_board_post(fp_board *board, const char *text, int64_t *number);  /* text: in UTF-8 */
int fp_board_number(fp_board *board, const char *key, int64_t *number); /* of those who read or entered; 0: none */

/* Read what is posted: 1 if all of it could be read. processes: look for those of this machine that have ended. waited: for
 * how many seconds this rank has waited for others; if for long, it calls them. */
int fp_board_look(fp_board *board, double waited, int processes);

/* Call all ranks: the number of the call; 0: none of them answers calls. And miss those that have not answered it yet. */
int fp_board_call(fp_board *board);
int fp_board_miss_silent(fp_board *board, int64_t call);

/* Dicts by rank: why ranks have ended; where those that have entered are. */
PyObject *fp_board_said(fp_board *board);
PyObject *fp_board_entered(fp_board *board);

FP_END_C
