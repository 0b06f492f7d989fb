/* module/fp_board_py.c -- the heap type flatparam._C.HealthBoard: the Python type of desync/fp_board.h and fp_watch.h. */
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
    FP_TRY_NULL(fp_read_args("look", args, nargs, "db", &waited, &processes));
    return fp_bool_unless(fp_board_look(self->board, waited, processes));
}

static PyObject *
board_ended(board_object *self, PyObject *ignored)
{
    const int count = fp_board_ended(self->board);
    return count < 0 ? NULL : PyLong_FromLong(count);
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
    FP_NEED_NULL(trace);
    FP_TRY_NULL(fp_as_int64_array(ranks, &numbers, &watched.n));
    watched.ranks = numbers;
    const int found = fp_watch(self->board, trace, &watched);
    fp_free(numbers);
    return fp_bool_unless(found);
}

static PyMethodDef board_methods[] = {
    {"appear", FP_METHOD(board_appear), METH_O,
     "appear($self, since, /)\n--\n\n"
     "Publish the process of this rank, and start the thread that answers calls of other ranks.\n\n"
     "since: seconds of the wall clock at which this world, or this process, began. Processes that were published "
     "before are ignored."},
    {"join", FP_METHOD(board_join), METH_O,
     "join($self, generation, /)\n--\n\nKeep later posts and numbers below generation, a str, in the store. "
     "All ranks pass the same generation."},
    {"enter", FP_METHOD(board_enter), METH_NOARGS,
     "enter($self, /)\n--\n\nCount this rank as a member: it reads posts from now on."},
    {"finish", FP_METHOD(board_finish), METH_NOARGS,
     "finish($self, /)\n--\n\n"
     "Publish that this rank has finished. The others then do not report that its process was killed."},
    {"stop", FP_METHOD(board_stop), METH_NOARGS,
     "stop($self, /)\n--\n\nStop the thread that answers calls, and let watch() return. Waits 0.5 s at most."},
    {"post", FP_METHOD(board_post), METH_O,
     "post($self, text, /)\n--\n\nPost text as the reason why this rank ends. "
     "Return the number of the post, counted from 1 in this generation."},
    {"number", FP_METHOD(board_number), METH_O,
     "number($self, key, /)\n--\n\nRead a counter of this generation. "
     "'members': how many ranks have entered. 'readers of N': how many ranks have read post N."},
    {"look", FP_METHOD(board_look), METH_FASTCALL,
     "look($self, waited, processes, /)\n--\n\nLook once for ranks that do not come; said() then has the reasons. "
     "Return whether all posts that were announced could be read.\n\n"
     "waited: seconds for which this rank has waited for others. After a while it calls all ranks. "
     "processes: look for ended processes of this machine, too."},
    {"ended", FP_METHOD(board_ended), METH_NOARGS,
     "ended($self, /)\n--\n\nReturn how many ranks of this machine have a process that has ended."},
    {"call", FP_METHOD(board_call), METH_NOARGS,
     "call($self, /)\n--\n\nCall all ranks, and do not wait for answers. "
     "Return the number of the call, from 1; 0: no rank answers calls."},
    {"miss_silent", FP_METHOD(board_miss_silent), METH_O,
     "miss_silent($self, call, /)\n--\n\nNote each rank that answers calls and has not answered this one."},
    {"said", FP_METHOD(board_said), METH_NOARGS,
     "said($self, /)\n--\n\nReturn a dict from ranks to texts: the reason why a rank does not come."},
    {"entered", FP_METHOD(board_entered), METH_NOARGS,
     "entered($self, /)\n--\n\n"
     "Return a dict from ranks to texts: the process number, its start in ticks, and the machine of each rank that has "
     "appeared."},
    {"around_wait", FP_METHOD(board_around), METH_VARARGS,
     "around_wait($self, group, device, wait, /)\n--\n\n"
     "Call wait(), in which the current stream of device, as 'cuda', begins to wait for a collective over group that "
     "Python has issued. watch() sees by it that the device waits."},
    {"watch", FP_METHOD(board_watch), METH_VARARGS | METH_KEYWORDS,
     "watch($self, /, trace, group, device, prefix, ranks, interval)\n--\n\n"
     "Look after the ranks of a group every interval seconds. It blocks, without the GIL.\n\n"
     "device: the type of the device that waits for collectives, as 'cuda'. "
     "prefix: begins the keys by which the ranks ask each other in the store. "
     "ranks: the world ranks of the group, in the group's order.\n\n"
     "True: the ranks differ, or one of them is lost. trace is broken then, and the communicator is aborted. "
     "False: the group was destroyed, or stop() was called. "
     "RuntimeError: torch has no such group or device, or its backend cannot abort."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot board_slots[] = {
    {Py_tp_doc, "HealthBoard(group, prefix, beat, own)\n--\n\n"
                "The health board of a world: its ranks report in the store why they end, and show that they "
                "live.\n\ngroup: the name under which torch registered the process group of the world. "
                "prefix: begins all keys in the store. "
                "beat: seconds; a rank that answers no call for so long counts as stopped. 0: no rank is called. "
                "own: use a second connection to the store."},
    {Py_tp_new, board_new},
    {Py_tp_dealloc, board_dealloc},
    {Py_tp_methods, board_methods},
    {0, NULL},
};

PyType_Spec fp_board_type = FP_TYPE("HealthBoard", board_object, 0, board_slots);
