/* module/fp_board_py.c -- the heap type flatparam._C.Board: what ranks tell each other of their end; see desync/fp_board.h. */
#include "module/fp_tables.h"
#include "runtime/fp_trace_py.h"
#include "desync/fp_watch.h"

#include "core/fp_alloc.h"

typedef struct {
    PyObject_HEAD
    fp_board *board;
} board_object;

static PyObject *
board_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"group", "prefix", "beat", "own", NULL};
    const char *group, *prefix;
    double beat;
    int own;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ssdp:Board", keywords, &group, &prefix, &beat, &own)) {
        return NULL;
    }
    board_object *self = (board_object *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->board = fp_board_new(group, prefix, beat, own);
        if (self->board == NULL) {
            Py_CLEAR(self);
        }
    }
    return (PyObject *)self;
}

static void
board_dealloc(PyObject *self)
{
    fp_board_free(((board_object *)self)->board);
    fp_free_object(self);
}

static PyObject *
board_appear(board_object *self, PyObject *since)
{
    double seconds;
    return fp_as_double(since, &seconds) < 0 ? NULL : fp_none_unless(fp_board_appear(self->board, seconds));
}

static PyObject *
board_join(board_object *self, PyObject *generation)
{
    const char *utf8 = PyUnicode_AsUTF8(generation);
    return utf8 == NULL ? NULL : fp_none_unless(fp_board_join(self->board, utf8));
}

static PyObject *
board_finish(board_object *self, PyObject *ignored)
{
    return fp_none_unless(fp_board_finish(self->board));
}

static PyObject *
board_enter(board_object *self, PyObject *ignored)
{
    return fp_none_unless(fp_board_enter(self->board));
}

static PyObject *
board_stop(board_object *self, PyObject *ignored)
{
    fp_board_stop(self->board);
    Py_RETURN_NONE;
}

static PyObject *
board_post(board_object *self, PyObject *text)
{
    int64_t number;
    PyObject *shown = fp_as_text(text);
    const int status = shown == NULL ? -1 : fp_board_post(self->board, PyUnicode_AsUTF8(shown), &number);
    Py_XDECREF(shown);
    return status < 0 ? NULL : PyLong_FromLongLong(number);
}

static PyObject *
board_number(board_object *self, PyObject *key)
{
    int64_t number;
    const char *utf8 = PyUnicode_AsUTF8(key);
    const int status = utf8 == NULL ? -1 : fp_board_number(self->board, utf8, &number);
    return status < 0 ? NULL : PyLong_FromLongLong(number);
}

static PyObject *
board_look(board_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    double waited;
    int processes;
    if (fp_read_args("look", args, nargs, "db", &waited, &processes) < 0) {
        return NULL;
    }
    return fp_bool_unless(fp_board_look(self->board, waited, processes));
}

static PyObject *
board_call(board_object *self, PyObject *ignored)
{
    const int call = fp_board_call(self->board);
    return call < 0 ? NULL : PyLong_FromLong(call);
}

static PyObject *
board_miss_silent(board_object *self, PyObject *number)
{
    int64_t call;
    return fp_as_int64(number, &call) < 0 ? NULL : fp_none_unless(fp_board_miss_silent(self->board, call));
}

static PyObject *
board_said(board_object *self, PyObject *ignored)
{
    return fp_board_said(self->board);
}

static PyObject *
board_entered(board_object *self, PyObject *ignored)
{
    return fp_board_entered(self->board);
}

static PyObject *
board_around(board_object *self, PyObject *args)
{
    const char *group, *device;
    PyObject *wait;
    return PyArg_ParseTuple(args, "ssO:around_wait", &group, &device, &wait)
               ? fp_none_unless(fp_watch_around(group, device, wait))
               : NULL;
}

