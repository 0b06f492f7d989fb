/* module/fp_gather_py.c -- the heap type flatparam._C.Gather: the all-gathers of one unit that Python begins. */
#include "module/fp_tables.h"

typedef struct {
    PyObject_HEAD
    fp_gather *gather;
} gather_object;

static PyObject *
gather_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *keywords[] = {"group", "name", "sliced", NULL};
    PyObject *group;
    const char *name;
    int sliced;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Osp:Gather", keywords, &group, &name, &sliced)) {
        return NULL;
    }
    gather_object *self = (gather_object *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->gather = fp_gather_new(group, name, sliced);
        if (self->gather == NULL) {
            Py_CLEAR(self);
        }
    }
    return (PyObject *)self;
}

static void
gather_dealloc(PyObject *self)
{
    fp_gather_free(((gather_object *)self)->gather);
    fp_free_object(self);
}

static PyObject *
gather_begin(gather_object *self, PyObject *const *args, Py_ssize_t nargs)
{
    FP_TRY_NULL(fp_check_nargs("begin", nargs, 2));
    return fp_none_unless(fp_gather_begin(self->gather, args[0], args[1]));
}

static PyObject *
gather_wait(gather_object *self, PyObject *ignored)
{
    return fp_bool_unless(fp_gather_wait(self->gather));
}

static PyObject *
gather_is_completed(gather_object *self, PyObject *ignored)
{
    return PyBool_FromLong(!fp_gather_is_under_way(self->gather));
}

static PyMethodDef gather_methods[] = {
    {"begin", FP_METHOD(gather_begin), METH_FASTCALL,
     "begin($self, output, shard, /)\n--\n\n"
     "Begin to gather the shard of every rank into output, in rank order. Both are 1-D. "
     "RuntimeError: a gather is pending."},
    {"wait", FP_METHOD(gather_wait), METH_NOARGS,
     "wait($self, /)\n--\n\nWait until the gather has ended; on an accelerator the current stream waits. "
     "True: it has ended, or none was begun. False: sliced, and 300 ms are over. RuntimeError: it has failed; the next "
     "one may begin."},
    {"is_completed", FP_METHOD(gather_is_completed), METH_NOARGS,
     "is_completed($self, /)\n--\n\nReturn whether no gather is pending, as Work.is_completed() of torch does."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot gather_slots[] = {
    {Py_tp_doc, "Gather(group, name, sliced)\n--\n\n"
                "The all-gathers of one unit over a process group, one at a time.\n\n"
                "name: the name under which torch registered the group. "
                "sliced: a wait returns after 300 ms, and may be repeated."},
    {Py_tp_new, gather_new},
    {Py_tp_dealloc, gather_dealloc},
    {Py_tp_methods, gather_methods},
    {0, NULL},
};

PyType_Spec fp_gather_type = FP_TYPE("Gather", gather_object, 0, gather_slots);
