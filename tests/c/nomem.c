/* nomem.c -- a library for the tests that makes one of the interpreter's allocations fail. Loaded with ctypes.PyDLL, so
 * that its function runs with the GIL held, as the hooks do. */
#include <Python.h>

typedef struct {
    PyMemAllocatorDomain domain;
    PyMemAllocatorEx original;
} hooked;

static hooked domains[] = {{.domain = PYMEM_DOMAIN_MEM}, {.domain = PYMEM_DOMAIN_OBJ}};
static long countdown; /* 1: the next allocation fails; 0: off, or it has failed */

static int
must_fail(void)
{
    return countdown > 0 && --countdown == 0;
}

static void *
hook_malloc(void *context, size_t size)
{
    const hooked *domain = context;
    return must_fail() ? NULL : domain->original.malloc(domain->original.ctx, size);
}

static void *
hook_calloc(void *context, size_t count, size_t size)
{
    const hooked *domain = context;
    return must_fail() ? NULL : domain->original.calloc(domain->original.ctx, count, size);
}

static void *
hook_realloc(void *context, void *block, size_t size)
{
    const hooked *domain = context;
    return must_fail() ? NULL : domain->original.realloc(domain->original.ctx, block, size);
}

static void
hook_free(void *context, void *block)
{
    const hooked *domain = context;
    domain->original.free(domain->original.ctx, block);
}

/* Call function(*arguments) while the k-th allocation from then on fails, once. Returns what the function returns, and
 * NULL with its exception set. *has_failed tells if there were so many allocations. */
PyObject *
nomem_call(PyObject *function, PyObject *arguments, long k, int *has_failed)
{
    for (size_t i = 0; i < sizeof domains / sizeof domains[0]; i++) {
        PyMemAllocatorEx hooks = {&domains[i], hook_malloc, hook_calloc, hook_realloc, hook_free};
        PyMem_GetAllocator(domains[i].domain, &domains[i].original);
        PyMem_SetAllocator(domains[i].domain, &hooks);
    }
    countdown = k;
    PyObject *result = PyObject_CallObject(function, arguments);
    *has_failed = countdown == 0;
    countdown = 0;
    for (size_t i = 0; i < sizeof domains / sizeof domains[0]; i++) {
        PyMem_SetAllocator(domains[i].domain, &domains[i].original);
    }
    return result;
}