static PyObject *
board_watch(board_object *self, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"trace", "group", "device", "prefix", "ranks", "interval", NULL};
    PyObject *object, *ranks;
    fp_watched watched;
    int64_t *numbers;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OsssOd:watch", keywords, &object, &watched.group, &watched.device,
                                     &watched.prefix, &ranks, &watched.interval)) {
        return NULL;
    }
    fp_trace *trace = fp_trace_of(object);
    if (trace == NULL) {
        return NULL;
    }
    if (fp_as_int64_array(ranks, &numbers, &watched.n) < 0) {
        return NULL;
    }
    watched.ranks = numbers;
    const int found = fp_watch(self->board, trace, &watched);
    fp_free(numbers);
    return fp_bool_unless(found);
}

static PyMethodDef board_methods[] = {
    {"appear", FP_METHOD(board_appear), METH_O,
     "appear($self, since, /)\n--\n\nLet others find this process, and a thread answer their calls.\n\n"
     "since: when its world or process began, in seconds of the wall clock: older signs of others count for nothing."},
    {"join", FP_METHOD(board_join), METH_O,
     "join($self, generation, /)\n--\n\nPost and read below the name of this generation, to which ranks have come "
     "alike."},
    {"enter", FP_METHOD(board_enter), METH_NOARGS,
     "enter($self, /)\n--\n\nFrom now on this rank reads what others post."},
    {"finish", FP_METHOD(board_finish), METH_NOARGS,
     "finish($self, /)\n--\n\nLet the others know that this rank comes to nothing any more, and that all is well."},
    {"stop", FP_METHOD(board_stop), METH_NOARGS, "stop($self, /)\n--\n\nAnswer no more, and let watch() return."},
    {"post", FP_METHOD(board_post), METH_O,
     "post($self, text, /)\n--\n\nLet the others know why this rank ends: the number of the post."},
    {"number", FP_METHOD(board_number), METH_O,
     "number($self, key, /)\n--\n\nWhat is counted at 'members', those who have entered, or at 'readers of N'."},
    {"look", FP_METHOD(board_look), METH_FASTCALL,
     "look($self, waited, processes, /)\n--\n\nRead what is posted; whether all of it could be read.\n\n"
     "processes: look for those of this machine that have ended; waited: how many seconds this rank has waited: if for "
     "long, it calls the others."},
    {"call", FP_METHOD(board_call), METH_NOARGS,
     "call($self, /)\n--\n\nCall all ranks: the number of the call; 0: none answers calls."},
    {"miss_silent", FP_METHOD(board_miss_silent), METH_O,
     "miss_silent($self, call, /)\n--\n\nMiss the ranks that have not answered this call yet."},
    {"said", FP_METHOD(board_said), METH_NOARGS, "said($self, /)\n--\n\nWhy ranks have ended, by rank."},
    {"entered", FP_METHOD(board_entered), METH_NOARGS,
     "entered($self, /)\n--\n\nWhere the ranks that have entered are, by rank."},
    {"around_wait", FP_METHOD(board_around), METH_VARARGS,
     "around_wait($self, group, device, wait, /)\n--\n\n"
     "Call wait(), in which the current stream begins to wait for a collective that Python has begun over a group."},
    {"watch", FP_METHOD(board_watch), METH_VARARGS | METH_KEYWORDS,
     "watch($self, /, trace, group, device, prefix, ranks, interval)\n--\n\n"
     "Look after the ranks of a group every interval seconds, without the GIL.\n\n"
     "True: they differ, or one is lost or comes to nothing that this rank waits for; trace is broken and the "
     "communicator aborted. False: the group was destroyed, or stop() was called."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot board_slots[] = {
    {Py_tp_doc,
     "HealthBoard(group, prefix, beat, own)\n--\n\nWhat the ranks of a world tell each other through its store, "
     "below prefix.\n\n"
     "group: the name under which C++ knows the world; beat: seconds without an answer after which a "
     "process counts as "
     "stopped, 0: never; own: over a connection of its own."},
    {Py_tp_new, board_new},
    {Py_tp_dealloc, board_dealloc},
    {Py_tp_methods, board_methods},
    {0, NULL},
};

PyType_Spec fp_board_type = FP_TYPE("HealthBoard", board_object, 0, board_slots);
